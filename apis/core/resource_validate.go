package core

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/quantity"
)

// validateResources checks limits, requests and claims of one container.
func validateResources(r *corev1.ResourceRequirements, claims []corev1.PodResourceClaim, at *field.Path) field.ErrorList {
	errs := validateLimitsAndRequests(r, at)
	known := sets.New[string]()
	for _, claim := range claims {
		known.Insert(claim.Name)
	}
	seen := sets.New[string]()
	for i, claim := range r.Claims {
		at := at.Child("claims").Index(i)
		errs = append(errs, check.RequiredText(at.Child("name"), claim.Name, nil)...)
		if key := claim.Name + "/" + claim.Request; seen.Has(key) {
			errs = append(errs, field.Duplicate(at, key))
		} else {
			seen.Insert(key)
		}
		if claim.Name != "" && !known.Has(claim.Name) {
			errs = append(errs, field.NotFound(at.Child("name"), claim.Name))
		}
	}
	return errs
}

func validateLimitsAndRequests(r *corev1.ResourceRequirements, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	limits, requests := at.Child("limits"), at.Child("requests")
	hugePages, cpuOrMemory := false, false
	note := func(name corev1.ResourceName) {
		hugePages = hugePages || isHugePages(name)
		cpuOrMemory = cpuOrMemory || name == corev1.ResourceCPU || name == corev1.ResourceMemory
	}
	for name, amount := range r.Limits {
		at := limits.Key(string(name))
		errs = append(errs, validateContainerResourceName(name, at)...)
		errs = append(errs, validateQuantity(name, amount, at)...)
		errs = append(errs, validatePages(name, amount, at)...)
		note(name)
	}
	for name, amount := range r.Requests {
		at := requests.Key(string(name))
		errs = append(errs, validateContainerResourceName(name, at)...)
		errs = append(errs, validateQuantity(name, amount, at)...)
		errs = append(errs, validatePages(name, amount, at)...)
		note(name)
		limit, limited := r.Limits[name]
		switch {
		case !limited && !overcommits(name):
			errs = append(errs, field.Required(limits, "Limit must be set for non overcommitable resources"))
		case limited && !overcommits(name) && amount.Cmp(limit) != 0:
			errs = append(errs, field.Invalid(requests, amount.String(), fmt.Sprintf("must be equal to %s limit of %s", name, limit.String())))
		case limited && amount.Cmp(limit) > 0:
			errs = append(errs, field.Invalid(requests, amount.String(), fmt.Sprintf("must be less than or equal to %s limit of %s", name, limit.String())))
		}
	}
	if hugePages && !cpuOrMemory {
		errs = append(errs, field.Forbidden(at, "HugePages require cpu or memory"))
	}
	return errs
}

// ValidateOverhead returns every fault of what a pod costs beside its
// containers.
func ValidateOverhead(overhead corev1.ResourceList, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for name, amount := range overhead {
		at := at.Key(string(name))
		errs = append(errs, validateContainerResourceName(name, at)...)
		errs = append(errs, validateQuantity(name, amount, at)...)
	}
	return errs
}

// validatePodResources checks what is said for the pod as a whole, against
// itself and against its containers.
func validatePodResources(spec *corev1.PodSpec, specPath *field.Path) field.ErrorList {
	r, at, containers := spec.Resources, specPath.Child("resources"), specPath.Child("containers")
	errs := validateLimitsAndRequests(r, at)
	if len(r.Claims) > 0 {
		errs = append(errs, field.Forbidden(at.Child("claims"), "claims cannot be set for Resources at pod-level"))
	}
	for _, list := range []struct {
		name      string
		resources corev1.ResourceList
	}{{"limits", r.Limits}, {"requests", r.Requests}} {
		for name := range list.resources {
			if name != corev1.ResourceCPU && name != corev1.ResourceMemory && !isHugePages(name) {
				errs = append(errs, field.NotSupported(at.Child(list.name), name, []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceHugePagesPrefix}))
			}
		}
	}
	sum := ContainerRequests(&corev1.Pod{Spec: *spec})
	for name, request := range r.Requests {
		if total, ok := sum[name]; ok && total.Cmp(request) > 0 {
			errs = append(errs, field.Invalid(at.Child("requests").Key(string(name)), request.String(), fmt.Sprintf("must be greater than or equal to aggregate container requests of %s", total.String())))
		}
	}
	for name, limit := range r.Limits {
		for i := range spec.Containers {
			if own, ok := spec.Containers[i].Resources.Limits[name]; ok && own.Cmp(limit) > 0 {
				errs = append(errs, field.Invalid(containers.Index(i).Child("resources", "limits").Key(string(name)), own.String(), fmt.Sprintf("must be less than or equal to pod limits of %s", limit.String())))
			}
		}
	}
	return errs
}

// validateContainerResourceName knows the resources a container can ask for:
// the standard ones, and extended ones named like example.com/gpu.
func validateContainerResourceName(name corev1.ResourceName, at *field.Path) field.ErrorList {
	if errs := check.Text(at, string(name), validation.IsQualifiedName); len(errs) > 0 {
		return errs
	}
	switch {
	case isNative(name):
		switch name {
		case corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage:
			return nil
		}
		if size, ok := strings.CutPrefix(string(name), corev1.ResourceHugePagesPrefix); ok {
			if err := quantity.Bounded(size); err != nil {
				return field.ErrorList{field.Invalid(at, name, "the size of the pages: "+err.Error())}
			}
			return nil
		}
		return field.ErrorList{field.Invalid(at, name, "must be a standard resource for containers")}
	case !IsExtended(name):
		return field.ErrorList{field.Invalid(at, name, "doesn't follow extended resource name standard")}
	}
	return nil
}

// validateQuantity wants an amount that can be had: not negative, and whole for
// resources that come in pieces.
func validateQuantity(name corev1.ResourceName, amount resource.Quantity, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if amount.Sign() < 0 {
		errs = append(errs, field.Invalid(at, amount.String(), "must be greater than or equal to 0"))
	}
	if countable(name) && amount.MilliValue()%1000 != 0 {
		errs = append(errs, field.Invalid(at, amount.String(), "must be an integer"))
	}
	return errs
}

// validatePages wants whole pages of memory where a resource is made of them.
func validatePages(name corev1.ResourceName, amount resource.Quantity, at *field.Path) field.ErrorList {
	if !isHugePages(name) {
		return nil
	}
	page, ok := pageSize(name)
	if !ok || amount.Value()%page == 0 {
		return nil
	}
	return field.ErrorList{field.Invalid(at, amount.String(), fmt.Sprintf("is not positive integer multiple of %s", name))}
}

// pageSize is how many bytes a page of a resource of pages has, if its name says that.
func pageSize(name corev1.ResourceName) (int64, bool) {
	text, ok := strings.CutPrefix(string(name), corev1.ResourceHugePagesPrefix)
	if !ok {
		return 0, false
	}
	size, err := quantity.Parse(text)
	return size.Value(), err == nil && size.Value() > 0
}

func isNative(name corev1.ResourceName) bool {
	return !strings.Contains(string(name), "/") ||
		strings.Contains(string(name), corev1.ResourceDefaultNamespacePrefix) && !strings.HasPrefix(string(name), resourcev1.ResourceDeviceClassPrefix)
}

// IsExtended tells whether a resource is an extended one: qualified by a domain
// that is not ours, or the one of a class of devices, and still a qualified
// name when a quota prefixes it.
func IsExtended(name corev1.ResourceName) bool {
	return !isNative(name) && !strings.HasPrefix(string(name), corev1.DefaultResourceRequestsPrefix) &&
		len(validation.IsQualifiedName(corev1.DefaultResourceRequestsPrefix+string(name))) == 0
}

func isHugePages(name corev1.ResourceName) bool {
	return strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix)
}

// overcommits tells whether more of a resource may be limited than requested.
func overcommits(name corev1.ResourceName) bool { return isNative(name) && !isHugePages(name) }

// countable tells whether a resource comes in pieces.
func countable(name corev1.ResourceName) bool { return name == corev1.ResourcePods || IsExtended(name) }

func validateResizePolicy(policies []corev1.ContainerResizePolicy, restart corev1.RestartPolicy, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := sets.New[corev1.ResourceName]()
	for i, policy := range policies {
		at := at.Index(i)
		if seen.Has(policy.ResourceName) {
			errs = append(errs, field.Duplicate(at, policy.ResourceName))
		}
		seen.Insert(policy.ResourceName)
		errs = append(errs, check.OneOf(at.Child("resourceName"), policy.ResourceName, corev1.ResourceCPU, corev1.ResourceMemory)...)
		errs = append(errs, check.OneOf(at.Child("restartPolicy"), policy.RestartPolicy, corev1.NotRequired, corev1.RestartContainer)...)
		if restart == corev1.RestartPolicyNever && policy.RestartPolicy == corev1.RestartContainer {
			errs = append(errs, field.Invalid(at.Child("restartPolicy"), policy.RestartPolicy, "must be 'NotRequired' when `restartPolicy` of the pod is 'Never'"))
		}
	}
	return errs
}
