package stats

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// series is one name of metrics that are made at the moment of asking.
type series struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
}

func counter(name, help string, labels ...string) series {
	return series{prometheus.NewDesc(name, help, labels, nil), prometheus.CounterValue}
}

func gauge(name, help string, labels ...string) series {
	return series{prometheus.NewDesc(name, help, labels, nil), prometheus.GaugeValue}
}

func (s series) send(ch chan<- prometheus.Metric, v float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(s.desc, s.kind, v, labels...)
}

// sendAt gives the value the moment at which it was read.
func (s series) sendAt(ch chan<- prometheus.Metric, at time.Time, v float64, labels ...string) {
	ch <- prometheus.NewMetricWithTimestamp(at, prometheus.MustNewConstMetric(s.desc, s.kind, v, labels...))
}

// seconds turns nanoseconds into seconds.
func seconds(ns uint64) float64 { return float64(ns) / 1e9 }

// unixSeconds is a moment as Prometheus tells it; 0: it is not known.
func unixSeconds(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMilli()) / 1000
}

// scrapeTimeout bounds one question; Prometheus itself asks with a limit of
// some ten seconds.
const scrapeTimeout = 10 * time.Second
