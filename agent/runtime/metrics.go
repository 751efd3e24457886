package runtime

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Names of the metrics are part of the interface; operations are called as
// agent/podmon/api calls them.
var (
	operations = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "kubelet_runtime_operations_total",
		Help: "Cumulative number of runtime operations by operation type.",
	}, []string{"operation_type"})
	operationErrors = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "kubelet_runtime_operations_errors_total",
		Help: "Cumulative number of runtime operation errors by operation type.",
	}, []string{"operation_type"})
	operationSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "kubelet_runtime_operations_duration_seconds",
		Help:    "Duration in seconds of runtime operations. Broken down by operation type.",
		Buckets: prometheus.ExponentialBuckets(.001, 2.5, 12),
	}, []string{"operation_type"})
)

// Metrics are the collectors of this package, for the process's registry.
func Metrics() []prometheus.Collector {
	return []prometheus.Collector{operations, operationErrors, operationSeconds}
}

// observe counts one finished request to podmon.
func observe(op string, began time.Time, failed bool) {
	operations.WithLabelValues(op).Inc()
	operationSeconds.WithLabelValues(op).Observe(time.Since(began).Seconds())
	if failed {
		operationErrors.WithLabelValues(op).Inc()
	}
}
