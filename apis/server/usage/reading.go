package usage

import (
	"errors"
	"fmt"
	"io"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// reading is a node's counters at one time.
type reading struct {
	at   time.Time
	node counter
	pods map[Pod]map[string]counter
}

// counter is what something has used since it started.
type counter struct {
	at      time.Time // when cpu was read, to the millisecond
	started float64   // Unix time, seconds
	cpu     float64   // seconds of processor time
	memory  uint64    // working set, bytes
}

// parse reads what a node serves under /metrics/resource. The summary, which
// tells the same, has times of whole seconds only.
func parse(r io.Reader, now time.Time) (*reading, error) {
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(r)
	if err != nil {
		return nil, fmt.Errorf("read its metrics: %w", err)
	}
	out := &reading{at: now, pods: map[Pod]map[string]counter{}}
	for _, m := range families["node_cpu_usage_seconds_total"].GetMetric() {
		out.node.cpu, out.node.at = m.GetCounter().GetValue(), taken(m)
	}
	for _, m := range families["node_memory_working_set_bytes"].GetMetric() {
		out.node.memory = uint64(m.GetGauge().GetValue())
	}
	if out.node.at.IsZero() {
		return nil, errors.New("it does not tell its processor time")
	}
	for _, m := range families["resource_scrape_error"].GetMetric() {
		if m.GetGauge().GetValue() != 0 {
			return nil, errors.New("it could not measure its pods; its log says why")
		}
	}
	each := func(family string, note func(*counter, *dto.Metric)) {
		for _, m := range families[family].GetMetric() {
			pod, name := labels(m)
			if out.pods[pod] == nil {
				out.pods[pod] = map[string]counter{}
			}
			c := out.pods[pod][name]
			note(&c, m)
			out.pods[pod][name] = c
		}
	}
	each("container_cpu_usage_seconds_total", func(c *counter, m *dto.Metric) { c.cpu, c.at = m.GetCounter().GetValue(), taken(m) })
	each("container_memory_working_set_bytes", func(c *counter, m *dto.Metric) { c.memory = uint64(m.GetGauge().GetValue()) })
	each("container_start_time_seconds", func(c *counter, m *dto.Metric) { c.started = m.GetGauge().GetValue() })
	return out, nil
}

// taken is when a metric was read; zero: it does not say.
func taken(m *dto.Metric) time.Time {
	if m.TimestampMs == nil {
		return time.Time{}
	}
	return time.UnixMilli(*m.TimestampMs)
}

// labels are whose metric it is.
func labels(m *dto.Metric) (pod Pod, container string) {
	for _, l := range m.GetLabel() {
		switch l.GetName() {
		case "namespace":
			pod.Namespace = l.GetValue()
		case "pod":
			pod.Name = l.GetValue()
		case "container":
			container = l.GetValue()
		}
	}
	return pod, container
}

// since is what was used from base to r; all tells whether base has everything
// that r has. Of a pod, all containers are reported or none.
func (r *reading) since(base reading) (u *Usage, all bool) {
	u = &Usage{Pods: make(map[Pod]PodUsage, len(r.pods))}
	if u.Node, all = r.node.since(base.node); !all {
		u.Node = Sample{At: r.node.at, Memory: r.node.memory}
	}
	for name, containers := range r.pods {
		out := PodUsage{}
		for c, now := range containers {
			before, known := base.pods[name][c]
			if s, ok := now.since(before); known && ok {
				out[c] = s
			}
		}
		if len(out) == len(containers) {
			u.Pods[name] = out
		} else {
			all = false
		}
	}
	return u, all
}

// since is the rate between two readings of the same counter; false: they are
// not of the same.
func (c counter) since(before counter) (Sample, bool) {
	past := c.at.Sub(before.at)
	if before.at.IsZero() || past <= 0 || c.cpu < before.cpu || c.started != before.started {
		return Sample{}, false
	}
	return Sample{At: c.at, Window: past, CPU: (c.cpu - before.cpu) / past.Seconds(), Memory: c.memory}, true
}
