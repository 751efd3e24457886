package join

import (
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"net"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/pki"
)

// TestNamesAskedFor: a joiner's certificate names its node and its address, whatever
// its request for one says. A server puts further names into its own certificate
// itself, with the authority's key, once it holds that.
func TestNamesAskedFor(t *testing.T) {
	w := newWorld(t)
	for _, role := range []pki.Role{pki.Server, pki.Agent} {
		key, err := pki.NewKey()
		if err != nil {
			t.Fatal(err)
		}
		name := "n-" + string(role)
		csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
			Subject:  pkix.Name{CommonName: pki.NodeUserPrefix + "n1", Organization: []string{pki.AdminsGroup}},
			DNSNames: []string{"n1", "kubernetes.default.svc.cluster.local", "db.prod.svc", "api.example.org"}, IPAddresses: []net.IP{net.ParseIP("10.96.0.10")},
		}, key)
		if err != nil {
			t.Fatal(err)
		}
		_, wish, _ := w.join(t, w.tokenFor(t, TokenOptions{Role: pki.Agent, TTL: time.Hour}), "other-"+string(role))
		token := w.tokenFor(t, TokenOptions{Role: role, TTL: time.Hour})
		res, err := w.server.admit(t.Context(), Request{TokenID: token.ID, TokenSecret: token.Secret, Name: name, Addr: wish.Addr, CSR: csr, Version: "v1", Separate: true}, "127.0.0.1:1", time.Now())
		if err != nil {
			t.Fatal(err)
		}
		cert, err := pki.ParseCert(res.NodeCert)
		if err != nil {
			t.Fatal(err)
		}
		if got, _ := pki.NodeName(cert); got != name || pki.NodeRole(cert) != role || len(cert.Subject.Organization) > 2 {
			t.Errorf("%s: a certificate for %s of %v", role, got, cert.Subject)
		}
		for _, other := range []string{"n1", "kubernetes.default.svc.cluster.local", "db.prod.svc", "api.example.org", "10.96.0.10"} {
			if cert.VerifyHostname(other) == nil {
				t.Errorf("%s: the certificate is good for %s", role, other)
			}
		}
	}
}
