package statefulset

import (
	"fmt"
	"maps"
	"strconv"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/history"
	"github.com/clusterd/clusterd/sched/internal/podctl"
)

// podName is the name of the set's pod of that ordinal.
func podName(set *appsv1.StatefulSet, ordinal int) string {
	return set.Name + "-" + strconv.Itoa(ordinal)
}

// ordinalOf reads the ordinal from the name of a pod; -1 if it is none of the
// set's names.
func ordinalOf(set *appsv1.StatefulSet, name string) int {
	digits, ok := strings.CutPrefix(name, set.Name+"-")
	if !ok {
		return -1
	}
	n, err := strconv.ParseInt(digits, 10, 32)
	if err != nil || podName(set, int(n)) != name { // "web-01" is not "web-1"
		return -1
	}
	return int(n)
}

// span returns the ordinals that the set is to have: start ≤ ordinal < end.
func span(set *appsv1.StatefulSet) (start, end int) {
	if set.Spec.Ordinals != nil {
		start = int(set.Spec.Ordinals.Start)
	}
	return start, start + int(ptr.Deref(set.Spec.Replicas, 1))
}

// claimName is the name of the claim that a template makes for an ordinal.
func claimName(set *appsv1.StatefulSet, template *corev1.PersistentVolumeClaim, ordinal int) string {
	return fmt.Sprintf("%s-%s-%d", template.Name, set.Name, ordinal)
}

// identity returns the labels that tell a pod apart from its siblings.
func identity(set *appsv1.StatefulSet, ordinal int) map[string]string {
	return map[string]string{
		appsv1.StatefulSetPodNameLabel: podName(set, ordinal),
		appsv1.PodIndexLabel:           strconv.Itoa(ordinal),
	}
}

// newPod returns the pod of an ordinal, made of a revision's template.
func newPod(set *appsv1.StatefulSet, template *corev1.PodTemplateSpec, ordinal int, revision string) *corev1.Pod {
	pod := podctl.FromTemplate(set, Kind, template)
	pod.Name = podName(set, ordinal)
	pod.GenerateName = set.Name + "-"
	labels := maps.Clone(pod.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	maps.Copy(labels, identity(set, ordinal))
	labels[history.HashLabel] = revision
	pod.Labels = labels
	pod.Spec.Hostname = pod.Name
	pod.Spec.Subdomain = set.Spec.ServiceName
	pod.Spec.Volumes = volumes(set, pod.Spec.Volumes, ordinal)
	return pod
}

// volumes returns the template's volumes with each claim's in the place of a
// volume of the same name.
func volumes(set *appsv1.StatefulSet, of []corev1.Volume, ordinal int) []corev1.Volume {
	claims := map[string]bool{}
	var out []corev1.Volume
	for i := range set.Spec.VolumeClaimTemplates {
		template := &set.Spec.VolumeClaimTemplates[i]
		claims[template.Name] = true
		out = append(out, corev1.Volume{Name: template.Name, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claimName(set, template, ordinal)},
		}})
	}
	for _, v := range of {
		if !claims[v.Name] {
			out = append(out, v)
		}
	}
	return out
}

// strange reports whether a pod lacks a label of its identity.
func strange(set *appsv1.StatefulSet, pod *corev1.Pod, ordinal int) bool {
	for k, v := range identity(set, ordinal) {
		if pod.Labels[k] != v {
			return true
		}
	}
	return false
}
