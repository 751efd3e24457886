package stats

import (
	"context"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/klog/v2"
)

// Resource collects what /metrics/resource serves: processor time and memory
// of node, pods and containers, by the names that Kubernetes holds stable
// (KEP-727). They are counters and not rates: two readings give a rate,
// and nothing is measured between requests.
type Resource struct{ c *Collector }

// Resource returns the collector of /metrics/resource.
func (c *Collector) Resource() Resource { return Resource{c} }

var (
	nodeCPU        = counter("node_cpu_usage_seconds_total", "Cumulative cpu time consumed by the node in core-seconds")
	nodeMemory     = gauge("node_memory_working_set_bytes", "Current working set of the node in bytes")
	podCPU         = counter("pod_cpu_usage_seconds_total", "Cumulative cpu time consumed by the pod in core-seconds", "pod", "namespace")
	podMemory      = gauge("pod_memory_working_set_bytes", "Current working set of the pod in bytes", "pod", "namespace")
	resourceCPU    = counter("container_cpu_usage_seconds_total", "Cumulative cpu time consumed by the container in core-seconds", "container", "pod", "namespace")
	resourceMemory = gauge("container_memory_working_set_bytes", "Current working set of the container in bytes", "container", "pod", "namespace")
	resourceStart  = gauge("container_start_time_seconds", "Start time of the container since unix epoch in seconds", "container", "pod", "namespace")
	resourceError  = gauge("resource_scrape_error", "1 if there was an error while getting container metrics, 0 otherwise")
)

// Describe implements prometheus.Collector: which series there are, the answer
// tells.
func (Resource) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (r Resource) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	s, err := r.c.Summary(ctx, true)
	if err != nil {
		klog.Background().Error(err, "Resource metrics are not complete")
		resourceError.send(ch, 1)
		return
	}
	resourceError.send(ch, 0)
	if c := s.Node.CPU; c != nil {
		nodeCPU.sendAt(ch, c.Time.Time, seconds(*c.UsageCoreNanoSeconds))
	}
	if m := s.Node.Memory; m != nil {
		nodeMemory.sendAt(ch, m.Time.Time, float64(*m.WorkingSetBytes))
	}
	seen := map[[2]string]bool{}
	for _, p := range s.Pods {
		// While a static pod's successor starts there are two of the name.
		name := [2]string{p.PodRef.Name, p.PodRef.Namespace}
		if seen[name] {
			continue
		}
		seen[name] = true
		podCPU.sendAt(ch, p.CPU.Time.Time, seconds(*p.CPU.UsageCoreNanoSeconds), name[:]...)
		podMemory.sendAt(ch, p.Memory.Time.Time, float64(*p.Memory.WorkingSetBytes), name[:]...)
		for _, ct := range p.Containers {
			labels := []string{ct.Name, name[0], name[1]}
			resourceCPU.sendAt(ch, ct.CPU.Time.Time, seconds(*ct.CPU.UsageCoreNanoSeconds), labels...)
			resourceMemory.sendAt(ch, ct.Memory.Time.Time, float64(*ct.Memory.WorkingSetBytes), labels...)
			if start := ct.StartTime.Time; !start.IsZero() {
				resourceStart.send(ch, unixSeconds(start), labels...)
			}
		}
	}
}
