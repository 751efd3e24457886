package raftstore_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), raftstoretest.Timeout)
	t.Cleanup(cancel)
	return ctx
}

func put(key, value string) mvcc.Txn {
	return mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: key, Value: []byte(value)}}}
}

func mustPut(t testing.TB, s *raftstore.Store, key, value string) mvcc.TxnResult {
	t.Helper()
	res, err := s.Txn(testContext(t), put(key, value))
	if err != nil || !res.Succeeded {
		t.Fatalf("put %s: %+v, %v", key, res, err)
	}
	return res
}

func get(t testing.TB, s *raftstore.Store, key string) string {
	t.Helper()
	kv, _, err := s.Get(testContext(t), key, raftstore.ReadOptions{})
	if err != nil {
		t.Fatalf("get %s: %v", key, err)
	}
	if kv == nil {
		return ""
	}
	return string(kv.Value)
}

func TestMultiOneMember(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 1, nil)
	s := c.Store("n0")
	if err := s.Bootstrap(); !errors.Is(err, raftstore.ErrStateExists) {
		t.Errorf("second bootstrap: %v", err)
	}
	r := mustPut(t, s, "/a", "1")
	if got := get(t, s, "/a"); got != "1" {
		t.Errorf("got %q", got)
	}
	c.Stop("n0")
	s = c.Start("n0")
	if !s.HasState() {
		t.Error("no state after a restart")
	}
	if got := get(t, s, "/a"); got != "1" {
		t.Errorf("after a restart: %q", got)
	}
	if r2 := mustPut(t, s, "/a", "2"); r2.Revision <= r.Revision {
		t.Errorf("revision went from %d to %d", r.Revision, r2.Revision)
	}
}

func TestMultiThreeMembers(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, nil)
	for i, id := range c.IDs() {
		key := fmt.Sprintf("/k/%d", i)
		start := time.Now()
		mustPut(t, c.Store(id), key, id)
		t.Logf("put on %s: %v", id, time.Since(start))
		for _, other := range c.IDs() {
			start := time.Now()
			if got := get(t, c.Store(other), key); got != id {
				t.Errorf("%s reads %q of %s", other, got, key)
			}
			t.Logf("get on %s: %v", other, time.Since(start))
		}
	}
	leader := c.LeaderID()
	c.Kill(leader)
	start := time.Now()
	mustPut(t, c.Follower(), "/after", "x")
	t.Logf("write after the leader was killed: %v", time.Since(start))
	s := c.Start(leader)
	if got := get(t, s, "/after"); got != "x" {
		t.Errorf("restarted member reads %q", got)
	}
}

func isUnknown(err error) bool { return errors.Is(err, raftstore.ErrUnknownOutcome) }

func TestMultiLimits(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 1, func(cfg *raftstore.Config) {
		cfg.MaxKeyBytes, cfg.MaxValueBytes, cfg.MaxTxnBytes, cfg.QuotaBytes = 100, 1000, 1500, 3000
	})
	s := c.Store("n0")
	long := func(n int) string { return string(make([]byte, n)) }
	for name, tc := range map[string]struct {
		txn  mvcc.Txn
		want error
	}{
		"key":         {put(long(101), ""), raftstore.ErrTooLarge},
		"compare key": {mvcc.Txn{Compares: []mvcc.Compare{{Key: long(101)}}}, raftstore.ErrTooLarge},
		"value":       {put("k", long(1001)), raftstore.ErrTooLarge},
		"transaction": {mvcc.Txn{Ops: append(put("a", long(900)).Ops, put("b", long(900)).Ops...)}, raftstore.ErrTooLarge},
		"twice":       {mvcc.Txn{Ops: append(put("a", "").Ops, put("a", "").Ops...)}, mvcc.ErrInvalid},
		"fits":        {put("k", long(1000)), nil},
	} {
		if _, err := s.Txn(testContext(t), tc.txn); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", name, err, tc.want)
		}
	}
	mustPut(t, s, "k2", long(1000))
	if _, err := s.Txn(testContext(t), put("k3", long(1000))); !errors.Is(err, raftstore.ErrNoSpace) {
		t.Errorf("over the quota: %v", err)
	}
	if _, err := s.Txn(testContext(t), mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpDelete, Key: "k"}}}); err != nil {
		t.Errorf("delete over the quota: %v", err)
	}
	mustPut(t, s, "k3", long(1000))
}

func TestMultiExpiry(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, raftstoretest.Steady) // an election would write to the log
	s := c.Follower()
	r, err := s.Txn(testContext(t), mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/e/1", TTL: 1}, {Type: mvcc.OpPut, Key: "/e/2", TTL: 3600}}})
	if err != nil {
		t.Fatal(err)
	}
	w, err := s.Watch(testContext(t), "/e/", raftstore.WatchOptions{Revision: r.Revision + 1})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	b := <-w.C()
	if len(b.Events) != 1 || b.Events[0].Type != mvcc.Delete || b.Events[0].KV.Key != "/e/1" || b.Events[0].Prev == nil {
		t.Fatalf("%+v", b)
	}
	if get(t, s, "/e/1") != "" {
		t.Error("still there")
	}
	// Nothing is due any more: the log stays as it is.
	index := c.Leader().Status().LastIndex
	time.Sleep(1500 * time.Millisecond) // longer than a tick: nothing is to happen
	if now := c.Leader().Status().LastIndex; now != index {
		t.Errorf("an idle store wrote %d log entries", now-index)
	}
}

func TestMultiMembers(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 2, raftstoretest.Steady)
	for i := range 20 {
		mustPut(t, c.Leader(), fmt.Sprint("/k/", i), "x")
	}
	ctx := testContext(t)
	n2 := c.Start("n2")
	if n2.HasState() {
		t.Error("a new folder has state")
	}
	// Asked of a follower.
	if err := c.Follower().AddNonvoter(ctx, "n2"); err != nil {
		t.Fatal(err)
	}
	c.Wait("n2 follows", func() bool { return n2.Leader() != "" })
	if got := get(t, n2, "/k/19"); got != "x" {
		t.Errorf("a non-voter reads %q", got)
	}
	mustPut(t, n2, "/from-nonvoter", "x")
	if err := n2.AddVoter(ctx, "n2"); err != nil {
		t.Fatal(err)
	}
	old := c.LeaderID()
	if err := n2.TransferLeadershipTo(ctx, old); !errors.Is(err, raftstore.ErrNoLeader) {
		t.Errorf("a follower hands over: %v", err)
	}
	for _, to := range []string{old, "n9"} {
		if err := c.Leader().TransferLeadershipTo(ctx, to); !errors.Is(err, raftstore.ErrInvalid) {
			t.Errorf("to %s: %v", to, err)
		}
	}
	if err := c.Leader().TransferLeadershipTo(ctx, "n2"); err != nil {
		t.Fatal(err)
	}
	c.Wait("n2 to lead", func() bool { return c.LeaderID() == "n2" })
	if err := n2.TransferLeadershipTo(ctx, old); err != nil {
		t.Fatal(err)
	}
	c.Wait("the first to lead again", func() bool { return c.LeaderID() == old })
	if err := n2.TransferLeadership(ctx); err != nil {
		t.Fatal(err)
	}
	c.Wait("another leader", func() bool { return c.LeaderID() != old })
	if err := c.Leader().RemoveMember(ctx, old); err != nil {
		t.Fatal(err)
	}
	c.Stop(old)
	mustPut(t, n2, "/after", "x")
	ms, err := n2.Members()
	if err != nil || len(ms) != 2 || !ms[0].Voter || !ms[1].Voter {
		t.Errorf("%+v, %v", ms, err)
	}
	if err := n2.AddVoter(ctx, ""); !errors.Is(err, raftstore.ErrInvalid) {
		t.Errorf("empty id: %v", err)
	}
}

func TestMultiLeaderCh(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, raftstoretest.Steady)
	next := func(s *raftstore.Store) bool {
		t.Helper()
		select {
		case v, ok := <-s.LeaderCh():
			if !ok {
				t.Fatal("closed")
			}
			return v
		case <-time.After(raftstoretest.Timeout):
			t.Fatal("nothing came")
		}
		return false
	}
	first := c.Leader()
	if !next(first) {
		t.Error("begins with a loss")
	}
	if err := first.TransferLeadership(testContext(t)); err != nil {
		t.Fatal(err)
	}
	if next(first) {
		t.Error("the loss was not reported")
	}
	second := c.Leader()
	if second == first {
		t.Fatal("not handed over")
	}
	if !next(second) {
		t.Error("the new leader begins with a loss")
	}
	// Handed over on a clean stop: the others do not wait for a timeout.
	c.Stop(second.Status().ID)
	if _, ok := <-second.LeaderCh(); ok {
		if _, ok := <-second.LeaderCh(); ok {
			t.Error("not closed")
		}
	}
	if _, err := second.Txn(testContext(t), put("/x", "")); !errors.Is(err, raftstore.ErrClosed) {
		t.Errorf("after close: %v", err)
	}
	mustPut(t, first, "/x", "")
}
