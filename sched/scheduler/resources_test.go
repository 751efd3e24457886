package scheduler

import (
	"math"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/clusterd/clusterd/sched/schedtest"
)

// TestHugeQuantities: a quantity that no int64 holds counts as more than any node
// has, never as little or as less than nothing.
func TestHugeQuantities(t *testing.T) {
	const device = corev1.ResourceName("example.com/device")
	for _, text := range []string{"9300000000000000", "9223372036854775807", "10P", "10E", "1e30"} {
		list := corev1.ResourceList{}
		for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, device} {
			list[name] = resource.MustParse(text)
		}
		got := amountsOf(list)
		for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, device} {
			if n := got.of(name); n < 9_000_000_000_000_000 || n > math.MaxInt64/1000 {
				t.Errorf("%s of %s counts as %d", text, name, n)
			}
		}
		pod := schedtest.Pod("p").Obj()
		pod.Spec.Containers[0].Resources.Requests = list
		sum := requests(pod)
		for range 500 {
			sum.add(requests(pod))
		}
		if sum.cpu < most || sum.memory < most || sum.of(device) < most {
			t.Errorf("500 pods of %s sum up to %d, %d, %d", text, sum.cpu, sum.memory, sum.of(device))
		}
	}
	if got := amountsOf(corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1500m"), corev1.ResourceMemory: resource.MustParse("2Ti")}); got.cpu != 1500 || got.memory != 2<<40 {
		t.Errorf("1500m and 2Ti count as %d and %d", got.cpu, got.memory)
	}
}
