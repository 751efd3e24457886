package auth

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func sign(t *testing.T, template, parent *x509.Certificate, public, private *ecdsa.PrivateKey) *x509.Certificate {
	t.Helper()
	raw, err := x509.CreateCertificate(rand.Reader, template, parent, &public.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(raw)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

var epoch = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

func newAuthority(t *testing.T) authority {
	t.Helper()
	key := newKey(t)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "CA"},
		NotBefore: epoch.Add(-time.Hour), NotAfter: epoch.Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	return authority{sign(t, template, template, key, key), key}
}

// issue makes a client certificate that is good for an hour from epoch.
func (a authority) issue(t *testing.T, change func(*x509.Certificate)) *x509.Certificate {
	t.Helper()
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "jane", Organization: []string{"g1", "g2"}},
		NotBefore: epoch, NotAfter: epoch.Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if change != nil {
		change(template)
	}
	return sign(t, template, a.cert, newKey(t), a.key)
}

func TestClientCert(t *testing.T) {
	ca := newAuthority(t)
	pool := x509.NewCertPool()
	pool.AddCert(ca.cert)
	for _, test := range []struct {
		name string
		cert *x509.Certificate
		at   time.Duration // after epoch
		user string
		err  string
	}{
		{name: "good", cert: ca.issue(t, nil), user: "jane"},
		{name: "expired", cert: ca.issue(t, nil), at: 2 * time.Hour, err: "expired or is not yet valid"},
		{name: "not yet good", cert: ca.issue(t, nil), at: -time.Minute, err: "expired or is not yet valid"},
		{name: "of another CA", cert: newAuthority(t).issue(t, nil), err: "signed by unknown authority"},
		{name: "for servers only", err: "incompatible key usage",
			cert: ca.issue(t, func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth} })},
		{name: "without a name", cert: ca.issue(t, func(c *x509.Certificate) { c.Subject.CommonName = "" })},
		{name: "none"},
	} {
		t.Run(test.name, func(t *testing.T) {
			a := ClientCert(func(*x509.Certificate) *x509.CertPool { return pool }).(*clientCert)
			a.now = func() time.Time { return epoch.Add(test.at) }
			req := httptest.NewRequest("GET", "/", nil)
			if test.cert != nil {
				req.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{test.cert}}
			}
			for range 2 { // the second time from memory
				who, ok, err := a.AuthenticateRequest(req)
				switch {
				case test.err != "":
					if err == nil || !strings.Contains(err.Error(), test.err) {
						t.Errorf("%v, want %q", err, test.err)
					}
				case err != nil || ok != (test.user != ""):
					t.Errorf("%t %v", ok, err)
				case ok && (who.User.GetName() != test.user || strings.Join(who.User.GetGroups(), ",") != "g1,g2"):
					t.Errorf("%+v", who.User)
				}
			}
		})
	}
}

func TestAVerifiedCertificateStillExpires(t *testing.T) {
	ca := newAuthority(t)
	pool := x509.NewCertPool()
	pool.AddCert(ca.cert)
	now := epoch.Add(time.Hour - verifiedFor/2)
	a := ClientCert(func(*x509.Certificate) *x509.CertPool { return pool }).(*clientCert)
	a.now = func() time.Time { return now }
	req := httptest.NewRequest("GET", "/", nil)
	req.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{ca.issue(t, nil)}}
	if _, ok, err := a.AuthenticateRequest(req); !ok || err != nil {
		t.Fatalf("%t %v", ok, err)
	}
	now = epoch.Add(time.Hour + time.Second)
	if _, ok, err := a.AuthenticateRequest(req); ok || err == nil {
		t.Errorf("an expired certificate was accepted from the cache: %t %v", ok, err)
	}
}

// TestAVerifiedCertificateGoesWithItsAuthority: that it was verified before is
// worth nothing once the authority is not trusted any more.
func TestAVerifiedCertificateGoesWithItsAuthority(t *testing.T) {
	old, next := newAuthority(t), newAuthority(t)
	pool := x509.NewCertPool()
	pool.AddCert(old.cert)
	a := ClientCert(func(*x509.Certificate) *x509.CertPool { return pool }).(*clientCert)
	a.now = func() time.Time { return epoch }
	req := httptest.NewRequest("GET", "/", nil)
	req.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{old.issue(t, nil)}}
	if _, ok, err := a.AuthenticateRequest(req); !ok || err != nil {
		t.Fatalf("%t %v", ok, err)
	}
	pool = x509.NewCertPool()
	pool.AddCert(next.cert)
	if _, ok, err := a.AuthenticateRequest(req); ok || err == nil {
		t.Errorf("a certificate of the old authority was accepted from the cache: %t %v", ok, err)
	}
}

func TestAnonymous(t *testing.T) {
	chain := Chain(ClientCert(func(*x509.Certificate) *x509.CertPool { return x509.NewCertPool() }))
	for path, want := range map[string]bool{"/healthz": true, "/readyz": true, "/livez": true, "/version": true, "/metrics": false, "/readyz/storage": false, "/api": false, "/": false} {
		_, ok, err := chain.AuthenticateRequest(&http.Request{Method: "GET", URL: httptest.NewRequest("GET", path, nil).URL})
		if ok != want || err != nil {
			t.Errorf("%s: %t %v, want %t", path, ok, err, want)
		}
	}
}
