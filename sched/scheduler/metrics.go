package scheduler

import "github.com/prometheus/client_golang/prometheus"

var (
	attempts = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "clusterd_sched_schedule_attempts_total",
		Help: "Attempts to schedule a pod by result (scheduled, unschedulable, error).",
	}, []string{"result"})
	attemptSeconds = prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "clusterd_sched_schedule_seconds",
		Help:    "Time from taking a pod off the queue until it was bound.",
		Buckets: prometheus.ExponentialBuckets(0.0005, 2, 14),
	})
	waitingPods = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "clusterd_sched_waiting_pods",
		Help: "Unscheduled pods by queue (ready, backoff, unschedulable, in_flight).",
	}, []string{"place"})
	preempted = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "clusterd_sched_preempted_pods_total",
		Help: "Pods deleted to make room for one of higher priority.",
	})
)

// Collectors returns the scheduler's metrics, for the process's registry.
func Collectors() []prometheus.Collector {
	return []prometheus.Collector{attempts, attemptSeconds, waitingPods, preempted}
}
