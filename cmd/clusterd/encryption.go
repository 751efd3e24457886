package main

import (
	"cmp"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// encryptionView is how a server seals what is at rest, in its answers.
type encryptionView struct {
	// Config names the content of the EncryptionConfiguration in force; "": none.
	Config string `json:"config,omitempty"`
	// Outdated: its file has another content by now, which is not in force.
	Outdated bool `json:"outdated,omitempty"`
	// Keys are those that its resources are written with.
	Keys string `json:"keys,omitempty"`
	// What the leader has counted: how many values are to be sealed, and those of them
	// that are not sealed with the key of now yet, or that the leader cannot open. Nil
	// elsewhere, and at the beginning of a term.
	Values   *int `json:"values,omitempty"`
	Stale    *int `json:"stale,omitempty"`
	Unopened *int `json:"unopened,omitempty"`
	// CountedTime is when, in milliseconds since 1970.
	CountedTime *int64 `json:"countedTime,omitempty"`
}

// encryptionState is this server's view.
func (m *Main) encryptionState() *encryptionView {
	v := &encryptionView{Config: m.atRest.Hash(), Outdated: !m.atRest.Valid()}
	var keys []string
	for _, k := range m.atRest.Keys() {
		keys = append(keys, k.String())
	}
	v.Keys = strings.Join(keys, "; ")
	if r := m.counted(); r != nil {
		at := r.at.UnixMilli()
		v.Values, v.Stale, v.Unopened, v.CountedTime = &r.Values, &r.Stale, &r.Unopened, &at
	}
	return v
}

// shortHash is enough of "sha256:…" to tell contents of one file apart.
func shortHash(hash string) string {
	_, digits, _ := strings.Cut(hash, ":")
	return digits[:min(len(digits), 12)]
}

// sealedOtherwise warns of servers whose EncryptionConfigurations differ, whose file is
// not in force, and of values that the leader cannot open.
func sealedOtherwise(members []memberView) (warnings []string) {
	var first *memberView
	for i := range members {
		m := &members[i]
		if m.sealing == nil {
			continue
		}
		if m.sealing.Outdated {
			warnings = append(warnings, fmt.Sprintf("the file of --encryption-provider-config on %s is not in force as it is now: its log and its /readyz?verbose say why", m.Name))
		}
		if n := m.sealing.Unopened; n != nil && *n > 0 {
			warnings = append(warnings, fmt.Sprintf("%d objects are sealed with keys that the leader %s does not have, or whose KMS plugin does not answer: its log names the first of them", *n, m.Name))
		}
		if first == nil {
			first = m
			continue
		}
		if m.sealing.Config != first.sealing.Config {
			warnings = append(warnings, fmt.Sprintf("the EncryptionConfiguration of %s (%s) is not that of %s (%s): a server reads no object that is sealed by a provider which its own file lacks; give all servers the same file",
				m.Name, cmp.Or(shortHash(m.sealing.Config), "none"), first.Name, cmp.Or(shortHash(first.sealing.Config), "none")))
		}
	}
	return warnings
}

// encryptionCollector tells Prometheus how what is at rest is sealed.
type encryptionCollector struct {
	main                     atomic.Pointer[Main] // nil until it is known
	valid, key, values, last *prometheus.Desc
}

func newEncryptionCollector() *encryptionCollector {
	return &encryptionCollector{
		valid:  prometheus.NewDesc("clusterd_encryption_config_valid", "1 if the EncryptionConfiguration is in force as its file is now, 0 if it is an earlier one.", nil, nil),
		key:    prometheus.NewDesc("clusterd_encryption_key_info", "The key that resources of the EncryptionConfiguration are written with; 1.", []string{"resources", "provider", "key"}, nil),
		values: prometheus.NewDesc("clusterd_encryption_values", "Stored values of resources that are encrypted at rest, as counted by the leader: current (with the current key), stale (to be re-encrypted), unopened (the leader cannot decrypt them).", []string{"state"}, nil),
		last:   prometheus.NewDesc("clusterd_encryption_counted_seconds", "Seconds since the leader counted them.", nil, nil),
	}
}

// Describe implements prometheus.Collector.
func (c *encryptionCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.valid
	ch <- c.key
	ch <- c.values
	ch <- c.last
}

// Collect implements prometheus.Collector.
func (c *encryptionCollector) Collect(ch chan<- prometheus.Metric) {
	m := c.main.Load()
	if m == nil {
		return
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	if m.cfg.EncryptionProviderConfig != "" {
		valid := 0.0
		if m.atRest.Valid() {
			valid = 1
		}
		gauge(c.valid, valid)
		for _, k := range m.atRest.Keys() {
			gauge(c.key, 1, strings.Join(k.Resources, ","), k.Provider, k.ID)
		}
	}
	if r := m.counted(); r != nil {
		gauge(c.values, float64(r.Values-r.Stale-r.Unopened), "current")
		gauge(c.values, float64(r.Stale), "stale")
		gauge(c.values, float64(r.Unopened), "unopened")
		gauge(c.last, time.Since(r.at).Seconds())
	}
}
