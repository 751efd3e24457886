package gossipkey

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/join/jointest"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// nodeOf is server n1, which holds a ring and can ask n2 for its own.
func nodeOf(t *testing.T, s *jointest.Store, mine Ring, theirs *Ring) *Node {
	t.Helper()
	for _, id := range []string{"n1", "n2"} {
		b, err := json.Marshal(join.Record{ID: id, Name: id, Confirmed: true})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.Txn(t.Context(), mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/clusterd/members/" + id, Value: b}}}); err != nil {
			t.Fatal(err)
		}
	}
	return &Node{
		Store: s, ID: "n1", HasLeader: func() bool { return true },
		Ring:  func() Ring { return mine },
		Adopt: func(r Ring) error { mine = r; return nil },
		Addr:  func(string) netip.AddrPort { return netip.AddrPort{} },
		Fetch: func(_ context.Context, _ netip.AddrPort, id string) (*join.Keys, error) {
			if id != "n2" || theirs == nil {
				return nil, errors.New("no answer")
			}
			return &join.Keys{GossipKey: theirs.Keys[0], Gossip: &join.GossipKeys{Number: theirs.Number, Keys: theirs.Keys}}, nil
		},
		Now: time.Now, Log: slog.New(slog.DiscardHandler),
	}
}

// TestNodeFollows: a server takes the key that it lacks from another one, records the state only
// once it has it, and hands out no keys of a state that its store does not have.
func TestNodeFollows(t *testing.T) {
	ctx, s := t.Context(), jointest.New()
	before, after := New(), New()
	var theirs *Ring
	n := nodeOf(t, s, Ring{Keys: [][]byte{before}}, nil)
	n.Fetch = func(ctx context.Context, addr netip.AddrPort, id string) (*join.Keys, error) {
		return nodeOf(t, s, Ring{}, theirs).Fetch(ctx, addr, id)
	}
	if done, err := put(ctx, s, 0, State{Number: 1, Phase: Distribute, Keys: []string{ID(before), ID(after)}}); err != nil || !done {
		t.Fatal(done, err)
	}
	if err := n.follow(ctx); err == nil {
		t.Error("it follows without the key")
	}
	if has, err := progress.All(ctx, s, true); err != nil || has["n1"] != 0 {
		t.Errorf("recorded: %v, %v", has, err)
	}
	theirs = &Ring{Number: 1, Keys: [][]byte{before, after}}
	if err := n.follow(ctx); err != nil {
		t.Fatal(err)
	}
	if r := n.Ring(); r.Number != 1 || !r.Names([]string{ID(before), ID(after)}) {
		t.Errorf("it has %+v", r)
	}
	if has, err := progress.All(ctx, s, true); err != nil || has["n1"] != 1 {
		t.Errorf("recorded: %v, %v", has, err)
	}
	if keys, err := n.Answer(ctx); err != nil || keys.Number != 1 || len(keys.Keys) != 2 {
		t.Errorf("answered: %+v, %v", keys, err)
	}
	ahead := nodeOf(t, s, Ring{Number: 2, Keys: [][]byte{after}}, nil)
	if keys, err := ahead.Answer(ctx); err == nil {
		t.Errorf("of a state that the store does not have: %+v", keys)
	}
}
