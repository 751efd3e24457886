package agent_test

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	summary "k8s.io/kubelet/pkg/apis/stats/v1alpha1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/pressure"
	"github.com/clusterd/clusterd/features"
)

// TestRootSummary: what the pods use can be asked for.
func TestRootSummary(t *testing.T) {
	features.Shows(t, 167)
	m := newMachine(t)
	m.create(newPod("one", app("web")))
	p := m.ready("one")
	m.fetch(p, "/") // some bytes on the wire
	var got summary.Summary
	var pod *summary.PodStats
	m.eventually("the pod in the summary", func() bool {
		code, body := m.call("/stats/summary")
		if code != http.StatusOK || json.Unmarshal([]byte(body), &got) != nil {
			t.Fatalf("%d %s", code, body)
		}
		for i := range got.Pods {
			if got.Pods[i].PodRef.UID == "uid-one" && len(got.Pods[i].Containers) == 1 {
				pod = &got.Pods[i]
			}
		}
		if pod == nil {
			return false
		}
		// The log is written a moment after the page, and the container is looked at a
		// moment after its pod.
		c := pod.Containers[0]
		return c.Logs != nil && c.Logs.UsedBytes != nil && *c.Logs.UsedBytes > 0 && *c.Memory.UsageBytes <= *pod.Memory.UsageBytes
	})
	positive := func(what string, n *uint64) {
		t.Helper()
		if n == nil || *n == 0 {
			t.Errorf("%s is not told", what)
		}
	}
	c := pod.Containers[0]
	positive("node memory", got.Node.Memory.WorkingSetBytes)
	positive("node cpu", got.Node.CPU.UsageCoreNanoSeconds)
	positive("node disk", got.Node.Fs.CapacityBytes)
	positive("image disk", got.Node.Runtime.ImageFs.AvailableBytes)
	positive("pod memory", pod.Memory.WorkingSetBytes)
	positive("pod cpu", pod.CPU.UsageCoreNanoSeconds)
	positive("pod processes", pod.ProcessStats.ProcessCount)
	positive("pod disk", pod.EphemeralStorage.UsedBytes)
	positive("container memory", c.Memory.WorkingSetBytes)
	positive("container cpu", c.CPU.UsageCoreNanoSeconds)
	positive("container log", c.Logs.UsedBytes)
	if pod.Network == nil || pod.Network.Name != "eth0" {
		t.Fatalf("network: %+v", pod.Network)
	}
	positive("bytes received", pod.Network.RxBytes)
	if c.Name != "web" || c.StartTime.IsZero() {
		t.Errorf("container %+v in %+v", c, pod)
	}
	if _, body := m.call("/stats/summary?only_cpu_and_memory=true"); strings.Contains(body, "ephemeral-storage") || !strings.Contains(body, "uid-one") {
		t.Errorf("only cpu and memory: %s", body)
	}
}

// TestRootDiskPressure: a node whose disk is nearly full says so, ends a pod,
// and starts none, whatever it asks for.
func TestRootDiskPressure(t *testing.T) {
	features.Shows(t, 268)
	m := newMachine(t)
	m.create(newPod("before", app("web")))
	m.ready("before")
	m.stop()
	m.limits = []pressure.Threshold{{Signal: pressure.NodefsAvailable, Percent: 100}}
	m.start()
	m.eventually("the pod to be evicted", func() bool { return m.get("before").Status.Phase == v1.PodFailed })
	if p := m.get("before"); p.Status.Reason != "Evicted" || !strings.HasPrefix(p.Status.Message, "The node was low on resource: ephemeral-storage.") {
		t.Errorf("before: %+v", p.Status)
	}
	m.eventually("the node to tell of it", func() bool {
		n, err := m.api.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
		return err == nil && slices.ContainsFunc(n.Status.Conditions, func(c v1.NodeCondition) bool {
			return c.Type == v1.NodeDiskPressure && c.Status == v1.ConditionTrue
		})
	})
	asks := app("web")
	asks.Resources.Requests = v1.ResourceList{v1.ResourceMemory: resource.MustParse("64Mi")}
	m.create(newPod("late", asks))
	m.eventually("a pod to be refused", func() bool { return m.get("late").Status.Phase == v1.PodFailed })
	if p := m.get("late"); p.Status.Reason != "Evicted" || !strings.Contains(p.Status.Message, "The node had condition: [DiskPressure]") || len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].ContainerID != "" {
		t.Errorf("late: %+v", p.Status)
	}
}

// TestRootEviction: a node that runs short of memory says so, ends pods in
// order, takes no pods that asked for nothing, and spares the system's own.
func TestRootEviction(t *testing.T) {
	m := newMachine(t)
	critical := newPod("critical", app("web"))
	critical.Spec.Priority = ptr.To[int32](2_000_000_000)
	m.create(critical)
	greedy := newPod("greedy", app("web"))
	m.create(greedy)
	for _, name := range []string{"critical", "greedy"} {
		m.ready(name)
	}
	// More has to be free than there is: the node is short whatever it has.
	m.stop()
	m.limits = []pressure.Threshold{{Signal: pressure.MemoryAvailable, Percent: 100}}
	m.start()
	m.eventually("the greedy pod to be evicted", func() bool { return m.get("greedy").Status.Phase == v1.PodFailed })
	p := m.get("greedy")
	if p.Status.Reason != "Evicted" || !strings.HasPrefix(p.Status.Message, "The node was low on resource: memory. Threshold quantity: ") {
		t.Errorf("status %+v", p.Status)
	}
	disrupted := false
	for _, c := range p.Status.Conditions {
		disrupted = disrupted || c.Type == v1.DisruptionTarget && c.Status == v1.ConditionTrue && c.Reason == v1.PodReasonTerminationByKubelet
	}
	if !disrupted {
		t.Errorf("no DisruptionTarget: %+v", p.Status.Conditions)
	}
	m.eventually("the node to tell of it", func() bool {
		n, err := m.api.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
		if err != nil {
			return false
		}
		for _, c := range n.Status.Conditions {
			if c.Type == v1.NodeMemoryPressure {
				return c.Status == v1.ConditionTrue
			}
		}
		return false
	})
	m.create(newPod("late", app("web")))
	m.eventually("a pod that asks for nothing to be refused", func() bool { return m.get("late").Status.Phase == v1.PodFailed })
	if p := m.get("late"); p.Status.Reason != "Evicted" || !strings.Contains(p.Status.Message, "The node had condition: [MemoryPressure]") {
		t.Errorf("late: %+v", p.Status)
	}
	asks := app("web")
	asks.Resources.Requests = v1.ResourceList{v1.ResourceMemory: resource.MustParse("64Mi")}
	second := newPod("critical-2", asks)
	second.Spec.Priority = critical.Spec.Priority
	m.create(second)
	m.ready("critical-2")
	if p := m.ready("critical"); p.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Errorf("critical: %+v", p.Status)
	}
}
