package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
)

// mutual speaks TLS between two pods that both show a certificate: as SPIFFE has
// it, a peer is who its chain's URI says, whatever its address is called.
//
//	mtls serve BUNDLE ROOTS      answer on :8443 with the peer's URI
//	mtls fetch URL BUNDLE ROOTS  print the answer and the server's URI
func mutual(ctx context.Context, args []string) error {
	switch {
	case len(args) == 3 && args[0] == "serve":
		cfg, err := mutualConfig(args[1], args[2])
		if err != nil {
			return err
		}
		s := &http.Server{Addr: ":8443", TLSConfig: cfg, BaseContext: func(net.Listener) context.Context { return ctx }, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			fmt.Fprintf(w, "hello %s\n", r.TLS.PeerCertificates[0].URIs)
		})}
		stop := context.AfterFunc(ctx, func() { _ = s.Close() })
		defer stop()
		if err := s.ListenAndServeTLS("", ""); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	case len(args) == 4 && args[0] == "fetch":
		cfg, err := mutualConfig(args[2], args[3])
		if err != nil {
			return err
		}
		cfg.VerifyConnection = func(c tls.ConnectionState) error {
			fmt.Println("server", c.PeerCertificates[0].URIs)
			return nil
		}
		http.DefaultTransport.(*http.Transport).TLSClientConfig = cfg
		return fetch(ctx, args[1])
	}
	return errors.New("mtls serve BUNDLE ROOTS, or mtls fetch URL BUNDLE ROOTS")
}

// mutualConfig shows the certificate of a bundle and believes chains of roots.
func mutualConfig(bundle, roots string) (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(bundle, bundle)
	if err != nil {
		return nil, err
	}
	pem, err := os.ReadFile(roots)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s holds no certificate", roots)
	}
	return &tls.Config{
		Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
		InsecureSkipVerify: true, // of names: the chain is checked below
		VerifyPeerCertificate: func(raw [][]byte, _ [][]*x509.Certificate) error {
			if len(raw) == 0 {
				return errors.New("the peer has no certificate")
			}
			between := x509.NewCertPool()
			for _, der := range raw[1:] {
				c, err := x509.ParseCertificate(der)
				if err != nil {
					return err
				}
				between.AddCert(c)
			}
			leaf, err := x509.ParseCertificate(raw[0])
			if err != nil {
				return err
			}
			_, err = leaf.Verify(x509.VerifyOptions{Roots: pool, Intermediates: between, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
			return err
		},
	}, nil
}
