package scheduler

import (
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
)

// victimsFor returns what finds the victims for p on one node, or nil if no loss there
// helps.
func victimsFor(s *snapshot, p *podInfo, budgets []*policyv1.PodDisruptionBudget) func(*nodeInfo) *candidate {
	slow := func(n *nodeInfo) *candidate { return s.without(p, n, budgets) }
	if !onlyRoom(s, p) {
		return slow
	}
	wanting := requestedBy(p)
	return func(n *nodeInfo) *candidate {
		if len(s.pledged(n, p)) > 0 {
			return slow(n) // with rules of their own, maybe
		}
		return wanting.without(p, n, budgets)
	}
}

// onlyRoom reports whether resources and the number of pods are all that the loss of
// pods can change for p.
func onlyRoom(s *snapshot, p *podInfo) (only bool) {
	if p.devices != nil && p.devices.extended != nil {
		return false // on some nodes claims give what it asks for
	}
	for _, f := range s.profile(p).filters {
		switch {
		case f.wokenBy&podGone == 0:
		case f.Name == resourcesFit:
			only = true
		case f.prepare(s, p) != nil:
			return false
		}
	}
	return only
}

// requested is what a pod asks a node for.
type requested []wanting

type wanting struct {
	name corev1.ResourceName
	want int64
}

func requestedBy(p *podInfo) (out requested) {
	add := func(name corev1.ResourceName, want int64) {
		if want > 0 {
			out = append(out, wanting{name, want})
		}
	}
	add(corev1.ResourceCPU, p.requests.cpu)
	add(corev1.ResourceMemory, p.requests.memory)
	for name, want := range p.requests.other {
		add(name, want)
	}
	return out
}

// without finds what snapshot.without does, by sums and without a change of the
// snapshot: for pods of which onlyRoom is true.
func (r requested) without(p *podInfo, n *nodeInfo, budgets []*policyv1.PodDisruptionBudget) *candidate {
	var few [8]int64
	free := few[:0] // as r
	for _, a := range r {
		free = append(free, n.allocatable.of(a.name)-n.requested.of(a.name))
	}
	lower := make([]*podInfo, 0, len(n.pods))
	for _, other := range n.pods {
		if priority(other) < priority(p) {
			lower = append(lower, other)
		}
	}
	move := func(other *podInfo, sign int64) {
		for i, a := range r {
			free[i] += sign * other.requests.of(a.name)
		}
	}
	fits := func(count int) bool {
		for i, a := range r {
			if a.want > free[i] {
				return false
			}
		}
		return int64(count)+1 <= n.maxPods
	}
	for _, other := range lower {
		move(other, 1)
	}
	count := len(n.pods) - len(lower)
	if !fits(count) {
		return nil
	}
	c := &candidate{node: n}
	violates := overdrawn(lower, budgets)
	dearestFirst(lower, violates)
	for _, other := range lower {
		move(other, -1)
		if fits(count + 1) {
			count++
			continue
		}
		move(other, 1)
		c.victims = append(c.victims, other)
		if violates[other] {
			c.violations++
		}
	}
	return c
}
