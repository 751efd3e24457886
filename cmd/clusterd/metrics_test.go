package main

import (
	"context"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// Metric names of the store are stable, and each metric counts what happens.
func TestStoreMetrics(t *testing.T) {
	members := raftstoretest.New(t, 1, func(c *raftstore.Config) { c.Events = storeEvents() })
	store := members.Leader()
	storeMetrics.state.store.Store(store)
	t.Cleanup(func() { storeMetrics.state.store.Store(nil) })
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
	if err := store.Snapshot(ctx); err != nil {
		t.Fatal(err)
	}
	registry := prometheus.NewRegistry()
	m := storeMetrics
	registry.MustRegister(m.commit, m.apply, m.snapshot, m.commands, m.bytes, m.leaders, m.fsync, m.watchLag, m.behind, m.cut, m.damage, m.heldBack, m.state)
	families, err := registry.Gather()
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
