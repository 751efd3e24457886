package noderestriction

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/utils/ptr"
)

func TestANodeOffersItsOwnDevices(t *testing.T) {
	n1 := &user.DefaultInfo{Name: "system:node:n1", Groups: []string{user.NodesGroup}}
	for name, c := range map[string]struct {
		node *string
		ok   bool
	}{"its own": {ptr.To("n1"), true}, "another's": {ptr.To("n2"), false}, "all nodes'": {nil, false}} {
		s := &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "s"}, Spec: resourcev1.ResourceSliceSpec{NodeName: c.node}}
		kind, resource := resourcev1.SchemeGroupVersion.WithKind("ResourceSlice"), resourcev1.SchemeGroupVersion.WithResource("resourceslices")
		create := admission.NewAttributesRecord(s, nil, kind, "", "s", resource, "", admission.Create, &metav1.CreateOptions{}, false, n1)
		remove := admission.NewAttributesRecord(nil, s, kind, "", "s", resource, "", admission.Delete, &metav1.DeleteOptions{}, false, n1)
		for _, a := range []admission.Attributes{create, remove} {
			if err := New(nothing{}).(admission.ValidationInterface).Validate(t.Context(), a, nil); (err == nil) != c.ok {
				t.Errorf("%s, %s: %v", name, a.GetOperation(), err)
			}
		}
	}
}

func TestANodeGivesItsPodsNoClaims(t *testing.T) {
	n1 := &user.DefaultInfo{Name: "system:node:n1", Groups: []string{user.NodesGroup}}
	old := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "d"}, Spec: corev1.PodSpec{NodeName: "n1"}}
	old.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: ptr.To("p-gpu-1")}}
	for name, c := range map[string]struct {
		change func(*corev1.PodStatus)
		ok     bool
	}{
		"its phase":          {func(s *corev1.PodStatus) { s.Phase = corev1.PodRunning }, true},
		"another claim":      {func(s *corev1.PodStatus) { s.ResourceClaimStatuses[0].ResourceClaimName = ptr.To("other") }, false},
		"no claim":           {func(s *corev1.PodStatus) { s.ResourceClaimStatuses = nil }, false},
		"extended resources": {func(s *corev1.PodStatus) { s.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{} }, false},
	} {
		next := old.DeepCopy()
		c.change(&next.Status)
		a := admission.NewAttributesRecord(next, old, corev1.SchemeGroupVersion.WithKind("Pod"), "d", "p", corev1.SchemeGroupVersion.WithResource("pods"), "status", admission.Update, &metav1.UpdateOptions{}, false, n1)
		if err := New(nothing{}).(admission.ValidationInterface).Validate(t.Context(), a, nil); (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
	mirror := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "m", Namespace: "d", Annotations: map[string]string{corev1.MirrorPodAnnotationKey: "1"}, OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "n1"}}}}
	mirror.Spec = corev1.PodSpec{NodeName: "n1", ResourceClaims: []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: ptr.To("other")}}}
	a := admission.NewAttributesRecord(mirror, nil, corev1.SchemeGroupVersion.WithKind("Pod"), "d", "m", corev1.SchemeGroupVersion.WithResource("pods"), "", admission.Create, &metav1.CreateOptions{}, false, n1)
	if err := New(nothing{}).(admission.ValidationInterface).Validate(t.Context(), a, nil); err == nil {
		t.Error("a mirror pod may name a claim, which its node could read then")
	}
}
