package proxy

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"testing"
	"time"

	"github.com/clusterd/clusterd/ingress/route"
)

// TestVerified: a backend is answered for only if its certificate is signed by whom,
// and has the name, that is asked for.
func TestVerified(t *testing.T) {
	id, err := url.Parse("spiffe://a.example/web")
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	cert := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), BasicConstraintsValid: true, IsCA: true,
		KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames: []string{"web.example", "*.any.example"}, URIs: []*url.URL{id},
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	own := tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
	serve := func(clients tls.ClientAuthType) netip.AddrPort {
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			shown := ""
			if len(r.TLS.PeerCertificates) > 0 {
				shown = " shown " + r.TLS.PeerCertificates[0].DNSNames[0]
			}
			_, _ = io.WriteString(w, r.Proto+" "+r.TLS.ServerName+shown)
		}))
		server.TLS = &tls.Config{Certificates: []tls.Certificate{own}, ClientAuth: clients}
		server.EnableHTTP2 = true
		server.StartTLS()
		t.Cleanup(server.Close)
		return netip.MustParseAddrPort(server.Listener.Addr().String())
	}
	at, asking := serve(tls.NoClientCert), serve(tls.RequireAnyClientCert)
	ours, none := x509.NewCertPool(), x509.NewCertPool()
	ours.AddCert(leaf)
	k := newKit(t, Config{})
	for _, tt := range []struct {
		name string
		tls  route.TLS
		want string // "": the certificate is refused
	}{
		{"its name", route.TLS{ServerName: "web.example", Roots: ours}, "web.example"},
		{"another name", route.TLS{ServerName: "b.example", Roots: ours}, ""},
		{"another authority", route.TLS{ServerName: "web.example", Roots: none}, ""},
		{"one of the names, asked for by another", route.TLS{ServerName: "b.example", Roots: ours, Hosts: []string{"c.example", "web.example"}}, "b.example"},
		{"none of the names, asked for by its own", route.TLS{ServerName: "web.example", Roots: ours, Hosts: []string{"c.example"}, URIs: []string{"spiffe://a.example/db"}}, ""},
		{"a URI", route.TLS{ServerName: "b.example", Roots: ours, URIs: []string{"spiffe://a.example/web"}}, "b.example"},
		{"a wildcard", route.TLS{ServerName: "b.example", Roots: ours, Hosts: []string{"*.any.example"}}, "b.example"},
		{"no authority for a name", route.TLS{ServerName: "b.example", Roots: none, Hosts: []string{"web.example"}}, ""},
	} {
		tt.tls.Key = tt.name
		backend := &route.Backend{Name: "shop/web:443", Protocol: route.HTTPS, TLS: &tt.tls, Endpoints: []netip.AddrPort{at}}
		k.gateway(when("/", route.Action{Shares: []route.Share{{Weight: 1, Backend: backend}}}))
		code, body, _ := k.ask("GET", "http://a.example/", "")
		if tt.want == "" {
			if want := "502 Bad Gateway: the certificate of shop/web:443 is not what its BackendTLSPolicy asks for\n"; code != 502 || body != want {
				t.Errorf("%s: %d %q", tt.name, code, body)
			}
			continue
		}
		if code != 200 || body != "HTTP/2.0 "+tt.want {
			t.Errorf("%s: %d %q", tt.name, code, body)
		}
	}
	// One that asks for our certificate is shown that of the rule, and no other rule's.
	for _, tt := range []struct {
		name  string
		shown *tls.Certificate
		code  int
		want  string
	}{
		{"a certificate to show", &own, 200, "HTTP/2.0 web.example shown web.example"},
		{"none to show", nil, 502, ""},
	} {
		backend := &route.Backend{
			Name: "shop/web:443", Protocol: route.HTTPS, Endpoints: []netip.AddrPort{asking},
			TLS: &route.TLS{Key: tt.name, ServerName: "web.example", Roots: ours, Certificate: tt.shown},
		}
		k.gateway(when("/", route.Action{Shares: []route.Share{{Weight: 1, Backend: backend}}}))
		if code, body, _ := k.ask("GET", "http://a.example/", ""); code != tt.code || tt.want != "" && body != tt.want {
			t.Errorf("%s: %d %q", tt.name, code, body)
		}
	}
}
