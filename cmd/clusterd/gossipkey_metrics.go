package main

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/clusterd/clusterd/member/gossipkey"
	"github.com/clusterd/clusterd/raftstore"
)

// gossipKeyState reports to Prometheus the gossip key, as this server's store has it.
type gossipKeyState struct {
	store                    atomic.Pointer[raftstore.Store] // nil until it is open
	generation, age, lagging *prometheus.Desc
}

func newGossipKeyState() *gossipKeyState {
	return &gossipKeyState{
		generation: prometheus.NewDesc("clusterd_gossip_key_generation", "Number of gossip key rotations.", nil, nil),
		age:        prometheus.NewDesc("clusterd_gossip_key_age_seconds", "Age in seconds of the current gossip key; absent while it is the cluster's first key.", nil, nil),
		lagging:    prometheus.NewDesc("clusterd_gossip_key_lagging_servers", "Servers that lag behind the current gossip key.", nil, nil),
	}
}

// Describe implements prometheus.Collector.
func (s *gossipKeyState) Describe(ch chan<- *prometheus.Desc) {
	ch <- s.generation
	ch <- s.age
	ch <- s.lagging
}

// Collect implements prometheus.Collector.
func (s *gossipKeyState) Collect(ch chan<- prometheus.Metric) {
	store := s.store.Load()
	if store == nil {
		return
	}
	ctx := context.Background() // stale reads do not wait
	state, err := gossipkey.Get(ctx, store, true)
	if err != nil {
		return
	}
	servers, err := gossipkey.Servers(ctx, store, true)
	if err != nil {
		return
	}
	gauge := func(d *prometheus.Desc, v float64) { ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v) }
	gauge(s.generation, float64(state.Generation))
	if !state.Used.IsZero() {
		gauge(s.age, time.Since(state.Used).Seconds())
	}
	gauge(s.lagging, float64(len(state.Lagging(servers))))
}
