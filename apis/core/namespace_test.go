package core

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func TestNamespaceLife(t *testing.T) {
	n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "hello"}, Status: corev1.NamespaceStatus{Phase: corev1.NamespaceTerminating}}
	prepareNamespaceCreate(n)
	want := &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{Name: "hello", Labels: map[string]string{"kubernetes.io/metadata.name": "hello"}},
		Spec:       corev1.NamespaceSpec{Finalizers: []corev1.FinalizerName{"kubernetes"}},
		Status:     corev1.NamespaceStatus{Phase: corev1.NamespaceActive},
	}
	if diff := cmp.Diff(want, n); diff != "" {
		t.Errorf("created (-want +got):\n%s", diff)
	}

	old := n.DeepCopy()
	old.ResourceVersion = "7"
	finalized := old.DeepCopy()
	finalized.Labels = nil
	finalized.Spec.Finalizers = nil
	PrepareNamespaceFinalize(finalized, old)
	if len(finalized.Spec.Finalizers) != 0 || finalized.Labels == nil {
		t.Errorf("finalize may change spec.finalizers only, got %+v", finalized)
	}
	finalized.Spec.Finalizers = []corev1.FinalizerName{"not a name"}
	if errs := ValidateNamespaceFinalize(finalized, old); len(errs) == 0 {
		t.Error("a bad finalizer passed")
	}
}

func TestValidateNamespace(t *testing.T) {
	n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "a.b", Namespace: "c"}}
	checktest.Faults(t, validateNamespace(n),
		`metadata.name: Invalid value: "a.b": must not contain dots`,
		"metadata.namespace: Forbidden: not allowed on this type")
}

func TestValidateNamespaceStatusUpdate(t *testing.T) {
	deleted := metav1.Now()
	for _, test := range []struct {
		phase   corev1.NamespacePhase
		deleted *metav1.Time
		want    []string
	}{
		{corev1.NamespaceActive, nil, nil},
		{corev1.NamespaceTerminating, &deleted, nil},
		{corev1.NamespaceTerminating, nil, []string{`status.phase: Invalid value: "Terminating": may only be 'Active' if ` + "`deletionTimestamp` is empty"}},
		{corev1.NamespaceActive, &deleted, []string{`status.phase: Invalid value: "Active": may only be 'Terminating' if ` + "`deletionTimestamp` is not empty"}},
	} {
		n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "a", ResourceVersion: "7", DeletionTimestamp: test.deleted}, Status: corev1.NamespaceStatus{Phase: test.phase}}
		checktest.Faults(t, validateNamespaceStatusUpdate(n, n.DeepCopy()), test.want...)
	}
}
