package join

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

// TestTrustWord: a joiner, an agent that renews and one that asks where the servers
// are receive which authorities to trust, and the server receives what the one that
// asks has.
func TestTrustWord(t *testing.T) {
	w := newWorld(t)
	next, err := w.ca.NewSuccessor(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	noted := map[string]uint64{}
	w.server.NoteTrust = func(_ context.Context, id string, number uint64, _ func() bool) error {
		noted[id] = number
		return nil
	}
	res, wish, err := w.join(t, w.tokenFor(t, TokenOptions{Role: pki.Agent, TTL: time.Hour}), "a1")
	if err != nil {
		t.Fatal(err)
	}
	agent := w.as(wish, res, transport.Member)
	id := pki.Fingerprint(wish.Key.Public())
	if list, err := FetchServers(t.Context(), agent, netip.AddrPort{}, 0); err != nil || list.Trust == nil || list.Trust.Number != 0 || len(noted) != 0 {
		t.Fatalf("%+v, %v; noted %v", list, err, noted)
	}

	w.trust.Store(pki.NewTrust(2, next, w.ca))
	list, err := FetchServers(t.Context(), agent, netip.AddrPort{}, 1)
	if err != nil || list.Trust == nil || list.Trust.Number != 2 || noted[id] != 1 {
		t.Fatalf("%+v, %v; noted %v", list, err, noted)
	}
	trust, err := pki.ParseTrust(2, list.Trust.Authorities, nil)
	if err != nil || trust.Signer().ID() != next.ID() || trust.Find(w.ca.ID()) == nil {
		t.Errorf("it is to trust %+v, %v", trust, err)
	}
	cert, answer, err := Renew(t.Context(), w.as(wish, res, transport.Join), "a1", wish.Key, by(next))
	if err != nil || !next.Signed(cert) || answer.Trust == nil || answer.Trust.Number != 2 {
		t.Errorf("renewal: %+v, %v", answer, err)
	}

	// A token from before still opens the door.
	if res, _, err := w.join(t, w.tokenFor(t, TokenOptions{Role: pki.Agent, TTL: time.Hour}), "a2"); err != nil || res.Trust != 2 {
		t.Errorf("by a token that pins the old authority: %+v, %v", res, err)
	} else if trust, err := pki.ParseTrust(res.Trust, res.CACert, nil); err != nil || trust.Signer().ID() != next.ID() {
		t.Errorf("the joiner trusts %+v, %v", trust, err)
	}
}
