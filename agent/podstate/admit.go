package podstate

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"

	"github.com/clusterd/clusterd/apis/core"
)

// Admit is the node's own last check of a pod that was bound to it: others
// are the pods that already hold a part of the node. It is pure. nil: the pod
// may run.
func Admit(pod *v1.Pod, node *v1.Node, others []*v1.Pod) *Verdict {
	if sel := pod.Spec.OS; sel != nil && sel.Name != v1.Linux {
		return &Verdict{"PodOSNotSupported", fmt.Sprintf("Failed to admit pod as the OS field doesn't match node OS: %s", sel.Name)}
	}
	if !MatchesNode(pod, node) {
		return &Verdict{"NodeAffinity", "Predicate NodeAffinity failed: node(s) didn't match Pod's node affinity/selector"}
	}
	used := v1.ResourceList{}
	for _, o := range others {
		AddList(used, ofNode(o))
	}
	if max, ok := node.Status.Allocatable[v1.ResourcePods]; ok && int64(len(others)) >= max.Value() {
		return &Verdict{"OutOfpods", fmt.Sprintf("Node didn't have enough resource: pods, requested: 1, used: %d, capacity: %d", len(others), max.Value())}
	}
	for _, o := range others {
		if portsClash(pod, o) {
			return &Verdict{"NodePorts", "Predicate NodePorts failed: node(s) didn't have free ports for the requested pod ports"}
		}
	}
	want := ofNode(pod)
	for _, name := range counted(want) {
		q := want[name]
		have, known := node.Status.Allocatable[name]
		if q.IsZero() || !known && !strings.HasPrefix(string(name), v1.ResourceHugePagesPrefix) {
			continue // not counted by the node: checked elsewhere
		}
		total := used[name]
		total.Add(q)
		if total.Cmp(have) > 0 {
			u, r, h := used[name], q.Value(), have.Value()
			un := u.Value()
			if name == v1.ResourceCPU {
				un, r, h = u.MilliValue(), q.MilliValue(), have.MilliValue()
			}
			return &Verdict{"OutOf" + string(name), fmt.Sprintf(
				"Node didn't have enough resource: %s, requested: %d, used: %d, capacity: %d", name, r, un, h)}
		}
	}
	return nil
}

// MatchesNode tells whether a node fits the pod's nodeSelector and its required
// node affinity.
func MatchesNode(pod *v1.Pod, node *v1.Node) bool {
	ok, err := nodeaffinity.GetRequiredNodeAffinity(pod).Match(node)
	return err == nil && ok
}

// ofNode is what a pod asks for of the node itself: what a claim for extended
// resources gives is none of it.
func ofNode(pod *v1.Pod) v1.ResourceList {
	out := core.Requests(pod)
	if e := pod.Status.ExtendedResourceClaimStatus; e != nil {
		out = maps.Clone(out)
		for _, r := range e.RequestMappings {
			delete(out, v1.ResourceName(r.ResourceName))
		}
	}
	return out
}

// counted lists the resources in the order they are looked at: those every
// node has first.
func counted(want v1.ResourceList) []v1.ResourceName {
	first := []v1.ResourceName{v1.ResourceCPU, v1.ResourceMemory, v1.ResourceEphemeralStorage}
	rest := slices.DeleteFunc(slices.Sorted(maps.Keys(want)), func(n v1.ResourceName) bool { return slices.Contains(first, n) })
	return slices.DeleteFunc(append(first, rest...), func(n v1.ResourceName) bool {
		_, asked := want[n]
		return !asked || n == v1.ResourcePods
	})
}
