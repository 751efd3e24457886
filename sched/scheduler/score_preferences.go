package scheduler

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
)

// scoreTaints counts PreferNoSchedule taints that the pod does not tolerate.
func scoreTaints(_ *snapshot, p *podInfo) func(*nodeInfo) int64 {
	return func(n *nodeInfo) (count int64) {
		for i := range n.taints {
			t := &n.taints[i]
			if t.Effect == corev1.TaintEffectPreferNoSchedule && !tolerated(t, p.pod.Spec.Tolerations) {
				count++
			}
		}
		return count
	}
}

// scoreNodeAffinity sums the weights of the preferred terms a node meets, the pod's and
// those that its profile adds.
func scoreNodeAffinity(s *snapshot, p *podInfo) func(*nodeInfo) int64 {
	var list []*nodeaffinity.PreferredSchedulingTerms
	if added := s.profile(p).args.added.preferred; added != nil {
		list = append(list, added)
	}
	if a := p.pod.Spec.Affinity; a != nil && a.NodeAffinity != nil && len(a.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution) > 0 {
		own, err := nodeaffinity.NewPreferredSchedulingTerms(a.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution)
		if err == nil { // a preference that cannot be read is none
			list = append(list, own)
		}
	}
	if len(list) == 0 {
		return nil
	}
	return func(n *nodeInfo) (sum int64) {
		for _, preferred := range list {
			sum += preferred.Score(n.node)
		}
		return sum
	}
}

// scoreSpread counts matching pods in a node's domains, for constraints that
// are wishes (ScheduleAnyway).
func scoreSpread(s *snapshot, p *podInfo) func(*nodeInfo) int64 {
	soft := spreads(s, p, corev1.ScheduleAnyway)
	if len(soft) == 0 {
		return nil
	}
	return func(n *nodeInfo) (sum int64) {
		for _, sp := range soft {
			if value, ok := topologyValue(n, sp.constraint.TopologyKey); ok {
				sum += int64(sp.counts[value])
			} else {
				sum += int64(len(s.placed)) // no label: after all that have it
			}
		}
		return sum
	}
}
