package fieldref

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

func TestResource(t *testing.T) {
	q := resource.MustParse
	pod := &v1.Pod{Spec: v1.PodSpec{
		Containers: []v1.Container{
			{Name: "sized", Resources: v1.ResourceRequirements{
				Requests: v1.ResourceList{v1.ResourceCPU: q("250m"), v1.ResourceMemory: q("32Mi")},
				Limits:   v1.ResourceList{v1.ResourceCPU: q("1250m"), v1.ResourceMemory: q("100Mi"), "hugepages-2Mi": q("4Mi")},
			}},
			{Name: "bare"},
		},
		InitContainers: []v1.Container{{Name: "init", Resources: v1.ResourceRequirements{Limits: v1.ResourceList{v1.ResourceCPU: q("3")}}}},
	}}
	allocatable := v1.ResourceList{v1.ResourceCPU: q("3500m"), v1.ResourceMemory: q("4Gi"), v1.ResourceEphemeralStorage: q("10Gi"), "hugepages-2Mi": q("64Mi")}
	for _, tt := range []struct {
		container, resource, divisor string
		want                         string
	}{
		{"sized", "limits.cpu", "", "2"},
		{"sized", "limits.cpu", "1m", "1250"},
		{"sized", "requests.cpu", "1", "1"},
		{"sized", "requests.cpu", "100m", "3"},
		{"sized", "limits.memory", "", "104857600"},
		{"sized", "limits.memory", "1Mi", "100"},
		{"sized", "limits.memory", "1Gi", "1"},
		{"sized", "limits.memory", "1M", "105"},
		{"sized", "requests.memory", "1Ki", "32768"},
		{"sized", "limits.hugepages-2Mi", "1Mi", "4"},
		{"init", "limits.cpu", "", "3"},
		{"init", "requests.cpu", "", "3"}, // a limit stands in for a request
		{"bare", "limits.cpu", "", "4"},
		{"bare", "limits.cpu", "1m", "3500"},
		{"bare", "limits.memory", "1Gi", "4"},
		{"bare", "limits.ephemeral-storage", "1Gi", "10"},
		{"bare", "limits.hugepages-2Mi", "", "0"},
		{"bare", "requests.cpu", "", "0"},
		{"bare", "requests.memory", "", "0"},
		{"none", "limits.cpu", "", "container none not found"},
		{"bare", "cpu", "", "unsupported container resource: cpu"},
	} {
		ref := &v1.ResourceFieldSelector{Resource: tt.resource}
		if tt.divisor != "" {
			ref.Divisor = q(tt.divisor)
		}
		got, err := Resource(pod, ref, tt.container, allocatable)
		if err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("%s of %s by %q: %s, want %s", tt.resource, tt.container, tt.divisor, got, tt.want)
		}
	}
}
