package raftstore_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// writers write keys of their own through each member that runs, and remember
// what was acknowledged.
type writers struct {
	t     *testing.T
	c     *raftstoretest.Cluster
	stop  chan struct{}
	wg    sync.WaitGroup
	count atomic.Int64

	mu    sync.Mutex
	acked map[string]int64 // key → revision
}

func startWriters(t *testing.T, c *raftstoretest.Cluster, perMember int) *writers {
	w := &writers{t: t, c: c, stop: make(chan struct{}), acked: map[string]int64{}}
	for _, id := range c.IDs() {
		for i := range perMember {
			w.wg.Add(1)
			go func() {
				defer w.wg.Done()
				w.run(id, i)
			}()
		}
	}
	t.Cleanup(w.halt)
	return w
}

func (w *writers) run(id string, worker int) {
	for n := 0; ; n++ {
		select {
		case <-w.stop:
			return
		default:
		}
		s := w.c.Store(id)
		if s == nil {
			time.Sleep(time.Millisecond) // the member is down
			continue
		}
		key := fmt.Sprintf("/w/%s/%d/%d", id, worker, n)
		ctx, cancel := context.WithTimeout(context.Background(), raftstoretest.Timeout)
		res, err := s.Txn(ctx, mvcc.Txn{
			Compares: []mvcc.Compare{{Key: key}},
			Ops:      []mvcc.Op{{Type: mvcc.OpPut, Key: key, Value: []byte(key)}},
		})
		cancel()
		switch {
		case err != nil: // the member was killed: nothing is promised
		case !res.Succeeded:
			// No other goroutine writes it: the command took effect twice.
			w.t.Errorf("create of %s was refused: %+v", key, res.Current[0])
		default:
			w.mu.Lock()
			w.acked[key] = res.Revision
			w.mu.Unlock()
			w.count.Add(1)
		}
	}
}

func (w *writers) halt() {
	select {
	case <-w.stop:
	default:
		close(w.stop)
	}
	w.wg.Wait()
}

// more waits until n more writes have been acknowledged.
func (w *writers) more(n int64) {
	target := w.count.Load() + n
	w.c.Wait("writes to go on", func() bool { return w.count.Load() >= target })
}

// check stops the writers and looks for every acknowledged write on every
// running member.
func (w *writers) check() {
	w.t.Helper()
	w.halt()
	w.c.Agree()
	for id, s := range w.c.Running() {
		l, err := s.List(testContext(w.t), "/w/", raftstore.ListOptions{})
		if err != nil {
			w.t.Fatalf("list on %s: %v", id, err)
		}
		have := map[string]int64{}
		for _, kv := range l.KVs {
			have[kv.Key] = kv.ModRevision
		}
		for key, rev := range w.acked {
			if have[key] != rev {
				w.t.Errorf("%s: %s was acknowledged at %d, is at %d", id, key, rev, have[key])
			}
		}
	}
	w.t.Logf("%d writes acknowledged", len(w.acked))
}

func TestMultiLeaderKilledUnderWrites(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, nil)
	w := startWriters(t, c, 8)
	w.more(200)
	for range 2 {
		leader := c.LeaderID()
		c.Kill(leader)
		start := time.Now()
		c.Leader()
		w.more(200)
		t.Logf("leader killed, 200 writes later: %v", time.Since(start))
		c.Start(leader)
		w.more(50)
	}
	w.check()
}

func TestMultiLeaderIsolatedUnderWrites(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, nil)
	w := startWriters(t, c, 4)
	w.more(100)
	leader := c.LeaderID()
	c.Isolate(leader)
	c.Wait("another leader", func() bool {
		for id, s := range c.Running() {
			if id != leader && s.IsLeader() {
				return true
			}
		}
		return false
	})
	w.more(100)
	c.Rejoin(leader)
	w.more(100)
	w.check()
}

func TestMultiCatchUpBySnapshot(t *testing.T) {
	t.Parallel()
	var restored atomic.Int64
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) {
		cfg.Events.Restored = func(mvcc.Digest) { restored.Add(1) }
	})
	behind := c.Follower()
	mustPut(t, behind, "/k", "0")
	id := behind.Status().ID
	w, err := behind.Watch(testContext(t), "/k", raftstore.WatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	leader := c.Leader()
	c.Isolate(id)
	var last mvcc.TxnResult
	// The log since the snapshot before the newest one is kept.
	for i := range 50 {
		last = mustPut(t, leader, "/k", fmt.Sprint(i+1))
		if i%25 != 24 {
			continue
		}
		for other, s := range c.Running() {
			if other == id {
				continue
			}
			c.Wait(other+" has applied all", func() bool { return s.Revision() >= last.Revision })
			if err := s.Snapshot(testContext(t)); err != nil {
				t.Fatal(err)
			}
		}
	}
	c.Rejoin(id)
	if got := get(t, behind, "/k"); got != "50" {
		t.Errorf("reads %q", got)
	}
	// The listener is called after readers can see the state.
	c.Wait("the listener to be called for the snapshot", func() bool { return restored.Load() > 0 })
	// The history came with the snapshot: the watch goes on without a gap.
	for next, n := last.Revision-49, 0; n < 50; {
		select {
		case b, ok := <-w.C():
			if !ok {
				t.Fatalf("watch ended: %v", w.Err())
			}
			for _, e := range b.Events {
				if e.KV.ModRevision != next {
					t.Fatalf("event of %d, want %d", e.KV.ModRevision, next)
				}
				next++
				n++
			}
		case <-time.After(raftstoretest.Timeout):
			t.Fatal("nothing came")
		}
	}
	if kv, _, err := behind.Get(testContext(t), "/k", raftstore.ReadOptions{Revision: last.Revision - 10}); err != nil || string(kv.Value) != "40" {
		t.Errorf("time travel: %+v, %v", kv, err)
	}

	// And a restart from the snapshot file.
	c.Kill(id)
	if got := get(t, c.Start(id), "/k"); got != "50" {
		t.Errorf("restarted, reads %q", got)
	}
}

// A leader that is cut off must not answer a linearizable read, even if it
// considers itself the leader.
func TestMultiNoStaleReads(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, nil)
	old := c.Leader()
	id := old.Status().ID
	mustPut(t, old, "/k", "old")
	c.Isolate(id)
	var wg sync.WaitGroup
	var wrote atomic.Bool
	stop := make(chan struct{})
	for range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for {
				select {
				case <-stop:
					return
				default:
				}
				after := wrote.Load()
				ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
				kv, _, err := old.Get(ctx, "/k", raftstore.ReadOptions{})
				cancel()
				if err == nil && after && string(kv.Value) != "new" {
					t.Errorf("stale read: %q", kv.Value)
					return
				}
			}
		}()
	}
	other := c.Store(c.IDs()[0])
	if other == old {
		other = c.Store(c.IDs()[1])
	}
	mustPut(t, other, "/k", "new")
	wrote.Store(true)
	if kv, _, err := old.Get(testContext(t), "/k", raftstore.ReadOptions{Stale: true}); err != nil || string(kv.Value) != "old" {
		t.Errorf("stale read by choice: %+v, %v", kv, err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer cancel()
	if _, _, err := old.Get(ctx, "/k", raftstore.ReadOptions{}); err == nil {
		t.Error("a member that is cut off answered")
	}
	c.Rejoin(id)
	if got := get(t, old, "/k"); got != "new" {
		t.Errorf("after it rejoined: %q", got)
	}
	close(stop)
	wg.Wait()
}

func TestMultiWithoutQuorum(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) {
		const lease = 8 * time.Second // the write below begins well within it
		cfg.HeartbeatTimeout, cfg.ElectionTimeout, cfg.LeaderLease, cfg.SlowDisk = lease, lease, lease, lease
		cfg.LeaderWait = 1500 * time.Millisecond
	})
	leader := c.LeaderID()
	s := c.Store(leader)
	c.Isolate(leader)
	// It still considers itself the leader: the write is in its log, and its outcome is unknown.
	handedOver := make(chan error, 1)
	go func() {
		_, err := s.Txn(testContext(t), put("/a", "1"))
		handedOver <- err
	}()
	for _, id := range c.IDs() {
		if id != leader {
			c.Kill(id)
		}
	}
	if err := <-handedOver; !errors.Is(err, raftstore.ErrUnknownOutcome) {
		t.Errorf("a write that was handed over: %v", err)
	}
	c.Wait("it steps down", func() bool { return s.Leader() == "" })
	if _, err := s.Txn(testContext(t), put("/b", "1")); !errors.Is(err, raftstore.ErrNoLeader) || errors.Is(err, raftstore.ErrUnknownOutcome) {
		t.Errorf("a write that was not: %v", err)
	}
	if _, err := s.List(testContext(t), "", raftstore.ListOptions{}); !errors.Is(err, raftstore.ErrNoLeader) {
		t.Errorf("a list: %v", err)
	}
	// That lasts: calls do not wait each as long as an election may take, and
	// say what is missing.
	var lasting *raftstore.NoLeaderError
	c.Wait("it is known to last", func() bool {
		_, err := s.List(testContext(t), "", raftstore.ListOptions{})
		return errors.As(err, &lasting)
	})
	if lasting.Voters != 3 || lasting.Needed() != 2 || lasting.For < 1500*time.Millisecond {
		t.Errorf("%+v", lasting)
	}
	if _, err := s.Txn(testContext(t), put("/d", "1")); !errors.As(err, &lasting) || errors.Is(err, raftstore.ErrUnknownOutcome) {
		t.Errorf("a write: %v", err)
	}
	if err := s.RemoveMember(testContext(t), "n1"); !errors.Is(err, raftstore.ErrNoLeader) {
		t.Errorf("a change of members: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := s.Txn(ctx, put("/c", "1")); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
	if st := s.Status(); st.Leader != "" || len(st.Members) != 3 || st.Keyspace.Revision == 0 {
		t.Errorf("status: %+v", st)
	}
	c.Rejoin(leader)
	for _, id := range c.IDs() {
		if id != leader {
			c.Start(id)
		}
	}
	// Until an election has ended, calls still answer early that there is no leader.
	c.Wait("it knows a leader again", func() bool { return s.Leader() != "" })
	mustPut(t, s, "/d", "1")
	if got := get(t, s, "/b"); got != "" {
		t.Errorf("the refused write was applied: %q", got)
	}
}

// A watcher that moves to another member goes on where it was.
func TestMultiWatchMovesOn(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, nil)
	writers := startWriters(t, c, 2)
	seen := map[string]bool{}
	next := int64(2)
	var lastRev int64
	follow := func(id string, events int) {
		t.Helper()
		w, err := c.Store(id).Watch(testContext(t), "/w/", raftstore.WatchOptions{Revision: next})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
		for n := 0; n < events; {
			b, ok := <-w.C()
			if !ok {
				t.Fatalf("%s: watch ended: %v", id, w.Err())
			}
			for _, e := range b.Events {
				if seen[e.KV.Key] || e.KV.ModRevision <= lastRev {
					t.Fatalf("%s at %d came twice or late, after %d", e.KV.Key, e.KV.ModRevision, lastRev)
				}
				seen[e.KV.Key] = true
				lastRev = e.KV.ModRevision
				n++
			}
			next = b.Revision + 1
		}
	}
	for range 2 {
		leader := c.LeaderID()
		follow(leader, 100)
		c.Kill(leader)
		follow(c.Follower().Status().ID, 100)
		c.Start(leader)
	}
	writers.halt()
	c.Agree()
	s := c.Leader()
	w, err := s.Watch(testContext(t), "/w/", raftstore.WatchOptions{Revision: next})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	for w.RequestProgress(); next <= s.Revision(); {
		b := <-w.C()
		for _, e := range b.Events {
			seen[e.KV.Key] = true
		}
		next = b.Revision + 1
	}
	l, err := s.List(testContext(t), "/w/", raftstore.ListOptions{})
	if err != nil || len(l.KVs) != len(seen) {
		t.Errorf("%d keys, the watches have seen %d (%v)", len(l.KVs), len(seen), err)
	}
}
