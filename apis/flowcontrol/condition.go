package flowcontrol

import (
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
)

// condition is what the conditions of both kinds have in common.
type condition struct {
	kind   string
	status flowcontrolv1.ConditionStatus
	reason string
}

// validateConditions wants each type once, with a status.
func validateConditions[T any](conditions []T, of func(T) condition) field.ErrorList {
	var errs field.ErrorList
	seen := sets.New[string]()
	for i := range conditions {
		c, at := of(conditions[i]), field.NewPath("status", "conditions").Index(i)
		switch {
		case c.kind == "":
			errs = append(errs, field.Required(at.Child("type"), ""))
		case seen.Has(c.kind):
			errs = append(errs, field.Duplicate(at.Child("type"), c.kind))
		}
		seen.Insert(c.kind)
		errs = append(errs, check.OneOf(at.Child("status"), c.status, flowcontrolv1.ConditionTrue, flowcontrolv1.ConditionFalse, flowcontrolv1.ConditionUnknown)...)
	}
	return errs
}
