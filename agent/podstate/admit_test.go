package podstate

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// TestAdmitLocalStorage: the node refuses a pod that asks for more of its disk
// than the others have left; a limit stands in for a request.
func TestAdmitLocalStorage(t *testing.T) {
	asks := func(request, limit string) *v1.Pod {
		r := v1.ResourceRequirements{Requests: v1.ResourceList{}, Limits: v1.ResourceList{}}
		if request != "" {
			r.Requests[v1.ResourceEphemeralStorage] = resource.MustParse(request)
		}
		if limit != "" {
			r.Limits[v1.ResourceEphemeralStorage] = resource.MustParse(limit)
		}
		return &v1.Pod{Spec: v1.PodSpec{Containers: []v1.Container{{Name: "a", Resources: r}}}}
	}
	node := &v1.Node{Status: v1.NodeStatus{Allocatable: v1.ResourceList{v1.ResourceEphemeralStorage: resource.MustParse("10Gi")}}}
	for _, tt := range []struct {
		name           string
		pod            *v1.Pod
		reason, detail string
	}{
		{"fits", asks("4Gi", "100Gi"), "", ""},
		{"nothing asked for", asks("", ""), "", ""},
		{"too much", asks("5Gi", ""), "OutOfephemeral-storage", "Node didn't have enough resource: ephemeral-storage, requested: 5368709120, used: 6442450944, capacity: 10737418240"},
		{"too much by its limit", asks("", "5Gi"), "OutOfephemeral-storage", "Node didn't have enough resource: ephemeral-storage, requested: 5368709120, used: 6442450944, capacity: 10737418240"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var want *Verdict
			if tt.reason != "" {
				want = &Verdict{tt.reason, tt.detail}
			}
			got := Admit(defaulted(tt.pod), node, []*v1.Pod{asks("6Gi", "")})
			if (got == nil) != (want == nil) || got != nil && *got != *want {
				t.Errorf("%+v, want %+v", got, want)
			}
		})
	}
}

// TestAdmitExtendedResources: what a claim gives is not asked of the node.
func TestAdmitExtendedResources(t *testing.T) {
	const gpu = v1.ResourceName("example.com/gpu")
	pod := func(claimed bool) *v1.Pod {
		p := &v1.Pod{Spec: v1.PodSpec{Containers: []v1.Container{{Name: "a", Resources: v1.ResourceRequirements{Requests: v1.ResourceList{gpu: resource.MustParse("1")}}}}}}
		if claimed {
			p.Status.ExtendedResourceClaimStatus = &v1.PodExtendedResourceClaimStatus{ResourceClaimName: "c", RequestMappings: []v1.ContainerExtendedResourceRequest{{ContainerName: "a", ResourceName: string(gpu), RequestName: "r"}}}
		}
		return p
	}
	node := &v1.Node{Status: v1.NodeStatus{Allocatable: v1.ResourceList{gpu: resource.MustParse("1")}}}
	if v := Admit(pod(false), node, []*v1.Pod{pod(true)}); v != nil {
		t.Errorf("beside a pod with a claim: %v", v)
	}
	if v := Admit(pod(true), node, []*v1.Pod{pod(false)}); v != nil {
		t.Errorf("with a claim: %v", v)
	}
	if v := Admit(pod(false), node, []*v1.Pod{pod(false)}); v == nil || v.Reason != "OutOfexample.com/gpu" {
		t.Errorf("two of one: %v", v)
	}
}
