package review

import (
	"errors"
	"fmt"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
)

// fieldRequirements are those of s that a field selector can express: equal or
// not equal to one value. The error is about those that were left out.
func fieldRequirements(s *authorizationv1.FieldSelectorAttributes) (fields.Requirements, error) {
	if s.RawSelector != "" {
		selector, err := fields.ParseSelector(s.RawSelector)
		if err != nil {
			return nil, fmt.Errorf("parse field selector: %w", err)
		}
		return selector.Requirements(), nil
	}
	var all fields.Requirements
	var faults []error
	for _, r := range s.Requirements {
		operator, ok := map[metav1.FieldSelectorOperator]selection.Operator{
			metav1.FieldSelectorOpIn: selection.Equals, metav1.FieldSelectorOpNotIn: selection.NotEquals,
		}[r.Operator]
		if !ok || len(r.Values) != 1 {
			faults = append(faults, fmt.Errorf("field selector: %s %s %q cannot be asked about", r.Key, r.Operator, r.Values))
			continue
		}
		all = append(all, fields.Requirement{Field: r.Key, Operator: operator, Value: r.Values[0]})
	}
	return all, errors.Join(faults...)
}

// labelRequirements are those of s that are understood. The error is about those
// that were left out.
func labelRequirements(s *authorizationv1.LabelSelectorAttributes) (labels.Requirements, error) {
	if s.RawSelector != "" {
		all, err := labels.ParseToRequirements(s.RawSelector)
		if err != nil {
			return nil, fmt.Errorf("parse label selector: %w", err)
		}
		return all, nil
	}
	var all labels.Requirements
	var faults []error
	for _, r := range s.Requirements {
		selector, err := metav1.LabelSelectorAsSelector(&metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{r}})
		if err != nil {
			faults = append(faults, fmt.Errorf("read label selector: %w", err))
			continue
		}
		requirements, _ := selector.Requirements()
		all = append(all, requirements...)
	}
	return all, errors.Join(faults...)
}
