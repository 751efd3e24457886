package scheduler

import "math"

// share is how full a resource would be, 0 … 1, with used of have taken.
func share(used, have int64) float64 {
	if have <= 0 {
		return 1
	}
	return min(1, float64(used)/float64(have))
}

// scoreLeastAllocated prefers nodes with much free CPU and memory.
func scoreLeastAllocated(_ *snapshot, p *podInfo) func(*nodeInfo) int64 {
	return func(n *nodeInfo) int64 {
		free := 2 - share(n.weight.cpu+p.weight.cpu, n.allocatable.cpu) - share(n.weight.memory+p.weight.memory, n.allocatable.memory)
		return int64(free / 2 * maxScore)
	}
}

// scoreBalanced prefers nodes whose CPU and memory fill up evenly: what is
// left of one is of no use without the other. It counts what was asked for,
// not the weights: where those exceed the CPU there is, more memory in use
// would look more even, and pods that ask for nothing would pile up.
func scoreBalanced(_ *snapshot, p *podInfo) func(*nodeInfo) int64 {
	if p.requests.cpu == 0 && p.requests.memory == 0 {
		return nil
	}
	return func(n *nodeInfo) int64 {
		cpu := share(n.requested.cpu+p.requests.cpu, n.allocatable.cpu)
		memory := share(n.requested.memory+p.requests.memory, n.allocatable.memory)
		return int64((1 - math.Abs(cpu-memory)) * maxScore)
	}
}
