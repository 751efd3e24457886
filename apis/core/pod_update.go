package core

import (
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/diff"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
)

// validatePodUpdate checks that nothing but the few fields changed that a pod
// can change while it exists.
func validatePodUpdate(pod, old *corev1.Pod) field.ErrorList {
	errs := validatePodMetaUpdate(pod, old)
	at := field.NewPath("spec")
	errs = append(errs, validatePodSpec(&pod.Spec, at, specOfPod)...)
	if len(errs) > 0 {
		return errs // the comparison below would only repeat them
	}
	for _, lists := range []struct {
		name     string
		new, old int
	}{
		{"containers", len(pod.Spec.Containers), len(old.Spec.Containers)},
		{"initContainers", len(pod.Spec.InitContainers), len(old.Spec.InitContainers)},
	} {
		if lists.new != lists.old {
			return append(errs, field.Forbidden(at.Child(lists.name), "pod updates may not add or remove containers"))
		}
	}
	errs = append(errs, validateDeadlineUpdate(pod.Spec.ActiveDeadlineSeconds, old.Spec.ActiveDeadlineSeconds, at.Child("activeDeadlineSeconds"))...)
	errs = append(errs, validateTolerationsUpdate(pod.Spec.Tolerations, old.Spec.Tolerations, at.Child("tolerations"))...)
	errs = append(errs, validateGatesUpdate(pod.Spec.SchedulingGates, old.Spec.SchedulingGates, at.Child("schedulingGates"))...)

	// Put back what may change: whatever still differs may not.
	rest := pod.Spec.DeepCopy()
	for i := range rest.Containers {
		rest.Containers[i].Image = old.Spec.Containers[i].Image
	}
	for i := range rest.InitContainers {
		rest.InitContainers[i].Image = old.Spec.InitContainers[i].Image
	}
	rest.ActiveDeadlineSeconds = old.Spec.ActiveDeadlineSeconds
	rest.Tolerations = old.Spec.Tolerations
	rest.SchedulingGates = old.Spec.SchedulingGates
	if len(old.Spec.SchedulingGates) > 0 {
		errs = append(errs, narrowGated(rest, &old.Spec, at)...)
	}
	if !equality.Semantic.DeepEqual(*rest, old.Spec) {
		errs = append(errs, field.Forbidden(at, fmt.Sprintf("pod updates may not change fields other than "+
			"`spec.containers[*].image`,`spec.initContainers[*].image`,`spec.activeDeadlineSeconds`,"+
			"`spec.tolerations` (only additions to existing tolerations),"+
			"`spec.schedulingGates` (only removals)\n%v", specDiff(&old.Spec, rest))))
	}
	return errs
}

// validateDeadlineUpdate: a deadline can be set and shortened.
func validateDeadlineUpdate(deadline, old *int64, at *field.Path) field.ErrorList {
	switch {
	case old == nil:
		return nil
	case deadline == nil:
		return field.ErrorList{field.Invalid(at, deadline, "must not update from a positive integer to nil value")}
	case *deadline > *old:
		return field.ErrorList{field.Invalid(at, *deadline, "must be less than or equal to previous value")}
	}
	return nil
}

// specDiff is for people to read: what differs in specs of more than 64 KiB takes long
// to find, the square of its lines.
func specDiff(old, spec *corev1.PodSpec) string {
	if old.Size() > 64<<10 || spec.Size() > 64<<10 {
		return "(the specs are too large to show what differs)"
	}
	return diff.Diff(*old, *spec)
}

// validatePodMetaUpdate checks the metadata of any change of a pod. What makes it a
// mirror stays: its node would take a pod that became one for the mirror of a static
// pod that it does not have, and delete it while its containers run.
func validatePodMetaUpdate(pod, old *corev1.Pod) field.ErrorList {
	meta := field.NewPath("metadata")
	errs := apivalidation.ValidateObjectMetaUpdate(&pod.ObjectMeta, &old.ObjectMeta, meta)
	if now := pod.Annotations[corev1.PodDeletionCost]; now != old.Annotations[corev1.PodDeletionCost] {
		errs = append(errs, validateDeletionCost(pod.Annotations, meta.Child("annotations"))...)
	}
	mirror, is := pod.Annotations[corev1.MirrorPodAnnotationKey]
	was, had := old.Annotations[corev1.MirrorPodAnnotationKey]
	at := meta.Child("annotations").Key(corev1.MirrorPodAnnotationKey)
	switch {
	case is && !had:
		errs = append(errs, field.Forbidden(at, "may not add mirror pod annotation"))
	case is != had || mirror != was:
		errs = append(errs, field.Forbidden(at, "may not remove or update mirror pod annotation"))
	}
	return errs
}

// validateTolerationsUpdate: tolerations can be added, and last longer.
func validateTolerationsUpdate(tolerations, old []corev1.Toleration, at *field.Path) field.ErrorList {
	kept := sets.New[corev1.Toleration]()
	for _, t := range tolerations {
		t.TolerationSeconds = nil
		kept.Insert(t)
	}
	for _, had := range old {
		had.TolerationSeconds = nil
		if !kept.Has(had) {
			return field.ErrorList{field.Forbidden(at, "existing toleration can not be modified except its tolerationSeconds")}
		}
	}
	return nil
}

// validateGatesUpdate: scheduling gates can be removed.
func validateGatesUpdate(gates, old []corev1.PodSchedulingGate, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	had := sets.New(old...)
	for i, gate := range gates {
		if !had.Has(gate) {
			errs = append(errs, field.Forbidden(at.Index(i), fmt.Sprintf("only deletion is allowed, but found new scheduling gate '%s'", gate.Name)))
		}
	}
	return errs
}

// narrowGated lets a pod that no scheduler looks at yet be sent to fewer nodes:
// its node selector may grow, its required node affinity become stricter, its
// preferences change. What it lets pass is put back into rest.
func narrowGated(rest, old *corev1.PodSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for key, value := range old.NodeSelector {
		if now, ok := rest.NodeSelector[key]; !ok || now != value {
			errs = append(errs, field.Invalid(at.Child("nodeSelector"), rest.NodeSelector, "only additions are allowed (no mutations or deletions)"))
			break
		}
	}
	rest.NodeSelector = maps.Clone(old.NodeSelector)

	var now, was *corev1.NodeAffinity
	if rest.Affinity != nil {
		now = rest.Affinity.NodeAffinity
	}
	if old.Affinity != nil {
		was = old.Affinity.NodeAffinity
	}
	if !stricter(now, was) {
		return append(errs, field.Invalid(at.Child("affinity", "nodeAffinity", "requiredDuringSchedulingIgnoredDuringExecution", "nodeSelectorTerms"), "",
			"only additions are allowed (no mutations or deletions)"))
	}
	switch {
	case was != nil && rest.Affinity == nil: // mere preferences are dropped; nothing else may be
		rest.Affinity = &corev1.Affinity{NodeAffinity: was.DeepCopy()}
	case was != nil:
		rest.Affinity.NodeAffinity = was.DeepCopy()
	case rest.Affinity != nil:
		rest.Affinity.NodeAffinity = nil
		if old.Affinity == nil && *rest.Affinity == (corev1.Affinity{}) {
			rest.Affinity = nil
		}
	}
	return errs
}

// stricter tells whether every node that now requires was also allowed by was.
func stricter(now, was *corev1.NodeAffinity) bool {
	if was == nil {
		return true
	}
	old := was.RequiredDuringSchedulingIgnoredDuringExecution
	if old == nil || len(old.NodeSelectorTerms) == 0 {
		return true
	}
	if now == nil {
		return false
	}
	required := now.RequiredDuringSchedulingIgnoredDuringExecution
	// Terms are alternatives: another one would allow more.
	if required == nil || len(required.NodeSelectorTerms) != len(old.NodeSelectorTerms) {
		return false
	}
	for i, term := range old.NodeSelectorTerms {
		if !containsAll(required.NodeSelectorTerms[i].MatchExpressions, term.MatchExpressions) ||
			!containsAll(required.NodeSelectorTerms[i].MatchFields, term.MatchFields) {
			return false
		}
	}
	return true
}

func containsAll(list, wanted []corev1.NodeSelectorRequirement) bool {
	has := sets.New[string]()
	for i := range list {
		has.Insert(list[i].String())
	}
	for i := range wanted {
		if !has.Has(wanted[i].String()) {
			return false
		}
	}
	return true
}

// validatePodStatusUpdate checks what a node reports of a pod.
func validatePodStatusUpdate(pod, old *corev1.Pod) field.ErrorList {
	errs := validatePodMetaUpdate(pod, old)
	at := field.NewPath("status")
	status := &pod.Status
	if status.NominatedNodeName != "" {
		errs = append(errs, check.Text(at.Child("nominatedNodeName"), status.NominatedNodeName, check.Subdomain)...)
	}
	errs = append(errs, validateTransitions(status.ContainerStatuses, old.Status.ContainerStatuses, pod.Spec.Containers, pod.Spec.RestartPolicy, at.Child("containerStatuses"))...)
	errs = append(errs, validateTransitions(status.InitContainerStatuses, old.Status.InitContainerStatuses, pod.Spec.InitContainers, pod.Spec.RestartPolicy, at.Child("initContainerStatuses"))...)
	errs = append(errs, validateClaimStatuses(status.ResourceClaimStatuses, pod.Spec.ResourceClaims, at.Child("resourceClaimStatuses"))...)
	for i, ip := range status.PodIPs {
		errs = append(errs, validation.IsValidIPForLegacyField(at.Child("podIPs").Index(i), ip.IP, true, nil)...)
	}
	if len(status.PodIPs) > 0 && status.PodIP != status.PodIPs[0].IP {
		errs = append(errs, field.Invalid(at.Child("podIPs").Index(0), status.PodIPs[0].IP, "must be equal to `podIP`"))
	}
	return errs
}

// validateTransitions: a container that ended for good does not run again. It
// ended for good if its restart policy says Never, or says OnFailure and it
// succeeded.
func validateTransitions(statuses, old []corev1.ContainerStatus, containers []corev1.Container, policy corev1.RestartPolicy, at *field.Path) field.ErrorList {
	if policy == corev1.RestartPolicyAlways {
		return nil
	}
	var errs field.ErrorList
	for i, status := range statuses {
		was := slices.IndexFunc(old, func(s corev1.ContainerStatus) bool { return s.Name == status.Name })
		if was < 0 || old[was].State.Terminated == nil || status.State.Terminated != nil {
			continue
		}
		if own := slices.IndexFunc(containers, func(c corev1.Container) bool { return c.Name == status.Name }); own >= 0 && containers[own].RestartPolicy != nil {
			continue // its own policy and rules decide
		}
		if policy == corev1.RestartPolicyOnFailure && old[was].State.Terminated.ExitCode != 0 {
			continue
		}
		errs = append(errs, field.Forbidden(at.Index(i).Child("state"), "may not be transitioned to non-terminated state"))
	}
	return errs
}
