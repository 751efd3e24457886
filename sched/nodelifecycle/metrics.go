package nodelifecycle

import "github.com/prometheus/client_golang/prometheus"

var (
	evictions = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "clusterd_sched_taint_evictions_total",
		Help: "Pods deleted because they do not tolerate a NoExecute taint of their node.",
	})
	leasesTaken = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "clusterd_sched_leases_taken_total",
		Help: "Leases taken from nodes that had not renewed them, so that pods that such a node has ended by itself are replaced.",
	})
	evictionsSuspended = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "clusterd_sched_evictions_suspended",
		Help: "Zones (nodes without one are a zone together) of whose lost nodes no pod is evicted, as more than half look dead.",
	})
)

// Collectors returns the metrics, for the process's registry.
func Collectors() []prometheus.Collector {
	return []prometheus.Collector{evictions, leasesTaken, evictionsSuspended}
}
