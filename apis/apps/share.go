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
		return check.Text(at, share.StrVal, validation.IsValidPercent)
	}
	return check.NonNegative(at, int64(share.IntVal))
}

// isNone tells whether a valid share is 0 or 0%.
func isNone(share *intstr.IntOrString) bool {
	n, err := intstr.GetScaledValueFromIntOrPercent(share, 100, true)
	return err == nil && n == 0
}
