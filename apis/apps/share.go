package apps

import (
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
)

// validateShare wants a number of pods, or a percentage of them.
func validateShare(share *intstr.IntOrString, at *field.Path) field.ErrorList {
	if share == nil {
		return field.ErrorList{field.Required(at, "")}
	}
	if share.Type == intstr.String {
		errs := check.Text(at, share.StrVal, validation.IsValidPercent)
		if _, err := intstr.GetScaledValueFromIntOrPercent(share, 100, true); len(errs) == 0 && err != nil {
			errs = append(errs, field.Invalid(at, share.StrVal, "is not a number of percent that can be computed with"))
		}
		return errs
	}
	return check.NonNegative(at, int64(share.IntVal))
}

// isNone tells whether a valid share is 0 or 0%.
func isNone(share *intstr.IntOrString) bool {
	n, err := intstr.GetScaledValueFromIntOrPercent(share, 100, true)
	return err == nil && n == 0
}
