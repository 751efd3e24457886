package core

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/resource"
)

// The node's agent, the scheduler and the API server ask here what a pod's
// spec means for resources, so that they cannot disagree.

// Requests is what a pod's spec asks of its node: the larger of the containers
// that run together and of each step of the initialization; what is said for
// the pod as a whole stands in for the sum of its containers; plus overhead.
// Requests that were left out have been defaulted already.
func Requests(pod *corev1.Pod) corev1.ResourceList {
	return resource.PodRequests(pod, resource.PodResourcesOptions{})
}

// Reserved is what a pod takes of its node while it is resized: the larger of
// what its spec asks for and of what the node has granted. A size that the node
// cannot give does not count.
func Reserved(pod *corev1.Pod) corev1.ResourceList {
	return resource.PodRequests(pod, resource.PodResourcesOptions{UseStatusResources: true})
}

// ContainerRequests is what the containers ask for together, without what is
// said for the pod as a whole and without overhead.
func ContainerRequests(pod *corev1.Pod) corev1.ResourceList {
	return resource.AggregateContainerRequests(pod, resource.PodResourcesOptions{})
}

// ContainerLimits is what the containers may use together, of each resource
// that any of them limits.
func ContainerLimits(pod *corev1.Pod) corev1.ResourceList {
	return resource.AggregateContainerLimits(pod, resource.PodResourcesOptions{})
}

// Limits is what a pod may use as a whole, of each resource that it or any of
// its containers limits, with overhead.
func Limits(pod *corev1.Pod) corev1.ResourceList {
	return resource.PodLimits(pod, resource.PodResourcesOptions{})
}

// IsSidecar reports whether an init container keeps running beside the app
// containers.
func IsSidecar(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}
