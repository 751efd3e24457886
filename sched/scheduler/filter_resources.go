package scheduler

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// filterResources refuses nodes whose allocatable resources minus the requests
// of their pods do not cover the pod's requests. It names every resource that
// is short.
func filterResources(_ *snapshot, p *podInfo) func(*nodeInfo) []string {
	return func(n *nodeInfo) []string { return short(n, p) }
}

func short(n *nodeInfo, p *podInfo) []string {
	var out []string
	if allowed, ok := n.allocatable[corev1.ResourcePods]; ok && int64(len(n.pods))+1 > allowed {
		out = append(out, "Too many pods")
	}
	for name, want := range p.requests {
		if want > 0 && want > n.allocatable[name]-n.requested[name] {
			out = append(out, "Insufficient "+string(name))
		}
	}
	slices.Sort(out)
	return out
}
