package fairness

import (
	"testing"

	"golang.org/x/sync/errgroup"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/apis/flowcontrol/bootstrap"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"
)

// TestEnsure: a suggested object is restored unless an administrator has changed
// it, and only by a whole pass.
func TestEnsure(t *testing.T) {
	want := bootstrap.SuggestedPriorityLevelConfigurationWorkloadLow
	const theirs = 7
	for _, test := range []struct {
		name       string
		annotation string
		generation int64
		whole      bool
		kept       bool
	}{
		{"by its annotation", "true", 5, true, false},
		{"not in haste", "true", 5, false, true},
		{"theirs", "false", 1, true, true},
		{"never changed", "", 1, true, false},
		{"changed", "", 2, true, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			have := want.DeepCopy()
			have.Annotations, have.Generation = nil, test.generation
			if test.annotation != "" {
				have.Annotations = map[string]string{flowcontrolv1.AutoUpdateAnnotationKey: test.annotation}
			}
			have.Spec.Limited.NominalConcurrencyShares = ptr.To(int32(theirs))
			got, err := levels(t, want, have, test.whole).get(want.Name)
			if err != nil {
				t.Fatal(err)
			}
			if shares := *got.Spec.Limited.NominalConcurrencyShares; (shares == theirs) != test.kept {
				t.Errorf("shares %d", shares)
			}
		})
	}
}

func TestEnsureExempt(t *testing.T) {
	want := bootstrap.MandatoryPriorityLevelConfigurationExempt
	have := want.DeepCopy()
	have.Spec.Exempt.NominalConcurrencyShares = ptr.To(int32(3))
	got, err := levels(t, want, have, true).get(want.Name)
	if err != nil || *got.Spec.Exempt.NominalConcurrencyShares != 3 {
		t.Errorf("%+v, %v: what the exempt level takes is the user's choice", got, err)
	}
	if got, err := levels(t, want, nil, false).get(want.Name); err != nil || got.Spec.Type != flowcontrolv1.PriorityLevelEnablementExempt {
		t.Errorf("missing: %+v, %v", got, err)
	}
}

// levels makes a pass over want as it is stored: have, or nothing.
func levels(t *testing.T, want, have *flowcontrolv1.PriorityLevelConfiguration, whole bool) *objects[*flowcontrolv1.PriorityLevelConfiguration] {
	t.Helper()
	client := fake.NewClientset()
	api := client.FlowcontrolV1().PriorityLevelConfigurations()
	if have != nil {
		if _, err := api.Create(t.Context(), have, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	o := &objects[*flowcontrolv1.PriorityLevelConfiguration]{
		kind: "PriorityLevelConfiguration", writer: api, copySpec: copyLevel,
		get: func(name string) (*flowcontrolv1.PriorityLevelConfiguration, error) {
			return api.Get(t.Context(), name, metav1.GetOptions{})
		},
		suggested: []*flowcontrolv1.PriorityLevelConfiguration{want},
	}
	var group errgroup.Group
	o.ensure(t.Context(), &group, whole)
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
	return o
}
