package review

import (
	"fmt"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
)

// fieldRequirements are those of s that a field selector can express: equal or
// not equal to one value.
func fieldRequirements(s *authorizationv1.FieldSelectorAttributes) (fields.Requirements, error) {
	if s.RawSelector != "" {
		selector, err := fields.ParseSelector(s.RawSelector)
		if err != nil {
			return nil, fmt.Errorf("parse field selector: %w", err)
		}
		return selector.Requirements(), nil
	}
	var all fields.Requirements
	for _, r := range s.Requirements {
		if len(r.Values) != 1 {
			continue
		}
		operator, ok := map[metav1.FieldSelectorOperator]selection.Operator{
			metav1.FieldSelectorOpIn: selection.Equals, metav1.FieldSelectorOpNotIn: selection.NotEquals,
		}[r.Operator]
		if ok {
			all = append(all, fields.Requirement{Field: r.Key, Operator: operator, Value: r.Values[0]})
		}
	}
	return all, nil
}

func labelRequirements(s *authorizationv1.LabelSelectorAttributes) (labels.Requirements, error) {
	if s.RawSelector != "" {
		all, err := labels.ParseToRequirements(s.RawSelector)
		if err != nil {
			return nil, fmt.Errorf("parse label selector: %w", err)
		}
		return all, nil
	}
	selector, err := metav1.LabelSelectorAsSelector(&metav1.LabelSelector{MatchExpressions: s.Requirements})
	if err != nil {
		return nil, fmt.Errorf("read label selector: %w", err)
	}
	all, _ := selector.Requirements()
	return all, nil
}
