package nodelifecycle

import (
	"container/list"
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Grace is how long a node may be silent before it counts as unreachable.
const Grace = 40 * time.Second

// seen is what is known of a node beside its object. Times are this process's
// own: a node's clock is never compared with ours.
type seen struct {
	// heartbeat is when the node's Lease or its Ready condition was last seen
	// to change; a new leader begins with the moment it first saw the node.
	heartbeat time.Time
	// lease is the node's Lease, nil: it has none; renewed is when this version of
	// it was first seen.
	lease   *coordinationv1.Lease
	renewed time.Time
	// dead: gossip suspected the node and its agent did not answer; no
	// heartbeat since.
	dead bool

	// node: there is a Node of the name; zone is its zone, and unknown says that its
	// Ready condition is.
	node    bool
	zone    string
	unknown bool
	// at is its place in controller.heardOf; nil: the heartbeat is older than Grace.
	at *list.Element
	// counted is as what the census has it.
	counted member
}

// silent reports whether the node must be taken for unreachable, and if not,
// after what time to look again.
func (s seen) silent(now time.Time) (silent bool, recheck time.Duration) {
	if s.dead {
		return true, 0
	}
	left := s.heartbeat.Add(Grace).Sub(now)
	return left <= 0, max(left, 0)
}

// What the conditions of a silent node say; users' scripts match these words.
const (
	reasonSilent  = "NodeStatusUnknown"
	reasonNever   = "NodeStatusNeverUpdated"
	messageSilent = "Kubelet stopped posting node status."
	messageNever  = "Kubelet never posted node status."
)

// silenced are the conditions that only the agent can know about.
var silenced = []corev1.NodeConditionType{
	corev1.NodeReady, corev1.NodeMemoryPressure, corev1.NodeDiskPressure, corev1.NodePIDPressure,
}

// unknown returns the node's conditions with all that its agent reported set
// to Unknown. It returns nil if they are so already.
func unknown(conditions []corev1.NodeCondition, now time.Time) []corev1.NodeCondition {
	out := slices.Clone(conditions)
	changed := false
	for _, kind := range silenced {
		i := slices.IndexFunc(out, func(c corev1.NodeCondition) bool { return c.Type == kind })
		switch {
		case i < 0:
			out = append(out, corev1.NodeCondition{
				Type: kind, Status: corev1.ConditionUnknown, Reason: reasonNever, Message: messageNever,
				LastTransitionTime: metav1.NewTime(now),
			})
			changed = true
		case out[i].Status != corev1.ConditionUnknown:
			out[i].Status, out[i].Reason, out[i].Message = corev1.ConditionUnknown, reasonSilent, messageSilent
			out[i].LastTransitionTime = metav1.NewTime(now)
			changed = true
		}
	}
	if !changed {
		return nil
	}
	return out
}

func condition(node *corev1.Node, kind corev1.NodeConditionType) *corev1.NodeCondition {
	for i := range node.Status.Conditions {
		if node.Status.Conditions[i].Type == kind {
			return &node.Status.Conditions[i]
		}
	}
	return nil
}

// readiness is the status of the node's Ready condition; a node that has none
// has not begun to work yet.
func readiness(node *corev1.Node) corev1.ConditionStatus {
	if c := condition(node, corev1.NodeReady); c != nil {
		return c.Status
	}
	return corev1.ConditionFalse
}

// ours are the taint keys this controller sets and removes.
var ours = []string{
	corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable, corev1.TaintNodeUnschedulable,
	corev1.TaintNodeMemoryPressure, corev1.TaintNodeDiskPressure, corev1.TaintNodePIDPressure,
	corev1.TaintNodeNetworkUnavailable,
}

// taints returns the taints the node should have: all foreign ones as they
// are, ours as its conditions say. The NoExecute taint of a node that is not
// ready is set only if evict is true; once set it stays until the node is
// ready. recheck is the time until delay has passed, 0 if it plays no part.
func taints(node *corev1.Node, evict bool, delay time.Duration, now time.Time) (out []corev1.Taint, recheck time.Duration) {
	wanted := map[string]bool{
		corev1.TaintNodeUnschedulable:      node.Spec.Unschedulable,
		corev1.TaintNodeMemoryPressure:     is(node, corev1.NodeMemoryPressure),
		corev1.TaintNodeDiskPressure:       is(node, corev1.NodeDiskPressure),
		corev1.TaintNodePIDPressure:        is(node, corev1.NodePIDPressure),
		corev1.TaintNodeNetworkUnavailable: is(node, corev1.NodeNetworkUnavailable),
	}
	execute := false // does the key in wanted also get NoExecute?
	switch ready := condition(node, corev1.NodeReady); {
	case ready == nil:
		wanted[corev1.TaintNodeNotReady] = true
	case ready.Status != corev1.ConditionTrue:
		key := corev1.TaintNodeNotReady
		if ready.Status == corev1.ConditionUnknown {
			key = corev1.TaintNodeUnreachable
		}
		wanted[key] = true
		if evict {
			recheck = max(0, ready.LastTransitionTime.Add(delay).Sub(now))
			execute = recheck == 0
		}
	}

	had := map[string]*corev1.Taint{} // by key, NoExecute ones
	for i := range node.Spec.Taints {
		t := &node.Spec.Taints[i]
		if !slices.Contains(ours, t.Key) {
			out = append(out, *t)
			continue
		}
		switch t.Effect {
		case corev1.TaintEffectNoExecute:
			had[t.Key] = t
		case corev1.TaintEffectNoSchedule:
			if wanted[t.Key] {
				out = append(out, *t)
				wanted[t.Key] = false
			}
		default:
			out = append(out, *t) // an administrator's own
		}
	}
	for _, key := range ours {
		if wanted[key] {
			out = append(out, corev1.Taint{Key: key, Effect: corev1.TaintEffectNoSchedule, TimeAdded: stamp(now)})
		}
	}
	key, other := corev1.TaintNodeNotReady, corev1.TaintNodeUnreachable
	if readiness(node) == corev1.ConditionUnknown {
		key, other = other, key
	}
	switch {
	case readiness(node) == corev1.ConditionTrue || condition(node, corev1.NodeReady) == nil:
	case had[key] != nil:
		out = append(out, *had[key])
	case had[other] != nil:
		// Not ready one way or the other: evictions keep counting from when the
		// trouble began.
		out = append(out, corev1.Taint{Key: key, Effect: corev1.TaintEffectNoExecute, TimeAdded: had[other].TimeAdded})
	case execute:
		out = append(out, corev1.Taint{Key: key, Effect: corev1.TaintEffectNoExecute, TimeAdded: stamp(now)})
	}
	return out, recheck
}

func is(node *corev1.Node, kind corev1.NodeConditionType) bool {
	c := condition(node, kind)
	return c != nil && c.Status == corev1.ConditionTrue
}

func stamp(t time.Time) *metav1.Time {
	s := metav1.NewTime(t)
	return &s
}
