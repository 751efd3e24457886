package policy

import (
	"testing"

	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func newBudget(spec policyv1.PodDisruptionBudgetSpec) *policyv1.PodDisruptionBudget {
	return &policyv1.PodDisruptionBudget{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "hello", ResourceVersion: "7", Generation: 1}, Spec: spec}
}

func TestValidateBudget(t *testing.T) {
	tests := []struct {
		name string
		spec policyv1.PodDisruptionBudgetSpec
		want []string
	}{
		{"empty", policyv1.PodDisruptionBudgetSpec{}, nil},
		{"number", policyv1.PodDisruptionBudgetSpec{MinAvailable: ptr.To(intstr.FromInt32(2))}, nil},
		{"both", policyv1.PodDisruptionBudgetSpec{MinAvailable: ptr.To(intstr.FromInt32(2)), MaxUnavailable: ptr.To(intstr.FromInt32(2))}, []string{"spec: Invalid value: "}},
		{"negative", policyv1.PodDisruptionBudgetSpec{MaxUnavailable: ptr.To(intstr.FromInt32(-1))}, []string{"spec.maxUnavailable: Invalid value: -1: must be greater than or equal to 0"}},
		{"more than all", policyv1.PodDisruptionBudgetSpec{MinAvailable: ptr.To(intstr.FromString("101%"))}, []string{`spec.minAvailable: Invalid value: "101%": must not be greater than 100%`}},
		{"no percentage", policyv1.PodDisruptionBudgetSpec{MinAvailable: ptr.To(intstr.FromString("half"))}, []string{`spec.minAvailable: Invalid value: "half": a valid percent string`}},
		{"policy", policyv1.PodDisruptionBudgetSpec{UnhealthyPodEvictionPolicy: ptr.To(policyv1.UnhealthyPodEvictionPolicyType("Ask"))},
			[]string{`spec.unhealthyPodEvictionPolicy: Unsupported value: "Ask": supported values: "AlwaysAllow", "IfHealthyBudget"`}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			checktest.Faults(t, PodDisruptionBudget().Validate(newBudget(test.spec)), test.want...)
		})
	}
}

func TestBudgetUpdates(t *testing.T) {
	kind := PodDisruptionBudget()
	old := newBudget(policyv1.PodDisruptionBudgetSpec{})
	b := newBudget(policyv1.PodDisruptionBudgetSpec{MinAvailable: ptr.To(intstr.FromInt32(2))})
	b.Status.CurrentHealthy = 5
	kind.PrepareUpdate(b, old)
	if b.Generation != 2 || b.Status.CurrentHealthy != 0 {
		t.Errorf("generation %d, healthy %d; want 2, 0", b.Generation, b.Status.CurrentHealthy)
	}
	b.Status.CurrentHealthy = -1
	kind.Status.PrepareUpdate(b, old)
	if b.Spec.MinAvailable != nil || b.Generation != 1 {
		t.Error("a status update changed the spec")
	}
	checktest.Faults(t, kind.Status.ValidateUpdate(b, old), "status.currentHealthy: Invalid value: -1: must be greater than or equal to 0")
}
