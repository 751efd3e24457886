package scheduler

import (
	"math"

	corev1 "k8s.io/api/core/v1"
)

// share is how full a node's resource would be with the pod on it, 0 … 1.
func share(n *nodeInfo, p *podInfo, name corev1.ResourceName) float64 {
	have := n.allocatable[name]
	if have <= 0 {
		return 1
	}
	return min(1, float64(n.weight[name]+p.weight[name])/float64(have))
}

// scoreLeastAllocated prefers nodes with much free CPU and memory.
func scoreLeastAllocated(_ *snapshot, p *podInfo) func(*nodeInfo) int64 {
	return func(n *nodeInfo) int64 {
		free := 2 - share(n, p, corev1.ResourceCPU) - share(n, p, corev1.ResourceMemory)
		return int64(free / 2 * maxScore)
	}
}

// scoreBalanced prefers nodes whose CPU and memory fill up evenly: what is
// left of one is of no use without the other. It counts what was asked for,
// not the weights: where those exceed the CPU there is, more memory in use
// would look more even, and pods that ask for nothing would pile up.
func scoreBalanced(_ *snapshot, p *podInfo) func(*nodeInfo) int64 {
	if p.requests[corev1.ResourceCPU] == 0 && p.requests[corev1.ResourceMemory] == 0 {
		return nil
	}
	asked := func(n *nodeInfo, name corev1.ResourceName) float64 {
		if n.allocatable[name] <= 0 {
			return 1
		}
		return min(1, float64(n.requested[name]+p.requests[name])/float64(n.allocatable[name]))
	}
	return func(n *nodeInfo) int64 {
		skew := math.Abs(asked(n, corev1.ResourceCPU) - asked(n, corev1.ResourceMemory))
		return int64((1 - skew) * maxScore)
	}
}
