package pod

import "github.com/prometheus/client_golang/prometheus"

// Names of the metrics are part of the interface.
var (
	podStartSeconds = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "kubelet_pod_start_duration_seconds",
		Help:    "Time from the node first observing a pod until its phase is Running.",
		Buckets: []float64{.005, .01, .015, .02, .03, .06, .1, .25, .5, 1, 2.5, 10, 60, 300},
	})
	containersPerPod = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "kubelet_containers_per_pod_count",
		Help:    "Number of containers of the pods observed.",
		Buckets: []float64{1, 2, 4, 8, 16},
	})
	workerSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "kubelet_pod_worker_duration_seconds",
		Help:    "Duration in seconds to sync a single pod. Broken down by operation type: create, update, or sync",
		Buckets: prometheus.ExponentialBuckets(.00001, 4, 10),
	}, []string{"operation_type"})
	statusSeconds = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "kubelet_pod_status_sync_duration_seconds",
		Help:    "Duration in seconds to sync a pod status update.",
		Buckets: prometheus.ExponentialBuckets(.001, 2.5, 12),
	})
)

// Metrics are the collectors of this package, for the process's registry.
func Metrics() []prometheus.Collector {
	return []prometheus.Collector{podStartSeconds, containersPerPod, workerSeconds, statusSeconds}
}
