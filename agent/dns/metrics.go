package dns

import (
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
)

// metrics are named as CoreDNS names them, for the dashboards and alerts that
// people have.
type metrics struct {
	requests, responses *prometheus.CounterVec
	duration, forwards  *prometheus.HistogramVec
	asks, says          *prometheus.HistogramVec // sizes of questions and answers
	signed              *prometheus.CounterVec
	hits                *prometheus.CounterVec
	asked, misses       prometheus.Counter
	stale               prometheus.Counter
	rejects, broken     prometheus.Counter
	panics              prometheus.Counter
	entries             [2]func() int // by hitLabels
	all                 []prometheus.Collector

	answeredSeries [3]answeredSeries // of the cluster's names, of others, of what is refused
	hitSeries      [2]series[prometheus.Counter]
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
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		h := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, labels)
		add(h)
		return h
	}
	seconds := prometheus.ExponentialBuckets(0.00025, 2, 16)
	sizes := []float64{0, 100, 200, 300, 400, 511, 1023, 2047, 4095, 8191, 16e3, 32e3, 48e3, 64e3}
	all := prometheus.Labels{"server": serverLabel, "zones": ".", "view": ""}
	m.requests = vec("coredns_dns_requests_total", "Counter of DNS requests made per zone, protocol and family.", "server", "zone", "view", "proto", "family", "type")
	m.responses = vec("coredns_dns_responses_total", "Counter of response status codes.", "server", "zone", "view", "rcode", "plugin")
	m.duration = histogram("coredns_dns_request_duration_seconds", "Histogram of the time (in seconds) each request took per zone.", seconds, "server", "zone", "view")
	m.asks = histogram("coredns_dns_request_size_bytes", "Size of the request in bytes.", sizes, "server", "zone", "view", "proto")
	m.says = histogram("coredns_dns_response_size_bytes", "Size of the returned response in bytes.", sizes, "server", "zone", "view", "proto")
	m.signed = vec("coredns_dns_do_requests_total", "Counter of DNS requests with DO bit set per zone.", "server", "zone", "view")
	m.forwards = histogram("coredns_proxy_request_duration_seconds", "Histogram of the time each request took.", seconds, "proxy_name", "to", "rcode")
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

var entriesDesc = prometheus.NewDesc("coredns_cache_entries", "The number of elements in the cache.", []string{"type"}, prometheus.Labels{"server": serverLabel, "zones": otherZones, "view": ""})

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.all {
		c.Collect(ch)
	}
	for i, n := range m.entries {
		ch <- prometheus.MustNewConstMetric(entriesDesc, prometheus.GaugeValue, float64(n()), hitLabels[i])
	}
}

func (m *metrics) hit(denied bool) {
	i := 0
	if denied {
		i = 1
	}
	m.hitSeries[i].get(func() prometheus.Counter { return m.hits.WithLabelValues(serverLabel, hitLabels[i], otherZones, "") }).Inc()
}

// hitLabels are the types of what is remembered.
var hitLabels = [2]string{"success", "denial"}

// otherZones is the label of names that are not the cluster's, droppedZone that of
// questions that are refused unread.
const (
	otherZones  = "."
	droppedZone = "dropped"
)

// typeLabels keeps the label's values few: a client chooses the number.
var (
	typeLabels = []string{"other", "A", "AAAA", "MX", "SOA", "CNAME", "PTR", "TXT", "NS", "SRV", "DS", "DNSKEY", "RRSIG", "NSEC", "NSEC3", "HTTPS", "ANY"}
	typeIndex  = func() map[uint16]int {
		out := map[uint16]int{}
		for i, name := range typeLabels[1:] {
			out[dns.StringToType[name]] = i + 1
		}
		return out
	}()
)

// series are looked up by their labels once: that takes longer than counting.
type series[T any] struct{ found atomic.Pointer[T] }

func (s *series[T]) get(find func() T) T {
	if p := s.found.Load(); p != nil {
		return *p
	}
	v := find()
	s.found.Store(&v)
	return v
}

// knownRcodes are those that are answered.
const knownRcodes = dns.RcodeBadVers + 1

// answeredSeries are the series of one zone.
type answeredSeries struct {
	requests   [2][2][17]series[prometheus.Counter] // by TCP, by IPv6, of the type
	responses  [knownRcodes]series[prometheus.Counter]
	duration   series[prometheus.Observer]
	asks, says [2]series[prometheus.Observer] // by TCP
	signed     series[prometheus.Counter]
}

// exchanged is a question that was answered.
type exchanged struct {
	zone         string // otherZones, droppedZone or the cluster's
	stream       bool
	client       netip.Addr
	kind         uint16
	signed       bool // with signatures, if there are any
	rcode        int
	asked, reply int // bytes
	began        time.Time
}

// answered counts an answer.
func (m *metrics) answered(x exchanged) {
	proto, family, plugin := "udp", "1", "kubernetes"
	var tcp, six, zone int
	if x.stream {
		proto, tcp = "tcp", 1
	}
	if x.client.Is6() {
		family, six = "2", 1
	}
	switch x.zone {
	case otherZones:
		plugin, zone = "forward", 1
	case droppedZone:
		plugin, zone = "", 2
	}
	s, t := &m.answeredSeries[zone], typeIndex[x.kind]
	s.requests[tcp][six][t].get(func() prometheus.Counter {
		return m.requests.WithLabelValues(serverLabel, x.zone, "", proto, family, typeLabels[t])
	}).Inc()
	response := func() prometheus.Counter {
		return m.responses.WithLabelValues(serverLabel, x.zone, "", dns.RcodeToString[x.rcode], plugin)
	}
	if x.rcode < knownRcodes {
		s.responses[x.rcode].get(response).Inc()
	} else {
		response().Inc()
	}
	if x.signed {
		s.signed.get(func() prometheus.Counter { return m.signed.WithLabelValues(serverLabel, x.zone, "") }).Inc()
	}
	s.asks[tcp].get(func() prometheus.Observer { return m.asks.WithLabelValues(serverLabel, x.zone, "", proto) }).Observe(float64(x.asked))
	s.says[tcp].get(func() prometheus.Observer { return m.says.WithLabelValues(serverLabel, x.zone, "", proto) }).Observe(float64(x.reply))
	s.duration.get(func() prometheus.Observer { return m.duration.WithLabelValues(serverLabel, x.zone, "") }).Observe(time.Since(x.began).Seconds())
}
