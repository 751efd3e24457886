package pod_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// sized is the container with requests and limits of cpu and memory.
func sized(c v1.Container, cpu, memory string) v1.Container {
	list := v1.ResourceList{v1.ResourceCPU: resource.MustParse(cpu), v1.ResourceMemory: resource.MustParse(memory)}
	c.Resources = v1.ResourceRequirements{Requests: list, Limits: list.DeepCopy()}
	return c
}

// resize asks for another size of the pod's first container.
func (n *node) resize(name, cpu, memory string) {
	n.t.Helper()
	p := n.get(name)
	p.Generation++
	p.Spec.Containers[0] = sized(p.Spec.Containers[0], cpu, memory)
	n.update(p)
}

func (n *node) update(p *v1.Pod) {
	n.t.Helper()
	if _, err := n.api.CoreV1().Pods("default").Update(n.t.Context(), p, metav1.UpdateOptions{}); err != nil {
		n.t.Fatal(err)
	}
}

func reasonOf(p *v1.Pod, t v1.PodConditionType) string {
	for _, c := range p.Status.Conditions {
		if c.Type == t {
			return c.Reason + ": " + c.Message
		}
	}
	return ""
}

// has fails unless the container has the size, in the status and in its cgroup.
func (n *node) has(name, cpu, memory string) {
	n.t.Helper()
	p := n.get(name)
	st := p.Status.ContainerStatuses[0]
	c, m := resource.MustParse(cpu), resource.MustParse(memory)
	if st.Resources == nil || st.Resources.Limits.Cpu().Cmp(c) != 0 || st.Resources.Limits.Memory().Cmp(m) != 0 {
		n.t.Errorf("status: resources %+v, want %s and %s", st.Resources, cpu, memory)
	}
	for _, what := range []string{st.Name, name} {
		if r := n.runtime.Resources(what); r.CPUQuota != c.MilliValue()*100 || r.MemoryLimit != m.Value() {
			n.t.Errorf("cgroup of %s: %+v, want %s and %s", what, r, cpu, memory)
		}
	}
}

func TestResize(t *testing.T) {
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, sized(ctr("app"), "500m", "64Mi")))
		n.after(time.Second)
		n.has("p", "500m", "64Mi")
		n.resize("p", "1", "128Mi")
		n.after(time.Second)
		n.has("p", "1", "128Mi")
		p := n.get("p")
		if st := p.Status.ContainerStatuses[0]; st.RestartCount != 0 || st.AllocatedResources.Cpu().String() != "1" {
			t.Errorf("status %+v", st)
		}
		if condition(p, v1.PodResizePending) != "" || condition(p, v1.PodResizeInProgress) != "" {
			t.Errorf("conditions %+v", p.Status.Conditions)
		}
		if !n.events.has("ResizeCompleted") {
			t.Error("no event ResizeCompleted")
		}
		// The pod's limit is never below its container's.
		calls := n.runtime.Calls()
		updates := slices.DeleteFunc(calls, func(s string) bool { return !strings.HasPrefix(s, "update") })
		if want := []string{"update sandbox p", "update app", "update sandbox p"}; !slices.Equal(updates, want) {
			t.Errorf("order %q, want %q", updates, want)
		}
		// A restarted container has the new size; so has what a new agent sees.
		n.runtime.Exit("app", 1)
		n.after(time.Second)
		n.has("p", "1", "128Mi")
		n.stop()
		n.start()
		n.after(time.Second)
		n.has("p", "1", "128Mi")
		if got := n.runtime.Calls(); len(slices.DeleteFunc(got, func(s string) bool { return !strings.HasPrefix(s, "update") })) != 3 {
			t.Errorf("the new agent wrote cgroups again: %q", got)
		}
	})
}

// TestResizeWaits: what the node cannot give is infeasible, what others hold is
// given when they end; until then everything stays as it was.
func TestResizeWaits(t *testing.T) {
	inBubble(t, func(n *node) { // 2 cpus
		n.create(testPod("p", v1.RestartPolicyAlways, sized(ctr("app"), "500m", "64Mi")))
		n.create(testPod("other", v1.RestartPolicyNever, sized(ctr("job"), "1", "64Mi")))
		n.after(time.Second)
		n.resize("p", "5", "64Mi")
		n.after(time.Second)
		if got := reasonOf(n.get("p"), v1.PodResizePending); !strings.HasPrefix(got, "Infeasible: Node didn't have enough capacity: cpu, requested: 5, capacity: 2") {
			t.Errorf("pending: %q", got)
		}
		n.has("p", "500m", "64Mi")
		n.resize("p", "1500m", "64Mi")
		n.after(time.Second)
		if got := reasonOf(n.get("p"), v1.PodResizePending); !strings.HasPrefix(got, "Deferred: Node didn't have enough resource: cpu") {
			t.Errorf("pending: %q", got)
		}
		n.has("p", "500m", "64Mi")
		if !n.events.has("ResizeInfeasible") || !n.events.has("ResizeDeferred") {
			t.Error("events are missing")
		}
		n.runtime.Exit("job", 0)
		n.after(time.Second)
		n.has("p", "1500m", "64Mi")
		if condition(n.get("p"), v1.PodResizePending) != "" {
			t.Error("it still is pending")
		}
		// What it was given counts for others.
		n.create(testPod("late", v1.RestartPolicyNever, sized(ctr("big"), "1", "64Mi")))
		n.after(time.Second)
		if got := n.get("late").Status.Reason; got != "OutOfcpu" {
			t.Errorf("a pod beyond the rest of the node: reason %q", got)
		}
	})
}

// TestResizeTakenBack: a wish that is taken back leaves no condition.
func TestResizeTakenBack(t *testing.T) {
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, sized(ctr("app"), "500m", "64Mi")))
		n.after(time.Second)
		n.resize("p", "5", "64Mi")
		n.after(time.Second)
		n.resize("p", "500m", "64Mi")
		n.after(time.Second)
		if p := n.get("p"); condition(p, v1.PodResizePending) != "" {
			t.Errorf("conditions %+v", p.Status.Conditions)
		}
	})
}

// TestResizeRestarts: a resource whose policy is RestartContainer restarts its
// container at once, without back-off; another does not.
func TestResizeRestarts(t *testing.T) {
	inBubble(t, func(n *node) {
		c := sized(ctr("app"), "500m", "64Mi")
		c.ResizePolicy = []v1.ContainerResizePolicy{
			{ResourceName: v1.ResourceCPU, RestartPolicy: v1.NotRequired}, {ResourceName: v1.ResourceMemory, RestartPolicy: v1.RestartContainer},
		}
		n.create(testPod("p", v1.RestartPolicyOnFailure, c))
		n.after(time.Second)
		n.resize("p", "1", "64Mi")
		n.after(time.Second)
		n.has("p", "1", "64Mi")
		if r := n.get("p").Status.ContainerStatuses[0].RestartCount; r != 0 {
			t.Errorf("cpu: %d restarts", r)
		}
		n.resize("p", "1", "32Mi")
		n.after(time.Second)
		n.has("p", "1", "32Mi")
		if r := n.get("p").Status.ContainerStatuses[0].RestartCount; r != 1 {
			t.Errorf("memory: %d restarts", r)
		}
	})
}

// TestResizeFails: a cgroup that refuses is told and tried again.
func TestResizeFails(t *testing.T) {
	inBubble(t, func(n *node) {
		var refuse atomic.Bool
		refuse.Store(true)
		n.runtime.UpdateErr = func(u api.Update) error {
			if refuse.Load() && u.Resources.MemoryLimit == 32<<20 {
				return errors.New("device or resource busy")
			}
			return nil
		}
		n.create(testPod("p", v1.RestartPolicyAlways, sized(ctr("app"), "500m", "64Mi")))
		n.after(time.Second)
		n.resize("p", "500m", "32Mi")
		n.after(time.Second)
		p := n.get("p")
		if got := reasonOf(p, v1.PodResizeInProgress); !strings.Contains(got, "Error: ") || !strings.Contains(got, "device or resource busy") {
			t.Errorf("in progress: %q", got)
		}
		if st := p.Status.ContainerStatuses[0]; st.Resources.Limits.Memory().String() != "64Mi" || st.AllocatedResources.Memory().String() != "32Mi" {
			t.Errorf("status %+v", st)
		}
		refuse.Store(false)
		n.after(time.Minute)
		n.has("p", "500m", "32Mi")
		if condition(n.get("p"), v1.PodResizeInProgress) != "" {
			t.Error("it still is in progress")
		}
	})
}

// TestResizeReachesFiles: a downward API volume tells the size that the node has
// granted, not the one that is waited for.
func TestResizeReachesFiles(t *testing.T) {
	inBubble(t, func(n *node) {
		p := testPod("p", v1.RestartPolicyAlways, sized(ctr("app"), "500m", "64Mi"))
		p.Spec.Volumes = []v1.Volume{{Name: "size", VolumeSource: v1.VolumeSource{DownwardAPI: &v1.DownwardAPIVolumeSource{Items: []v1.DownwardAPIVolumeFile{
			{Path: "cpu", ResourceFieldRef: &v1.ResourceFieldSelector{ContainerName: "app", Resource: "limits.cpu", Divisor: resource.MustParse("1m")}},
		}}}}}
		n.create(p)
		n.after(time.Second)
		for _, tt := range []struct{ asks, told string }{{"500m", "500"}, {"1", "1000"}, {"50", "1000"}, {"700m", "700"}} {
			n.resize("p", tt.asks, "64Mi")
			n.after(time.Second)
			got, err := os.ReadFile(filepath.Join(n.dir, "pods", "uid-p", "volumes", "kubernetes.io~downward-api", "size", "cpu"))
			if err != nil || string(got) != tt.told {
				t.Errorf("asked for %s: told %q (%v), want %s", tt.asks, got, err, tt.told)
			}
		}
	})
}
