package core

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// validateEphemeralUpdate: ephemeral containers can be added to a pod, and
// neither changed nor taken away.
func validateEphemeralUpdate(pod, old *corev1.Pod) field.ErrorList {
	errs := validatePodMetaUpdate(pod, old)
	at := field.NewPath("spec", "ephemeralContainers")
	if IsMirror(old) {
		return append(errs, field.Forbidden(at, "static pods do not support ephemeral containers"))
	}
	now := map[string]*corev1.EphemeralContainer{}
	for i := range pod.Spec.EphemeralContainers {
		now[pod.Spec.EphemeralContainers[i].Name] = &pod.Spec.EphemeralContainers[i]
	}
	for i := range old.Spec.EphemeralContainers {
		was := &old.Spec.EphemeralContainers[i]
		switch is := now[was.Name]; {
		case is == nil:
			errs = append(errs, field.Forbidden(at, fmt.Sprintf("existing ephemeral containers %q may not be removed", was.Name)))
		case !equality.Semantic.DeepEqual(is, was):
			errs = append(errs, field.Forbidden(at, fmt.Sprintf("existing ephemeral containers %q may not be changed", was.Name)))
		}
	}
	return append(errs, validatePodSpec(&pod.Spec, field.NewPath("spec"), specOfPod)...)
}

// validateEphemeralContainer forbids what a container that comes and goes
// inside a running pod cannot have: a place in its resources, its ports, its
// readiness or its end.
func validateEphemeralContainer(c *corev1.Container, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, f := range []struct {
		name string
		set  bool
	}{
		{"ports", len(c.Ports) > 0},
		{"resources", len(c.Resources.Limits)+len(c.Resources.Requests)+len(c.Resources.Claims) > 0},
		{"resizePolicy", len(c.ResizePolicy) > 0},
		{"restartPolicy", c.RestartPolicy != nil},
		{"restartPolicyRules", len(c.RestartPolicyRules) > 0},
		{"lifecycle", c.Lifecycle != nil},
		{"livenessProbe", c.LivenessProbe != nil},
		{"readinessProbe", c.ReadinessProbe != nil},
		{"startupProbe", c.StartupProbe != nil},
	} {
		if f.set {
			errs = append(errs, field.Forbidden(at.Child(f.name), "cannot be set for an Ephemeral Container"))
		}
	}
	for i, mount := range c.VolumeMounts {
		at := at.Child("volumeMounts").Index(i)
		if mount.SubPath != "" {
			errs = append(errs, field.Forbidden(at.Child("subPath"), "cannot be set for an Ephemeral Container"))
		}
		if mount.SubPathExpr != "" {
			errs = append(errs, field.Forbidden(at.Child("subPathExpr"), "cannot be set for an Ephemeral Container"))
		}
	}
	return errs
}

// validateResize: cpu and memory of containers that keep running can change
// within the pod's class, and none of them can be taken back.
func validateResize(pod, old *corev1.Pod) field.ErrorList {
	errs := validatePodMetaUpdate(pod, old)
	at := field.NewPath("spec")
	if IsMirror(old) {
		return append(errs, field.Forbidden(at, "static pods cannot be resized"))
	}
	if Finished(old) {
		return append(errs, field.Forbidden(at, fmt.Sprintf("pod is %s: nothing of it runs that could be resized", old.Status.Phase)))
	}
	if old.Spec.OS != nil && old.Spec.OS.Name == corev1.Windows {
		return append(errs, field.Forbidden(at, "windows pods cannot be resized"))
	}
	if !sameNames(pod.Spec.Containers, old.Spec.Containers) || !sameNames(pod.Spec.InitContainers, old.Spec.InitContainers) {
		return append(errs, field.Forbidden(at, "containers may not be added, removed, renamed or reordered on resize"))
	}
	errs = append(errs, validatePodSpec(&pod.Spec, at, specOfPod)...)
	if len(errs) > 0 {
		return errs // the comparison below would only repeat them
	}
	rest := pod.Spec.DeepCopy()
	for _, group := range []struct {
		rest, old []corev1.Container
		at        *field.Path
		init      bool
	}{
		{rest.InitContainers, old.Spec.InitContainers, at.Child("initContainers"), true},
		{rest.Containers, old.Spec.Containers, at.Child("containers"), false},
	} {
		for i := range group.rest {
			c, was, at := &group.rest[i], &group.old[i], group.at.Index(i)
			if group.init && !IsSidecar(was) {
				if !equality.Semantic.DeepEqual(c.Resources, was.Resources) {
					errs = append(errs, field.Forbidden(at.Child("resources"), "only init containers with restartPolicy=Always can be resized"))
				}
			} else {
				errs = append(errs, validateResizedList(c.Resources.Limits, was.Resources.Limits, at.Child("resources", "limits"), "limits")...)
				errs = append(errs, validateResizedList(c.Resources.Requests, was.Resources.Requests, at.Child("resources", "requests"), "requests")...)
			}
			c.Resources, c.ResizePolicy = was.Resources, was.ResizePolicy
		}
	}
	if QOSClass(pod) != QOSClass(old) {
		errs = append(errs, field.Invalid(at, string(QOSClass(pod)), fmt.Sprintf("Pod QOS Class may not change as a result of resizing (it is %s)", QOSClass(old))))
	}
	if !equality.Semantic.DeepEqual(rest.Resources, old.Spec.Resources) {
		errs = append(errs, field.Forbidden(at.Child("resources"), "what the pod as a whole asks for cannot be resized: resize its containers within it, or make the pod anew"))
		rest.Resources = old.Spec.Resources
	}
	if len(errs) == 0 && !equality.Semantic.DeepEqual(*rest, old.Spec) {
		errs = append(errs, field.Forbidden(at, "only cpu and memory resources are mutable"))
	}
	return errs
}

// validateResizedList checks one of limits and requests.
func validateResizedList(list, old corev1.ResourceList, at *field.Path, word string) field.ErrorList {
	var errs field.ErrorList
	for name := range old {
		if _, kept := list[name]; !kept && (name == corev1.ResourceCPU || name == corev1.ResourceMemory) {
			errs = append(errs, field.Forbidden(at.Key(string(name)), "resource "+word+" cannot be removed"))
		}
	}
	for name, quantity := range list {
		was, had := old[name]
		if name != corev1.ResourceCPU && name != corev1.ResourceMemory && (!had || quantity.Cmp(was) != 0) {
			errs = append(errs, field.Forbidden(at.Key(string(name)), "only cpu and memory resources are mutable"))
		}
	}
	for name := range old {
		if _, kept := list[name]; !kept && name != corev1.ResourceCPU && name != corev1.ResourceMemory {
			errs = append(errs, field.Forbidden(at.Key(string(name)), "only cpu and memory resources are mutable"))
		}
	}
	return errs
}
