package main

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/watch"
	"github.com/clusterd/clusterd/sched"
)

// nodeMetrics are one node's own: what happens in its store, in seconds where it is time,
// and what is read of it when Prometheus asks.
type nodeMetrics struct {
	commit, apply, snapshot prometheus.Histogram
	commands, bytes         prometheus.Counter
	leaders                 prometheus.Counter
	fsync, watchLag         prometheus.Histogram
	behind, cut, damage     prometheus.Counter
	heldBack                prometheus.Counter
	state                   *storeState
	gossipKey               *gossipKeyState
	encryption              *encryptionCollector
	scheduled               *snapshotCollector
}

func newMetrics() *nodeMetrics {
	return &nodeMetrics{
		fsync: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "clusterd_raftstore_fsync_seconds", Help: "Time to write entries to the log and sync them to disk.",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2, 16),
		}),
		watchLag: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "clusterd_raftstore_watch_lag_seconds", Help: "Time from applying changes until they are queued for the watchers.",
			Buckets: prometheus.ExponentialBuckets(0.00001, 4, 11),
		}),
		behind: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "clusterd_raftstore_watchers_behind_total", Help: "Number of times a watcher was too slow and had to catch up from the history.",
		}),
		cut: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "clusterd_raftstore_watchers_cut_total", Help: "Watchers closed because the history no longer held what they needed.",
		}),
		heldBack: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "clusterd_raftstore_writes_held_back_total", Help: "Writes refused by this server because their writer had used up its budget.",
		}),
		state:      newStoreState(),
		gossipKey:  newGossipKeyState(),
		encryption: newEncryptionCollector(),
		scheduled:  newSnapshotCollector(),
		commit: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "clusterd_raftstore_commit_seconds", Help: "Time from proposing a log entry until it is committed and applied, on the leader.",
			Buckets: prometheus.ExponentialBuckets(0.00025, 2, 16),
		}),
		apply: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "clusterd_raftstore_apply_seconds", Help: "Time to apply one log entry to the keyspace.",
			Buckets: prometheus.ExponentialBuckets(0.000005, 4, 12),
		}),
		snapshot: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "clusterd_raftstore_snapshot_seconds", Help: "Time to write a snapshot.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 10),
		}),
		commands: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "clusterd_raftstore_commands_total", Help: "Commands committed by this node as leader.",
		}),
		bytes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "clusterd_raftstore_committed_bytes_total", Help: "Bytes of log entries committed by this node as leader.",
		}),
		leaders: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "clusterd_raftstore_leader_changes_total", Help: "Leader changes observed by this node.",
		}),
		damage: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "clusterd_raftstore_damaged_files_total", Help: "Damaged files found in the store's data directory since this process started; the log names them.",
		}),
	}
}

// collectors are all of them.
func (m *nodeMetrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.commit, m.apply, m.snapshot, m.commands, m.bytes, m.leaders,
		m.fsync, m.watchLag, m.behind, m.cut, m.damage, m.heldBack, m.state, m.gossipKey, m.encryption, m.scheduled}
}

// registry holds them, for this node's API to serve.
func (m *nodeMetrics) registry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(m.collectors()...)
	return r
}

// setStore has the store's state read from now on.
func (m *nodeMetrics) setStore(store *raftstore.Store) {
	m.state.store.Store(store)
	m.gossipKey.store.Store(store)
	m.scheduled.store.Store(store)
}

// registerLoopMetrics puts the collectors that the rooms keep for the whole process
// where every API's /metrics reads them: once is enough.
var registerLoopMetrics = sync.OnceFunc(func() {
	legacyregistry.RawMustRegister(sched.Collectors()...)
	legacyregistry.RawMustRegister(pod.Metrics()...)
})

// storeEvents turns what happens in the store into metrics.
func (m *nodeMetrics) storeEvents() raftstore.EventListener {
	return raftstore.EventListener{
		LeaderChanged: func(string, uint64) { m.leaders.Inc() },
		Damaged:       func(error) { m.damage.Inc() },
		Applied:       func(_ uint64, _ int, took time.Duration) { m.apply.Observe(took.Seconds()) },
		Committed: func(commands, bytes int, took time.Duration) {
			m.commands.Add(float64(commands))
			m.bytes.Add(float64(bytes))
			m.commit.Observe(took.Seconds())
		},
		Snapshotted: func(_ uint64, took time.Duration) { m.snapshot.Observe(took.Seconds()) },
		Synced:      func(_ int, took time.Duration) { m.fsync.Observe(took.Seconds()) },
		Watches: watch.Listener{
			Dispatched: func(_ int, lag time.Duration) { m.watchLag.Observe(lag.Seconds()) },
			FellBehind: m.behind.Inc,
			Cut:        m.cut.Inc,
		},
	}
}

// storeState tells Prometheus how large the store is and how far it has come,
// when it asks.
type storeState struct {
	store  atomic.Pointer[raftstore.Store] // nil until it is open
	gauges []storeGauge
}

type storeGauge struct {
	desc *prometheus.Desc
	read func(raftstore.Status) float64
}

func newStoreState() *storeState {
	s := &storeState{}
	gauge := func(name, help string, read func(raftstore.Status) float64) {
		s.gauges = append(s.gauges, storeGauge{prometheus.NewDesc("clusterd_raftstore_"+name, help, nil, nil), read})
	}
	gauge("keys", "Live keys.", func(s raftstore.Status) float64 { return float64(s.Keyspace.Keys) })
	gauge("live_bytes", "Bytes of live keys and values.", func(s raftstore.Status) float64 { return float64(s.Keyspace.Bytes) })
	gauge("quota_bytes", "How many bytes of live keys and values are allowed.", func(s raftstore.Status) float64 { return float64(s.QuotaBytes) })
	gauge("quota_reserve_bytes", "The part of the quota that takes no new objects: what is left for deletes, leases and small changes.", func(s raftstore.Status) float64 { return float64(s.ReserveBytes) })
	gauge("history_bytes", "Bytes of the history of changes.", func(s raftstore.Status) float64 { return float64(s.Keyspace.HistoryBytes) })
	gauge("history_seconds", "How far the history reaches back.", func(s raftstore.Status) float64 {
		return float64(s.History.NewestTime-s.History.OldestTime) / 1000
	})
	gauge("revision", "Revision of the last change.", func(s raftstore.Status) float64 { return float64(s.Keyspace.Revision) })
	gauge("oldest_revision", "Oldest revision that can be read.", func(s raftstore.Status) float64 { return float64(s.Keyspace.Oldest) })
	gauge("applied_index", "Last log entry applied.", func(s raftstore.Status) float64 { return float64(s.Keyspace.Index) })
	gauge("commit_index", "Last log entry known to be committed.", func(s raftstore.Status) float64 { return float64(s.Commit) })
	gauge("term", "Raft's term.", func(s raftstore.Status) float64 { return float64(s.Term) })
	gauge("is_leader", "1 on the leader.", func(s raftstore.Status) float64 {
		if s.Ready {
			return 1
		}
		return 0
	})
	gauge("watchers", "Open watches of the store.", func(s raftstore.Status) float64 { return float64(s.Watchers) })
	gauge("log_bytes", "Bytes of the log on disk.", func(s raftstore.Status) float64 { return float64(s.LogBytes) })
	gauge("snapshot_bytes", "Bytes of the snapshots on disk.", func(s raftstore.Status) float64 { return float64(s.SnapBytes) })
	return s
}

// Describe implements prometheus.Collector.
func (s *storeState) Describe(ch chan<- *prometheus.Desc) {
	for _, g := range s.gauges {
		ch <- g.desc
	}
}

// Collect implements prometheus.Collector.
func (s *storeState) Collect(ch chan<- prometheus.Metric) {
	store := s.store.Load()
	if store == nil {
		return
	}
	status := store.Status()
	for _, g := range s.gauges {
		ch <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, g.read(status))
	}
}
