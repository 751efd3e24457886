package agent_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/clusterd/clusterd/features"
)

// TestRootMetrics: a node's monitoring finds what it knows of a kubelet.
func TestRootMetrics(t *testing.T) {
	features.Shows(t, 161)
	m := newMachine(t)
	web := app("web", "serve", "8080")
	web.Resources.Limits = v1.ResourceList{v1.ResourceCPU: resource.MustParse("500m"), v1.ResourceMemory: resource.MustParse("64Mi")}
	web.ReadinessProbe = &v1.Probe{ProbeHandler: v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Path: "/", Port: intstr.FromInt32(8080)}},
		PeriodSeconds: 1, TimeoutSeconds: 1, SuccessThreshold: 1, FailureThreshold: 3}
	m.create(newPod("one", web))
	p := m.ready("one")
	m.fetch(p, "/") // some bytes on the wire

	scrape := func(path string) map[string]*dto.MetricFamily {
		t.Helper()
		code, body := m.call(path)
		parser := expfmt.NewTextParser(model.UTF8Validation)
		families, err := parser.TextToMetricFamilies(strings.NewReader(body))
		if code != http.StatusOK || err != nil {
			t.Fatalf("%s: %d %v\n%s", path, code, err, body)
		}
		return families
	}
	// value is the one of the series with the labels, "a=b,c=d".
	value := func(families map[string]*dto.MetricFamily, name, labels string) (v float64, ok bool) {
		for _, s := range families[name].GetMetric() {
			has := map[string]string{}
			for _, l := range s.GetLabel() {
				has[l.GetName()] = l.GetValue()
			}
			match := true
			for _, pair := range strings.Split(labels, ",") {
				k, want, _ := strings.Cut(pair, "=")
				match = match && (pair == "" || has[k] == want)
			}
			if match {
				return s.GetCounter().GetValue() + s.GetGauge().GetValue() + float64(s.GetHistogram().GetSampleCount()), true
			}
		}
		return 0, false
	}
	atLeast := func(path, name, labels string, least float64) {
		t.Helper()
		m.eventually(fmt.Sprintf("%s: %s{%s} >= %v", path, name, labels, least), func() bool {
			v, ok := value(scrape(path), name, labels)
			return ok && v >= least
		})
	}
	equal := func(path, name, labels string, want float64) {
		t.Helper()
		if v, ok := value(scrape(path), name, labels); !ok || v != want {
			t.Errorf("%s: %s{%s} is %v (%v), want %v", path, name, labels, v, ok, want)
		}
	}

	for _, name := range []string{"kubelet_pod_start_duration_seconds", "kubelet_pod_worker_duration_seconds", "kubelet_pod_status_sync_duration_seconds", "process_cpu_seconds_total", "go_goroutines"} {
		atLeast("/metrics", name, "", 0.001)
	}
	equal("/metrics", "kubelet_node_name", "node=n1", 1)
	equal("/metrics", "kubelet_running_pods", "", 1)
	equal("/metrics", "kubelet_running_containers", "container_state=running", 1)
	atLeast("/metrics", "kubelet_runtime_operations_total", "operation_type=startContainer", 1)

	who := "namespace=default,pod=one,container=web"
	atLeast("/metrics/probes", "prober_probe_total", who+",probe_type=Readiness,result=successful", 2)
	atLeast("/metrics/probes", "prober_probe_duration_seconds", who+",probe_type=Readiness", 2)

	equal("/metrics/resource", "resource_scrape_error", "", 0)
	atLeast("/metrics/resource", "node_cpu_usage_seconds_total", "", 0.001)
	atLeast("/metrics/resource", "node_memory_working_set_bytes", "", 1<<20)
	atLeast("/metrics/resource", "pod_memory_working_set_bytes", "namespace=default,pod=one", 1<<10)
	atLeast("/metrics/resource", "container_cpu_usage_seconds_total", who, 0.0001)
	atLeast("/metrics/resource", "container_memory_working_set_bytes", who, 1<<10)
	atLeast("/metrics/resource", "container_start_time_seconds", who, 1e9)

	equal("/metrics/cadvisor", "container_scrape_error", "", 0)
	one := who + ",image=" + appImage
	equal("/metrics/cadvisor", "container_spec_memory_limit_bytes", one, 64<<20)
	equal("/metrics/cadvisor", "container_spec_cpu_quota", one, 50000)
	equal("/metrics/cadvisor", "container_spec_cpu_period", one, 100000)
	atLeast("/metrics/cadvisor", "container_processes", one, 1)
	atLeast("/metrics/cadvisor", "container_cpu_usage_seconds_total", one+",cpu=total", 0.0001)
	atLeast("/metrics/cadvisor", "container_cpu_cfs_periods_total", one, 1)
	atLeast("/metrics/cadvisor", "container_memory_usage_bytes", one, 1<<10)
	atLeast("/metrics/cadvisor", "container_fs_usage_bytes", one, 1)
	atLeast("/metrics/cadvisor", "container_network_receive_bytes_total", "namespace=default,pod=one,container=,interface=eth0", 1)
	atLeast("/metrics/cadvisor", "container_memory_working_set_bytes", "id=/", 1<<20)

	m.delete("one", 1)
	m.eventually("the pod's series go with it", func() bool {
		for _, path := range []string{"/metrics/probes", "/metrics/resource", "/metrics/cadvisor"} {
			if _, body := m.call(path); strings.Contains(body, `pod="one"`) {
				return false
			}
		}
		return true
	})
}
