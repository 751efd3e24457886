package proxy

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	// headerTimeout is how long a client may take to send a request's header.
	headerTimeout = 30 * time.Second
	// idleTimeout is how long a connection may be without a request. It is longer
	// than the minute that balancers in front of this one often keep theirs.
	idleTimeout = 90 * time.Second
	// maxHeader is how many bytes a request's header may have.
	maxHeader = 64 << 10
	// last is how long requests that are under way may take after the drain.
	last = 20 * time.Second
)

// Serve answers on both listeners, and on the ports that the table's Gateways
// have beside them, until ctx ends, and then lets what is under
// way end. It closes the listeners.
func (p *Proxy) Serve(ctx context.Context, plain, secure net.Listener) error {
	self, err := selfSigned()
	if err != nil {
		return errors.Join(fmt.Errorf("make a certificate: %w", err), plain.Close(), secure.Close())
	}
	server := func() *http.Server {
		return &http.Server{
			Handler:           p,
			ReadHeaderTimeout: headerTimeout,
			IdleTimeout:       idleTimeout,
			MaxHeaderBytes:    maxHeader,
			ErrorLog:          slog.NewLogLogger(p.cfg.Logger.Handler(), slog.LevelDebug), // strangers' faults
			Protocols:         new(http.Protocols),
		}
	}
	open, closed := server(), server()
	open.Protocols.SetHTTP1(true)
	open.Protocols.SetUnencryptedHTTP2(true)
	closed.Protocols.SetHTTP1(true)
	closed.Protocols.SetHTTP2(true)
	closed.TLSConfig = &tls.Config{
		MinVersion: tls.VersionTLS12,
		GetCertificate: func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
			if t := p.table.Load(); t != nil {
				all := t.Certificates(t.PlaceOfPort(localPort(hello.Conn.LocalAddr()), true), serverName(hello.ServerName))
				for _, c := range all {
					if len(all) == 1 || hello.SupportsCertificate(c) == nil {
						return c, nil
					}
				}
			}
			return self, nil
		},
	}
	usual := closed.TLSConfig.Clone()
	usual.NextProtos = []string{"h2", "http/1.1"}
	closed.TLSConfig.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) { return p.forClient(usual, hello), nil }
	work, stopped := errgroup.WithContext(ctx)
	work.Go(func() error { return served(open.Serve(plain)) })
	work.Go(func() error { return served(closed.ServeTLS(secure, "", "")) })
	// Ports are kept while connections are still taken.
	ports, over := context.WithCancel(context.WithoutCancel(ctx))
	work.Go(func() error { return p.ports(ports, open, closed) })
	work.Go(func() error {
		<-stopped.Done()
		if ctx.Err() != nil {
			time.Sleep(p.cfg.Drain)
		}
		over()
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), last)
		defer cancel()
		var both errgroup.Group
		both.Go(func() error { return open.Shutdown(end) })
		both.Go(func() error { return closed.Shutdown(end) })
		if both.Wait() != nil {
			_, _ = open.Close(), closed.Close()
		}
		p.Close()
		return nil
	})
	return work.Wait()
}

// forClient is how a connection is made where a Gateway says which clients it is
// for; nil: as everywhere.
func (p *Proxy) forClient(usual *tls.Config, hello *tls.ClientHelloInfo) *tls.Config {
	t := p.table.Load()
	if t == nil {
		return nil
	}
	clients := t.Clients(t.PlaceOfPort(localPort(hello.Conn.LocalAddr()), true))
	if clients == nil {
		return nil
	}
	c := usual.Clone()
	c.ClientCAs, c.ClientAuth = clients.Roots, tls.RequireAndVerifyClientCert
	if clients.Any {
		c.ClientAuth = tls.RequestClientCert
	}
	// A session of another place, or of before a change, is no proof.
	c.SessionTicketsDisabled = true
	return c
}

func served(err error) error {
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// selfSigned is shown where no certificate is known for the host: clients see
// that no authority signed it, and those that do not verify are answered.
func selfSigned() (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	cert := &x509.Certificate{
		SerialNumber: big.NewInt(now.UnixNano()),
		Subject:      pkix.Name{CommonName: "clusterd: no certificate for this host"},
		NotBefore:    now.Add(-time.Hour), NotAfter: now.AddDate(10, 0, 0),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames: []string{"no-certificate.invalid"},
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}
