package registry

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
)

// Connection is how one host is connected to: values that can be sent to another
// process. The zero value is TLS with the system's authorities.
type Connection struct {
	PlainHTTP bool `json:"plainHTTP,omitempty"`
	// CA are authorities beside the system's, Cert and Key a certificate of this node's
	// to show, all in PEM.
	CA   []byte `json:"ca,omitempty"`
	Cert []byte `json:"cert,omitempty"`
	Key  []byte `json:"key,omitempty"`
}

// Connections are those of the hosts of which something is said.
func (s *Settings) Connections() map[string]Connection {
	if s == nil {
		return nil
	}
	out := map[string]Connection{}
	for name, h := range s.hosts {
		if h.PlainHTTP || h.tls != nil {
			out[name] = h.Connection
		}
	}
	return out
}

// FromConnections are settings that say how to connect, and nothing else.
func FromConnections(all map[string]Connection) (*Settings, error) {
	s := &Settings{hosts: map[string]*host{}}
	for name, c := range all {
		t, err := c.tls()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		s.hosts[name] = &host{last: true, Connection: c, tls: t}
	}
	return s, nil
}

// tls is nil if nothing is said of it.
func (c Connection) tls() (*tls.Config, error) {
	if len(c.CA)+len(c.Cert) == 0 {
		return nil, nil
	}
	out := &tls.Config{MinVersion: tls.VersionTLS12}
	if len(c.CA) > 0 {
		var err error
		if out.RootCAs, err = x509.SystemCertPool(); err != nil {
			out.RootCAs = x509.NewCertPool()
		}
		if !out.RootCAs.AppendCertsFromPEM(c.CA) {
			return nil, errors.New("there is no certificate among its authorities")
		}
	}
	if len(c.Cert) > 0 {
		pair, err := tls.X509KeyPair(c.Cert, c.Key)
		if err != nil {
			return nil, err
		}
		out.Certificates = []tls.Certificate{pair}
	}
	return out, nil
}
