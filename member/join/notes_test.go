package join

import (
	"context"
	"net/netip"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/raftstore"
)

// TestNotesBounded: an agent that says another thing of itself with each question
// changes the store a few times; one that says what is so is believed at once, and
// what lies beyond the state of the authority never is.
func TestNotesBounded(t *testing.T) {
	w := newWorld(t)
	has := Progress{Prefix: "/test/has/", Origin: "test"}
	w.server.NoteTrust = func(ctx context.Context, id string, number uint64, may func() bool) error {
		return has.Note(ctx, w.store, id, number, may)
	}
	next, err := w.ca.NewSuccessor(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	w.trust.Store(pki.NewTrust(2000, w.ca, next))
	revision := func() int64 {
		t.Helper()
		_, rev, err := w.store.Get(t.Context(), clusterKey, raftstore.ReadOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return rev
	}
	addr := func(i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.9"), uint16(7000+i))
	}
	for name, ask := range map[string]func(i int) (netip.AddrPort, uint64){
		"addresses":   func(i int) (netip.AddrPort, uint64) { return addr(i), 0 },
		"authorities": func(i int) (netip.AddrPort, uint64) { return addr(0), uint64(1 + i) },
		"both":        func(i int) (netip.AddrPort, uint64) { return addr(i % 2), uint64(1 + i%2) },
	} {
		res, wish, err := w.join(t, w.tokenFor(t, TokenOptions{Role: pki.Agent, TTL: time.Hour}), "a-"+name)
		if err != nil {
			t.Fatal(err)
		}
		dial, before, began := w.as(wish, res, transport.Member), revision(), time.Now()
		for i := range 1000 {
			at, trust := ask(i)
			if _, err := FetchServers(t.Context(), dial, at, trust); err != nil {
				t.Fatal(err)
			}
		}
		// The machine may be slow.
		most := int64(notesAtOnce + 1 + time.Since(began)/notesEvery)
		if got := revision() - before; got < 1 || got > most {
			t.Errorf("%s: 1000 questions made %d changes, want 1 to %d", name, got, most)
		}
	}
	res, wish, err := w.join(t, w.tokenFor(t, TokenOptions{Role: pki.Agent, TTL: time.Hour}), "a1")
	if err != nil {
		t.Fatal(err)
	}
	id := pki.Fingerprint(wish.Key.Public())
	for _, step := range []struct{ says, want uint64 }{{2001, 0}, {1, 1}, {2000, 2000}, {2001, 2000}} {
		if _, err := FetchServers(t.Context(), w.as(wish, res, transport.Member), addr(1), step.says); err != nil {
			t.Fatal(err)
		}
		all, err := has.All(t.Context(), w.store, false)
		if err != nil || all[id] != step.want {
			t.Errorf("says %d: noted %d, %v, want %d", step.says, all[id], err, step.want)
		}
	}
}
