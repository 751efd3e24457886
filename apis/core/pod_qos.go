package core

import (
	corev1 "k8s.io/api/core/v1"
)

// QOSClass is the quality of service a pod gets from what it asks for:
// Guaranteed when cpu and memory are limited and requested alike everywhere,
// BestEffort when neither is mentioned anywhere, Burstable otherwise.
func QOSClass(pod *corev1.Pod) corev1.PodQOSClass {
	var all []corev1.ResourceRequirements
	if r := pod.Spec.Resources; r != nil && len(r.Requests)+len(r.Limits) > 0 {
		all = append(all, *r) // said for the pod as a whole
	} else {
		for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
			for i := range containers {
				all = append(all, containers[i].Resources)
			}
		}
	}

	mentioned, guaranteed := false, len(all) > 0
	for _, r := range all {
		for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
			request, limit := r.Requests[name], r.Limits[name]
			if !request.IsZero() || !limit.IsZero() {
				mentioned = true
			}
			// A request left out equals the limit: defaulting sees to that.
			_, requested := r.Requests[name]
			if limit.IsZero() || requested && request.Cmp(limit) != 0 {
				guaranteed = false
			}
		}
	}
	switch {
	case !mentioned:
		return corev1.PodQOSBestEffort
	case guaranteed:
		return corev1.PodQOSGuaranteed
	default:
		return corev1.PodQOSBurstable
	}
}
