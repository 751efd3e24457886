package proxy

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/clusterd/clusterd/ingress/route"
)

// unused is after how long without a request the connections to backends of a
// certificate are given up, where others are made.
const unused = 10 * time.Minute

// errCertificate: the backend's certificate is not what the route's user asks for.
var errCertificate = errors.New("the backend's certificate is not valid")

// verified are transports by what they ask of a backend's certificate, so that no
// connection serves who asks for something else. The zero value has none.
type verified struct {
	mu  sync.Mutex // guards the rest
	all map[verifiedKey]*verifiedTransport
}

type verifiedKey struct {
	tls     string
	untimed bool
}

type verifiedTransport struct {
	*http.Transport
	used time.Time
}

// of is the transport for t; like is what it is else.
func (v *verified) of(t *route.TLS, untimed bool, like *http.Transport) *http.Transport {
	v.mu.Lock()
	defer v.mu.Unlock()
	now, key := time.Now(), verifiedKey{t.Key, untimed}
	if one := v.all[key]; one != nil {
		one.used = now
		return one.Transport
	}
	for k, one := range v.all {
		if now.Sub(one.used) > unused {
			one.CloseIdleConnections()
			delete(v.all, k)
		}
	}
	if v.all == nil {
		v.all = map[verifiedKey]*verifiedTransport{}
	}
	one := &verifiedTransport{like.Clone(), now}
	one.TLSClientConfig = clientConfig(t)
	v.all[key] = one
	return one.Transport
}

func (v *verified) close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, one := range v.all {
		one.CloseIdleConnections()
	}
}

// clientConfig verifies a backend's certificate, and shows it ours.
func clientConfig(t *route.TLS) *tls.Config {
	out := &tls.Config{
		ServerName: t.ServerName,
		// What follows takes the place of the library's own, which knows one name.
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection does
		VerifyConnection: func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) == 0 {
				return fmt.Errorf("%w: there is none", errCertificate)
			}
			leaf, between := s.PeerCertificates[0], x509.NewCertPool()
			for _, c := range s.PeerCertificates[1:] {
				between.AddCert(c)
			}
			if _, err := leaf.Verify(x509.VerifyOptions{Roots: t.Roots, Intermediates: between}); err != nil {
				return fmt.Errorf("%w: %w", errCertificate, err)
			}
			if !named(leaf, t) {
				return fmt.Errorf("%w: it has none of the names that are asked for", errCertificate)
			}
			return nil
		},
	}
	if t.Certificate != nil {
		// Whatever authorities the backend names: it is to be shown, and a backend that
		// does not take it says so.
		out.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return t.Certificate, nil }
	}
	return out
}

// named reports whether the certificate is for one of the names.
func named(leaf *x509.Certificate, t *route.TLS) bool {
	if len(t.Hosts)+len(t.URIs) == 0 {
		return leaf.VerifyHostname(t.ServerName) == nil
	}
	for _, h := range t.Hosts {
		if strings.HasPrefix(h, "*.") && slices.Contains(leaf.DNSNames, h) || leaf.VerifyHostname(h) == nil {
			return true
		}
	}
	for _, u := range leaf.URIs {
		if slices.Contains(t.URIs, u.String()) {
			return true
		}
	}
	return false
}
