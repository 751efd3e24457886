package scheduler

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
)

// filterResources refuses nodes whose allocatable resources minus the requests
// of their pods do not cover the pod's requests. It names every resource that
// is short.
//
// Pods that the node is promised to and that go before this one count as there.
func filterResources(s *snapshot, p *podInfo) func(*nodeInfo) []string {
	return func(n *nodeInfo) []string {
		if len(s.nominated) == 0 {
			return short(n, p)
		}
		pledged := s.pledged(n, p)
		pledged = slices.DeleteFunc(pledged, func(other *podInfo) bool { return n.pods[other.pod.UID] != nil })
		for _, other := range pledged {
			n.pods[other.pod.UID] = other
			n.requested.add(other.requests)
		}
		out := short(n, p)
		for _, other := range pledged {
			delete(n.pods, other.pod.UID)
			n.requested.sub(other.requests)
		}
		return out
	}
}

// What most refusals say, ready made: a pod that fits nowhere gets it from
// each of thousands of nodes.
var (
	tooManyPods = []string{"Too many pods"}
	tooLittle   = map[corev1.ResourceName][]string{
		corev1.ResourceCPU: {"Insufficient cpu"}, corev1.ResourceMemory: {"Insufficient memory"},
	}
)

// short names what the node has too little of. The answer is read only.
func short(n *nodeInfo, p *podInfo) []string {
	var out []string
	if int64(len(n.pods))+1 > n.maxPods {
		out = tooManyPods
	}
	if p.requests.cpu > n.allocatable.cpu-n.requested.cpu {
		out = lacking(out, n, corev1.ResourceCPU, p.requests.cpu)
	}
	if p.requests.memory > n.allocatable.memory-n.requested.memory {
		out = lacking(out, n, corev1.ResourceMemory, p.requests.memory)
	}
	for name, want := range p.requests.other {
		if !p.devices.gives(n, name) {
			out = lacking(out, n, name, want)
		}
	}
	if len(out) > 1 {
		slices.Sort(out)
	}
	return out
}

// lacking adds the resource to out if the node has less of it than wanted.
func lacking(out []string, n *nodeInfo, name corev1.ResourceName, want int64) []string {
	if want <= 0 || want <= n.allocatable.of(name)-n.requested.of(name) {
		return out
	}
	words := tooLittle[name]
	if words == nil {
		words = []string{"Insufficient " + string(name)}
	}
	if out == nil {
		return words
	}
	return slices.Concat(out, words)
}
