package scheduler

// scoreOwnerSpread prefers nodes with few pods of the pod's own controller.
func scoreOwnerSpread(_ *snapshot, p *podInfo) func(*nodeInfo) int64 {
	if p.owner == "" || len(p.pod.Spec.TopologySpreadConstraints) > 0 {
		return nil // a pod that says how to be spread is left to its word
	}
	return func(n *nodeInfo) int64 { return int64(n.owners[p.owner]) }
}
