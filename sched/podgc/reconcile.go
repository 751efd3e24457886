package podgc

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/sched/internal/pods"
)

// Reason says why a pod is removed.
type Reason string

// The reasons for removing a pod.
const (
	NodeGone     Reason = "node is gone"
	NeverPlaced  Reason = "deleted before it was scheduled"
	OutOfService Reason = "node is out of service"
	Fenced       Reason = "node has ended it: it has lost its lease"
	TooMany      Reason = "too many finished pods"
)

// Victim is a pod to remove without grace.
type Victim struct {
	Pod    *corev1.Pod
	Reason Reason
}

// Decide picks the pods to remove. missing tells since when nodes that pods
// name are not among nodes; taken tells of nodes whose Lease was taken from them.
func Decide(all []*corev1.Pod, nodes map[string]*corev1.Node, missing map[string]time.Time, taken func(node string) bool, now time.Time) []Victim {
	var out []Victim
	var finished []*corev1.Pod
	for _, pod := range all {
		deleting := pod.DeletionTimestamp != nil
		name := pod.Spec.NodeName
		node := nodes[name]
		switch {
		case name == "" && deleting:
			out = append(out, Victim{pod, NeverPlaced})
		case name != "" && node == nil:
			if deleting || now.Sub(missing[name]) >= quarantine {
				out = append(out, Victim{pod, NodeGone})
			}
		case deleting && node != nil && outOfService(node):
			out = append(out, Victim{pod, OutOfService})
		case deleting && node != nil && pods.SelfFencing(pod) && taken(name):
			out = append(out, Victim{pod, Fenced})
		case pods.Finished(pod) && !deleting:
			finished = append(finished, pod)
		}
	}
	if surplus := len(finished) - maxFinished; surplus > 0 {
		slices.SortFunc(finished, func(a, b *corev1.Pod) int {
			return a.CreationTimestamp.Compare(b.CreationTimestamp.Time)
		})
		for _, pod := range finished[:surplus] {
			out = append(out, Victim{pod, TooMany})
		}
	}
	return out
}

// outOfService reports whether an administrator has vouched, by taint, that a
// node which is not ready is switched off.
func outOfService(node *corev1.Node) bool {
	vouched := slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool {
		return t.Key == corev1.TaintNodeOutOfService
	})
	ready := slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
	return vouched && !ready
}
