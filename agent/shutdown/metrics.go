package shutdown

import "github.com/prometheus/client_golang/prometheus"

// The kubelet's. They are of the process: a node has one Guard, and another one after
// its agent was started again.
var (
	started = prometheus.NewGauge(prometheus.GaugeOpts{Name: "kubelet_graceful_shutdown_start_time_seconds", Help: "When the last graceful shutdown of the machine began, in seconds since 1970; 0: there was none."})
	ended   = prometheus.NewGauge(prometheus.GaugeOpts{Name: "kubelet_graceful_shutdown_end_time_seconds", Help: "When the pods of the last graceful shutdown had ended, in seconds since 1970; 0: there was none, or it is under way or was cancelled."})
)

// Metrics are those of the process's shutdowns.
func Metrics() []prometheus.Collector { return []prometheus.Collector{started, ended} }
