package join

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/clusterd/clusterd/member/pki"
)

// AskToJoin tells the server of w that this machine wants to join, without a token:
// w.Token is not looked at. It returns the token to join with once it is approved
// (see AwaitApproval), and the code for the person who approves it. Errors are those
// of Join.
//
// The server's authority is accepted as it is shown. The code depends on it, on the
// machine's key and on what both ends drew: another server in between has another
// code, which the cluster does not know.
func AskToJoin(ctx context.Context, w Options) (pki.Token, string, error) {
	csr, err := newCSR(w.Name, w.Key)
	if err != nil {
		return pki.Token{}, "", err
	}
	// The first connection only looks at the authority; the others pin it.
	conn, ca, err := dialUnknown(ctx, w.Server)
	if err != nil {
		return pki.Token{}, "", err
	}
	conn.Close()
	token := pki.NewToken(ca)
	dial := func(ctx context.Context) (net.Conn, error) { return dialPinned(ctx, w.Server, token) }

	r := Reveal{ID: token.ID, Nonce: make([]byte, nonceBytes), Name: w.Name, Addr: w.Addr, CSR: csr, SecretHash: pki.HashSecret(token.Secret), Version: w.Version}
	if _, err := rand.Read(r.Nonce); err != nil {
		return pki.Token{}, "", err
	}
	var asked Asked
	if err := ask(ctx, dial, w.Server, http.MethodPost, AskPath, Ask{ID: r.ID, Commitment: r.commitment()}, &asked); err != nil {
		return pki.Token{}, "", err
	}
	if len(asked.Nonce) != nonceBytes {
		return pki.Token{}, "", fmt.Errorf("the answer of %s: a nonce of %d bytes, not %d", w.Server, len(asked.Nonce), nonceBytes)
	}
	if err := ask(ctx, dial, w.Server, http.MethodPost, RevealPath, r, new(AskState)); err != nil {
		return pki.Token{}, "", err
	}
	return token, r.code(token.Authority, asked.Nonce), nil
}

// askAgainAfter is how often a machine asks whether it is approved.
const askAgainAfter = 2 * time.Second

// AwaitApproval returns nil once the machine that AskToJoin gave the token may join
// by it. A *Refusal says that it may not; faults of the network are waited out until
// ctx ends.
func AwaitApproval(ctx context.Context, server string, token pki.Token) error {
	dial := func(ctx context.Context) (net.Conn, error) { return dialPinned(ctx, server, token) }
	tick := time.NewTicker(askAgainAfter)
	defer tick.Stop()
	for {
		var state AskState
		err := ask(ctx, dial, server, http.MethodPost, AskStatePath, AskID{token.ID}, &state)
		var no *Refusal
		if err == nil && state.Approved || errors.As(err, &no) {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		}
	}
}

// dialUnknown connects for the join protocol to a server of any cluster, and returns
// the authority that it shows and whose certificate it holds.
func dialUnknown(ctx context.Context, server string) (net.Conn, *x509.Certificate, error) {
	var authority *x509.Certificate
	conn, err := dialJoin(ctx, server, "", func(s tls.ConnectionState) error {
		err := error(&Refusal{CodeRequest, server + " shows no authority: give the address of a server of the cluster"})
		for _, ca := range s.PeerCertificates {
			if !ca.IsCA {
				continue
			}
			if err = verifyPinned(s.PeerCertificates, pki.Token{Authority: pki.Fingerprint(ca.PublicKey)}, server); err == nil {
				authority = ca
				return nil
			}
		}
		return err
	})
	return conn, authority, err
}
