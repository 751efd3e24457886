package nodelifecycle

import "github.com/prometheus/client_golang/prometheus"

var (
	evictions = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "clusterd_sched_taint_evictions_total",
		Help: "Pods deleted because they do not tolerate a NoExecute taint of their node.",
	})
	leasesTaken = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "clusterd_sched_leases_taken_total",
		Help: "Leases taken from nodes that had not renewed them, so that their self-fenced pods are replaced.",
	})
	evictionsSuspended = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "clusterd_sched_evictions_suspended",
		Help: "Zones in which evictions are suspended, because more than half of the nodes look dead; nodes without a zone count as one.",
	})
)

// Collectors returns the metrics, for the process's registry.
func Collectors() []prometheus.Collector {
	return []prometheus.Collector{evictions, leasesTaken, evictionsSuspended}
}
