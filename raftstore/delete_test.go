package raftstore_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// filled writes n keys, and returns what a list of them would lead to.
func filled(t testing.TB, s *raftstore.Store, n int) []mvcc.Compare {
	t.Helper()
	ctx := testContext(t)
	keys := make([]mvcc.Compare, n)
	for at := 0; at < n; at += 500 {
		var txn mvcc.Txn
		for i := at; i < min(at+500, n); i++ {
			keys[i].Key = fmt.Sprintf("/ns/%05d", i)
			txn.Ops = append(txn.Ops, mvcc.Op{Type: mvcc.OpPut, Key: keys[i].Key, Value: fmt.Appendf(nil, "value %d", i)})
		}
		res, err := s.Txn(ctx, txn)
		if err != nil {
			t.Fatal(err)
		}
		for i := at; i < min(at+500, n); i++ {
			keys[i].ModRevision = res.Revision
		}
	}
	return keys
}

// Thousands of keys go in a few log entries, from any member. A watcher sees
// each go once, in order, with what it held; who does not like one key keeps
// that one.
func TestMultiDelete(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, nil)
	ctx := testContext(t)
	const n = 3000
	keys := filled(t, c.Store("n0"), n)
	mustPut(t, c.Store("n1"), "/ns/00007", "changed since")
	w, err := c.Store("n2").Watch(ctx, "/ns/", raftstore.WatchOptions{Revision: c.Store("n1").Revision() + 1})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	deleted, err := c.Store("n1").Delete(ctx, keys, "sweeper")
	if err != nil {
		t.Fatal(err)
	}
	for i, kv := range deleted {
		switch {
		case i == 7 && kv != nil, i != 7 && (kv == nil || string(kv.Value) != fmt.Sprintf("value %d", i)):
			t.Fatalf("key %d: %+v", i, kv)
		}
	}
	next, last := 0, int64(0)
	for next < n {
		b, ok := <-w.C()
		if !ok {
			t.Fatalf("the watch ended after %d deletions: %v", next, w.Err())
		}
		for _, e := range b.Events {
			if next == 7 {
				next++
			}
			if e.Type != mvcc.Delete || e.KV.Key != keys[next].Key || e.KV.ModRevision <= last || string(e.Prev.Value) != fmt.Sprintf("value %d", next) {
				t.Fatalf("event %d: %+v after revision %d", next, e, last)
			}
			last = e.KV.ModRevision
			next++
		}
	}
	if got := get(t, c.Store("n2"), "/ns/00007"); got != "changed since" {
		t.Errorf("the key that had changed: %q", got)
	}
	h, err := c.Store("n0").History(ctx, "/ns/00010", 1, raftstore.ReadOptions{})
	if err != nil || len(h.Changes) != 1 || !strings.HasPrefix(h.Changes[0].Origin, "sweeper") {
		t.Errorf("history: %+v, %v", h, err)
	}
	for _, who := range c.Store("n0").Top().Writers {
		if who.Origin == "sweeper" && who.Writes != n {
			t.Errorf("counted as %d writes", who.Writes)
		}
	}
	again, err := c.Store("n0").Delete(ctx, keys, "sweeper")
	if err != nil {
		t.Fatal(err)
	}
	for i, kv := range again {
		if kv != nil {
			t.Fatalf("key %d was deleted twice: %+v", i, kv)
		}
	}
}

// While one member is of a version that would stop at the command, no entry
// holds it, wherever the deletion is asked for; the keys go all the same. Once
// that member is renewed, entries do.
func TestMultiDeleteBesideOlderMember(t *testing.T) {
	t.Parallel()
	var seen atomic.Int64
	var renewed atomic.Bool
	look := func(b *mvcc.Batch) {
		for i := range b.Commands {
			if b.Commands[i].Type == mvcc.CmdDelete {
				seen.Add(1)
			}
		}
	}
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) {
		cfg.Inject(raftstore.Faults{Mangle: look, Older: cfg.ID == "n2" && !renewed.Load()})
	})
	ctx := testContext(t)
	for _, id := range c.IDs() {
		keys := filled(t, c.Store("n0"), 300)
		keys[5].ModRevision++
		deleted, err := c.Store(id).Delete(ctx, keys, "sweeper")
		if err != nil {
			t.Fatalf("%s: %v", id, err)
		}
		for i, kv := range deleted {
			if (kv == nil) != (i == 5) {
				t.Fatalf("%s: key %d: %+v", id, i, kv)
			}
		}
	}
	if n := seen.Load(); n > 0 {
		t.Fatalf("%d commands that an older member does not know came into the log", n)
	}
	renewed.Store(true)
	c.Stop("n2")
	c.Start("n2")
	// Members that got a negative answer ask again after a while.
	c.Wait("the command is used", func() bool {
		keys := filled(t, c.Store("n0"), 10)
		if _, err := c.Store("n0").Delete(ctx, keys, "sweeper"); err != nil {
			t.Fatal(err)
		}
		return seen.Load() > 0
	})
}

// A member that is away, and has said before what it can read, holds nothing
// up.
func TestMultiDeleteWithMemberAway(t *testing.T) {
	t.Parallel()
	var seen atomic.Int64
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) {
		cfg.Inject(raftstore.Faults{Mangle: func(b *mvcc.Batch) {
			for i := range b.Commands {
				if b.Commands[i].Type == mvcc.CmdDelete {
					seen.Add(1)
				}
			}
		}})
	})
	ctx := testContext(t)
	leader := c.Leader()
	var away string
	for _, id := range c.IDs() {
		if c.Store(id) != leader {
			away = id
		}
	}
	// Who does not answer at once is asked again after a while.
	c.Wait("the command is used", func() bool {
		if _, err := leader.Delete(ctx, filled(t, leader, 10), ""); err != nil {
			t.Fatal(err)
		}
		return seen.Load() > 0
	})
	c.Agree() // whatever is counted of it is counted
	c.Kill(away)
	before := seen.Load()
	if deleted, err := leader.Delete(ctx, filled(t, leader, 10), ""); err != nil || deleted[0] == nil {
		t.Fatalf("%v, %v", deleted, err)
	}
	if before == 0 || seen.Load() == before {
		t.Errorf("%d commands before, %d after", before, seen.Load())
	}
	c.Start(away)
}

func TestMultiDeleteRefuses(t *testing.T) {
	t.Parallel()
	for _, older := range []bool{false, true} {
		c := raftstoretest.New(t, 1, func(cfg *raftstore.Config) { cfg.Inject(raftstore.Faults{Older: older}) })
		s := c.Store("n0")
		ctx := testContext(t)
		good := mvcc.Compare{Key: "/a", ModRevision: mustPut(t, s, "/a", "1").Revision}
		for what, tc := range map[string]struct {
			keys   []mvcc.Compare
			origin string
			want   error
		}{
			"order":    {keys: []mvcc.Compare{{Key: "/b", ModRevision: 1}, good}, want: mvcc.ErrInvalid},
			"revision": {keys: []mvcc.Compare{good, {Key: "/b"}}, want: mvcc.ErrInvalid},
			"long key": {keys: []mvcc.Compare{good, {Key: "/b" + strings.Repeat("b", 5000), ModRevision: 1}}, want: raftstore.ErrTooLarge},
			"origin":   {keys: []mvcc.Compare{good}, origin: strings.Repeat("o", 300), want: raftstore.ErrTooLarge},
		} {
			if _, err := s.Delete(ctx, tc.keys, tc.origin); !errors.Is(err, tc.want) {
				t.Errorf("%s, older %t: %v", what, older, err)
			}
		}
		if deleted, err := s.Delete(ctx, nil, ""); err != nil || len(deleted) > 0 {
			t.Errorf("nothing: %v, %v", deleted, err)
		}
		if get(t, s, "/a") != "1" {
			t.Error("a refused deletion took a key")
		}
		over, cancel := context.WithCancel(ctx)
		cancel()
		if _, err := s.Delete(over, []mvcc.Compare{good}, ""); !errors.Is(err, context.Canceled) {
			t.Errorf("a context that is over: %v", err)
		}
	}
}
