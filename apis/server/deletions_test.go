package server_test

import (
	"slices"
	"testing"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server/servertest"
)

// TestDeletionsOfOwners: what a deletion means for dependents is said, or warned of.
func TestDeletionsOfOwners(t *testing.T) {
	s := servertest.Start(t, nil)
	warnings := &warned{}
	config := rest.CopyConfig(s.LoopbackConfig())
	config.WarningHandler = warnings
	client := must[*kubernetes.Clientset](t)(kubernetes.NewForConfig(config))
	jobs := client.BatchV1().Jobs("default")
	job := func(name string) *batchv1.Job {
		return &batchv1.Job{ObjectMeta: meta(name), Spec: batchv1.JobSpec{Template: corev1.PodTemplateSpec{Spec: corev1.PodSpec{RestartPolicy: "Never", Containers: []corev1.Container{{Name: "c", Image: "i"}}}}}}
	}
	background := metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)}
	for name, test := range map[string]struct {
		delete func(string) error
		warns  bool
	}{
		"silent":     {func(name string) error { return jobs.Delete(t.Context(), name, metav1.DeleteOptions{}) }, true},
		"background": {func(name string) error { return jobs.Delete(t.Context(), name, background) }, false},
		"many": {func(string) error {
			return jobs.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{})
		}, true},
	} {
		must[*batchv1.Job](t)(jobs.Create(t.Context(), job(name), metav1.CreateOptions{}))
		warnings.said = nil
		if err := test.delete(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if (len(warnings.said) > 0) != test.warns {
			t.Errorf("%s: warnings %q", name, warnings.said)
		}
	}

	namespaces := client.CoreV1().Namespaces()
	for policy, finalizer := range map[metav1.DeletionPropagation]string{metav1.DeletePropagationForeground: "foregroundDeletion", metav1.DeletePropagationOrphan: "orphan", metav1.DeletePropagationBackground: ""} {
		made := must[*corev1.Namespace](t)(namespaces.Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "gone-"}}, metav1.CreateOptions{}))
		if err := namespaces.Delete(t.Context(), made.Name, metav1.DeleteOptions{PropagationPolicy: &policy}); err != nil {
			t.Fatal(err)
		}
		ns := must[*corev1.Namespace](t)(namespaces.Get(t.Context(), made.Name, metav1.GetOptions{}))
		if finalizer == "" && len(ns.Finalizers) > 0 || finalizer != "" && !slices.Equal(ns.Finalizers, []string{finalizer}) {
			t.Errorf("%s: finalizers %q", policy, ns.Finalizers)
		}
	}
}

// TestWritesByPut: a PUT makes a Service that is not there; a scale's UID is compared; a
// finalizer needs a domain.
func TestWritesByPut(t *testing.T) {
	s := servertest.Start(t, nil)
	core := s.Client.CoreV1()
	service := &corev1.Service{ObjectMeta: meta("put"), Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
	made := must[*corev1.Service](t)(core.Services("default").Update(t.Context(), service, metav1.UpdateOptions{}))
	if made.UID == "" {
		t.Errorf("made by a PUT: %+v", made)
	}
	rc := &corev1.ReplicationController{ObjectMeta: meta("rc"), Spec: corev1.ReplicationControllerSpec{Selector: map[string]string{"a": "b"}, Template: &corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"a": "b"}}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
	}}}
	must[*corev1.ReplicationController](t)(core.ReplicationControllers("default").Create(t.Context(), rc, metav1.CreateOptions{}))
	_, err := core.ReplicationControllers("default").Patch(t.Context(), "rc", types.MergePatchType, []byte(`{"metadata":{"uid":"another"},"spec":{"replicas":3}}`), metav1.PatchOptions{}, "scale")
	if !apierrors.IsConflict(err) {
		t.Errorf("a scale of another UID: %v, want Conflict", err)
	}
	cm := configMap("held", nil)
	cm.Finalizers = []string{"held"}
	if _, err := core.ConfigMaps("default").Create(t.Context(), cm, metav1.CreateOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("a finalizer without a domain: %v, want Invalid", err)
	}
	cm.Finalizers = []string{"example.com/held"}
	cm = must[*corev1.ConfigMap](t)(core.ConfigMaps("default").Create(t.Context(), cm, metav1.CreateOptions{}))
	cm.Finalizers = append(cm.Finalizers, "held")
	if _, err := core.ConfigMaps("default").Update(t.Context(), cm, metav1.UpdateOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("a finalizer without a domain, later: %v, want Invalid", err)
	}
}
