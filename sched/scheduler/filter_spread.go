package scheduler

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/utils/ptr"
)

// topologySpread is the name of the rule and of the score, as upstream has it.
const topologySpread = "PodTopologySpread"

// spread is one topology spread constraint with the number of matching pods in
// each domain it looks at.
type spread struct {
	constraint *corev1.TopologySpreadConstraint
	self       int            // 1 if the pod matches its own constraint
	living     *tally         // the matching pods that are not about to go
	counts     map[string]int // by domain; none is 0. It may be a tally's own: read only
	least      int
}

// spreads counts, for each of the pod's constraints with the given action, the
// matching pods in every eligible domain.
func spreads(s *snapshot, p *podInfo, action corev1.UnsatisfiableConstraintAction) []spread {
	var out []spread
	list, byOwner := s.ownConstraints(p)
	for i := range list {
		c := &list[i]
		if c.WhenUnsatisfiable != action {
			continue
		}
		sp := spread{constraint: c}
		if byOwner {
			sp.self, sp.living = 1, s.owned(p.owner)
		} else {
			match := withPodLabels(selector(c.LabelSelector), p.pod, c.MatchLabelKeys, nil)
			if match.Matches(labels.Set(p.pod.Labels)) {
				sp.self = 1
			}
			sp.living = s.living(p.pod.Namespace, match)
		}
		domains := sp.count(s, p)
		if len(sp.counts) == domains {
			sp.least = fewest(sp.counts)
		}
		if int(ptr.Deref(c.MinDomains, 1)) > domains {
			sp.least = 0 // too few domains: as if one more stood empty
		}
		out = append(out, sp)
	}
	return out
}

// count fills in how many of the living pods are in each eligible domain, and
// returns how many such domains there are. Where no node is left out, the tallies
// know it already; otherwise each node is asked.
func (sp *spread) count(s *snapshot, p *podInfo) (domains int) {
	c := sp.constraint
	if allEligible(p, c) {
		sp.counts = sp.living.in(c.TopologyKey)
		return len(s.all.in(c.TopologyKey))
	}
	sp.counts = map[string]int{}
	for _, n := range s.list {
		if value, ok := topologyValue(n, c.TopologyKey); ok && eligible(n, p, c) {
			sp.counts[value] += sp.living.nodes[n]
		}
	}
	return len(sp.counts)
}

// topologyValue returns the node's value of a topology key: which of its domains
// the node is in.
func topologyValue(n *nodeInfo, key string) (string, bool) {
	v, ok := n.labels()[key]
	return v, ok
}

// allEligible reports whether every node takes part in the constraint's count.
func allEligible(p *podInfo, c *corev1.TopologySpreadConstraint) bool {
	a := p.pod.Spec.Affinity
	anywhere := len(p.pod.Spec.NodeSelector) == 0 && (a == nil || a.NodeAffinity == nil || a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil)
	return (anywhere || ptr.Deref(c.NodeAffinityPolicy, corev1.NodeInclusionPolicyHonor) == corev1.NodeInclusionPolicyIgnore) &&
		ptr.Deref(c.NodeTaintsPolicy, corev1.NodeInclusionPolicyIgnore) == corev1.NodeInclusionPolicyIgnore
}

// eligible reports whether the node takes part in the constraint's count.
func eligible(n *nodeInfo, p *podInfo, c *corev1.TopologySpreadConstraint) bool {
	if ptr.Deref(c.NodeAffinityPolicy, corev1.NodeInclusionPolicyHonor) == corev1.NodeInclusionPolicyHonor {
		if ok, err := p.affinity.Match(n.node); err != nil || !ok {
			return false
		}
	}
	if ptr.Deref(c.NodeTaintsPolicy, corev1.NodeInclusionPolicyIgnore) == corev1.NodeInclusionPolicyHonor {
		if _, refused := untolerated(n.taints, p.pod.Spec.Tolerations, corev1.TaintEffectNoSchedule, corev1.TaintEffectNoExecute); refused {
			return false
		}
	}
	return true
}

func fewest(counts map[string]int) int {
	least, found := 0, false
	for _, n := range counts {
		if !found || n < least {
			least, found = n, true
		}
	}
	return least
}

// filterSpread refuses nodes where the pod would make the difference between
// the fullest and the emptiest domain exceed maxSkew.
func filterSpread(s *snapshot, p *podInfo) func(*nodeInfo) []string {
	hard := spreads(s, p, corev1.DoNotSchedule)
	if len(hard) == 0 {
		return nil
	}
	return func(n *nodeInfo) []string {
		for _, sp := range hard {
			value, ok := topologyValue(n, sp.constraint.TopologyKey)
			if !ok {
				return []string{"node(s) didn't match pod topology spread constraints (missing required label)"}
			}
			if sp.counts[value]+sp.self-sp.least > int(sp.constraint.MaxSkew) {
				return []string{"node(s) didn't match pod topology spread constraints"}
			}
		}
		return nil
	}
}
