package podstate

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/names"
)

// amounts reads "cpu=1 memory=64Mi".
func amounts(s string) v1.ResourceList {
	out := v1.ResourceList{}
	for f := range strings.FieldsSeq(s) {
		name, q, _ := strings.Cut(f, "=")
		out[v1.ResourceName(name)] = resource.MustParse(q)
	}
	return out
}

func sized(requests, limits string) v1.Container {
	return v1.Container{Name: "c", Resources: v1.ResourceRequirements{Requests: amounts(requests), Limits: amounts(limits)}}
}

// defaulted gives a pod what the API server gives every pod that reaches the
// agent: requests that follow from limits.
func defaulted(pod *v1.Pod) *v1.Pod {
	kind := core.Pod()
	kind.Default(pod)
	return pod
}

func TestQOS(t *testing.T) {
	whole := func(requests, limits string) *v1.ResourceRequirements {
		r := sized(requests, limits).Resources
		return &r
	}
	tests := []struct {
		name string
		spec v1.PodSpec
		want v1.PodQOSClass
	}{
		{"nothing", v1.PodSpec{Containers: []v1.Container{sized("", "")}}, v1.PodQOSBestEffort},
		{"other resources alone", v1.PodSpec{Containers: []v1.Container{sized("", "hugepages-2Mi=4Mi")}}, v1.PodQOSBestEffort},
		{"request", v1.PodSpec{Containers: []v1.Container{sized("cpu=1", "")}}, v1.PodQOSBurstable},
		{"limits alone", v1.PodSpec{Containers: []v1.Container{sized("", "cpu=1 memory=1Gi")}}, v1.PodQOSGuaranteed},
		{"request of zero", v1.PodSpec{Containers: []v1.Container{sized("cpu=0 memory=64Mi", "cpu=1 memory=64Mi")}}, v1.PodQOSBurstable},
		{"equal", v1.PodSpec{Containers: []v1.Container{sized("cpu=1 memory=1Gi", "cpu=1000m memory=1024Mi")}}, v1.PodQOSGuaranteed},
		{"one without", v1.PodSpec{Containers: []v1.Container{sized("cpu=1 memory=1Gi", "cpu=1 memory=1Gi"), sized("", "")}}, v1.PodQOSBurstable},
		{"init counts", v1.PodSpec{InitContainers: []v1.Container{sized("cpu=1", "")}, Containers: []v1.Container{sized("", "")}}, v1.PodQOSBurstable},
		{"whole pod, equal", v1.PodSpec{Resources: whole("cpu=1 memory=1Gi", "cpu=1 memory=1Gi"), Containers: []v1.Container{sized("", "")}}, v1.PodQOSGuaranteed},
		{"whole pod before containers", v1.PodSpec{Resources: whole("cpu=1", "cpu=2"), Containers: []v1.Container{sized("cpu=1 memory=1Gi", "cpu=1 memory=1Gi")}}, v1.PodQOSBurstable},
	}
	for _, tt := range tests {
		if got := core.QOSClass(&v1.Pod{Spec: tt.spec}); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}

func TestOOMScore(t *testing.T) {
	const node = 16 << 30
	app := sized("memory=4Gi", "")
	sidecar := sized("", "")
	sidecar.Name, sidecar.RestartPolicy = "side", ptr.To(v1.ContainerRestartPolicyAlways)
	burstable := &v1.Pod{Spec: v1.PodSpec{InitContainers: []v1.Container{sidecar}, Containers: []v1.Container{app}}}
	critical := &v1.Pod{Spec: v1.PodSpec{PriorityClassName: systemNodeCritical, Containers: []v1.Container{sized("", "")}}}
	best := &v1.Pod{Spec: v1.PodSpec{Containers: []v1.Container{sized("", "")}}}
	guaranteed := &v1.Pod{Spec: v1.PodSpec{Containers: []v1.Container{sized("", "cpu=1 memory=1Gi")}}}
	small := &v1.Pod{Spec: v1.PodSpec{Containers: []v1.Container{sized("memory=1Mi", "")}}}
	large := &v1.Pod{Spec: v1.PodSpec{Containers: []v1.Container{sized("memory=16Gi", "")}}}
	for _, tt := range []struct {
		name string
		pod  *v1.Pod
		c    *v1.Container
		want int
	}{
		{"a quarter of the node", burstable, &burstable.Spec.Containers[0], 750},
		{"sidecar as its app", burstable, &burstable.Spec.InitContainers[0], 750},
		{"critical", critical, &critical.Spec.Containers[0], -997},
		{"best effort", best, &best.Spec.Containers[0], 1000},
		{"guaranteed", guaranteed, &guaranteed.Spec.Containers[0], -997},
		{"never as best effort", small, &small.Spec.Containers[0], 999},
		{"never as guaranteed", large, &large.Spec.Containers[0], 3},
	} {
		if got := OomScoreAdj(tt.pod, tt.c, node); got != tt.want {
			t.Errorf("%s: %d, want %d", tt.name, got, tt.want)
		}
	}
}

func TestHugepageLimits(t *testing.T) {
	node := amounts("cpu=4 hugepages-2Mi=64Mi hugepages-64Ki=1Mi hugepages-1Gi=0")
	got := Hugepages(amounts("memory=1Gi hugepages-2Mi=4Mi"), node)
	if diff := cmp.Diff(map[string]uint64{"2MB": 4 << 20, "64KB": 0}, got); diff != "" {
		t.Error(diff)
	}
	if got := Hugepages(amounts("memory=1Gi"), amounts("hugepages-1Gi=0")); got != nil {
		t.Errorf("a node without huge pages: %v", got)
	}
}

func TestSingleProcessOOMKill(t *testing.T) {
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{names.SingleProcessOOMKill: "a, b"}},
		Spec: v1.PodSpec{Containers: []v1.Container{{Name: "a"}, {Name: "b"}, {Name: "c"}}}}
	for name, want := range map[string]bool{"a": true, "b": true, "c": false} {
		if got, err := OomSingleProcess(pod, name); err != nil || got != want {
			t.Errorf("%s: %v %v", name, got, err)
		}
	}
	pod.Annotations[names.SingleProcessOOMKill] = "a,x"
	if _, err := OomSingleProcess(pod, "a"); err == nil || !strings.Contains(err.Error(), `"x"`) {
		t.Errorf("unknown container: %v", err)
	}
}

func TestAdmitHugepages(t *testing.T) {
	node := &v1.Node{Status: v1.NodeStatus{Allocatable: amounts("cpu=4 hugepages-2Mi=8Mi")}}
	pod := func(limits string) *v1.Pod {
		return &v1.Pod{Spec: v1.PodSpec{Containers: []v1.Container{sized("", limits)}}}
	}
	for limits, want := range map[string]string{
		"hugepages-2Mi=6Mi": "", "hugepages-2Mi=10Mi": "OutOfhugepages-2Mi", "hugepages-1Gi=1Gi": "OutOfhugepages-1Gi",
		"cpu=5 hugepages-2Mi=10Mi": "OutOfcpu", "example.com/other=1": "",
	} {
		got := ""
		if v := Admit(defaulted(pod(limits)), node, nil); v != nil {
			got = v.Reason
		}
		if got != want {
			t.Errorf("%s: %q, want %q", limits, got, want)
		}
	}
}

// TestOverheadInCgroup: what a pod costs beside its containers is part of its
// own cgroup's limits and weight.
func TestOverheadInCgroup(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*v1.PodSpec)
		want   api.Resources
	}{
		{
			"limits of containers", func(s *v1.PodSpec) { s.Containers[0].Resources.Limits = amounts("cpu=500m memory=64Mi") },
			api.Resources{CPUShares: 768, CPUQuota: 75_000, CPUPeriod: 100_000, MemoryLimit: 80 << 20},
		},
		{
			"limits of the pod", func(s *v1.PodSpec) {
				s.Resources = &v1.ResourceRequirements{Requests: amounts("cpu=500m memory=64Mi"), Limits: amounts("cpu=1 memory=128Mi")}
			},
			api.Resources{CPUShares: 768, CPUQuota: 125_000, CPUPeriod: 100_000, MemoryLimit: 144 << 20},
		},
		{"no limits", func(*v1.PodSpec) {}, api.Resources{CPUShares: 256}},
	} {
		p := &v1.Pod{Spec: v1.PodSpec{Containers: []v1.Container{{Name: "a"}}, Overhead: amounts("cpu=250m memory=16Mi")}}
		tt.change(&p.Spec)
		if diff := cmp.Diff(tt.want, PodResources(defaulted(p), 0)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

// TestOOMScoreOfPodLevelRequests: what the pod as a whole asks for protects
// its containers alike, beyond what each asks for itself (KEP-2837).
func TestOOMScoreOfPodLevelRequests(t *testing.T) {
	memory := func(q string) v1.ResourceRequirements {
		return v1.ResourceRequirements{Requests: v1.ResourceList{v1.ResourceMemory: resource.MustParse(q)}}
	}
	p := &v1.Pod{Spec: v1.PodSpec{
		InitContainers: []v1.Container{{Name: "init", Resources: memory("900Mi")}, {Name: "sidecar", RestartPolicy: ptr.To(v1.ContainerRestartPolicyAlways)}},
		Containers:     []v1.Container{{Name: "a", Resources: memory("100Mi")}, {Name: "b"}},
	}}
	for _, tt := range []struct {
		pod  string
		want [3]int // a, b, sidecar; of a node with 1000 MiB
	}{
		{"", [3]int{900, 999, 900}},
		{"400Mi", [3]int{800, 900, 800}}, // 300 shared by three
		{"100Mi", [3]int{900, 999, 900}},
	} {
		if tt.pod != "" {
			r := memory(tt.pod)
			p.Spec.Resources = &r
		}
		for i, c := range []*v1.Container{&p.Spec.Containers[0], &p.Spec.Containers[1], &p.Spec.InitContainers[1]} {
			if got := OomScoreAdj(p, c, 1000<<20); got != tt.want[i] {
				t.Errorf("pod asks for %q: container %s has %d, want %d", tt.pod, c.Name, got, tt.want[i])
			}
		}
	}
}

// TestPodLevelLimits: a container without a limit of its own has its pod's.
func TestPodLevelLimits(t *testing.T) {
	p := &v1.Pod{Spec: v1.PodSpec{
		Containers: []v1.Container{sized("cpu=100m", "memory=64Mi"), sized("", ""), sized("", "cpu=500m memory=32Mi")},
		Resources:  &v1.ResourceRequirements{Limits: amounts("cpu=2 memory=128Mi"), Requests: amounts("cpu=2 memory=128Mi")},
	}}
	for i, want := range []api.Resources{
		{CPUShares: 102, CPUQuota: 200_000, CPUPeriod: 100_000, MemoryLimit: 64 << 20},
		{CPUShares: 2, CPUQuota: 200_000, CPUPeriod: 100_000, MemoryLimit: 128 << 20},
		{CPUShares: 512, CPUQuota: 50_000, CPUPeriod: 100_000, MemoryLimit: 32 << 20},
	} {
		if diff := cmp.Diff(want, ContainerResources(p, p.Spec.Containers[i].Resources)); diff != "" {
			t.Errorf("container %d (-want +got):\n%s", i, diff)
		}
	}
	if got := PodResources(p, 0); got.CPUShares != 2048 || got.CPUQuota != 200_000 || got.MemoryLimit != 128<<20 {
		t.Errorf("the pod: %+v", got)
	}
	p.Spec.Containers[0] = sized("cpu=1", "cpu=1 memory=64Mi")
	if got := ExclusiveCPUs(p); core.QOSClass(p) != v1.PodQOSGuaranteed || len(got) != 0 {
		t.Errorf("class %s, processors of their own %v: what a pod asks for as a whole is shared by its containers", core.QOSClass(p), got)
	}
}
