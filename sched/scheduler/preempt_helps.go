package scheduler

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// lossMayHelp returns what reports whether the node has pods that may go for p's
// sake, and whether without all of them it might have what p asks for: resources, a
// place among its pods, a claim that is for one pod, a domain that is not too full. It
// never refuses a node that without would take, and spares most nodes of a full cluster
// the search for victims.
func lossMayHelp(s *snapshot, p *podInfo) func(*nodeInfo) bool {
	rules := s.profile(p).filters
	has := func(name string) bool {
		return slices.ContainsFunc(rules, func(f Filter) bool { return f.Name == name })
	}
	fit := has(resourcesFit)
	var users []types.UID
	if p.storage != nil && has(volumeRestrictions) {
		users = slices.DeleteFunc(slices.Clone(p.storage.users), func(uid types.UID) bool { return s.placed[uid] == "" })
	}
	var hard []spread
	if has(topologySpread) {
		hard = spreads(s, p, corev1.DoNotSchedule)
	}
	return func(n *nodeInfo) bool {
		for _, uid := range users { // all of them have to go, and pods go from one node only
			if user := n.pods[uid]; user == nil || priority(user) >= priority(p) {
				return false
			}
		}
		for i := range hard {
			if hard[i].refusesWithout(n) {
				return false
			}
		}
		return roomWithoutLower(n, p, fit)
	}
}

// refusesWithout reports whether the constraint refuses the node even if all pods
// that it counts there had gone.
func (sp *spread) refusesWithout(n *nodeInfo) bool {
	value, ok := topologyValue(n, sp.constraint.TopologyKey)
	// The node's domain is then still fuller than the emptiest one, which hence is
	// another, and has no pod less.
	return !ok || sp.counts[value]-sp.living.nodes[n]+sp.self-sp.least > int(sp.constraint.MaxSkew)
}

// roomWithoutLower reports whether the node has pods of lower priority than p's, and,
// if fit, without all of them what p requests.
func roomWithoutLower(n *nodeInfo, p *podInfo, fit bool) bool {
	if fit && exceeds(n, p) {
		return false
	}
	lower := 0
	cpu, memory := n.allocatable.cpu-n.requested.cpu, n.allocatable.memory-n.requested.memory
	for _, other := range n.pods {
		if priority(other) < priority(p) {
			lower++
			cpu += other.requests.cpu
			memory += other.requests.memory
		}
	}
	switch {
	case lower == 0:
		return false
	case !fit:
		return true
	case int64(len(n.pods)-lower)+1 > n.maxPods,
		p.requests.cpu > 0 && p.requests.cpu > cpu,
		p.requests.memory > 0 && p.requests.memory > memory:
		return false
	}
	for name, want := range p.requests.other {
		if want <= 0 || p.devices.gives(n, name) {
			continue
		}
		have := n.allocatable.of(name) - n.requested.of(name)
		for _, other := range n.pods {
			if want <= have {
				break
			}
			if priority(other) < priority(p) {
				have += other.requests.of(name)
			}
		}
		if want > have {
			return false
		}
	}
	return true
}

// exceeds reports whether the pod requests more of something than the node has
// altogether.
func exceeds(n *nodeInfo, p *podInfo) bool {
	if p.requests.cpu > n.allocatable.cpu || p.requests.memory > n.allocatable.memory {
		return true
	}
	for name, want := range p.requests.other {
		if want > n.allocatable.of(name) && !p.devices.gives(n, name) {
			return true
		}
	}
	return false
}
