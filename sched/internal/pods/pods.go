// Package pods answers simple questions about one pod, the way every
// controller must answer them alike.
package pods

import (
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/names"
)

// Condition returns the pod's condition of that type, or nil.
func Condition(pod *corev1.Pod, kind corev1.PodConditionType) *corev1.PodCondition {
	return core.PodCondition(pod, kind)
}

// Ready reports whether the pod's Ready condition is True.
func Ready(pod *corev1.Pod) bool {
	return core.PodReady(pod)
}

// Available reports whether the pod has been ready for minReady; if it is
// ready but not for long enough, wait is how much is missing.
func Available(pod *corev1.Pod, minReady time.Duration, now time.Time) (available bool, wait time.Duration) {
	c := Condition(pod, corev1.PodReady)
	if c == nil || c.Status != corev1.ConditionTrue {
		return false, 0
	}
	if minReady == 0 {
		return true, 0
	}
	left := c.LastTransitionTime.Add(minReady).Sub(now)
	if c.LastTransitionTime.IsZero() {
		left = minReady
	}
	if left <= 0 {
		return true, 0
	}
	return false, left
}

// Finished reports whether the pod has ended permanently.
func Finished(pod *corev1.Pod) bool {
	return core.Finished(pod)
}

// Active reports whether the pod counts as a replica: neither finished nor
// being deleted.
func Active(pod *corev1.Pod) bool { return !Finished(pod) && pod.DeletionTimestamp == nil }

// Terminating reports whether the pod is being deleted and not finished yet.
func Terminating(pod *corev1.Pod) bool { return !Finished(pod) && pod.DeletionTimestamp != nil }

// SelfFencing reports whether the pod's node has said that the pod ends when the
// node loses its Lease.
func SelfFencing(pod *corev1.Pod) bool {
	c := Condition(pod, names.SelfFencingCondition)
	return c != nil && c.Status == corev1.ConditionTrue
}
