package main

import (
	"context"
	"encoding/json"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/cmd/clusterd/autosnapshot"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/sched/cronjob"
)

// takeSnapshots takes snapshots by the schedule while this node leads.
func (m *Main) takeSnapshots(ctx context.Context, events kubernetes.Interface) error {
	if m.cfg.SnapshotSchedule == "" {
		return nil
	}
	schedule, err := m.cfg.schedule()
	if err != nil {
		return err
	}
	lock, err := m.cfg.lock()
	if err != nil {
		return err
	}
	log := room(m.log, "snapshots")
	target, err := m.cfg.target(m.cfg.Name, log)
	if err != nil {
		return err
	}
	if err := m.cfg.checkAccess(); err != nil {
		log.Error("no snapshot can be taken", "err", err)
		m.warnEvent(ctx, events, "SnapshotFailed", "No snapshot can be taken: "+err.Error())
	}
	return autosnapshot.New(autosnapshot.Config{
		Schedule: schedule, Target: target, Lock: lock, Node: m.cfg.Name,
		Keep: m.cfg.SnapshotKeep, KeepAge: m.cfg.SnapshotKeepAge.Duration,
		State: snapshotState{m.store},
		Cluster: func(ctx context.Context) (string, error) {
			c, err := join.GetCluster(ctx, m.store)
			return m.cfg.clusterName(c), err
		},
		Write: func(ctx context.Context, w autosnapshot.Writer) error {
			write, err := m.clusterAPI.archive(ctx)
			if err != nil {
				return err
			}
			return write(w)
		},
		Failed: func(message string) { m.warnEvent(ctx, events, "SnapshotFailed", message) },
		Log:    log,
	}).Run(ctx)
}

// snapshotKey is the key in the store of autosnapshot's record.
const snapshotKey = "/clusterd/snapshots"

// snapshotState keeps that record in the store.
type snapshotState struct{ store *raftstore.Store }

// Load implements autosnapshot.State.
func (s snapshotState) Load(ctx context.Context) (autosnapshot.Record, int64, error) {
	return loadSnapshots(ctx, s.store, false)
}

func loadSnapshots(ctx context.Context, store *raftstore.Store, stale bool) (r autosnapshot.Record, revision int64, err error) {
	kv, _, err := store.Get(ctx, snapshotKey, raftstore.ReadOptions{Stale: stale})
	if err == nil && kv != nil {
		revision, err = kv.ModRevision, json.Unmarshal(kv.Value, &r)
	}
	if err != nil {
		return r, 0, fmt.Errorf("read the record of snapshots: %w", err)
	}
	return r, revision, nil
}

// Save implements autosnapshot.State.
func (s snapshotState) Save(ctx context.Context, r autosnapshot.Record, revision int64) (bool, error) {
	b, err := json.Marshal(r)
	if err != nil {
		return false, err
	}
	res, err := s.store.Txn(ctx, mvcc.Txn{
		Origin:   "clusterd snapshots",
		Compares: []mvcc.Compare{{Key: snapshotKey, ModRevision: revision}},
		Ops:      []mvcc.Op{{Type: mvcc.OpPut, Key: snapshotKey, Value: b}},
	})
	if err != nil {
		return false, fmt.Errorf("write the record of snapshots: %w", err)
	}
	return res.Succeeded, nil
}

// snapshotsView is what is shown of the snapshots of the schedule.
type snapshotsView struct {
	Schedule string                 `json:"schedule,omitempty"` // this server's; empty: never
	Next     *time.Time             `json:"next,omitempty"`
	Last     *autosnapshot.Snapshot `json:"last,omitempty"`
	Failure  *autosnapshot.Failure  `json:"failure,omitempty"`
}

// snapshots are those of the schedule, as this server's store knows them; nil: there
// are none and will be none.
func (a *clusterAPI) snapshots(ctx context.Context, now time.Time) *snapshotsView {
	rec, _, err := loadSnapshots(ctx, a.store, true)
	if err != nil || a.schedule.SnapshotSchedule == "" && rec.Last == nil {
		return nil
	}
	v := &snapshotsView{Schedule: a.schedule.SnapshotSchedule, Last: rec.Last, Failure: rec.Failure}
	if s, err := a.schedule.schedule(); err == nil && v.Schedule != "" {
		anchor := rec.Slot
		if anchor.IsZero() {
			anchor = rec.Since
		}
		if !anchor.IsZero() {
			v.Next = new(cronjob.Next(s, anchor, now).UTC())
		}
	}
	return v
}

// warning is what is wrong with them; "": nothing.
func (v *snapshotsView) warning() string {
	if v == nil || v.Schedule == "" || v.Failure == nil {
		return ""
	}
	last := "there is none"
	if v.Last != nil {
		last = "the last is of " + v.Last.Taken.Format(time.RFC3339)
	}
	return fmt.Sprintf("the snapshot of %s was not taken by %s (%d tries, %s): %s", v.Failure.Slot.Format(time.RFC3339), v.Failure.Node, v.Failure.Tries, last, v.Failure.Error)
}

// snapshotCollector tells Prometheus about them, as this server's store has it.
type snapshotCollector struct {
	store             atomic.Pointer[raftstore.Store] // nil until it is open
	last, bytes, fail *prometheus.Desc
}

func newSnapshotCollector() *snapshotCollector {
	return &snapshotCollector{
		last:  prometheus.NewDesc("clusterd_snapshot_last_timestamp_seconds", "When the last snapshot of the schedule was taken, in seconds since 1970; none if there is none.", nil, nil),
		bytes: prometheus.NewDesc("clusterd_snapshot_last_bytes", "How large that snapshot is.", nil, nil),
		fail:  prometheus.NewDesc("clusterd_snapshot_failed_tries", "How often the snapshot that is due was tried in vain; 0: none is due.", nil, nil),
	}
}

// Describe implements prometheus.Collector.
func (s *snapshotCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- s.last
	ch <- s.bytes
	ch <- s.fail
}

// Collect implements prometheus.Collector.
func (s *snapshotCollector) Collect(ch chan<- prometheus.Metric) {
	store := s.store.Load()
	if store == nil {
		return
	}
	rec, _, err := loadSnapshots(context.Background(), store, true) // stale reads do not wait
	if err != nil || rec.Since.IsZero() {
		return
	}
	gauge := func(d *prometheus.Desc, v float64) { ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v) }
	if rec.Last != nil {
		gauge(s.last, float64(rec.Last.Taken.Unix()))
		gauge(s.bytes, float64(rec.Last.Bytes))
	}
	tries := 0
	if rec.Failure != nil {
		tries = rec.Failure.Tries
	}
	gauge(s.fail, float64(tries))
}
