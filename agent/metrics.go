package agent

import (
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/agent/probe"
	"github.com/clusterd/clusterd/agent/runtime"
	"github.com/clusterd/clusterd/agent/shutdown"
	"github.com/clusterd/clusterd/netsetup/lb"
)

// metrics are what Prometheus may read of this node, by path: the paths and
// names that it knows of a kubelet.
func (a *Agent) metrics(probes *probe.Metrics) map[string]prometheus.Gatherer {
	own := append(slices.Concat(pod.Metrics(), runtime.Metrics(), shutdown.Metrics()), &population{a}, volumeSeries{a}, Connections{},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if a.paths != nil {
		own = append(own, a.paths)
	}
	if a.dns != nil {
		own = append(own, a.dns.Metrics())
	}
	out := map[string]prometheus.Gatherer{}
	for path, list := range map[string][]prometheus.Collector{
		"/metrics":          own,
		"/metrics/probes":   {probes},
		"/metrics/resource": {a.stats.Resource()},
		"/metrics/cadvisor": {a.stats.Containers()},
	} {
		r := prometheus.NewRegistry()
		r.MustRegister(list...)
		out[path] = r
	}
	return out
}

// population counts what is on the node, when asked.
type population struct{ a *Agent }

var (
	nodeName          = prometheus.NewDesc("kubelet_node_name", "The node's name. The count is always 1.", []string{"node"}, nil)
	runningPods       = prometheus.NewDesc("kubelet_running_pods", "Number of pods that have a running pod sandbox", nil, nil)
	runningContainers = prometheus.NewDesc("kubelet_running_containers", "Number of containers currently running", []string{"container_state"}, nil)
	tracked           = prometheus.NewDesc("clusterd_conntrack_entries", "Connections tracked by the kernel in the node's network namespace.", nil, nil)
	trackedMost       = prometheus.NewDesc("clusterd_conntrack_entries_limit", "Maximum number of tracked connections; packets of further connections are dropped.", nil, nil)
)

// Describe implements prometheus.Collector.
func (p *population) Describe(ch chan<- *prometheus.Desc) {
	ch <- nodeName
	ch <- runningPods
	ch <- runningContainers
}

// Collect implements prometheus.Collector.
func (p *population) Collect(ch chan<- prometheus.Metric) {
	pods, running, exited := 0, 0, 0
	for _, v := range p.a.pods.Views() {
		if v.SandboxID != "" {
			pods++
		}
		for _, c := range v.Containers {
			switch {
			case c.Running:
				running++
			case c.Made:
				exited++
			}
		}
	}
	gauge := func(d *prometheus.Desc, v int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v), labels...)
	}
	gauge(nodeName, 1, p.a.cfg.NodeName)
	gauge(runningPods, pods)
	gauge(runningContainers, running, "running")
	gauge(runningContainers, exited, "exited")
}

// Connections tells how full the kernel's table of connections is.
type Connections struct{}

// Describe implements prometheus.Collector.
func (Connections) Describe(ch chan<- *prometheus.Desc) {
	ch <- tracked
	ch <- trackedMost
}

// Collect implements prometheus.Collector. A kernel that tracks none has no figures.
func (Connections) Collect(ch chan<- prometheus.Metric) {
	used, most, err := lb.Tracked()
	if err != nil {
		return
	}
	ch <- prometheus.MustNewConstMetric(tracked, prometheus.GaugeValue, float64(used))
	ch <- prometheus.MustNewConstMetric(trackedMost, prometheus.GaugeValue, float64(most))
}
