package rebalance

import "github.com/prometheus/client_golang/prometheus"

var evictions = prometheus.NewCounterVec(prometheus.CounterOpts{
	Name: "clusterd_sched_rebalance_evictions_total",
	Help: "Attempts to evict pods that fit better on other nodes, by kind (rule, affinity, spread, load) and result (evicted, budget, error).",
}, []string{"kind", "result"})

// Collectors returns the metrics, for the process's registry.
func Collectors() []prometheus.Collector { return []prometheus.Collector{evictions} }
