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
	"strings"
	"time"

	"github.com/clusterd/clusterd/cmd/clusterd/pki"
	"github.com/clusterd/clusterd/cmd/clusterd/transport"
)

// Wish is what a machine joins with.
type Wish struct {
	Server  string // HOST:PORT of any member
	Token   pki.Token
	Name    string
	Addr    netip.AddrPort
	Key     crypto.Signer
	Version string
}

// Join asks the cluster for membership. It writes nothing. A *Refusal is
// final; every other error may pass.
func Join(ctx context.Context, w Wish) (*Response, error) {
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: pki.NodeUserPrefix + w.Name}}, w.Key)
	if err != nil {
		return nil, fmt.Errorf("make the certificate request: %w", err)
	}
	body, err := json.Marshal(Request{TokenID: w.Token.ID, TokenSecret: w.Token.Secret, Name: w.Name, Addr: w.Addr, CSR: csr, Version: w.Version})
	if err != nil {
		return nil, err
	}
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialTLSContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialPinned(ctx, w.Server, w.Token)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+w.Server+Path, bytes.NewReader(body))
	if err != nil {
		return nil, fmt.Errorf("the address %q: %w", w.Server, err)
	}
	res, err := client.Do(req)
	if err != nil {
		var no *Refusal
		if errors.As(err, &no) {
			return nil, no
		}
		return nil, fmt.Errorf("ask %s: %w", w.Server, errors.Unwrap(err)) // the *url.Error repeats the address
	}
	defer res.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(res.Body, 1<<20))
	if err != nil {
		return nil, fmt.Errorf("read the answer of %s: %w", w.Server, err)
	}
	if res.StatusCode != http.StatusOK {
		var no Refusal
		if err := json.Unmarshal(answer, &no); err != nil || no.Message == "" {
			return nil, fmt.Errorf("%s answered %s", w.Server, res.Status)
		}
		if no.Code == CodeBusy {
			return nil, errors.New(no.Message)
		}
		return nil, &no
	}
	var r Response
	if err := json.Unmarshal(answer, &r); err != nil {
		return nil, fmt.Errorf("read the answer of %s: %w", w.Server, err)
	}
	return &r, r.check(w)
}

// check makes sure that the answer fits together, before anything of it is
// written down.
func (r *Response) check(w Wish) error {
	caKey, err := pki.LoadCA(r.CACert, r.CAKey)
	if err != nil {
		return fmt.Errorf("the cluster's answer: %w", err)
	}
	cert, err := pki.ParseCert(r.NodeCert)
	if err != nil {
		return fmt.Errorf("the cluster's answer: node certificate: %w", err)
	}
	peer, err := pki.VerifyPeer([]*x509.Certificate{cert}, caKey.Pool(), x509.ExtKeyUsageClientAuth, time.Now())
	if err != nil {
		return fmt.Errorf("the cluster's answer (is this machine's clock right?): %w", err)
	}
	if !w.Token.Pins(caKey.Cert) || peer.ID != pki.Fingerprint(w.Key.Public()) || peer.Name != w.Name || len(r.GossipKey) != 32 {
		return errors.New("the cluster's answer does not belong to this request")
	}
	return nil
}

// dialPinned connects for the join protocol and checks, before a byte is
// sent, that the server holds a certificate of the authority the token pins.
func dialPinned(ctx context.Context, server string, token pki.Token) (net.Conn, error) {
	d := tls.Dialer{
		NetDialer: &net.Dialer{Timeout: 10 * time.Second},
		Config: &tls.Config{
			MinVersion:         tls.VersionTLS12,
			NextProtos:         []string{transport.Join},
			InsecureSkipVerify: true, // by name; VerifyConnection checks the pinned authority
			VerifyConnection: func(s tls.ConnectionState) error {
				return verifyPinned(s.PeerCertificates, token, server)
			},
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
		if _, err := pki.VerifyPeer(chain, roots, x509.ExtKeyUsageServerAuth, time.Now()); err != nil {
			return &Refusal{CodeRequest, fmt.Sprintf("%s shows a certificate that is not valid now (is this machine's clock, %s, right?): %v", server, time.Now().Format(time.RFC3339), err)}
		}
		return nil
	}
	return &Refusal{CodeToken, fmt.Sprintf("%s belongs to another cluster than the join token: check the address, or make a token on that cluster with `clusterctl token create`", server)}
}
