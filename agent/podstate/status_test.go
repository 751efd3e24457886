package podstate

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/apis/core"
)

func (w *world) status(at time.Duration) *v1.PodStatus {
	return BuildStatus(w.d, w.o, &w.d.Pod.Status, []netip.Addr{netip.MustParseAddr("192.0.2.1")}, t0.Add(at))
}

func condOf(s *v1.PodStatus, t v1.PodConditionType) v1.PodCondition {
	if i := core.PodConditionIndex(s.Conditions, t); i >= 0 {
		return s.Conditions[i]
	}
	return v1.PodCondition{}
}

func TestPhase(t *testing.T) {
	const always, never, onFailure = v1.RestartPolicyAlways, v1.RestartPolicyNever, v1.RestartPolicyOnFailure
	ab := []string{"a", "b"}
	deleted := func(w *world) { w.d.Pod.DeletionTimestamp = &metav1.Time{Time: t0} }
	tests := []struct {
		name string
		w    *world
		want v1.PodPhase
	}{
		{"new", newWorld(always, nil, ab), v1.PodPending},
		{"one of two made", newWorld(always, nil, ab).up().running("a"), v1.PodPending},
		{"all run", newWorld(always, nil, ab).up().running("a", "b"), v1.PodRunning},
		{"init running", newWorld(always, []string{"i"}, ab).up().running("i"), v1.PodPending},
		{"init failed for good", newWorld(never, []string{"i"}, ab).up().exited("i", 1), v1.PodFailed},
		{"one exited, Always", newWorld(always, nil, ab).up().running("a").exited("b", 1), v1.PodRunning},
		{"all exited, Always", newWorld(always, nil, ab).up().exited("a", 0).exited("b", 0), v1.PodRunning},
		{"all exited 0, Never", newWorld(never, nil, ab).up().exited("a", 0).exited("b", 0), v1.PodSucceeded},
		{"one failed, one runs, Never", newWorld(never, nil, ab).up().running("a").exited("b", 1), v1.PodRunning},
		{"one failed, Never", newWorld(never, nil, ab).up().exited("a", 0).exited("b", 1), v1.PodFailed},
		{"one failed, OnFailure", newWorld(onFailure, nil, ab).up().exited("a", 0).exited("b", 1), v1.PodRunning},
		{"sidecar still runs", newWorld(never, []string{"s"}, []string{"a"}).up().running("s").exited("a", 0), v1.PodRunning},
		{"sidecar ended too", newWorld(never, []string{"s"}, []string{"a"}).up().exited("s", 143).exited("a", 0), v1.PodSucceeded},
		{"verdict, still running", newWorld(always, nil, ab).up().running("a", "b").with(func(w *world) { w.o.Verdict = &Verdict{} }), v1.PodRunning},
		{"verdict", newWorld(always, nil, ab).with(func(w *world) { w.o.Verdict = &Verdict{} }), v1.PodFailed},
		{"deleted, running", newWorld(always, nil, ab).up().running("a", "b").with(deleted), v1.PodRunning},
		{"deleted, ended well", newWorld(always, nil, ab).up().exited("a", 0).exited("b", 0).with(deleted), v1.PodSucceeded},
		{"deleted, killed", newWorld(always, nil, ab).up().exited("a", 137).exited("b", 0).with(deleted), v1.PodFailed},
		{"deleted before it ran", newWorld(always, nil, ab).with(deleted), v1.PodPending},
		{"failed by somebody else while it runs", newWorld(always, nil, ab).up().running("a", "b").with(func(w *world) { w.o.EndedAs = v1.PodFailed }), v1.PodFailed},
		{"failed by somebody else, ended", newWorld(always, nil, ab).up().exited("a", 0).exited("b", 0).with(func(w *world) { w.o.EndedAs = v1.PodFailed }), v1.PodFailed},
		{"failed by somebody else", newWorld(always, nil, ab).with(func(w *world) { w.d.Pod.Status.Phase = v1.PodFailed; w.o.Final = true }), v1.PodFailed},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := tt.w.status(0).Phase; got != tt.want {
				t.Errorf("%s, want %s", got, tt.want)
			}
		})
	}
}

func TestWaitingReasons(t *testing.T) {
	one := func() *world { return newWorld(v1.RestartPolicyAlways, nil, []string{"a"}) }
	c := func(w *world) *Container { return w.o.Containers["a"] }
	tests := []struct {
		name            string
		w               *world
		at              time.Duration
		reason, message string
	}{
		{"new", one(), 0, "ContainerCreating", ""},
		{"init first", newWorld(v1.RestartPolicyAlways, []string{"i"}, []string{"a"}).up(), 0, "PodInitializing", ""},
		{"network not ready", one().with(func(w *world) { w.o.Sandbox.Err = &Fault{Reason: "NetworkNotReady", Message: "no range"} }), 0, "ContainerCreating", "no range"},
		{"volume missing", one().with(func(w *world) { w.o.Volumes.Err = &Fault{Message: `configmaps "x" not found`} }), 0, "ContainerCreating", `configmaps "x" not found`},
		{"slow pull", one().with(func(w *world) { c(w).Op, c(w).OpSince = OpPull, t0 }), 3 * time.Second, "ContainerCreating", `Pulling image "i" since 03:04:05 UTC`},
		{"pull failed", one().with(func(w *world) {
			c(w).ImageErr, c(w).ImageRef = &Fault{Reason: "ErrImagePull", Message: "manifest unknown", At: t0, RetryAt: t0}, "i"
		}), 0, "ErrImagePull", "manifest unknown"},
		{"pull backs off", one().with(func(w *world) {
			c(w).ImageErr, c(w).ImageRef = &Fault{Reason: "ErrImagePull", Message: "manifest unknown", At: t0, RetryAt: t0}, "i"
		}), 5 * time.Second,
			"ImagePullBackOff", `Back-off pulling image "i": ErrImagePull: manifest unknown`},
		{"config", one().with(func(w *world) { c(w).StartErr = &Fault{Reason: "CreateContainerConfigError", Message: "m"} }), 0, "CreateContainerConfigError", "m"},
		{"crash loop", one().up().exited("a", 1).with(func(w *world) { c(w).BackOff = 80 * time.Second }), time.Second,
			"CrashLoopBackOff", "back-off 1m20s restarting failed container=a pod=p_ns(u)"},
		{"crash loop, longest", one().up().exited("a", 1).with(func(w *world) { c(w).BackOff = 5 * time.Minute }), time.Second,
			"CrashLoopBackOff", "back-off 5m0s restarting failed container=a pod=p_ns(u)"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := tt.w.status(tt.at).ContainerStatuses[0]
			if w := s.State.Waiting; w == nil || w.Reason != tt.reason || w.Message != tt.message {
				t.Errorf("state %+v", s.State)
			}
		})
	}
}

// TestResizeConditions: from the first status with the new generation on, a condition
// says that its resources are not held yet.
func TestResizeConditions(t *testing.T) {
	size := func(cpu string) v1.ResourceRequirements {
		return v1.ResourceRequirements{Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse(cpu)}}
	}
	w := newWorld(v1.RestartPolicyAlways, nil, []string{"a"}).up().running("a")
	w.d.Pod.Generation, w.d.Pod.Spec.Containers[0].Resources = 2, size("25m")
	w.o.Allocated, w.o.Containers["a"].Now.Applied = Allocation{"a": size("20m")}, size("20m")
	has := func(want ...v1.PodConditionType) {
		t.Helper()
		var got []v1.PodConditionType
		for _, c := range w.status(0).Conditions {
			if IsTransient(c.Type) {
				got = append(got, c.Type)
			}
		}
		if !slices.Equal(got, want) {
			t.Errorf("%q, want %q", got, want)
		}
	}
	has(v1.PodResizeInProgress) // not granted yet
	w.o.ResizePending = &Fault{Reason: v1.PodReasonDeferred}
	has(v1.PodResizePending)
	w.o.ResizePending, w.o.Allocated["a"] = nil, size("25m")
	has(v1.PodResizeInProgress) // not applied yet
	w.o.Containers["a"].Now.Applied = size("25m")
	has()
}

// TestNeverRan: what never ran in an ended pod counts as ended only if its turn had come.
func TestNeverRan(t *testing.T) {
	w := newWorld(v1.RestartPolicyNever, []string{"i", "j", "k"}, []string{"a"}).up().exited("i", 0).exited("j", 1)
	s := w.status(0)
	if s.Phase != v1.PodFailed {
		t.Fatalf("phase %s", s.Phase)
	}
	for _, c := range append(s.InitContainerStatuses[2:], s.ContainerStatuses...) {
		if c.State.Waiting == nil || c.State.Waiting.Reason != "PodInitializing" {
			t.Errorf("%s after a failed init container: %+v", c.Name, c.State)
		}
	}
	w = newWorld(v1.RestartPolicyNever, []string{"i"}, []string{"a", "b"}).up().exited("i", 0).exited("a", 1)
	w.o.Verdict = &Verdict{Reason: "Evicted"}
	if c := w.status(0).ContainerStatuses[1]; c.State.Terminated == nil || c.State.Terminated.Reason != "ContainerStatusUnknown" {
		t.Errorf("b of an evicted pod: %+v", c.State)
	}
}

func TestConditions(t *testing.T) {
	w := newWorld(v1.RestartPolicyAlways, []string{"i"}, []string{"a"}).up().running("i")
	w.d.Pod.Generation = 7
	w.d.Pod.Status.Conditions = []v1.PodCondition{{Type: "example.com/gate", Status: v1.ConditionFalse}}
	w.d.Pod.Spec.ReadinessGates = []v1.PodReadinessGate{{ConditionType: "example.com/gate"}}
	s := w.status(0)
	if c := condOf(s, v1.PodInitialized); c.Status != v1.ConditionFalse || c.Reason != "ContainersNotInitialized" || c.ObservedGeneration != 7 {
		t.Errorf("%+v", c)
	}
	if c := condOf(s, v1.ContainersReady); c.Status != v1.ConditionFalse || c.Message != "containers with unready status: [a]" {
		t.Errorf("%+v", c)
	}
	if c := condOf(s, v1.PodReadyToStartContainers); c.Status != v1.ConditionTrue {
		t.Errorf("%+v", c)
	}
	w.d.Pod.Status = *s
	w.exited("i", 0).running("a")
	s = w.status(time.Minute)
	if c := condOf(s, v1.PodReadyToStartContainers); !c.LastTransitionTime.Time.Equal(t0) {
		t.Errorf("transition time moved without a change: %+v", c)
	}
	if c := condOf(s, v1.ContainersReady); c.Status != v1.ConditionTrue || !c.LastTransitionTime.Time.Equal(t0.Add(time.Minute)) {
		t.Errorf("%+v", c)
	}
	if c := condOf(s, v1.PodReady); c.Status != v1.ConditionFalse || c.Reason != "ReadinessGatesNotReady" || !strings.Contains(c.Message, "example.com/gate") {
		t.Errorf("%+v", c)
	}
	s.Conditions[core.PodConditionIndex(s.Conditions, "example.com/gate")].Status = v1.ConditionTrue
	w.d.Pod.Status = *s
	if c := condOf(w.status(2*time.Minute), v1.PodReady); c.Status != v1.ConditionTrue {
		t.Errorf("%+v", c)
	}
}

// TestSeedAfterBoot: what was running before a boot is told as lost.
// TestMessagesShare: the messages of a pod's containers have a bound together.
func TestMessagesShare(t *testing.T) {
	long := strings.Repeat("é", 3000)
	w := newWorld(v1.RestartPolicyNever, []string{"i"}, []string{"a", "b", "c"}).up().exited("i", 1)
	w.o.Containers["i"].Now.Message, w.o.Containers["i"].Last = long, &Instance{Message: "short"}
	s := w.status(0).InitContainerStatuses[0]
	if got := s.State.Terminated.Message; len(got) != 12<<10/4 || !strings.HasPrefix(long, got) {
		t.Errorf("%d bytes of one message among four containers", len(got))
	}
	if s.LastTerminationState.Terminated.Message != "short" {
		t.Errorf("%+v", s.LastTerminationState.Terminated)
	}
}

// TestUser: the status tells whom a container runs as, also when only the API
// remembers it.
func TestUser(t *testing.T) {
	want := &v1.ContainerUser{Linux: &v1.LinuxContainerUser{UID: 1000, GID: 3000, SupplementalGroups: []int64{3000, 4000}}}
	w := newWorld(v1.RestartPolicyAlways, nil, []string{"a"}).up().running("a")
	w.o.Containers["a"].Now.User = userOf(api.Container{UID: 1000, GID: 3000, ExtraGIDs: []uint32{4000, 3000}})
	st := w.status(0)
	if d := cmp.Diff(want, st.ContainerStatuses[0].User); d != "" {
		t.Error(d)
	}
	w.d.Pod.Status = *st
	o := Seed(w.d.Pod, Records{}, t0, nil)
	if d := cmp.Diff(want, o.Containers["a"].Now.User); d != "" {
		t.Error(d)
	}
}

func TestSeedAfterBoot(t *testing.T) {
	w := newWorld(v1.RestartPolicyAlways, []string{"i"}, []string{"a"})
	w.d.Pod.Status = v1.PodStatus{
		Phase: v1.PodRunning, StartTime: &metav1.Time{Time: t0},
		InitContainerStatuses: []v1.ContainerStatus{{Name: "i", State: v1.ContainerState{Terminated: &v1.ContainerStateTerminated{ExitCode: 0, Reason: "Completed", ContainerID: "clusterd://x"}}}},
		ContainerStatuses:     []v1.ContainerStatus{{Name: "a", RestartCount: 2, ContainerID: "clusterd://y", State: v1.ContainerState{Running: &v1.ContainerStateRunning{}}}},
	}
	o := Seed(w.d.Pod, Records{}, t0.Add(time.Hour), nil)
	if c := o.Containers["a"]; c.Restarts != 2 || c.Now == nil || c.Now.Reason != "ContainerStatusUnknown" || c.Now.ID != "y" {
		t.Errorf("%+v", c)
	}
	o.Sandbox = Sandbox{ID: "s", State: SandboxReady}
	o.Volumes.Ready = true
	for _, c := range o.Containers {
		c.ImageReady, c.ImageRef = true, "i"
	}
	got := Plan(w.d, o, t0.Add(time.Hour))
	if len(got) != 1 || got[0] != (Start{"i", 1}) {
		t.Errorf("plan %v: the init container has to run again in the new sandbox", got)
	}
}

func TestQOSAndResources(t *testing.T) {
	list := func(cpu, mem string) v1.ResourceList {
		l := v1.ResourceList{}
		if cpu != "" {
			l[v1.ResourceCPU] = resource.MustParse(cpu)
		}
		if mem != "" {
			l[v1.ResourceMemory] = resource.MustParse(mem)
		}
		return l
	}
	pod := func(rs ...v1.ResourceRequirements) *v1.Pod {
		p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: "u"}}
		for _, r := range rs {
			p.Spec.Containers = append(p.Spec.Containers, v1.Container{Resources: r})
		}
		return p
	}
	full := v1.ResourceRequirements{Limits: list("1", "1Gi"), Requests: list("1", "1Gi")}
	tests := []struct {
		name   string
		pod    *v1.Pod
		class  v1.PodQOSClass
		parent string
		shares uint64
		quota  int64
		memory int64
	}{
		{"nothing", pod(v1.ResourceRequirements{}), v1.PodQOSBestEffort, "/r/besteffort/podu", 2, 0, 0},
		{"all", pod(full, full), v1.PodQOSGuaranteed, "/r/podu", 2048, 200000, 2 << 30},
		{"limits alone", pod(v1.ResourceRequirements{Limits: list("500m", "1Gi")}), v1.PodQOSGuaranteed, "/r/podu", 512, 50000, 1 << 30},
		{"one without", pod(full, v1.ResourceRequirements{}), v1.PodQOSBurstable, "/r/burstable/podu", 1024, 0, 0},
		{"request only", pod(v1.ResourceRequirements{Requests: list("250m", "")}), v1.PodQOSBurstable, "/r/burstable/podu", 256, 0, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := PodResources(defaulted(tt.pod), 0)
			if core.QOSClass(tt.pod) != tt.class || CgroupParent("/r", tt.pod) != tt.parent || r.CPUShares != tt.shares || r.CPUQuota != tt.quota || r.MemoryLimit != tt.memory {
				t.Errorf("%s %s %+v", core.QOSClass(tt.pod), CgroupParent("/r", tt.pod), r)
			}
		})
	}
	// The larger of the init step and the sum of the apps.
	p := pod(full)
	p.Spec.InitContainers = []v1.Container{
		{Resources: full, RestartPolicy: ptr.To(v1.ContainerRestartPolicyAlways)},
		{Resources: v1.ResourceRequirements{Requests: list("3", "1Gi")}},
	}
	if got := core.Requests(p); got.Cpu().String() != "4" || got.Memory().String() != "2Gi" {
		t.Errorf("requests %v %v", got.Cpu(), got.Memory())
	}
}
