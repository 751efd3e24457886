package gc

import "github.com/prometheus/client_golang/prometheus"

var collected = prometheus.NewCounter(prometheus.CounterOpts{
	Name: "clusterd_sched_collected_total",
	Help: "Objects deleted because their owners no longer exist.",
})

// Collectors returns the metrics, for the process's registry.
func Collectors() []prometheus.Collector { return []prometheus.Collector{collected} }
