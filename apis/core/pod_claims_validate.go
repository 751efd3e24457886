package core

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
)

// validateResourceClaims checks a pod's claims to devices: each has a name that
// containers use, and names a claim or a template of one.
func validateResourceClaims(claims []corev1.PodResourceClaim, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := sets.New[string]()
	for i := range claims {
		claim, at := &claims[i], path.Index(i)
		errs = append(errs, check.RequiredText(at.Child("name"), claim.Name, validation.IsDNS1123Label)...)
		if claim.Name != "" && seen.Has(claim.Name) {
			errs = append(errs, field.Duplicate(at.Child("name"), claim.Name))
		}
		seen.Insert(claim.Name)
		switch name, template := claim.ResourceClaimName, claim.ResourceClaimTemplateName; {
		case name != nil && template != nil:
			errs = append(errs, field.Invalid(at, claim.Name, "at most one of `resourceClaimName` or `resourceClaimTemplateName` may be specified"))
		case name != nil:
			errs = append(errs, check.RequiredText(at.Child("resourceClaimName"), *name, check.Subdomain)...)
		case template != nil:
			errs = append(errs, check.RequiredText(at.Child("resourceClaimTemplateName"), *template, check.Subdomain)...)
		default:
			errs = append(errs, field.Invalid(at, claim.Name, "must specify one of: `resourceClaimName`, `resourceClaimTemplateName`"))
		}
	}
	return errs
}

// validateClaimStatuses checks that the names of claims are of those that the pod
// has.
func validateClaimStatuses(statuses []corev1.PodResourceClaimStatus, claims []corev1.PodResourceClaim, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	known, seen := sets.New[string](), sets.New[string]()
	for i := range claims {
		known.Insert(claims[i].Name)
	}
	for i, status := range statuses {
		at := path.Index(i)
		switch {
		case !known.Has(status.Name):
			errs = append(errs, field.Invalid(at.Child("name"), status.Name, "must match the name of an entry in `spec.resourceClaims`"))
		case seen.Has(status.Name):
			errs = append(errs, field.Duplicate(at.Child("name"), status.Name))
		}
		seen.Insert(status.Name)
		if status.ResourceClaimName != nil {
			errs = append(errs, check.RequiredText(at.Child("resourceClaimName"), *status.ResourceClaimName, check.Subdomain)...)
		}
	}
	return errs
}
