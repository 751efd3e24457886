package apps

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func newReplicaSet(edit func(*appsv1.ReplicaSet)) *appsv1.ReplicaSet {
	r := &appsv1.ReplicaSet{
		ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "hello", ResourceVersion: "7", Generation: 1},
		Spec:       appsv1.ReplicaSetSpec{Selector: &metav1.LabelSelector{MatchLabels: webLabels}, Template: newTemplate()},
	}
	edit(r)
	ReplicaSet().Default(r)
	return r
}

func TestValidateReplicaSet(t *testing.T) {
	tests := []struct {
		name string
		edit func(*appsv1.ReplicaSet)
		want []string
	}{
		{"sound", func(*appsv1.ReplicaSet) {}, nil},
		{"negative", func(r *appsv1.ReplicaSet) { r.Spec.Replicas = ptr.To[int32](-1) }, []string{"spec.replicas: Invalid value: -1: must be greater than or equal to 0"}},
		{"empty selector", func(r *appsv1.ReplicaSet) { r.Spec.Selector = &metav1.LabelSelector{} }, []string{"spec.selector: Invalid value: {}: empty selector is invalid for replicaset"}},
		{"selector of other labels", func(r *appsv1.ReplicaSet) { r.Spec.Template.Labels = nil }, []string{"spec.template.metadata.labels: Invalid value: null: `selector` does not match template `labels`"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) { checktest.Faults(t, ReplicaSet().Validate(newReplicaSet(test.edit)), test.want...) })
	}
}

func TestReplicaSetUpdate(t *testing.T) {
	kind := ReplicaSet()
	old := newReplicaSet(func(*appsv1.ReplicaSet) {})
	scaled := newReplicaSet(func(r *appsv1.ReplicaSet) { r.Spec.Replicas, r.Status.Replicas = ptr.To[int32](4), 4 })
	kind.PrepareUpdate(scaled, old)
	if scaled.Generation != 2 || scaled.Status.Replicas != 0 {
		t.Errorf("generation %d, status.replicas %d; want 2, 0", scaled.Generation, scaled.Status.Replicas)
	}
	checktest.Faults(t, kind.ValidateUpdate(scaled, old))

	moved := newReplicaSet(func(r *appsv1.ReplicaSet) {
		r.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"a": "b"}}
		r.Spec.Template.Labels = map[string]string{"a": "b"}
	})
	checktest.Faults(t, kind.ValidateUpdate(moved, old), "spec.selector: Invalid value: ")

	status := old.DeepCopy()
	status.Status = appsv1.ReplicaSetStatus{Replicas: 1, FullyLabeledReplicas: 2, ObservedGeneration: -1}
	checktest.Faults(t, kind.Status.ValidateUpdate(status, old),
		"status.fullyLabeledReplicas: Invalid value: 2: cannot be greater than status.replicas",
		"status.observedGeneration: Invalid value: -1: must be greater than or equal to 0")
}
