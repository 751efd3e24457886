package subresource

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/registry/rest"
)

// defaultContainerAnnotation names the container meant when none is named.
const defaultContainerAnnotation = "kubectl.kubernetes.io/default-container"

// getPod reads the pod called name.
func getPod(ctx context.Context, pods rest.Getter, name string) (*corev1.Pod, error) {
	obj, err := pods.Get(ctx, name, &metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return nil, errors.NewInternalError(fmt.Errorf("read pod %s: got a %T", name, obj))
	}
	return pod, nil
}

// chooseContainer gives the container of pod that a request means: the one it
// names, the only one, or the one the pod's annotation names.
func chooseContainer(pod *corev1.Pod, name string) (string, error) {
	if name == "" {
		name = defaultContainer(pod)
	}
	if name == "" {
		return "", errors.NewBadRequest(fmt.Sprintf("a container name must be specified for pod %s, %s", pod.Name, choices(pod)))
	}
	if !hasContainer(pod, name) {
		return "", errors.NewBadRequest(fmt.Sprintf("container %s is not valid for pod %s", name, pod.Name))
	}
	return name, nil
}

func defaultContainer(pod *corev1.Pod) string {
	if len(pod.Spec.Containers) == 1 && len(pod.Spec.InitContainers) == 0 && len(pod.Spec.EphemeralContainers) == 0 {
		return pod.Spec.Containers[0].Name
	}
	if name := pod.Annotations[defaultContainerAnnotation]; hasContainer(pod, name) {
		return name
	}
	if len(pod.Spec.Containers) == 1 {
		return pod.Spec.Containers[0].Name
	}
	return ""
}

func hasContainer(pod *corev1.Pod, name string) bool {
	return slices.ContainsFunc(containerNames(pod), func(names []string) bool { return slices.Contains(names, name) })
}

// choices lists the containers of pod for a user who named none.
func choices(pod *corev1.Pod) string {
	names := containerNames(pod)
	text := fmt.Sprintf("choose one of: [%s]", strings.Join(names[0], " "))
	if len(names[1]) > 0 {
		text += fmt.Sprintf(" or one of the init containers: [%s]", strings.Join(names[1], " "))
	}
	if len(names[2]) > 0 {
		text += fmt.Sprintf(" or one of the ephemeral containers: [%s]", strings.Join(names[2], " "))
	}
	return text
}

// containerNames are the names of a pod's containers, init containers and
// ephemeral containers.
func containerNames(pod *corev1.Pod) [][]string {
	names := make([][]string, 3)
	for _, c := range pod.Spec.Containers {
		names[0] = append(names[0], c.Name)
	}
	for _, c := range pod.Spec.InitContainers {
		names[1] = append(names[1], c.Name)
	}
	for _, c := range pod.Spec.EphemeralContainers {
		names[2] = append(names[2], c.Name)
	}
	return names
}

// containerStatus finds what the node reported of a container.
func containerStatus(pod *corev1.Pod, name string) (corev1.ContainerStatus, bool) {
	for _, statuses := range [][]corev1.ContainerStatus{
		pod.Status.ContainerStatuses, pod.Status.InitContainerStatuses, pod.Status.EphemeralContainerStatuses,
	} {
		for _, status := range statuses {
			if status.Name == name {
				return status, true
			}
		}
	}
	return corev1.ContainerStatus{}, false
}
