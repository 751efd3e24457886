package scheduler

// filterNodeAffinity holds nodeSelector and required node affinity.
func filterNodeAffinity(_ *snapshot, p *podInfo) func(*nodeInfo) []string {
	a := p.pod.Spec.Affinity
	if len(p.pod.Spec.NodeSelector) == 0 && (a == nil || a.NodeAffinity == nil || a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil) {
		return nil
	}
	return func(n *nodeInfo) []string {
		if ok, err := p.affinity.Match(n.node); err != nil || !ok {
			return []string{"node(s) didn't match Pod's node affinity/selector"}
		}
		return nil
	}
}
