package scheduler

import (
	"maps"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/resource"

	"github.com/clusterd/clusterd/apis/core"
)

// amounts are quantities of resources: CPU in thousandths, the rest in bytes
// or pieces.
type amounts map[corev1.ResourceName]int64

func amountsOf(list corev1.ResourceList) amounts {
	out := make(amounts, len(list))
	for name, q := range list {
		if name == corev1.ResourceCPU {
			out[name] = q.MilliValue()
		} else {
			out[name] = q.Value()
		}
	}
	return out
}

func (a amounts) add(b amounts) {
	for name, v := range b {
		a[name] += v
	}
}

func (a amounts) sub(b amounts) {
	for name, v := range b {
		a[name] -= v
	}
}

// requests is what a pod asks for: the larger of the sum of its containers and
// sidecars and of each init container with the sidecars started before it,
// plus overhead. While a pod is resized it takes the larger of what it asks for
// and what its node has granted; a size its node cannot give does not count.
func requests(pod *corev1.Pod) amounts {
	return amountsOf(core.Reserved(pod))
}

// Pods that ask for nothing still take something: for scoring only, so that
// best-effort pods do not all land on one node.
const (
	assumedCPU    = 100
	assumedMemory = 200 << 20
)

func weight(pod *corev1.Pod) amounts {
	w := amountsOf(resource.PodRequests(pod, resource.PodResourcesOptions{
		NonMissingContainerRequests: assumedRequests,
	}))
	maps.DeleteFunc(w, func(name corev1.ResourceName, _ int64) bool {
		return name != corev1.ResourceCPU && name != corev1.ResourceMemory
	})
	return w
}
