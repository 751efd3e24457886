package server_test

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server/servertest"
)

// Pods that controllers make carry no managedFields, through all updates of
// their status, until a client applies to them; pods of all other clients do.
func TestPodsOfControllersHaveNoManagedFields(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx := t.Context()
	controller := s.ClientFor(t, user.KubeControllerManager, user.SystemPrivilegedGroup)
	pods := s.Client.CoreV1().Pods("default")
	if _, err := controller.CoreV1().Pods("default").Create(ctx, pod("made"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	theirs, err := pods.Create(ctx, pod("theirs"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(theirs.ManagedFields) == 0 {
		t.Error("a user's pod has no managedFields")
	}
	got, err := pods.Patch(ctx, "made", types.StrategicMergePatchType, []byte(`{"status":{"phase":"Running"}}`), metav1.PatchOptions{}, "status")
	if err != nil {
		t.Fatal(err)
	}
	if len(got.ManagedFields) != 0 {
		t.Errorf("after a status patch: %v", got.ManagedFields)
	}
	got, err = pods.Patch(ctx, "made", types.ApplyPatchType, []byte(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"made","labels":{"by":"hand"}}}`),
		metav1.PatchOptions{FieldManager: "hand", Force: ptr.To(true)})
	if err != nil {
		t.Fatal(err)
	}
	managers := map[string]bool{}
	for _, m := range got.ManagedFields {
		managers[m.Manager] = true
	}
	if !managers["hand"] || !managers["before-first-apply"] || got.Labels["by"] != "hand" {
		t.Errorf("after an apply: managers %v, labels %v", managers, got.Labels)
	}
	got, err = pods.Patch(ctx, "made", types.StrategicMergePatchType, []byte(`{"status":{"phase":"Failed"}}`), metav1.PatchOptions{FieldManager: "agent"}, "status")
	if err != nil {
		t.Fatal(err)
	}
	tracked := false
	for _, m := range got.ManagedFields {
		tracked = tracked || m.Manager == "agent"
	}
	if !tracked {
		t.Errorf("after an apply, a status patch is kept account of: %v", got.ManagedFields)
	}
}
