package probe

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Kind is what a probe is for, as the metrics and events name it.
type Kind string

// The kinds of probes.
const (
	Startup   Kind = "Startup"
	Liveness  Kind = "Liveness"
	Readiness Kind = "Readiness"
)

// Metrics count the questions of a node's probes. They are served apart from
// the node's other metrics, as they have a series per probe. Names and labels
// are those that dashboards for Kubernetes know. A nil *Metrics counts
// nothing; its methods may be called concurrently.
type Metrics struct {
	total    *prometheus.CounterVec
	duration *prometheus.HistogramVec
}

// NewMetrics returns Metrics to be registered as a Collector.
func NewMetrics() *Metrics {
	labels := []string{"probe_type", "container", "pod", "namespace", "pod_uid"}
	return &Metrics{
		total: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "prober_probe_total",
			Help: "Cumulative number of a liveness, readiness or startup probe for a container by result.",
		}, append([]string{"result"}, labels...)),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "prober_probe_duration_seconds",
			Help:    "Duration in seconds for a probe response.",
			Buckets: []float64{.005, .025, .1, .5, 1, 5, 10},
		}, labels),
	}
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	m.total.Describe(ch)
	m.duration.Describe(ch)
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	m.total.Collect(ch)
	m.duration.Collect(ch)
}

// Forget drops the series of a deleted pod.
func (m *Metrics) Forget(podUID string) {
	if m == nil {
		return
	}
	of := prometheus.Labels{"pod_uid": podUID}
	m.total.DeletePartialMatch(of)
	m.duration.DeletePartialMatch(of)
}

// series are the counters of one probe, looked up once per loop.
type series struct {
	good, bad, unknown prometheus.Counter
	took               prometheus.Observer
}

func (m *Metrics) series(kind Kind, t Target) *series {
	if m == nil {
		return nil
	}
	labels := prometheus.Labels{"probe_type": string(kind), "container": t.Container, "pod": t.Pod, "namespace": t.Namespace, "pod_uid": t.PodUID}
	s := &series{took: m.duration.With(labels)}
	of := m.total.MustCurryWith(labels)
	s.good, s.bad, s.unknown = of.WithLabelValues("successful"), of.WithLabelValues("failed"), of.WithLabelValues("unknown")
	return s
}

func (s *series) count(r Round, took time.Duration) {
	if s == nil {
		return
	}
	s.took.Observe(took.Seconds())
	switch {
	case r.OK:
		s.good.Inc()
	case r.Unknown:
		s.unknown.Inc()
	default:
		s.bad.Inc()
	}
}
