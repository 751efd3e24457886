package loop

import (
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

var (
	reconciles = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "clusterd_sched_reconciles_total",
		Help: "Reconcile calls by loop and result (ok, conflict, error, panic).",
	}, []string{"loop", "result"})
	reconcileSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "clusterd_sched_reconcile_seconds",
		Help:    "Duration of one reconcile call.",
		Buckets: prometheus.ExponentialBuckets(0.0005, 2.5, 12),
	}, []string{"loop"})
	panics = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "clusterd_sched_panics_total",
		Help: "Panics caught in reconcile calls.",
	}, []string{"loop"})
	eventsDropped = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "clusterd_sched_events_dropped_total",
		Help: "Events that were not written: the queue was full or the server refused them.",
	})
	lostWrites = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "clusterd_sched_unseen_writes_checked_total",
		Help: "Writes that a cache did not show in time and that were read from the server, by outcome.",
	}, []string{"outcome"})
)

// Collectors returns the metrics of the harness, for the process's registry.
func Collectors() []prometheus.Collector {
	return []prometheus.Collector{reconciles, reconcileSeconds, panics, eventsDropped, lostWrites}
}

func observe(loop string, took time.Duration, err error) {
	result := "ok"
	switch {
	case err == nil:
	case errors.Is(err, errPanic):
		result = "panic"
	case apierrors.IsConflict(err):
		result = "conflict"
	default:
		result = "error"
	}
	reconciles.WithLabelValues(loop, result).Inc()
	reconcileSeconds.WithLabelValues(loop).Observe(took.Seconds())
}

func countPanic(loop string) { panics.WithLabelValues(loop).Inc() }
