package agent

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/apis/paths"
	"github.com/clusterd/clusterd/slack"
)

// pathWatch makes a condition of the node of what is measured of the ways to
// other nodes.
type pathWatch struct {
	report func() paths.Report

	mu        sync.Mutex // guards all below
	seen      map[string]*sighting
	condition v1.NodeCondition
}

// sighting is a finding that is looked at again.
type sighting struct {
	finding paths.Finding
	in, out int // looks in a row with it, without it
	counts  bool
}

// A finding counts when two looks in a row saw it, and is over when three did
// not: the condition is written to the store, and busy nodes lose a packet now
// and then.
const (
	pathPeriod = 5 * time.Second
	looksIn    = 2
	looksOut   = 3
)

func newPathWatch(report func() paths.Report) *pathWatch {
	w := &pathWatch{report: report, seen: map[string]*sighting{}}
	w.look()
	return w
}

// run looks every now and then until ctx ends, and calls changed after each look
// that changed the condition.
func (w *pathWatch) run(ctx context.Context, changed func()) {
	tick := slack.NewTicker(pathPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if w.look() {
			changed()
		}
	}
}

// look judges the ways as they are now, and reports whether the condition
// changed.
func (w *pathWatch) look() bool {
	report := w.report()
	found := paths.Findings(report)
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range w.seen {
		s.out++
	}
	for _, f := range found {
		key := f.To + " " + string(f.State)
		s := w.seen[key]
		if s == nil {
			s = &sighting{finding: f}
			w.seen[key] = s
		}
		if s.out > 1 {
			s.in = 0
		}
		s.in, s.out = s.in+1, 0
		if s.in >= looksIn && !s.counts {
			s.counts, s.finding = true, f
		}
	}
	var counts []paths.Finding
	for key, s := range w.seen {
		if s.out >= looksOut {
			delete(w.seen, key)
		} else if s.counts {
			counts = append(counts, s.finding)
		}
	}
	slices.SortFunc(counts, func(a, b paths.Finding) int { return strings.Compare(a.To+string(a.State), b.To+string(b.State)) })
	now := v1.NodeCondition{Type: paths.Condition, Status: v1.ConditionFalse, Reason: "PathsWork", Message: paths.Summary(counts, len(report.Paths))}
	if len(counts) > 0 {
		now.Status, now.Reason = v1.ConditionTrue, "PathsFail"
	}
	if w.condition == now {
		return false
	}
	w.condition = now
	return true
}

// conditions is the one condition, for the node.
func (w *pathWatch) conditions() []v1.NodeCondition {
	w.mu.Lock()
	defer w.mu.Unlock()
	return []v1.NodeCondition{w.condition}
}

var (
	pathLost = prometheus.NewDesc("clusterd_path_lost_ratio", "Fraction of the last pings to the node that were lost.", []string{"node", "address"}, nil)
	pathRTT  = prometheus.NewDesc("clusterd_path_rtt_seconds", "Median round-trip time in seconds of the last pings to the node.", []string{"node", "address"}, nil)
	wgAge    = prometheus.NewDesc("clusterd_wireguard_handshake_age_seconds", "Seconds since the last WireGuard handshake with the node.", []string{"node"}, nil)
	wgIn     = prometheus.NewDesc("clusterd_wireguard_received_bytes_total", "Bytes received from the node through WireGuard.", []string{"node"}, nil)
	wgOut    = prometheus.NewDesc("clusterd_wireguard_sent_bytes_total", "Bytes sent to the node through WireGuard.", []string{"node"}, nil)
	pathOK   = prometheus.NewDesc("clusterd_path_ok", "1 where nothing is found wrong with the way to the node, else 0 with what it is like", []string{"node", "address", "state"}, nil)
)

// Describe implements prometheus.Collector.
func (w *pathWatch) Describe(ch chan<- *prometheus.Desc) {
	ch <- pathLost
	ch <- pathRTT
	ch <- pathOK
	ch <- wgAge
	ch <- wgIn
	ch <- wgOut
}

// Collect implements prometheus.Collector.
func (w *pathWatch) Collect(ch chan<- prometheus.Metric) {
	report := w.report()
	within := paths.HeardWithin(len(report.Paths))
	tunnels := map[string]bool{} // by peer: one may have two addresses
	for _, p := range report.Paths {
		if t := p.WireGuard; t != nil && !tunnels[p.Peer] {
			tunnels[p.Peer] = true
			ch <- prometheus.MustNewConstMetric(wgIn, prometheus.CounterValue, float64(t.Received), p.Peer)
			ch <- prometheus.MustNewConstMetric(wgOut, prometheus.CounterValue, float64(t.Sent), p.Peer)
			if t.Handshake >= 0 {
				ch <- prometheus.MustNewConstMetric(wgAge, prometheus.GaugeValue, t.Handshake, p.Peer)
			}
		}
		gauge := func(d *prometheus.Desc, v float64, more ...string) {
			ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, append([]string{p.Peer, p.Address}, more...)...)
		}
		if p.Sent > 0 {
			gauge(pathLost, float64(p.Lost)/float64(p.Sent))
		}
		if p.Sent > p.Lost {
			gauge(pathRTT, p.RTT/1000)
		}
		state, ok := paths.Judge(p, within), 0.0
		if state == paths.OK {
			ok = 1
		}
		gauge(pathOK, ok, string(state))
	}
}
