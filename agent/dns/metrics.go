package dns

import (
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
)

// metrics are named as CoreDNS names them, for the dashboards and alerts that
// people have.
type metrics struct {
	requests, responses *prometheus.CounterVec
	duration, forwards  *prometheus.HistogramVec
	hits                *prometheus.CounterVec
	asked, misses       prometheus.Counter
	stale               prometheus.Counter
	rejects, broken     prometheus.Counter
	panics              prometheus.Counter
	entries             func() int
	all                 []prometheus.Collector
}

// server is the label of all: there is one.
const serverLabel = "dns://:53"

func newMetrics() *metrics {
	m := &metrics{}
	add := func(c prometheus.Collector) { m.all = append(m.all, c) }
	vec := func(name, help string, labels ...string) *prometheus.CounterVec {
		v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
		add(v)
		return v
	}
	counter := func(name, help string, labels prometheus.Labels) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help, ConstLabels: labels})
		add(c)
		return c
	}
	seconds := func(name, help string, labels ...string) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(0.00025, 2, 16)}, labels)
		add(h)
		return h
	}
	all := prometheus.Labels{"server": serverLabel, "zones": ".", "view": ""}
	m.requests = vec("coredns_dns_requests_total", "Counter of DNS requests made per zone, protocol and family.", "server", "zone", "view", "proto", "family", "type")
	m.responses = vec("coredns_dns_responses_total", "Counter of response status codes.", "server", "zone", "view", "rcode", "plugin")
	m.duration = seconds("coredns_dns_request_duration_seconds", "Histogram of the time (in seconds) each request took per zone.", "server", "zone", "view")
	m.forwards = seconds("coredns_proxy_request_duration_seconds", "Histogram of the time each request took.", "proxy_name", "to", "rcode")
	m.hits = vec("coredns_cache_hits_total", "The count of cache hits.", "server", "type", "zones", "view")
	m.asked = counter("coredns_cache_requests_total", "The count of cache requests.", all)
	m.misses = counter("coredns_cache_misses_total", "The count of cache misses.", all)
	m.stale = counter("coredns_cache_served_stale_total", "The number of requests served from stale cache entries.", all)
	m.rejects = counter("coredns_forward_max_concurrent_rejects_total", "Counter of the number of queries rejected because the concurrent queries were at maximum.", nil)
	m.broken = counter("coredns_proxy_healthcheck_failures_total", "Counter of the number of failed questions to upstreams.", nil)
	m.panics = counter("coredns_panics_total", "A metrics that counts the number of panics.", nil)
	return m
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.all {
		c.Describe(ch)
	}
	ch <- entriesDesc
}

var entriesDesc = prometheus.NewDesc("coredns_cache_entries", "The number of elements in the cache.", nil, prometheus.Labels{"server": serverLabel, "type": "all", "zones": ".", "view": ""})

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.all {
		c.Collect(ch)
	}
	ch <- prometheus.MustNewConstMetric(entriesDesc, prometheus.GaugeValue, float64(m.entries()))
}

func (m *metrics) hit(rcode, answers int) {
	kind := "success"
	if rcode != dns.RcodeSuccess || answers == 0 {
		kind = "denial"
	}
	m.hits.WithLabelValues(serverLabel, kind, ".", "").Inc()
}

// knownTypes keeps the label's values few: a client chooses the number.
var knownTypes = map[uint16]bool{
	dns.TypeA: true, dns.TypeAAAA: true, dns.TypeMX: true, dns.TypeSOA: true, dns.TypeCNAME: true, dns.TypePTR: true, dns.TypeTXT: true,
	dns.TypeNS: true, dns.TypeSRV: true, dns.TypeDS: true, dns.TypeDNSKEY: true, dns.TypeRRSIG: true, dns.TypeNSEC: true,
	dns.TypeNSEC3: true, dns.TypeHTTPS: true, dns.TypeANY: true,
}

func (m *metrics) answered(q *question, zone string, reply *dns.Msg, began time.Time) {
	proto, family, kind := "udp", "1", "other"
	if q.stream {
		proto = "tcp"
	}
	if q.client.Is6() {
		family = "2"
	}
	if t := q.msg.Question[0].Qtype; knownTypes[t] {
		kind = dns.TypeToString[t]
	}
	plugin := "forward"
	if zone != "." {
		plugin = "kubernetes"
	}
	m.requests.WithLabelValues(serverLabel, zone, "", proto, family, kind).Inc()
	m.responses.WithLabelValues(serverLabel, zone, "", dns.RcodeToString[reply.Rcode], plugin).Inc()
	m.duration.WithLabelValues(serverLabel, zone, "").Observe(time.Since(began).Seconds())
}
