package devicetaint

import "github.com/prometheus/client_golang/prometheus"

var evictions = prometheus.NewCounter(prometheus.CounterOpts{
	Name: "clusterd_sched_device_taint_evictions_total",
	Help: "Pods deleted because their claims do not tolerate a NoExecute taint of a device.",
})

// Collectors returns the metrics, for the process's registry.
func Collectors() []prometheus.Collector { return []prometheus.Collector{evictions} }
