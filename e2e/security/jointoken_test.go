package security

import (
	"bytes"
	"context"
	"crypto"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"k8s.io/client-go/rest"

	clusterdv1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

// token makes a join token.
func (s *suite) token(flags ...string) pki.Token {
	s.t.Helper()
	var made clusterdv1.NewToken
	if err := json.Unmarshal([]byte(s.ctl(append([]string{"token", "create", "-o", "json"}, flags...)...)), &made); err != nil {
		s.t.Fatal(err)
	}
	token, err := pki.ParseToken(made.Token)
	if err != nil {
		s.t.Fatal(err)
	}
	return token
}

// machine is one that joins from the host and is never there.
type machine struct {
	name string
	key  crypto.Signer
	addr netip.AddrPort
	cert *x509.Certificate // of the last join
}

func (s *suite) machine(name string) *machine {
	s.t.Helper()
	key, err := pki.NewKey()
	if err != nil {
		s.t.Fatal(err)
	}
	return &machine{name: name, key: key, addr: netip.AddrPortFrom(s.addr("n1").Addr().Prev(), 7443)}
}

// join asks for membership, and again when too many wrong requests came from here:
// all come from the host's one address.
func (s *suite) join(m *machine, token pki.Token, csr *x509.CertificateRequest, more map[string]any) (res *join.Response, err error) {
	if csr == nil {
		csr = &x509.CertificateRequest{Subject: pkix.Name{CommonName: pki.NodeUserPrefix + m.name}}
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, csr, m.key)
	if err != nil {
		return nil, err
	}
	request := map[string]any{"tokenID": token.ID, "tokenSecret": token.Secret, "name": m.name, "addr": m.addr, "csr": der, "separate": true}
	for key, value := range more {
		request[key] = value
	}
	body, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	werr := s.within(waitLimit, func(ctx context.Context) error {
		res, err = s.post(ctx, "n1", body)
		var no *join.Refusal
		if errors.As(err, &no) && no.Code != join.CodeBusy || err == nil {
			return nil
		}
		return err
	})
	if werr != nil {
		return nil, werr
	}
	if err == nil {
		m.cert, err = pki.ParseCert(res.NodeCert)
	}
	return res, err
}

// post sends a body to a server's join protocol.
func (s *suite) post(ctx context.Context, to string, body []byte) (*join.Response, error) {
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true, NextProtos: []string{transport.Join}}}).DialContext(ctx, "tcp", s.addr(to).String())
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+to+join.Path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	res, err := tr.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	if err != nil {
		return nil, err
	}
	if res.StatusCode != http.StatusOK {
		no := new(join.Refusal)
		if err := json.Unmarshal(b, no); err != nil {
			return nil, fmt.Errorf("%s: %s", res.Status, b)
		}
		return nil, no
	}
	out := new(join.Response)
	return out, json.Unmarshal(b, out)
}

// identity is what the machine was given, as a node shows it.
func (m *machine) identity(ca *x509.Certificate) transport.Identity {
	pair := &tls.Certificate{Certificate: [][]byte{m.cert.Raw, ca.Raw}, PrivateKey: m.key, Leaf: m.cert}
	pool := x509.NewCertPool()
	pool.AddCert(ca)
	return transport.Identity{Certificate: func() *tls.Certificate { return pair }, Roots: func(*x509.Certificate) *x509.CertPool { return pool }}
}

// config shows the API the machine's certificate.
func (s *suite) asMachine(m *machine) *rest.Config {
	s.t.Helper()
	key, err := pki.EncodeKey(m.key)
	if err != nil {
		s.t.Fatal(err)
	}
	return &rest.Config{Host: s.admin.Host, TLSClientConfig: rest.TLSClientConfig{
		CertData: pki.EncodeCert(m.cert), KeyData: key, CAFile: filepath.Join(s.node("n1").Data, "pki", "ca.crt"),
	}}
}

// unconfirmedCalls are what a machine must not do that was given a certificate.
var unconfirmedCalls = []call{
	{name: "reads a Secret of an agent's pod", method: "GET", path: "/api/v1/namespaces/$NS/secrets/own"},
	{name: "lists Secrets", method: "GET", path: "/api/v1/secrets"},
	{name: "writes another Node", method: "PATCH", path: "/api/v1/nodes/a1", body: `{"metadata":{"annotations":{"x":"y"}}}`},
	{name: "makes a pod", method: "POST", path: "/api/v1/namespaces/$NS/pods", body: `{"metadata":{"name":"made"},"spec":{"containers":[{"name":"c","image":"x"}]}}`},
	{name: "makes a join token", method: "POST", path: "/clusterd/v1/tokens", body: `{}`, alone: true},
	{name: "takes a snapshot", method: "GET", path: "/clusterd/v1/snapshot", alone: true},
	{name: "asks a node by the proxy", method: "GET", path: "/api/v1/nodes/a1/proxy/pods"},
}

// joinTokens is what somebody can do who has got hold of a join token, or of a
// machine's request.
func joinTokens(s *suite) []attack {
	refused := func(name string, token func() pki.Token, m *machine, control func(*suite) error) attack {
		return attack{name: name, control: control, try: func(s *suite) verdict {
			_, err := s.join(m, token(), nil, nil)
			var no *join.Refusal
			switch {
			case errors.As(err, &no):
				return shut("%s: %v", no.Code, err)
			case err != nil:
				return broken(err)
			}
			return open("it was given a certificate, as %s", m.name)
		}}
	}
	kept := func(t pki.Token) func() pki.Token { return func() pki.Token { return t } }

	once := s.token("--role=agent")
	first := s.machine("ghost-1")
	if _, err := s.join(first, once, nil, nil); err != nil {
		s.t.Fatal(err)
	}
	withSecret := func(change func(string) string) func() pki.Token {
		return func() pki.Token {
			t := s.token("--role=agent")
			t.Secret = change(t.Secret)
			return t
		}
	}
	deleted := s.token("--role=agent")
	s.ctl("token", "rm", deleted.ID)
	other := s.token("--role=agent")
	out := []attack{
		refused("used twice", kept(once), s.machine("ghost-2"), func(s *suite) error {
			_, err := s.join(s.machine("ghost-3"), s.token("--role=agent"), nil, nil)
			return err
		}),
		{name: "that has expired", try: func(s *suite) verdict {
			token := s.token("--role=agent", "--ttl=1s")
			var last error
			err := s.within(waitLimit, func(context.Context) error {
				m := s.machine("ghost-late")
				_, last = s.join(m, token, nil, nil)
				var no *join.Refusal
				if !errors.As(last, &no) || !strings.Contains(last.Error(), "expired") {
					return fmt.Errorf("it still opens: %v", last)
				}
				return nil
			})
			if err != nil {
				return open("%v", err)
			}
			return shut("%v", last)
		}},
		refused("that was deleted", kept(deleted), s.machine("ghost-4"), nil),
		refused("with another secret", withSecret(func(t string) string { return strings.Repeat("a", len(t)) }), s.machine("ghost-5"), nil),
		refused("cut short", withSecret(func(t string) string { return t[:len(t)-1] }), s.machine("ghost-5"), nil),
		refused("with no secret", withSecret(func(string) string { return "" }), s.machine("ghost-5"), nil),
		refused("with the secret of another token", func() pki.Token { t := other; t.ID = once.ID; return t }, s.machine("ghost-5"), nil),
		refused("with an id that is a path", func() pki.Token { t := other; t.ID = "../tokens/" + other.ID; return t }, s.machine("ghost-5"), nil),
		refused("for another name", func() pki.Token { return s.token("--role=agent", "--name=wanted") }, s.machine("ghost-6"), func(s *suite) error {
			_, err := s.join(s.machine("wanted"), s.token("--role=agent", "--name=wanted"), nil, nil)
			return err
		}),
		refused("from another address", func() pki.Token { return s.token("--role=agent", "--from=192.0.2.0/24") }, s.machine("ghost-7"), func(s *suite) error {
			_, err := s.join(s.machine("ghost-8"), s.token("--role=agent", "--from=10.85.0.1"), nil, nil)
			return err
		}),
		refused("under a server's name", func() pki.Token { return s.token("--role=agent") }, s.machine("n1"), nil),
		refused("under an agent's name", func() pki.Token { return s.token("--role=agent") }, s.machine("a1"), nil),
		refused("under a name that is a path", func() pki.Token { return s.token("--role=agent") }, s.machine("../members/n1"), nil),
		refused("under a system name", func() pki.Token { return s.token("--role=agent") }, s.machine("system:masters"), nil),
		refused("under a name of 300 letters", func() pki.Token { return s.token("--role=agent") }, s.machine(strings.Repeat("a", 300)), nil),
		{name: "of agents, for a server's role", try: func(s *suite) verdict {
			m := s.machine("ghost-9")
			res, err := s.join(m, s.token("--role=agent"), nil, map[string]any{"role": "server", "Role": "server"})
			if err != nil {
				return broken(err)
			}
			if res.Role != pki.Agent || pki.NodeRole(m.cert) != pki.Agent {
				return open("the role is %s, the certificate's %s", res.Role, pki.NodeRole(m.cert))
			}
			return shut("the certificate is an agent's")
		}, control: func(s *suite) error {
			m := s.machine("ghost-s")
			if _, err := s.join(m, s.token("--role=server"), nil, nil); err != nil {
				return err
			}
			if role := pki.NodeRole(m.cert); role != pki.Server {
				return fmt.Errorf("a server's token gives the role %s", role)
			}
			return nil
		}},
	}
	// Requests whose certificate would say more than the token.
	ca := s.authority()
	for _, wish := range []struct {
		name string
		csr  x509.CertificateRequest
	}{
		{"in the group system:masters", x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:ghost-w", Organization: []string{"system:masters", "system:nodes"}}}},
		{"in the name of n1", x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:n1"}}},
		{"with a server's addresses", x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:ghost-w"}, IPAddresses: []net.IP{s.addr("n1").Addr().AsSlice()}, DNSNames: []string{"kubernetes.default.svc", "localhost"}}},
		{"as an authority", x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:ghost-w"},
			ExtraExtensions: []pkix.Extension{{Id: []int{2, 5, 29, 19}, Critical: true, Value: []byte{0x30, 3, 1, 1, 0xff}}}}},
	} {
		out = append(out, attack{name: "asks for a certificate " + wish.name, try: func(s *suite) verdict {
			m := s.machine("ghost-w")
			if _, err := s.join(m, s.token("--role=agent"), &wish.csr, nil); err != nil {
				return shut("%v", err)
			}
			name, _ := pki.NodeName(m.cert)
			if name != "ghost-w" || m.cert.IsCA || len(m.cert.IPAddresses)+len(m.cert.DNSNames) > 0 || strings.Contains(m.cert.Subject.String(), "masters") {
				return open("%s, names %v, addresses %v, authority %v", m.cert.Subject, m.cert.DNSNames, m.cert.IPAddresses, m.cert.IsCA)
			}
			return shut("the certificate says %s alone", m.cert.Subject)
		}})
	}
	// A machine that has arrived: its request is sent again, as it was and with
	// another key.
	arrived, token := s.machine("ghost-a"), s.token("--role=agent")
	if _, err := s.join(arrived, token, nil, nil); err != nil {
		s.t.Fatal(err)
	}
	if _, err := join.FetchServers(s.t.Context(), s.dials(arrived.identity(ca), "n1", transport.Member), arrived.addr, 0); err != nil {
		s.t.Fatal(err)
	}
	thief := s.machine("ghost-a")
	out = append(out,
		refused("of a machine that has arrived, again", kept(token), arrived, nil),
		refused("of a machine that has arrived, with a thief's key", kept(token), thief, nil),
		attack{name: "renews with a key that is unknown", try: func(s *suite) verdict {
			var last error
			if err := s.within(waitLimit, func(ctx context.Context) error {
				_, _, last = join.Renew(ctx, s.dials(s.stolen("a1"), "n1", transport.Join), "a1", thief.key, func(*join.Certificate) *pki.Trust { return s.trust("a1") })
				var no *join.Refusal
				if errors.As(last, &no) && no.Code == join.CodeBusy {
					return last
				}
				return nil
			}); err != nil {
				return broken(err)
			}
			if last == nil {
				return open("it was given a certificate")
			}
			return shut("%v", last)
		}},
		attack{name: "tries tokens until one fits", try: func(s *suite) verdict {
			body := []byte(`{"tokenID":"abcdef","tokenSecret":"x","name":"ghost-g","addr":"10.85.0.1:7443","csr":"AA=="}`)
			for i := range 2000 {
				_, err := s.post(s.t.Context(), "n2", body)
				var no *join.Refusal
				if !errors.As(err, &no) {
					return broken(fmt.Errorf("try %d: %w", i, err))
				}
				if no.Code == join.CodeBusy {
					return shut("after %d tries: %v", i, no)
				}
			}
			return open("2000 tries were looked at")
		}},
	)
	// One that never arrives reaches nothing but the join.
	out = append(out, calls(s.asMachine(first), unconfirmedCalls)...)
	ghost, voter := first.identity(ca), s.stolen("n2")
	for _, to := range []string{"n1", "n2", "a1"} {
		for _, protocol := range []string{transport.Raft, transport.Gossip, transport.Node} {
			out = append(out, attack{name: fmt.Sprintf("never arrives, and dials %s at %s", protocol, to), try: func(s *suite) verdict { return s.door(ghost, to, protocol, nil) }})
		}
	}
	out = append(out, attack{name: "never arrives, and asks for the cluster's keys", try: func(s *suite) verdict {
		_, err := join.FetchKeys(s.t.Context(), s.dials(ghost, "n1", transport.Member))
		if err != nil {
			return shut("%v", err)
		}
		return open("it has them")
	}})
	server := s.machine("ghost-server")
	if _, err := s.join(server, s.token("--role=server"), nil, nil); err != nil {
		s.t.Fatal(err)
	}
	for _, a := range raftAttacks("n1", "n3", server.identity(ca), voter) {
		a.name = "of servers, and never arrives: " + a.name
		out = append(out, a)
	}
	return append(out, attack{name: "leaves nothing behind", try: func(s *suite) verdict {
		list, err := s.members(s.t.Context())
		if err != nil {
			return broken(err)
		}
		for _, m := range list.Members {
			if strings.HasPrefix(m.Name, "ghost") || m.Name == "wanted" {
				s.ctl("members", "rm", "--yes", m.Name)
			}
		}
		v := s.door(ghost, "n1", transport.Member, nil)
		if _, err := os.Stat(filepath.Join(s.dir, "ghost-1")); err == nil {
			return broken(errors.New("a folder of a machine that is none"))
		}
		return v
	}})
}
