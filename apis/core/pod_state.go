package core

import corev1 "k8s.io/api/core/v1"

// Finished reports whether a pod has ended permanently.
func Finished(pod *corev1.Pod) bool { return FinalPhase(pod.Status.Phase) }

// FinalPhase reports whether a phase is the last one of a pod.
func FinalPhase(p corev1.PodPhase) bool { return p == corev1.PodSucceeded || p == corev1.PodFailed }

// IsMirror reports whether the pod only shows what a node runs by itself: a static pod.
func IsMirror(pod *corev1.Pod) bool {
	_, ok := pod.Annotations[corev1.MirrorPodAnnotationKey]
	return ok
}
