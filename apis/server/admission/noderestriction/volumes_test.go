package noderestriction

import (
	"context"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
)

func TestANodeSaysHowLargeAVolumeIs(t *testing.T) {
	n1 := &user.DefaultInfo{Name: "system:node:n1", Groups: []string{user.NodesGroup}}
	old := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "d"}, Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "v"}, Status: corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound}}
	for name, c := range map[string]struct {
		part   string
		change func(*corev1.PersistentVolumeClaim)
		ok     bool
	}{
		"its size": {"status", func(c *corev1.PersistentVolumeClaim) {
			c.Status.Capacity = corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}
		}, true},
		"what is left": {"status", func(c *corev1.PersistentVolumeClaim) {
			c.Status.Conditions = []corev1.PersistentVolumeClaimCondition{{Type: "x"}}
		}, true},
		"its phase":       {"status", func(c *corev1.PersistentVolumeClaim) { c.Status.Phase = corev1.ClaimLost }, false},
		"its volume":      {"status", func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "w" }, false},
		"its annotations": {"status", func(c *corev1.PersistentVolumeClaim) { c.Annotations = map[string]string{"a": "b"} }, false},
		"the claim":       {"", func(*corev1.PersistentVolumeClaim) {}, false},
	} {
		next := old.DeepCopy()
		c.change(next)
		a := admission.NewAttributesRecord(next, old, corev1.SchemeGroupVersion.WithKind("PersistentVolumeClaim"), "d", "c", corev1.SchemeGroupVersion.WithResource("persistentvolumeclaims"), c.part, admission.Update, &metav1.UpdateOptions{}, false, n1)
		if err := New(nothing{}).(admission.ValidationInterface).Validate(t.Context(), a, nil); (err == nil) != c.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestANodeHasItsOwnDrivers(t *testing.T) {
	n1 := &user.DefaultInfo{Name: "system:node:n1", Groups: []string{user.NodesGroup}}
	for name, ok := range map[string]bool{"n1": true, "n2": false} {
		var object runtime.Object = &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: name}}
		a := admission.NewAttributesRecord(object, nil, storagev1.SchemeGroupVersion.WithKind("CSINode"), "", "", storagev1.SchemeGroupVersion.WithResource("csinodes"), "", admission.Create, &metav1.CreateOptions{}, false, n1)
		if err := New(nothing{}).(admission.ValidationInterface).Validate(t.Context(), a, nil); (err == nil) != ok {
			t.Errorf("of %s: %v", name, err)
		}
	}
}

func TestAudiencesOfDrivers(t *testing.T) {
	p := &plugin{objects: vault{}}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "d"}, Spec: corev1.PodSpec{Volumes: []corev1.Volume{
		{VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}}},
		{VolumeSource: corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{Driver: "unknown.example.com"}}},
	}}}
	if got := p.driverAudiences(t.Context(), pod); !slices.Equal(got, []string{"vault"}) {
		t.Errorf("audiences %q", got)
	}
	pod.Spec.Volumes = pod.Spec.Volumes[1:]
	if got := p.driverAudiences(t.Context(), pod); len(got) > 0 {
		t.Errorf("of a driver without an object: %q", got)
	}
}

// nothing holds no object.
type nothing struct{}

func (nothing) Pod(context.Context, string, string) (*corev1.Pod, error) {
	return nil, errors.NewNotFound(corev1.Resource("pods"), "")
}

func (nothing) Claim(context.Context, string, string) (*corev1.PersistentVolumeClaim, error) {
	return nil, errors.NewNotFound(corev1.Resource("persistentvolumeclaims"), "")
}

func (nothing) Volume(context.Context, string) (*corev1.PersistentVolume, error) {
	return nil, errors.NewNotFound(corev1.Resource("persistentvolumes"), "")
}

func (nothing) Attachment(context.Context, string) (*storagev1.VolumeAttachment, error) {
	return nil, errors.NewNotFound(storagev1.Resource("volumeattachments"), "")
}

func (nothing) CSIDriver(context.Context, string) (*storagev1.CSIDriver, error) {
	return nil, errors.NewNotFound(storagev1.Resource("csidrivers"), "")
}

func (nothing) ServiceAccount(context.Context, string, string) (*corev1.ServiceAccount, error) {
	return nil, errors.NewNotFound(corev1.Resource("serviceaccounts"), "")
}

func (nothing) Node(context.Context, string) (*corev1.Node, error) {
	return nil, errors.NewNotFound(corev1.Resource("nodes"), "")
}

// vault has a claim "c" whose volume's driver wants tokens for the vault.
type vault struct{ nothing }

func (vault) Claim(context.Context, string, string) (*corev1.PersistentVolumeClaim, error) {
	return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{UID: "c1"}, Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "v"}}, nil
}

func (vault) Volume(context.Context, string) (*corev1.PersistentVolume, error) {
	return &corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{ClaimRef: &corev1.ObjectReference{UID: "c1"}, PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: "v.example.com"}}}}, nil
}

func (v vault) CSIDriver(ctx context.Context, name string) (*storagev1.CSIDriver, error) {
	if name != "v.example.com" {
		return v.nothing.CSIDriver(ctx, name)
	}
	return &storagev1.CSIDriver{Spec: storagev1.CSIDriverSpec{TokenRequests: []storagev1.TokenRequest{{Audience: "vault"}}}}, nil
}
