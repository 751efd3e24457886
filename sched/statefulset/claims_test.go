package statefulset

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"
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
