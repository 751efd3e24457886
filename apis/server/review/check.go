package review

import (
	"fmt"
	"strings"

	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

var spec = field.NewPath("spec")

// checkMeta refuses metadata in a question: it would be answered by nothing.
func checkMeta(given metav1.ObjectMeta, fault string) field.ErrorList {
	given.ManagedFields = nil // who asks by kubectl apply did not write them
	if equality.Semantic.DeepEqual(metav1.ObjectMeta{}, given) {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("metadata"), given, fault)}
}

// checkSpec is what is wrong with a question about any user.
func checkSpec(s authorizationv1.SubjectAccessReviewSpec) field.ErrorList {
	faults := checkAttributes(s.ResourceAttributes, s.NonResourceAttributes)
	if s.User == "" && len(s.Groups) == 0 {
		faults = append(faults, field.Invalid(spec.Child("user"), s.User, "at least one of user or group must be specified"))
	}
	return faults
}

// checkLocal is what is wrong with a question that came in a namespace.
func checkLocal(asked *authorizationv1.LocalSubjectAccessReview, namespace string) field.ErrorList {
	faults := checkSpec(asked.Spec)
	given := asked.ObjectMeta
	given.Namespace = ""
	faults = append(faults, checkMeta(given, "must be empty except for namespace")...)
	if r := asked.Spec.ResourceAttributes; r != nil && (r.Namespace != asked.Namespace || r.Namespace != namespace) {
		faults = append(faults, field.Invalid(spec.Child("resourceAttributes", "namespace"), r.Namespace, "must match metadata.namespace"))
	}
	if p := asked.Spec.NonResourceAttributes; p != nil {
		faults = append(faults, field.Invalid(spec.Child("nonResourceAttributes"), p, "disallowed on this kind of request"))
	}
	return faults
}

// checkAttributes: a question is about a resource or about a path.
func checkAttributes(resource *authorizationv1.ResourceAttributes, path *authorizationv1.NonResourceAttributes) field.ErrorList {
	var faults field.ErrorList
	switch {
	case resource != nil && path != nil:
		faults = append(faults, field.Invalid(spec.Child("nonResourceAttributes"), path, "cannot be specified in combination with resourceAttributes"))
	case resource == nil && path == nil:
		faults = append(faults, field.Invalid(spec.Child("resourceAttributes"), resource, "exactly one of nonResourceAttributes or resourceAttributes must be specified"))
	}
	if resource == nil {
		return faults
	}
	at := spec.Child("resourceAttributes")
	if s := resource.FieldSelector; s != nil {
		at := at.Child("fieldSelector")
		faults = append(faults, checkSelector(at, s.RawSelector, len(s.Requirements))...)
		for i, r := range s.Requirements {
			// Operators of newer clients are left out of the question, which is answered all the same.
			faults = append(faults, metav1validation.ValidateFieldSelectorRequirement(r,
				metav1validation.FieldSelectorValidationOptions{AllowUnknownOperatorInRequirement: true}, at.Child("requirements").Index(i))...)
		}
	}
	if s := resource.LabelSelector; s != nil {
		at := at.Child("labelSelector")
		faults = append(faults, checkSelector(at, s.RawSelector, len(s.Requirements))...)
		for i, r := range s.Requirements {
			faults = append(faults, metav1validation.ValidateLabelSelectorRequirement(r,
				metav1validation.LabelSelectorValidationOptions{AllowUnknownOperatorInRequirement: true}, at.Child("requirements").Index(i))...)
		}
	}
	return faults
}

func checkSelector(at *field.Path, raw string, requirements int) field.ErrorList {
	switch {
	case raw != "" && requirements > 0:
		return field.ErrorList{field.Invalid(at.Child("rawSelector"), raw, "may not specified at the same time as requirements")}
	case raw == "" && requirements == 0:
		return field.ErrorList{field.Required(at.Child("requirements"), fmt.Sprintf("when %s is specified, requirements or rawSelector is required", at))}
	}
	return nil
}

// evaluationError says what of a question could not be answered: err is the
// authorizer's; what of a selector was not understood was left out of the question.
func evaluationError(err error, question authorizer.AttributesRecord) string {
	var all []string
	if err != nil {
		all = append(all, err.Error())
	}
	ignored := func(which string, err error, kept int) {
		if err == nil {
			return
		}
		how := "ignored"
		if kept > 0 {
			how = "partially ignored"
		}
		all = append(all, fmt.Sprintf("spec.resourceAttributes.%s %s due to parse error", which, how))
	}
	ignored("fieldSelector", question.FieldSelectorParsingErr, len(question.FieldSelectorRequirements))
	ignored("labelSelector", question.LabelSelectorParsingErr, len(question.LabelSelectorRequirements))
	return strings.Join(all, "; ")
}
