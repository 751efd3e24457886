package join

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
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

// Options are what a machine joins with.
type Options struct {
	Server  string // HOST:PORT of any member
	Token   pki.Token
	Name    string
	Addr    netip.AddrPort
	Key     crypto.Signer
	Version string
}

// Join asks the cluster for membership. It writes nothing. A *Refusal is
// final; every other error may pass.
func Join(ctx context.Context, w Options) (*Response, error) {
	csr, err := newCSR(w.Name, w.Key)
	if err != nil {
		return nil, err
	}
	var r Response
	req := Request{TokenID: w.Token.ID, TokenSecret: w.Token.Secret, Name: w.Name, Addr: w.Addr, CSR: csr, Version: w.Version, Separate: true}
	dial := func(ctx context.Context) (net.Conn, error) { return dialPinned(ctx, w.Server, w.Token) }
	if err := ask(ctx, dial, w.Server, http.MethodPost, Path, req, &r); err != nil {
		return nil, err
	}
	return &r, r.check(w)
}

// Renew asks a server for a member's next certificate, of the role that its
// record has. dial opens a connection for the join protocol to a server that is
// verified. roots are the authorities, given the answer, that must have
// signed the certificate: a removed server still shows a good certificate, and
// signs with whatever key it likes.
func Renew(ctx context.Context, dial Dialer, name string, key crypto.Signer, roots func(*Certificate) *pki.Trust) (*x509.Certificate, *Certificate, error) {
	csr, err := newCSR(name, key)
	if err != nil {
		return nil, nil, err
	}
	var r Certificate
	if err := ask(ctx, dial, "a server", http.MethodPost, RenewPath, Renewal{CSR: csr, Separate: true}, &r); err != nil {
		return nil, nil, err
	}
	cert, err := pki.ParseCert(r.NodeCert)
	if err != nil {
		return nil, nil, fmt.Errorf("the server's answer: %w", err)
	}
	if pki.Fingerprint(cert.PublicKey) != pki.Fingerprint(key.Public()) {
		return nil, nil, errors.New("the server's answer is for another key")
	}
	// At the moment of its beginning: this machine's clock may be wrong.
	if _, err := pki.VerifyPeer([]*x509.Certificate{cert}, roots(&r).Roots, x509.ExtKeyUsageClientAuth, cert.NotBefore); err != nil {
		return nil, nil, fmt.Errorf("the server's answer is signed by an authority that this node does not trust: %w", err)
	}
	return cert, &r, nil
}

// FetchKeys asks a server, over the members' protocol, for what only servers
// know.
func FetchKeys(ctx context.Context, dial Dialer) (*Keys, error) {
	var k Keys
	if err := ask(ctx, dial, "a server", http.MethodGet, KeysPath+"?"+separateKey+"=true", nil, &k); err != nil {
		return nil, err
	}
	if len(k.GossipKey) != 32 {
		return nil, fmt.Errorf("the gossip key has %d bytes, not 32", len(k.GossipKey))
	}
	return &k, nil
}

// FetchServers asks a server, over the members' protocol, where the servers are
// and what this node is, and says where it listens and, unless it is 0, the
// number of the last word on the authority that it has.
func FetchServers(ctx context.Context, dial Dialer, self netip.AddrPort, trust uint64) (ServerList, error) {
	var l ServerList
	query := url.Values{"addr": {self.String()}, separateKey: {"true"}}
	if trust > 0 {
		query.Set("trust", strconv.FormatUint(trust, 10))
	}
	err := ask(ctx, dial, "a server", http.MethodGet, ServersPath+"?"+query.Encode(), nil, &l)
	return l, err
}

// FetchReleaseKeys asks a server, over the members' protocol, which keys releases may
// be signed with.
func FetchReleaseKeys(ctx context.Context, dial Dialer) ([]string, error) {
	var k ReleaseKeys
	err := ask(ctx, dial, "a server", http.MethodGet, ReleaseKeysPath, nil, &k)
	return k.Keys, err
}

// MayLeave asks a server, over the members' protocol, whether the cluster can do without
// this member. A *Refusal says why not.
func MayLeave(ctx context.Context, dial Dialer) error {
	return ask(ctx, dial, "a server", http.MethodGet, MemberPath, nil, &struct{}{})
}

// Leave has a server take this member out of the cluster.
func Leave(ctx context.Context, dial Dialer) error {
	return ask(ctx, dial, "a server", http.MethodDelete, MemberPath, nil, &struct{}{})
}

// Dialer opens a connection whose other end is verified.
type Dialer func(context.Context) (net.Conn, error)

func newCSR(name string, key crypto.Signer) ([]byte, error) {
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: pki.NodeUserPrefix + name}}, key)
	if err != nil {
		return nil, fmt.Errorf("make the certificate request: %w", err)
	}
	return csr, nil
}

// ask makes one request over a connection of its own. The scheme is http since
// what dial returns is the finished TLS connection.
func ask(ctx context.Context, dial Dialer, server, method, path string, in, into any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
	}}
	req, err := http.NewRequestWithContext(ctx, method, "http://server"+path, body)
	if err != nil {
		return err
	}
	res, err := client.Do(req)
	if err != nil {
		var no *Refusal
		if errors.As(err, &no) {
			return no
		}
		return fmt.Errorf("ask %s: %w", server, errors.Unwrap(err)) // the *url.Error repeats the address
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	if err != nil {
		return fmt.Errorf("read the answer of %s: %w", server, err)
	}
	if res.StatusCode != http.StatusOK {
		var no Refusal
		if err := json.Unmarshal(answer, &no); err != nil || no.Message == "" {
			return fmt.Errorf("%s answered %s", server, res.Status)
		}
		if no.Code == CodeBusy {
			return errors.New(no.Message)
		}
		return &no
	}
	if err := json.Unmarshal(answer, into); err != nil {
		return fmt.Errorf("read the answer of %s: %w", server, err)
	}
	return nil
}

// Trusts are the authorities in the answer.
func (r *Response) Trusts() (*pki.Trust, error) {
	return TrustBundle{Number: r.Trust, Authorities: r.CACert, Own: r.Own}.Trust()
}

// check makes sure that the answer fits together, before anything of it is
// written down.
func (r *Response) check(w Options) error {
	trust, err := r.Trusts()
	if err != nil {
		return fmt.Errorf("the cluster's answer: %w", err)
	}
	cert, err := pki.ParseCert(r.NodeCert)
	if err != nil {
		return fmt.Errorf("the cluster's answer: node certificate: %w", err)
	}
	peer, err := pki.VerifyPeer([]*x509.Certificate{cert}, trust.Roots, x509.ExtKeyUsageClientAuth, time.Now())
	if err != nil {
		return fmt.Errorf("the cluster's answer (is this machine's clock right?): %w", err)
	}
	if trust.Find(w.Token.Authority) == nil || peer.ID != pki.Fingerprint(w.Key.Public()) || peer.Name != w.Name || peer.Role != r.Role {
		return errors.New("the cluster's answer does not belong to this request")
	}
	return nil
}

// dialPinned connects for the join protocol and checks, before a byte is
// sent, that the server holds a certificate of the authority the token pins.
func dialPinned(ctx context.Context, server string, token pki.Token) (net.Conn, error) {
	return dialJoin(ctx, server, transport.AuthorityName(token.Authority), func(s tls.ConnectionState) error {
		return verifyPinned(s.PeerCertificates, token, server)
	})
}

// dialJoin connects for the join protocol. name is the TLS server name, verify all
// that judges the server's certificate.
func dialJoin(ctx context.Context, server, name string, verify func(tls.ConnectionState) error) (net.Conn, error) {
	d := tls.Dialer{
		NetDialer: &net.Dialer{Timeout: 10 * time.Second},
		Config: &tls.Config{
			MinVersion:         tls.VersionTLS13,
			NextProtos:         []string{transport.Join},
			ServerName:         name,
			InsecureSkipVerify: true, // by name; verify checks the authority
			VerifyConnection:   verify,
		},
	}
	c, err := d.DialContext(ctx, "tcp", server)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) && strings.Contains(op.Err.Error(), "no application protocol") {
			return nil, &Refusal{CodeRequest, fmt.Sprintf("%s is not a clusterd node of a version that this one can join", server)}
		}
		return nil, err
	}
	if c.(*tls.Conn).ConnectionState().NegotiatedProtocol != transport.Join {
		c.Close()
		return nil, &Refusal{CodeRequest, fmt.Sprintf("%s is not a clusterd node: give the address that `clusterd init` printed", server)}
	}
	return c, nil
}

func verifyPinned(chain []*x509.Certificate, token pki.Token, server string) error {
	for _, ca := range chain {
		if !ca.IsCA || !token.Pins(ca) {
			continue
		}
		roots := x509.NewCertPool()
		roots.AddCert(ca)
		peer, err := pki.VerifyPeer(chain, func(*x509.Certificate) *x509.CertPool { return roots }, x509.ExtKeyUsageServerAuth, time.Now())
		if err == nil && (peer.Name == "" || peer.Role != pki.Server) {
			// An agent's certificate is the authority's, too, and would get the token.
			return &Refusal{CodeRequest, fmt.Sprintf("%s is no server of the cluster: give the address that `clusterd init` printed", server)}
		}
		if err != nil {
			return &Refusal{CodeRequest, fmt.Sprintf("%s shows a certificate that is not valid now (is this machine's clock, %s, right?): %v", server, time.Now().Format(time.RFC3339), err)}
		}
		return nil
	}
	return &Refusal{CodeToken, fmt.Sprintf("%s belongs to another cluster than the join token: check the address; if it is right, the cluster has changed its authority since the token was made: make another there with `clusterctl token create`", server)}
}
