package server_test

import (
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
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

// A node's Lease and events carry none, whoever makes them, through all updates; other
// Leases do; and an apply begins to keep account.
func TestLeasesOfNodesAndEventsHaveNoManagedFields(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx := t.Context()
	lease := func(namespace string) *coordinationv1.Lease {
		t.Helper()
		leases := s.Client.CoordinationV1().Leases(namespace)
		at := metav1.NowMicro()
		l, err := leases.Create(ctx, &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Spec: coordinationv1.LeaseSpec{HolderIdentity: ptr.To("n1"), LeaseDurationSeconds: ptr.To[int32](40), RenewTime: &at},
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		later := metav1.NewMicroTime(at.Add(time.Second))
		l.Spec.RenewTime = &later
		if l, err = leases.Update(ctx, l, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		return l
	}
	if l := lease(corev1.NamespaceNodeLease); len(l.ManagedFields) != 0 {
		t.Errorf("a node's Lease has %v", l.ManagedFields)
	}
	if l := lease(metav1.NamespaceDefault); len(l.ManagedFields) == 0 {
		t.Error("another Lease has no managedFields")
	}
	events := s.Client.CoreV1().Events(metav1.NamespaceDefault)
	e, err := events.Create(ctx, &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "e"}, Type: "Normal", Reason: "Seen", Message: "once",
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: metav1.NamespaceDefault, Name: "p"}, Source: corev1.EventSource{Component: "test"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if e, err = events.Patch(ctx, e.Name, types.MergePatchType, []byte(`{"count":2}`), metav1.PatchOptions{}); err != nil || len(e.ManagedFields) != 0 || e.Count != 2 {
		t.Errorf("an event after a patch: %v, %v", e, err)
	}
	e, err = events.Patch(ctx, "e", types.ApplyPatchType, []byte(`{"apiVersion":"v1","kind":"Event","metadata":{"name":"e","labels":{"by":"hand"}}}`),
		metav1.PatchOptions{FieldManager: "hand", Force: ptr.To(true)})
	if err != nil || len(e.ManagedFields) != 2 || e.Labels["by"] != "hand" {
		t.Errorf("an event after an apply: %v, %v", e, err)
	}
}
