package scheduler

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/apis/names"
)

// explained is how many nodes are listed: a condition is no place for thousands.
const explained = 100

// asksWhy tells whether the pod's PodScheduled condition and the event are to say
// of each node what is in the way, not only how many nodes share a reason.
func asksWhy(pod *corev1.Pod) bool {
	value, ok := pod.Annotations[names.ExplainScheduling]
	return ok && value != "false"
}

// whyEach says of each node, by name, all that keeps p off it, one line a node.
func whyEach(s *snapshot, p *podInfo) string {
	type check struct {
		filter string
		of     func(*nodeInfo) []string
	}
	var checks []check
	for _, f := range s.profile(p).filters {
		if of := f.prepare(s, p); of != nil {
			checks = append(checks, check{f.Name, of})
		}
	}
	nodes := slices.DeleteFunc(slices.Clone(s.list), func(n *nodeInfo) bool { return n.out })
	slices.SortFunc(nodes, func(a, b *nodeInfo) int { return cmp.Compare(a.name, b.name) })
	var lines []string
	for _, n := range nodes[:min(explained, len(nodes))] {
		var reasons []string
		for _, c := range checks {
			if refused := c.of(n); len(refused) > 0 {
				if c.filter == dynamicResources && refused[0] == noDevices[0] {
					refused = p.devices.words(n, true)
				}
				reasons = append(reasons, c.filter+": "+strings.Join(refused, ", "))
			}
		}
		lines = append(lines, n.name+": "+strings.Join(reasons, "; "))
	}
	if more := len(nodes) - explained; more > 0 {
		lines = append(lines, fmt.Sprintf("and %d more nodes", more))
	}
	return strings.Join(lines, "\n")
}
