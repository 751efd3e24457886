package agent

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/cpuset"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/podresources"
)

// someCPUs gives containers named "own" processors of their own.
type someCPUs struct{}

func (someCPUs) Assign(string, map[string]int) error { return nil }
func (someCPUs) Release(string) error                { return nil }
func (someCPUs) Pods() []string                      { return nil }
func (someCPUs) Of(_, container string) (cpuset.CPUSet, bool) {
	return cpuset.New(3, 2), container == "own"
}

func TestResourcesOf(t *testing.T) {
	limits := v1.ResourceRequirements{Limits: v1.ResourceList{v1.ResourceCPU: resource.MustParse("2"), v1.ResourceMemory: resource.MustParse("64Mi")}}
	limits.Requests = limits.Limits
	p := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web", UID: "1"},
		Spec: v1.PodSpec{
			InitContainers: []v1.Container{{Name: "init", Resources: limits}, {Name: "side", Resources: limits, RestartPolicy: ptr.To(v1.ContainerRestartPolicyAlways)}},
			Containers:     []v1.Container{{Name: "own", Resources: limits}},
		},
	}
	memory := map[string]uint64{"memory": 64 << 20}
	want := podresources.Pod{Namespace: "default", Name: "web", Containers: []podresources.Container{{Name: "side", Memory: memory}, {Name: "own", CPUs: []int64{2, 3}, Memory: memory}}}
	if diff := cmp.Diff(want, resourcesOf(p, someCPUs{}, nil)); diff != "" {
		t.Error(diff)
	}
	// A pod that may use more than it asks for has nothing for itself.
	p.Spec.Containers[0].Resources.Requests = nil
	p.Spec.Containers[0].Resources.Limits = nil
	want.Containers = []podresources.Container{{Name: "side"}, {Name: "own"}}
	if diff := cmp.Diff(want, resourcesOf(p, nil, nil)); diff != "" {
		t.Error(diff)
	}
}
