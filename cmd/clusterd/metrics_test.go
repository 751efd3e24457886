package main

import (
	"context"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// Metric names of the store are stable, and each metric counts what happens.
func TestStoreMetrics(t *testing.T) {
	m := newMetrics()
	members := raftstoretest.New(t, 1, func(c *raftstore.Config) { c.Events = m.storeEvents() })
	store := members.Leader()
	m.setStore(store)
	ctx, cancel := context.WithTimeout(t.Context(), raftstoretest.Timeout)
	defer cancel()
	w, err := store.Watch(ctx, "/", raftstore.WatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := store.Txn(ctx, mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/a", Value: []byte("12345")}}}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-w.C():
	case <-ctx.Done():
		t.Fatal("the change was not watched")
	}
	raftstoretest.Wait(t, "it is counted as delivered", func() bool { return gathered(t, m)["clusterd_raftstore_watch_lag_seconds"] >= 1 })
	if err := store.Snapshot(ctx); err != nil {
		t.Fatal(err)
	}
	got := gathered(t, m)
	for name, value := range got {
		if strings.HasPrefix(name, "clusterd_gossip_key_") {
			delete(got, name)
			if value != 0 {
				t.Errorf("%s is %v in a cluster with its first key", name, value)
			}
		}
	}
	for name, least := range map[string]float64{
		"commit_seconds": 1, "apply_seconds": 1, "snapshot_seconds": 1, "fsync_seconds": 1, "watch_lag_seconds": 1,
		"commands_total": 1, "committed_bytes_total": 1, "leader_changes_total": 1,
		"watchers_behind_total": 0, "watchers_cut_total": 0, "damaged_files_total": 0, "writes_held_back_total": 0,
		"keys": 1, "live_bytes": 7, "quota_bytes": 8 << 30, "quota_reserve_bytes": 512 << 20, "history_bytes": 7, "history_seconds": 0, "revision": 2, "oldest_revision": 1,
		"applied_index": 2, "commit_index": 2, "term": 1, "is_leader": 1, "watchers": 1, "log_bytes": 1, "snapshot_bytes": 1,
	} {
		value, ok := got["clusterd_raftstore_"+name]
		if !ok || value < least {
			t.Errorf("clusterd_raftstore_%s is %v (%v), want at least %v", name, value, ok, least)
		}
		delete(got, "clusterd_raftstore_"+name)
	}
	if len(got) > 0 {
		t.Errorf("metrics without a test: %v", got)
	}
}

// TestMetricsOfTwoNodes: the bug of issue 9 was that all nodes in one process counted
// and showed the same things.
func TestMetricsOfTwoNodes(t *testing.T) {
	a, b := newMetrics(), newMetrics()
	members := raftstoretest.New(t, 1, func(c *raftstore.Config) { c.Events = a.storeEvents() })
	a.setStore(members.Leader())
	a.heldBack.Inc()
	if got := gathered(t, a); got["clusterd_raftstore_writes_held_back_total"] != 1 || got["clusterd_raftstore_is_leader"] != 1 || got["clusterd_raftstore_leader_changes_total"] < 1 {
		t.Errorf("of the node that leads: %v", got)
	}
	got := gathered(t, b)
	if _, shown := got["clusterd_raftstore_is_leader"]; shown || got["clusterd_raftstore_writes_held_back_total"] != 0 || got["clusterd_raftstore_leader_changes_total"] != 0 {
		t.Errorf("of a node whose store is not open: %v", got)
	}
}

// gathered is what a node's own registry has by name: counts of histograms.
func gathered(t *testing.T, m *nodeMetrics) map[string]float64 {
	t.Helper()
	families, err := m.registry().Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		one := f.GetMetric()[0]
		switch {
		case one.Histogram != nil:
			got[f.GetName()] = float64(one.Histogram.GetSampleCount())
		case one.Counter != nil:
			got[f.GetName()] = one.Counter.GetValue()
		default:
			got[f.GetName()] = one.Gauge.GetValue()
		}
	}
	return got
}
