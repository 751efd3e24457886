package scheduling

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func newClass(name string, value int32) *schedulingv1.PriorityClass {
	c := &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: "7"}, Value: value}
	PriorityClass().Default(c)
	return c
}

func TestValidatePriorityClass(t *testing.T) {
	for _, test := range []struct {
		name  string
		value int32
		want  []string
	}{
		{"important", highest, nil},
		{"negligible", -5, nil},
		{"too-important", highest + 1, []string{"value: Forbidden: maximum allowed value of a user defined priority is 1000000000"}},
		{"system-mine", 1, []string{"metadata.name: Forbidden: priority class names with 'system-' prefix are reserved for system use only."}},
		{"system-node-critical", 2000001000, nil},
		{"system-node-critical", 1, []string{"value: Forbidden: system-node-critical is a system class: its value is 2000001000"}},
	} {
		checktest.Faults(t, validatePriorityClass(newClass(test.name, test.value)), test.want...)
	}
}

func TestPriorityClassUpdate(t *testing.T) {
	old, c := newClass("a", 1), newClass("a", 2)
	c.PreemptionPolicy = ptr.To(corev1.PreemptNever)
	checktest.Faults(t, PriorityClass().ValidateUpdate(c, old),
		"value: Forbidden: may not be changed in an update.",
		`preemptionPolicy: Invalid value: "Never": field is immutable`)
}
