package cpu

import (
	"cmp"
	"slices"

	"k8s.io/utils/cpuset"
)

// levels are how processors lie to each other, from far to near.
var levels = []func(CPU) [2]int{
	func(c CPU) [2]int { return [2]int{c.Node} },
	func(c CPU) [2]int { return [2]int{c.Socket} },
	func(c CPU) [2]int { return [2]int{c.Socket, c.Core} },
}

// take chooses n of the free processors that lie close together: on one memory
// node, socket and core where possible, in the one that they fill best, so that
// large gaps stay for those who need them. It is pure; n is at most free.Size().
func take(t Topology, free cpuset.CPUSet, n int) cpuset.CPUSet {
	return takeAt(t, free, n, 0)
}

func takeAt(t Topology, free cpuset.CPUSet, n, level int) cpuset.CPUSet {
	if n == 0 {
		return cpuset.New()
	}
	if level == len(levels) {
		return cpuset.New(free.List()[:n]...)
	}
	groups := map[[2]int][]int{}
	for _, id := range free.List() {
		key := levels[level](t[id])
		groups[key] = append(groups[key], id)
	}
	var fits, largest []int
	for _, g := range groups {
		// Equal ones: the first by number, so that the choice is no matter of
		// chance.
		if len(g) >= n && (fits == nil || cmp.Or(cmp.Compare(len(g), len(fits)), slices.Compare(g, fits)) < 0) {
			fits = g
		}
		if largest == nil || cmp.Or(cmp.Compare(len(largest), len(g)), slices.Compare(g, largest)) < 0 {
			largest = g
		}
	}
	if fits != nil {
		return takeAt(t, cpuset.New(fits...), n, level+1)
	}
	whole := cpuset.New(largest...)
	return whole.Union(takeAt(t, free.Difference(whole), n-whole.Size(), level))
}
