package raftstore_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
	"github.com/clusterd/clusterd/raftstore/recovery"
)

// TestMultiGoesOnWithoutQuorum loses two of three members permanently. The third
// one's state, entries included that it did not know to be committed, begins a
// new epoch; a member of the old one is shut out until it starts over.
func TestMultiGoesOnWithoutQuorum(t *testing.T) {
	t.Parallel()
	var refused atomic.Int64
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) {
		raftstoretest.Steady(cfg)
		if cfg.ID == "n1" {
			cfg.Events.Refused = func(string) { refused.Add(1) }
		}
	})
	var last int64
	for i := range 100 {
		last = mustPut(t, c.Leader(), fmt.Sprintf("/k/%02d", i%40), fmt.Sprint(i)).Revision
	}
	survivor := c.LeaderID()
	// The last write reaches the survivor's log and no other member.
	before := c.Store(survivor).Status()
	c.Isolate(survivor)
	ctx, cancel := context.WithCancel(testContext(t))
	written := make(chan error, 1)
	go func() {
		_, err := c.Store(survivor).Txn(ctx, put("/tail", "kept"))
		written <- err
	}()
	s := c.Store(survivor)
	c.Wait("the last write is in the log", func() bool { return s.Status().LastIndex > before.LastIndex })
	c.Kill(survivor)
	cancel()
	if err := <-written; err == nil {
		t.Error("a write without a quorum passed")
	}
	old := "n1"
	if survivor == old {
		old = "n2"
		t.Log("the refusal is not counted for", old)
		refused.Store(1)
	}
	for _, id := range c.IDs() {
		if id != survivor {
			c.Kill(id)
		}
	}

	k, term, err := recovery.Replay(c.Dir(survivor), slog.Default())
	if err != nil {
		t.Fatal(err)
	}
	if kv, _, err := k.Get("/tail", 0); err != nil || kv == nil || string(kv.Value) != "kept" || term < before.Term {
		t.Errorf("the end of the log is missing: %v, %v; term %d after %d", kv, err, term, before.Term)
	}
	again, _, err := recovery.Replay(c.Dir(survivor), slog.Default())
	if err != nil || again.Digest() != k.Digest() {
		t.Errorf("the same log gives %+v and %+v (%v)", k.Digest(), again.Digest(), err)
	}
	e := raftstore.NewEpoch(1)
	next := c.Dir(survivor) + ".next"
	k = k.Rebase(recovery.RevisionGap)
	if err := recovery.Recover(next, survivor, e, k, term); err != nil {
		t.Fatal(err)
	}
	if err := recovery.Recover(next, survivor, e, k, term); err == nil {
		t.Error("a folder that is there was written over")
	}
	if err := errors.Join(os.RemoveAll(c.Dir(survivor)), os.Rename(next, c.Dir(survivor))); err != nil {
		t.Fatal(err)
	}

	c.Rejoin(survivor)
	s = c.Start(survivor)
	if got := get(t, s, "/k/39"); got != "79" {
		t.Errorf("/k/39 is %q", got)
	}
	if r := mustPut(t, s, "/new", "x"); r.Revision <= last+recovery.RevisionGap {
		t.Errorf("revision %d after %d", r.Revision, last)
	}
	if st := s.Status(); st.Epoch != e || st.Term < term || len(st.Members) != 1 {
		t.Errorf("%+v", st)
	}
	var compacted *mvcc.CompactedError
	if _, err := s.Watch(testContext(t), "/k/", raftstore.WatchOptions{Revision: last}); !errors.As(err, &compacted) || compacted.Oldest <= last {
		t.Errorf("a watch from the old epoch: %v", err)
	}

	o := c.Start(old)
	if err := s.AddNonvoter(testContext(t), old); err != nil {
		t.Fatal(err)
	}
	c.Wait("the member of the old epoch is refused", func() bool { return refused.Load() > 0 })
	if _, err := s.Progress(testContext(t), old); err == nil {
		t.Error("it answers")
	}
	if kv, _, err := o.Get(testContext(t), "/new", raftstore.ReadOptions{Stale: true}); err != nil || kv != nil {
		t.Errorf("it was given %v, %v", kv, err)
	}
	c.Stop(old)
	if err := errors.Join(os.RemoveAll(c.Dir(old)), raftstore.SetEpoch(c.Dir(old), e)); err != nil {
		t.Fatal(err)
	}
	o = c.Start(old)
	if got := get(t, o, "/new"); got != "x" {
		t.Errorf("started over, it reads %q", got)
	}
	c.Wait("they agree", func() bool { return o.Status().Keyspace == s.Status().Keyspace })
}

func TestReplayRefuses(t *testing.T) {
	dir := t.TempDir()
	if _, _, err := recovery.Replay(filepath.Join(dir, "none"), slog.Default()); err == nil {
		t.Error("a folder that is not there")
	}
	if _, err := os.Stat(filepath.Join(dir, "none")); err == nil {
		t.Error("it was made")
	}
	if err := recovery.Recover(filepath.Join(dir, "s"), "n", raftstore.Epoch{}, mvcc.New(), 1); !errors.Is(err, mvcc.ErrInvalid) {
		t.Errorf("a keyspace without a log: %v", err)
	}
}
