package proxy

import (
	"cmp"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// recorder notes what was answered. Unwrap lets http.ResponseController reach
// the writer for flushing and for upgrades.
type recorder struct {
	http.ResponseWriter
	code  int
	bytes int64
}

// Unwrap is for http.ResponseController.
func (r *recorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }

// WriteHeader implements http.ResponseWriter.
func (r *recorder) WriteHeader(code int) {
	if r.code == 0 && (code >= 200 || code == http.StatusSwitchingProtocols) {
		r.code = code
	}
	if code != statusClientGone {
		r.ResponseWriter.WriteHeader(code)
	}
}

// Write implements io.Writer.
func (r *recorder) Write(b []byte) (int, error) {
	if r.code == 0 {
		r.code = http.StatusOK
	}
	n, err := r.ResponseWriter.Write(b)
	r.bytes += int64(n)
	return n, err
}

// tell records the request in the access log and the metrics.
func (p *Proxy) tell(r *http.Request, c *call, recorded *recorder, took time.Duration) {
	code := recorded.code
	if code == 0 { // nothing was written: net/http answers for us
		code = http.StatusOK
	}
	var namespace, name string
	if c.rule != nil {
		namespace, name = c.rule.Owner.Namespace, c.rule.Owner.Name
		if c.rule.Kind != "" {
			name = strings.ToLower(c.rule.Kind) + "/" + name
		}
	}
	p.metrics.requests.WithLabelValues(namespace, name, strconv.Itoa(code)).Inc()
	if code != http.StatusSwitchingProtocols { // an upgraded connection lasts as long as it likes
		p.metrics.took.WithLabelValues(namespace, name).Observe(took.Seconds())
	}
	attrs := []slog.Attr{
		slog.String("client", c.client.String()),
		slog.String("host", cut(r.Host)),
		slog.String("method", cut(r.Method)),
		slog.String("path", cut(r.URL.EscapedPath())),
		slog.String("proto", r.Proto),
		slog.Int("status", code),
		slog.Int64("bytes", recorded.bytes),
		slog.Float64("ms", float64(took.Microseconds())/1000),
		slog.Bool("tls", r.TLS != nil),
		slog.String("agent", cut(r.UserAgent())),
		slog.String("id", c.id),
	}
	if c.rule != nil {
		attrs = append(attrs, slog.String(cmp.Or(strings.ToLower(c.rule.Kind), "ingress"), c.rule.Owner.String()))
	}
	if c.backend != nil {
		attrs = append(attrs, slog.String("backend", c.backend.Name))
	}
	if c.endpoint != nil {
		attrs = append(attrs, slog.String("endpoint", c.address()), slog.Int("tries", c.tries))
	}
	if c.why != "" {
		attrs = append(attrs, slog.String("why", c.why))
	}
	p.cfg.Access.LogAttrs(r.Context(), slog.LevelInfo, "request", attrs...)
}

// cut bounds the length of what a client sent, at a character's end, so that it cannot
// write log lines of any length.
func cut(s string) string {
	if len(s) > 512 {
		return strings.ToValidUTF8(s[:512], "") + "…"
	}
	return s
}

type metrics struct {
	requests *prometheus.CounterVec
	took     *prometheus.HistogramVec
	retries  prometheus.Counter
	mirrored *prometheus.CounterVec
	underWay prometheus.Gauge
	rules    prometheus.Gauge
}

func newMetrics() *metrics {
	return &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "clusterd_ingress_requests_total", Help: "Requests answered, by the Ingress whose rule they matched (empty if none) and status code."}, []string{"namespace", "ingress", "code"}),
		took:     prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "clusterd_ingress_request_duration_seconds", Help: "Time from a request's header to the end of its response, without upgraded connections.", Buckets: prometheus.ExponentialBuckets(0.001, 2.5, 12)}, []string{"namespace", "ingress"}),
		retries:  prometheus.NewCounter(prometheus.CounterOpts{Name: "clusterd_ingress_retries_total", Help: "Requests retried on another endpoint: the previous one did not accept them, or answered with a status that the route retries."}),
		mirrored: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "clusterd_ingress_mirrored_total", Help: "Copies of requests for mirrors: sent, failed (the mirror did not answer), dropped (the body was too long or did not come to its end, or too many were under way)."}, []string{"result"}),
		underWay: prometheus.NewGauge(prometheus.GaugeOpts{Name: "clusterd_ingress_requests_under_way", Help: "Requests in flight, including upgraded connections."}),
		rules:    prometheus.NewGauge(prometheus.GaugeOpts{Name: "clusterd_ingress_rules", Help: "Rules in force."}),
	}
}

// Collectors returns the metrics, for the process's registry.
func (p *Proxy) Collectors() []prometheus.Collector {
	m := p.metrics
	return []prometheus.Collector{m.requests, m.took, m.retries, m.mirrored, m.underWay, m.rules}
}
