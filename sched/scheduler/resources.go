package scheduler

import (
	"maps"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/component-helpers/resource"

	"github.com/clusterd/clusterd/apis/core"
)

// amounts are quantities of resources: CPU in thousandths, the rest in bytes
// or pieces. The two that every node is asked for have fields: placing a pod
// reads them once a node, and a map would be most of that cost.
type amounts struct {
	cpu, memory int64
	other       map[corev1.ResourceName]int64 // nil: none
}

// most is what one quantity counts at most: more than any node has, and so little that
// the sums of a thousand pods stay in an int64.
const most = 1 << 53

func pieces(q *resourceapi.Quantity) int64 {
	if q.CmpInt64(most) >= 0 {
		return most
	}
	return q.Value()
}

func amountsOf(list corev1.ResourceList) amounts {
	var out amounts
	for name, q := range list {
		switch name {
		case corev1.ResourceCPU:
			out.cpu = most
			if q.CmpInt64(most/1000) < 0 {
				out.cpu = q.MilliValue()
			}
		case corev1.ResourceMemory:
			out.memory = pieces(&q)
		default:
			if out.other == nil {
				out.other = make(map[corev1.ResourceName]int64, len(list))
			}
			out.other[name] = pieces(&q)
		}
	}
	return out
}

// of returns the quantity of one resource.
func (a *amounts) of(name corev1.ResourceName) int64 {
	switch name {
	case corev1.ResourceCPU:
		return a.cpu
	case corev1.ResourceMemory:
		return a.memory
	}
	return a.other[name]
}

func (a *amounts) add(b amounts) { a.sum(b, 1) }
func (a *amounts) sub(b amounts) { a.sum(b, -1) }

func (a *amounts) sum(b amounts, sign int64) {
	a.cpu += sign * b.cpu
	a.memory += sign * b.memory
	for name, v := range b.other {
		if a.other == nil {
			a.other = map[corev1.ResourceName]int64{}
		}
		a.other[name] += sign * v
	}
}

func (a amounts) equal(b amounts) bool {
	return a.cpu == b.cpu && a.memory == b.memory && maps.Equal(a.other, b.other)
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
	w.other = nil // scores look at these two
	return w
}
