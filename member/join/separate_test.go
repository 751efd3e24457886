package join

import (
	"context"
	"crypto"
	"crypto/tls"
	"errors"
	"net"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

// TestSeparateAuthorities: who joins a cluster with an authority for each purpose gets all of
// them, and a certificate by that for nodes; a version that knows one is sent away before it has a record,
// and a member of such a version is told nothing that it would take for something else.
func TestSeparateAuthorities(t *testing.T) {
	w := newWorld(t)
	separate, err := w.trust.Load().Separate(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	var known []string
	w.server.NoteSeparate = func(_ context.Context, id string, _ func() bool) error { known = append(known, id); return nil }
	old, wish, err := w.join(t, w.tokenFor(t, TokenOptions{Role: pki.Agent, TTL: time.Hour}), "a0") // before
	if err != nil || len(old.Own) > 0 {
		t.Fatalf("%+v, %v", old, err)
	}
	agentOf := func(res *Response, key crypto.Signer) Dialer {
		trust, err := res.Trusts()
		if err != nil {
			t.Fatal(err)
		}
		cert, err := pki.ParseCert(res.NodeCert)
		if err != nil {
			t.Fatal(err)
		}
		pair := &tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key, Leaf: cert}
		id := transport.Identity{Certificate: func() *tls.Certificate { return pair }, Roots: trust.Roots}
		return func(ctx context.Context) (net.Conn, error) { return id.DialHost(ctx, w.addr, "", transport.Member) }
	}
	if _, err := FetchServers(t.Context(), agentOf(old, wish.Key), wish.Addr, 0); err != nil || len(known) != 1 || known[0] != pki.Fingerprint(wish.Key.Public()) {
		t.Errorf("noted as one that knows: %q, %v", known, err)
	}

	separate.Number = 4
	w.trust.Store(separate)
	res, wish, err := w.join(t, w.tokenFor(t, TokenOptions{Role: pki.Agent, TTL: time.Hour}), "a1")
	if err != nil {
		t.Fatal(err)
	}
	cert, err := pki.ParseCert(res.NodeCert)
	trust, terr := res.Trusts()
	if err != nil || terr != nil || trust.Number != 4 || !separate.For(pki.ForNodes).Signer().Signed(cert) || trust.For(pki.ForClients).Signer().ID() != separate.For(pki.ForClients).Signer().ID() {
		t.Errorf("%+v, %v, %v", res, err, terr)
	}
	renewed, answer, err := Renew(t.Context(), func(ctx context.Context) (net.Conn, error) { return dialPinned(ctx, w.addr, wish.Token) }, "a1", wish.Key, func(*Certificate) *pki.Trust { return trust })
	if err != nil || !separate.For(pki.ForNodes).Signer().Signed(renewed) || len(answer.Trust.Own) != len(pki.OwnPurposes) {
		t.Errorf("renewed: %+v, %v", answer, err)
	}
	for knows, want := range map[bool]bool{true: true, false: false} {
		if word := trustBundle(separate, knows); (word != nil) != want {
			t.Errorf("a member that knows (%t) of separate authorities hears %+v", knows, word)
		}
	}

	// As a version sends it that knows one.
	key, _ := pki.NewKey()
	csr, err := newCSR("a2", key)
	if err != nil {
		t.Fatal(err)
	}
	token := w.tokenFor(t, TokenOptions{Role: pki.Agent, TTL: time.Hour})
	_, err = w.server.admit(t.Context(), Request{TokenID: token.ID, TokenSecret: token.Secret, Name: "a2", Addr: wish.Addr, CSR: csr, Version: "v0.9"}, "127.0.0.1:1", time.Now())
	var no *Refusal
	if !errors.As(err, &no) || !strings.Contains(no.Message, "which clusterd v0.9 does not know") {
		t.Errorf("a machine of an earlier version: %v", err)
	}
	if records, err := Records(t.Context(), w.store, false); err != nil || slices.ContainsFunc(records, func(r Record) bool { return r.Name == "a2" }) {
		t.Errorf("it has a record: %+v, %v", records, err)
	}
	res, wish, err = w.join(t, w.token(t, time.Hour), "n3")
	if err != nil {
		t.Fatal(err)
	}
	keys, err := FetchKeys(t.Context(), agentOf(res, wish.Key))
	if err != nil {
		t.Fatal(err)
	}
	whole, err := keys.Whole(trust)
	if err != nil || !whole.For(pki.ForSecrets).Signer().HasKey() || whole.For(pki.ForSecrets).Signer().ID() != separate.For(pki.ForSecrets).Signer().ID() {
		t.Errorf("a server's keys: %+v, %v", keys, err)
	}
	_, err = w.server.getKeys(t.Context(), Record{ID: pki.Fingerprint(wish.Key.Public()), Name: "n3"}, httptest.NewRequest("GET", KeysPath, nil))
	if !errors.As(err, &no) || !strings.Contains(no.Message, "which the clusterd of node n3 does not know") {
		t.Errorf("keys for a server of an earlier version: %v", err)
	}
}
