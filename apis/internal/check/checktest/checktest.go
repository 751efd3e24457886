// Package checktest compares the faults a validation found with those a test
// expects.
package checktest

import (
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Faults fails t unless each of errs begins like one of want and the other way
// round, in any order. No want: there must be no fault.
func Faults(t *testing.T, errs field.ErrorList, want ...string) {
	t.Helper()
	rest := slices.Clone(want)
	for _, err := range errs {
		i := slices.IndexFunc(rest, func(prefix string) bool { return strings.HasPrefix(err.Error(), prefix) })
		if i < 0 {
			t.Errorf("unexpected: %v", err)
			continue
		}
		rest = slices.Delete(rest, i, i+1)
	}
	for _, missing := range rest {
		t.Errorf("missing: %s", missing)
	}
}
