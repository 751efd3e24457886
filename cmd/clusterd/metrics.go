package main

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/sched"
)

// storeMetrics listens to the store's events. Times are in seconds.
var storeMetrics = struct {
	commit, apply, snapshot prometheus.Histogram
	commands, bytes         prometheus.Counter
	leaders, damage         prometheus.Counter
}{
	commit: prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: "clusterd_raftstore_commit_seconds", Help: "Time from proposing a log entry to its being committed and applied here, on the leader.",
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
		Name: "clusterd_raftstore_leader_changes_total", Help: "Changes of leader that this node has heard of.",
	}),
	damage: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "clusterd_raftstore_damaged_files_total", Help: "Damaged files found in the store's data folder since this process started. The log names them.",
	}),
}

// registerMetrics puts all rooms' collectors where the API's /metrics reads
// them. The registry belongs to the process: once is enough.
var registerMetrics = sync.OnceFunc(func() {
	m := storeMetrics
	legacyregistry.RawMustRegister(m.commit, m.apply, m.snapshot, m.commands, m.bytes, m.leaders, m.damage)
	legacyregistry.RawMustRegister(sched.Collectors()...)
	legacyregistry.RawMustRegister(pod.Metrics()...)
})

// storeEvents turns what happens in the store into metrics.
func storeEvents() raftstore.EventListener {
	m := storeMetrics
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
	}
}
