package scheduler

// ownerSpread is the rule that stands for kube-scheduler's default spread
// constraints, which are wishes over zones and nodes.
const ownerSpread = "OwnerSpread"

// spreadsOwner reports whether the pod is spread by its controller: one that says
// how to be spread is left to its word.
func spreadsOwner(p *podInfo) bool {
	return p.owner != "" && len(p.pod.Spec.TopologySpreadConstraints) == 0
}

// scoreOwnerSpread prefers nodes with few pods of the pod's own controller.
func scoreOwnerSpread(_ *snapshot, p *podInfo) func(*nodeInfo) int64 {
	if !spreadsOwner(p) {
		return nil
	}
	return func(n *nodeInfo) int64 { return int64(n.owners[p.owner]) }
}

// scoreOwnerZones prefers zones with few of them. It is a score of its own: within
// a sum, the many pods of a zone would drown the few of a node.
func scoreOwnerZones(s *snapshot, p *podInfo) func(*nodeInfo) int64 {
	if !spreadsOwner(p) {
		return nil
	}
	in := s.zones.owners[p.owner]
	if len(in) == 0 || len(s.zones.ids) == 1 {
		return nil
	}
	return func(n *nodeInfo) int64 {
		if n.zoneID >= len(in) {
			return 0
		}
		return int64(in[n.zoneID])
	}
}
