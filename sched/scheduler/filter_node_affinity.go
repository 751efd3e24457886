package scheduler

// filterNodeAffinity holds nodeSelector and required node affinity, the pod's and
// what its profile adds.
func filterNodeAffinity(s *snapshot, p *podInfo) func(*nodeInfo) []string {
	a, added := p.pod.Spec.Affinity, s.profile(p).args.added.required
	own := len(p.pod.Spec.NodeSelector) > 0 || a != nil && a.NodeAffinity != nil && a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil
	if !own && added == nil {
		return nil
	}
	return func(n *nodeInfo) []string {
		if added != nil && !added.Match(n.node) {
			return []string{"node(s) didn't match scheduler-enforced node affinity"}
		}
		if !own {
			return nil
		}
		if ok, err := p.affinity.Match(n.node); err != nil || !ok {
			return []string{"node(s) didn't match Pod's node affinity/selector"}
		}
		return nil
	}
}
