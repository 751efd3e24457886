package security

import (
	"bytes"
	"context"
	"crypto"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"slices"
	"strings"
	"time"

	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

// anonymousCalls are what is refused to who shows nothing, and what headers of proxies
// do not change.
var anonymousCalls = []call{
	{name: "lists Secrets", method: "GET", path: "/api/v1/secrets"},
	{name: "reads a namespace", method: "GET", path: "/api/v1/namespaces/kube-system"},
	{name: "lists the API's groups", method: "GET", path: "/apis"},
	{name: "reads metrics", method: "GET", path: "/metrics"},
	{name: "reads a profile", method: "GET", path: "/debug/pprof/heap?debug=1"},
	{name: "lists the members", method: "GET", path: "/clusterd/v1/members"},
	{name: "takes a snapshot", method: "GET", path: "/clusterd/v1/snapshot", alone: true},
	{name: "makes a join token", method: "POST", path: "/clusterd/v1/tokens", body: `{"role":"server"}`, alone: true},
	{name: "binds strangers to cluster-admin", method: "POST", path: "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
		body: `{"metadata":{"name":"made"},"roleRef":{"apiGroup":"rbac.authorization.k8s.io","kind":"ClusterRole","name":"cluster-admin"},"subjects":[{"kind":"User","apiGroup":"rbac.authorization.k8s.io","name":"system:anonymous"}]}`},
	{name: "asks who has a token", method: "POST", path: "/apis/authentication.k8s.io/v1/tokenreviews", body: `{"spec":{"token":"x"}}`},
	{name: "makes a CertificateSigningRequest", method: "POST", path: "/apis/certificates.k8s.io/v1/certificatesigningrequests", body: `{"metadata":{"name":"made"}}`, alone: true},
	{name: "shows X-Remote-User", method: "GET", path: "/api/v1/secrets", header: map[string]string{"X-Remote-User": "admin", "X-Remote-Group": "system:masters"}},
	{name: "shows X-Remote-Uid", method: "GET", path: "/api/v1/secrets", header: map[string]string{"X-Remote-User": "system:admin", "X-Remote-Uid": "0", "X-Remote-Extra-Scopes": "all"}},
	{name: "shows Impersonate-User", method: "GET", path: "/api/v1/secrets", header: map[string]string{"Impersonate-User": "admin", "Impersonate-Group": "system:masters"}},
	{name: "shows a password", method: "GET", path: "/api/v1/secrets", header: map[string]string{"Authorization": "Basic YWRtaW46YWRtaW4="}},
	{name: "shows an empty token", method: "GET", path: "/api/v1/secrets", header: map[string]string{"Authorization": "Bearer "}},
	{name: "shows a forwarded certificate", method: "GET", path: "/api/v1/secrets", header: map[string]string{"X-Forwarded-Client-Cert": "Subject=\"O=system:masters,CN=admin\"", "X-Forwarded-For": "127.0.0.1"}},
	{name: "goes around by a path", method: "GET", path: "/healthz/../api/v1/secrets", refused: []int{301, 307, 308, 400, 401, 403, 404}, alone: true},
	{name: "goes around by an encoded path", method: "GET", path: "/healthz/%2e%2e/api/v1/secrets", refused: []int{301, 307, 308, 400, 401, 403, 404}, alone: true},
	{name: "goes around by a doubled slash", method: "GET", path: "//api/v1/secrets", refused: []int{301, 307, 308, 400, 401, 403, 404}, alone: true},
	{name: "overrides the method", method: "GET", path: "/api/v1/namespaces/$NS/secrets", header: map[string]string{"X-HTTP-Method-Override": "DELETE"}},
}

// forgedSubjects are whom a certificate of a foreign authority names.
var forgedSubjects = []struct {
	user   string
	groups []string
}{
	{"admin", []string{"system:masters"}},
	{"system:admin", []string{"system:masters"}},
	{"system:node:n1", []string{"system:nodes"}},
	{"system:kube-scheduler", nil},
	{"system:kube-controller-manager", nil},
	{"system:serviceaccount:kube-system:default", []string{"system:serviceaccounts"}},
	{"system:apiserver", []string{"system:masters"}},
}

// strangers is who reaches the port and has nothing, or a certificate of his own making.
func strangers(s *suite) []attack {
	out := calls(rest.AnonymousClientConfig(s.admin), anonymousCalls)
	now := time.Now()
	foreign, err := pki.NewCA("clusterd", now)
	if err != nil {
		s.t.Fatal(err)
	}
	key, err := pki.NewKey()
	if err != nil {
		s.t.Fatal(err)
	}
	var lists []tls.Certificate
	for _, subject := range forgedSubjects {
		cert, err := foreign.IssueClient(key.Public(), subject.user, subject.groups, time.Hour, now)
		if err != nil {
			s.t.Fatal(err)
		}
		pair := tls.Certificate{Certificate: [][]byte{cert.Raw, foreign.Cert.Raw}, PrivateKey: key}
		lists = append(lists, pair)
		out = append(out, attack{name: fmt.Sprintf("is %s by a foreign authority", subject.user), try: func(s *suite) verdict { return s.shown(pair) }})
	}
	// The cluster's own authority signs for servers and clients; who has the certificate
	// of a server cannot use it for a client of another name, nor sign with it.
	voter := s.stolen("n2").Certificate()
	out = append(out,
		attack{name: "signs an administrator with a server's key", try: func(s *suite) verdict {
			pair, err := signedBy(voter.Leaf, voter.PrivateKey, "admin", "system:masters")
			if err != nil {
				return broken(err)
			}
			pair.Certificate = append(pair.Certificate, voter.Certificate...)
			return s.shown(*pair)
		}, control: func(s *suite) error {
			code, body, err := s.send(s.admin, call{method: http.MethodGet, path: "/api/v1/secrets?limit=1"}, false)
			if err == nil && code != http.StatusOK {
				err = fmt.Errorf("%d %s", code, body)
			}
			return err
		}},
		attack{name: "shows the authority's own certificate with another key", try: func(s *suite) verdict {
			pair := tls.Certificate{Certificate: [][]byte{s.authority().Raw}, PrivateKey: key}
			return s.shown(pair)
		}},
		attack{name: "signs itself", try: func(s *suite) verdict {
			pair, err := signedBy(nil, key, "admin", "system:masters")
			if err != nil {
				return broken(err)
			}
			return s.shown(*pair)
		}},
	)
	// Protocols between nodes, with nothing and with those certificates.
	for _, to := range []string{"n1", "a1"} {
		for _, protocol := range []string{transport.Raft, transport.Gossip, transport.Node, transport.Tunnel, transport.Member} {
			out = append(out, attack{name: fmt.Sprintf("dials %s at %s with nothing", protocol, to), try: func(s *suite) verdict { return s.rawDoor(to, protocol, tls.VersionTLS13, nil) }})
			for i, subject := range forgedSubjects[:3] {
				out = append(out, attack{name: fmt.Sprintf("dials %s at %s as %s", protocol, to, subject.user), try: func(s *suite) verdict {
					return s.rawDoor(to, protocol, tls.VersionTLS13, []tls.Certificate{lists[i]})
				}})
			}
			out = append(out, attack{name: fmt.Sprintf("dials %s at %s with TLS 1.2 and a server's key", protocol, to), try: func(s *suite) verdict {
				return s.rawDoor(to, protocol, tls.VersionTLS12, []tls.Certificate{*voter})
			}})
		}
	}
	for _, version := range []uint16{tls.VersionTLS10, tls.VersionTLS11} {
		out = append(out, attack{name: "speaks " + tls.VersionName(version), try: func(s *suite) verdict {
			c, err := tls.Dial("tcp", s.addr("n1").String(), &tls.Config{InsecureSkipVerify: true, MinVersion: version, MaxVersion: version})
			if err != nil {
				return shut("%v", err)
			}
			_ = c.Close()
			return open("it was spoken")
		}})
	}
	for _, c := range slices.Concat(tls.InsecureCipherSuites(), tls.CipherSuites()) {
		if !slices.Contains(c.SupportedVersions, tls.VersionTLS12) || strings.Contains(c.Name, "GCM") || strings.Contains(c.Name, "CHACHA") {
			continue
		}
		out = append(out, attack{name: "speaks TLS 1.2 with " + c.Name, try: func(s *suite) verdict {
			conn, err := tls.Dial("tcp", s.addr("n1").String(), &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12, CipherSuites: []uint16{c.ID}})
			if err != nil {
				return shut("%v", err)
			}
			_ = conn.Close()
			return open("it was spoken")
		}})
	}
	return out
}

// rawDoor is door for who verifies nothing.
func (s *suite) rawDoor(to, protocol string, version uint16, certs []tls.Certificate) verdict {
	ctx, cancel := context.WithTimeout(s.t.Context(), waitLimit)
	defer cancel()
	raw, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.addr(to).String())
	if err != nil {
		return broken(err)
	}
	defer raw.Close()
	c := tls.Client(raw, &tls.Config{InsecureSkipVerify: true, MaxVersion: version, NextProtos: []string{protocol}, Certificates: certs})
	if err := c.HandshakeContext(ctx); err != nil {
		return shut("%v", err)
	}
	_ = c.SetReadDeadline(time.Now().Add(opens))
	n, err := c.Read(make([]byte, 1))
	var timeout net.Error
	if n > 0 || errors.As(err, &timeout) && timeout.Timeout() {
		return open("it stays open")
	}
	return shut("%v", err)
}

// shown shows the API a certificate and asks for Secrets.
func (s *suite) shown(pair tls.Certificate) verdict {
	client := http.Client{Timeout: opens, Transport: &http.Transport{DisableKeepAlives: true,
		TLSClientConfig: &tls.Config{InsecureSkipVerify: true, GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }}}}
	res, err := client.Get(s.admin.Host + "/api/v1/secrets?limit=1")
	if err != nil {
		return shut("%v", err)
	}
	defer res.Body.Close()
	if res.StatusCode == http.StatusUnauthorized || res.StatusCode == http.StatusForbidden {
		return shut("%s", res.Status)
	}
	return open("%s", res.Status)
}

// signedBy makes a client's certificate with a key of its own, signed by a key that
// is no authority's; parent nil: by itself.
func signedBy(parent *x509.Certificate, signer crypto.PrivateKey, user, group string) (*tls.Certificate, error) {
	key, err := pki.NewKey()
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(4711), Subject: pkix.Name{CommonName: user, Organization: []string{group}},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour), ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, KeyUsage: x509.KeyUsageDigitalSignature}
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}

// authority is the cluster's.
func (s *suite) authority() *x509.Certificate {
	s.t.Helper()
	chain := s.stolen("n1").Certificate().Certificate
	cert, err := x509.ParseCertificate(bytes.Clone(chain[len(chain)-1]))
	if err != nil {
		s.t.Fatal(err)
	}
	return cert
}
