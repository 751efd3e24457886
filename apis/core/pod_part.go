package core

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
)

// keepOfUpdate makes pod what old is, but for the metadata that decides
// whether and as whose an update is taken.
func keepOfUpdate(pod, old *corev1.Pod) {
	meta := pod.ObjectMeta
	*pod = *old.DeepCopy()
	pod.Name, pod.Namespace, pod.UID = meta.Name, meta.Namespace, meta.UID
	pod.ResourceVersion, pod.ManagedFields = meta.ResourceVersion, meta.ManagedFields
}

func countGeneration(pod, old *corev1.Pod) {
	if !equality.Semantic.DeepEqual(pod.Spec, old.Spec) {
		pod.Generation++
	}
}

// prepareEphemeralUpdate lets pods/ephemeralcontainers write the list of
// ephemeral containers and nothing else.
func prepareEphemeralUpdate(pod, old *corev1.Pod) {
	list := pod.Spec.EphemeralContainers
	keepOfUpdate(pod, old)
	pod.Spec.EphemeralContainers = list
	countGeneration(pod, old)
}

// prepareResize lets pods/resize write resources and resize policies. Other
// changes within the containers, and to what the pod as a whole asks for, are
// kept, for validation to refuse; changes elsewhere are dropped, as every
// subresource does.
func prepareResize(pod, old *corev1.Pod) {
	containers, initContainers, resources := pod.Spec.Containers, pod.Spec.InitContainers, pod.Spec.Resources
	keepOfUpdate(pod, old)
	pod.Spec.Containers, pod.Spec.InitContainers, pod.Spec.Resources = containers, initContainers, resources
	countGeneration(pod, old)
}

// sameNames tells whether two lists hold containers of the same names in the
// same order.
func sameNames(a, b []corev1.Container) bool {
	return slices.EqualFunc(a, b, func(x, y corev1.Container) bool { return x.Name == y.Name })
}
