package core

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SetPodCondition writes the condition into the status, in the place of the one
// of its type if there is one: a status holds each type once. Times are those of
// TimedPodCondition. An ObservedGeneration of 0 keeps that of the one before.
func SetPodCondition(status *corev1.PodStatus, c corev1.PodCondition, now time.Time) {
	c = TimedPodCondition(status.Conditions, c, now)
	i := PodConditionIndex(status.Conditions, c.Type)
	if i < 0 {
		status.Conditions = append(status.Conditions, c)
		return
	}
	if c.ObservedGeneration == 0 {
		c.ObservedGeneration = status.Conditions[i].ObservedGeneration
	}
	status.Conditions[i] = c
}

// TimedPodCondition returns the condition with the times it has when it follows
// the one of its type in old: LastTransitionTime moves to now only when the status
// does, and until then LastProbeTime stays. It changes nothing.
func TimedPodCondition(old []corev1.PodCondition, c corev1.PodCondition, now time.Time) corev1.PodCondition {
	c.LastTransitionTime = metav1.NewTime(now)
	if i := PodConditionIndex(old, c.Type); i >= 0 && old[i].Status == c.Status {
		c.LastTransitionTime = old[i].LastTransitionTime
		c.LastProbeTime = old[i].LastProbeTime
	}
	return c
}

// PodCondition returns the pod's condition of that type, or nil.
func PodCondition(pod *corev1.Pod, t corev1.PodConditionType) *corev1.PodCondition {
	if i := PodConditionIndex(pod.Status.Conditions, t); i >= 0 {
		return &pod.Status.Conditions[i]
	}
	return nil
}

// PodConditionIndex is the place of the condition of that type, -1: there is none.
func PodConditionIndex(conditions []corev1.PodCondition, t corev1.PodConditionType) int {
	return slices.IndexFunc(conditions, func(c corev1.PodCondition) bool { return c.Type == t })
}
