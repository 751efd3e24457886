package core

import (
	"fmt"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"

	"github.com/clusterd/clusterd/apis/kind"
)

// Pod is the kind Pod. Its parts: pod_default.go, *_validate.go, pod_update.go
// and pod_row.go.
func Pod() kind.Kind {
	return kind.Typed[*corev1.Pod]{
		GVK:        corev1.SchemeGroupVersion.WithKind("Pod"),
		Resource:   "pods",
		Singular:   "pod",
		ShortNames: []string{"po"},
		Untracked:  true,
		Categories: []string{"all"},
		Namespaced: true,

		New:     func() runtime.Object { return &corev1.Pod{} },
		NewList: func() runtime.Object { return &corev1.PodList{} },

		Default:        defaultPod,
		PrepareCreate:  preparePodCreate,
		PrepareUpdate:  preparePodUpdate,
		Validate:       validatePodCreate,
		ValidateUpdate: validatePodUpdate,
		Warnings:       podWarnings,

		Columns: podColumns,
		Row:     podRow,
		Fields:  podFields,

		Status: &kind.TypedStatus[*corev1.Pod]{
			PrepareUpdate:  preparePodStatusUpdate,
			ValidateUpdate: validatePodStatusUpdate,
		},
		Parts: []kind.TypedPart[*corev1.Pod]{
			{
				Name:           "ephemeralcontainers",
				PrepareUpdate:  prepareEphemeralUpdate,
				ValidateUpdate: validateEphemeralUpdate,
				Fields:         [][]string{{"spec", "ephemeralContainers"}},
			},
			{
				Name:           "resize",
				PrepareUpdate:  prepareResize,
				ValidateUpdate: validateResize,
				Fields: [][]string{
					{"spec", "containers", "*", "name"}, {"spec", "containers", "*", "resources"}, {"spec", "containers", "*", "resizePolicy"},
					{"spec", "initContainers", "*", "name"}, {"spec", "initContainers", "*", "resources"}, {"spec", "initContainers", "*", "resizePolicy"},
				},
			},
		},
		Grace:               podGrace,
		UnconditionalUpdate: true,
	}.Kind()
}

func preparePodCreate(pod *corev1.Pod) {
	pod.Generation = 1
	pod.Status = corev1.PodStatus{Phase: corev1.PodPending, QOSClass: QOSClass(pod)}
	if len(pod.Spec.SchedulingGates) > 0 {
		pod.Status.Conditions = []corev1.PodCondition{{
			Type:    corev1.PodScheduled,
			Status:  corev1.ConditionFalse,
			Reason:  corev1.PodReasonSchedulingGated,
			Message: "Scheduling is blocked due to non-empty scheduling gates",
		}}
	}
	mergeMatchLabels(pod)
}

func preparePodUpdate(pod, old *corev1.Pod) {
	pod.Status = old.Status
	pod.Generation = old.Generation
	if !equality.Semantic.DeepEqual(pod.Spec, old.Spec) {
		pod.Generation++
	}
}

func preparePodStatusUpdate(pod, old *corev1.Pod) {
	pod.Spec = old.Spec
	pod.OwnerReferences = old.OwnerReferences
	pod.Generation = old.Generation
	// The class follows from the spec, whatever the node says.
	pod.Status.QOSClass = old.Status.QOSClass
}

// mergeMatchLabels turns matchLabelKeys and mismatchLabelKeys into the label
// selectors that schedulers read: "pods whose label is, or is not, like mine".
// A key the pod has no label for is ignored.
func mergeMatchLabels(pod *corev1.Pod) {
	if affinity := pod.Spec.Affinity; affinity != nil {
		var terms []*corev1.PodAffinityTerm
		if a := affinity.PodAffinity; a != nil {
			terms = appendTerms(terms, a.RequiredDuringSchedulingIgnoredDuringExecution, a.PreferredDuringSchedulingIgnoredDuringExecution)
		}
		if a := affinity.PodAntiAffinity; a != nil {
			terms = appendTerms(terms, a.RequiredDuringSchedulingIgnoredDuringExecution, a.PreferredDuringSchedulingIgnoredDuringExecution)
		}
		for _, term := range terms {
			addRequirements(term.LabelSelector, metav1.LabelSelectorOpIn, term.MatchLabelKeys, pod.Labels)
			addRequirements(term.LabelSelector, metav1.LabelSelectorOpNotIn, term.MismatchLabelKeys, pod.Labels)
		}
	}
	for i := range pod.Spec.TopologySpreadConstraints {
		c := &pod.Spec.TopologySpreadConstraints[i]
		addRequirements(c.LabelSelector, metav1.LabelSelectorOpIn, c.MatchLabelKeys, pod.Labels)
	}
}

func appendTerms(terms []*corev1.PodAffinityTerm, required []corev1.PodAffinityTerm, preferred []corev1.WeightedPodAffinityTerm) []*corev1.PodAffinityTerm {
	for i := range required {
		terms = append(terms, &required[i])
	}
	for i := range preferred {
		terms = append(terms, &preferred[i].PodAffinityTerm)
	}
	return terms
}

func addRequirements(selector *metav1.LabelSelector, operator metav1.LabelSelectorOperator, keys []string, labels map[string]string) {
	if selector == nil {
		return // a fault that validation reports
	}
	for _, key := range keys {
		if value, ok := labels[key]; ok {
			selector.MatchExpressions = append(selector.MatchExpressions, metav1.LabelSelectorRequirement{Key: key, Operator: operator, Values: []string{value}})
		}
	}
}

// podGrace gives a pod the time it or the caller asks for, and none if nothing
// of it runs: not scheduled yet, or finished.
func podGrace(pod *corev1.Pod, options *metav1.DeleteOptions) bool {
	if options == nil {
		return false
	}
	var seconds int64
	switch {
	case options.GracePeriodSeconds != nil:
		seconds = *options.GracePeriodSeconds
	case pod.Spec.TerminationGracePeriodSeconds != nil:
		seconds = *pod.Spec.TerminationGracePeriodSeconds
	}
	if seconds < 0 {
		seconds = 1
	}
	if pod.Spec.NodeName == "" || Finished(pod) {
		seconds = 0
	}
	options.GracePeriodSeconds = &seconds
	return true
}

func podFields(pod *corev1.Pod) fields.Set {
	ip := pod.Status.PodIP
	if len(pod.Status.PodIPs) > 0 {
		ip = pod.Status.PodIPs[0].IP
	}
	return fields.Set{
		"spec.nodeName":            pod.Spec.NodeName,
		"spec.restartPolicy":       string(pod.Spec.RestartPolicy),
		"spec.schedulerName":       pod.Spec.SchedulerName,
		"spec.serviceAccountName":  pod.Spec.ServiceAccountName,
		"spec.hostNetwork":         strconv.FormatBool(pod.Spec.HostNetwork),
		"status.phase":             string(pod.Status.Phase),
		"status.podIP":             ip,
		"status.nominatedNodeName": pod.Status.NominatedNodeName,
	}
}

func podWarnings(pod *corev1.Pod) []string { return PodSpecWarnings(&pod.Spec, "spec") }

// PodSpecWarnings returns what is allowed in a pod spec, but hardly meant. path
// is where the spec stands in its object.
func PodSpecWarnings(spec *corev1.PodSpec, path string) []string {
	var warnings []string
	warn := func(format string, args ...any) { warnings = append(warnings, fmt.Sprintf(format, args...)) }
	for _, list := range []struct {
		name       string
		containers []corev1.Container
	}{{"initContainers", spec.InitContainers}, {"containers", spec.Containers}} {
		for i := range list.containers {
			c, at := &list.containers[i], fmt.Sprintf("%s.%s[%d]", path, list.name, i)
			seen := map[string]bool{}
			for j, variable := range c.Env {
				if seen[variable.Name] {
					warn("%s.env[%d]: hides previous definition of %q, which may be dropped when using apply", at, j, variable.Name)
				}
				seen[variable.Name] = true
			}
			ports := map[string]int{}
			for j, port := range c.Ports {
				key := fmt.Sprintf("%d/%s", port.ContainerPort, port.Protocol)
				if first, ok := ports[key]; ok {
					warn("%s.ports[%d]: duplicate port definition with %s.ports[%d]", at, j, at, first)
					continue
				}
				ports[key] = j
			}
			for _, memory := range []struct {
				name string
				list corev1.ResourceList
			}{{"limits", c.Resources.Limits}, {"requests", c.Resources.Requests}} {
				// "100m" of memory is a tenth of a byte; 100M was meant.
				if q, ok := memory.list[corev1.ResourceMemory]; ok && q.MilliValue()%1000 != 0 {
					warn("%s.resources.%s[memory]: fractional byte value %q is invalid, must be an integer", at, memory.name, q.String())
				}
			}
		}
	}
	for i := range spec.Volumes {
		if spec.Volumes[i].GitRepo != nil {
			warn("%s.volumes[%d].gitRepo: gitRepo volumes are not supported", path, i)
		}
	}
	secrets := sets.New[string]()
	for i, secret := range spec.ImagePullSecrets {
		switch {
		case secret.Name == "":
			warn("%s.imagePullSecrets[%d].name: invalid empty name %q", path, i, secret.Name)
		case secrets.Has(secret.Name):
			warn("%s.imagePullSecrets[%d].name: duplicate secret name %q", path, i, secret.Name)
		}
		secrets.Insert(secret.Name)
	}
	return warnings
}
