package apps

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/internal/check"
)

// validateSelected checks what makes a workload find its pods: a selector that
// selects something, and a template whose pods it selects.
func validateSelected(selector *metav1.LabelSelector, template *corev1.PodTemplateSpec, kindName string, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	path := at.Child("selector")
	switch {
	case selector == nil:
		errs = append(errs, field.Required(path, ""))
	default:
		errs = append(errs, check.LabelSelector(path, selector)...)
		if len(selector.MatchLabels)+len(selector.MatchExpressions) == 0 {
			errs = append(errs, field.Invalid(path, selector, fmt.Sprintf("empty selector is invalid for %s", kindName)))
		}
	}

	at = at.Child("template")
	if parsed, err := metav1.LabelSelectorAsSelector(selector); err != nil {
		errs = append(errs, field.Invalid(path, selector, "invalid label selector"))
	} else if !parsed.Empty() && !parsed.Matches(labels.Set(template.Labels)) {
		errs = append(errs, field.Invalid(at.Child("metadata", "labels"), template.Labels, "`selector` does not match template `labels`"))
	}
	errs = append(errs, core.ValidatePodTemplate(template, at)...)
	if policy := template.Spec.RestartPolicy; policy != corev1.RestartPolicyAlways && policy != "" {
		errs = append(errs, field.NotSupported(at.Child("spec", "restartPolicy"), policy, []corev1.RestartPolicy{corev1.RestartPolicyAlways}))
	}
	if template.Spec.ActiveDeadlineSeconds != nil {
		errs = append(errs, field.Forbidden(at.Child("spec", "activeDeadlineSeconds"), fmt.Sprintf("activeDeadlineSeconds in %s is not Supported", kindName)))
	}
	return errs
}

// count is a named number of replicas.
type count struct {
	field string
	n     int32
}

func nonNegative(at *field.Path, counts []count) field.ErrorList {
	var errs field.ErrorList
	for _, c := range counts {
		errs = append(errs, check.NonNegative(at.Child(c.field), int64(c.n))...)
	}
	return errs
}

// bound says that a number must not exceed another.
type bound struct {
	field string
	n     int32
	than  string
	limit int32
}

func atMost(at *field.Path, bounds []bound) field.ErrorList {
	var errs field.ErrorList
	for _, b := range bounds {
		if b.n > b.limit {
			errs = append(errs, field.Invalid(at.Child(b.field), b.n, "cannot be greater than "+b.than))
		}
	}
	return errs
}

// replicas is the number asked for; left out, it is 1.
func replicas(n *int32) int32 {
	if n == nil {
		return 1
	}
	return *n
}

func selectorText(selector *metav1.LabelSelector) (string, error) {
	parsed, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil {
		return "", fmt.Errorf("label selector: %w", err)
	}
	return parsed.String(), nil
}

func setDefault[T any](field **T, value T) {
	if *field == nil {
		*field = &value
	}
}
