package statefulset

import (
	"errors"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/podctl"
)

// TestRetentionLooksAtClaimsThereAre: a set that wants millions of pods costs no more
// than its claims.
func TestRetentionLooksAtClaimsThereAre(t *testing.T) {
	claim := func(name string) *corev1.PersistentVolumeClaim {
		return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
	}
	client := fake.NewSimpleClientset(claim("data-db-0"), claim("data-db-7"), claim("data-db-x"), claim("data-db-07"), claim("data-other-0"), claim("db-0"))
	c := &controller{client: client}
	set := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "db", UID: "u", Generation: 2}, Spec: appsv1.StatefulSetSpec{
		Replicas: ptr.To(int32(2_000_000_000)), VolumeClaimTemplates: []corev1.PersistentVolumeClaim{*claim("data")},
		PersistentVolumeClaimRetentionPolicy: &appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{
			WhenDeleted: appsv1.DeletePersistentVolumeClaimRetentionPolicyType, WhenScaled: appsv1.RetainPersistentVolumeClaimRetentionPolicyType,
		},
	}, Status: appsv1.StatefulSetStatus{ObservedGeneration: 1}}
	if err := c.followRetention(t.Context(), set); err != nil {
		t.Fatal(err)
	}
	if n := len(client.Actions()); n > 20 {
		t.Errorf("%d requests for two claims", n)
	}
	list, err := client.CoreV1().PersistentVolumeClaims("ns").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, claim := range list.Items {
		if owned := len(claim.OwnerReferences) == 1; owned != (claim.Name == "data-db-0" || claim.Name == "data-db-7") {
			t.Errorf("claim %s has owners %v", claim.Name, claim.OwnerReferences)
		}
	}
}

// TestClaimsThereAreUnderAFullQuota: a pod's claims that exist need no quota.
func TestClaimsThereAreUnderAFullQuota(t *testing.T) {
	set := newSet(1, func(set *appsv1.StatefulSet) {
		set.Spec.VolumeClaimTemplates = []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"}}}
	})
	client := fake.NewSimpleClientset(&corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: set.Namespace, Name: "data-db-0"}})
	client.PrependReactor("create", "persistentvolumeclaims", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(corev1.Resource("persistentvolumeclaims"), "data-db", errors.New("exceeded quota"))
	})
	c := &controller{client: client, pods: &podctl.Control{Events: record.NewFakeRecorder(10)}}
	if err := c.ensureClaims(t.Context(), set, 0); err != nil {
		t.Errorf("the claim is there: %v", err)
	}
	if err := c.ensureClaims(t.Context(), set, 1); !apierrors.IsForbidden(err) {
		t.Errorf("the quota is not what keeps a claim from being made: %v", err)
	}
}
