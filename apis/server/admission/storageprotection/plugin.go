// Package storageprotection implements StorageObjectInUseProtection: it gives new claims, volumes and VolumeAttributesClasses the finalizer that
// keeps them while they are used. A loop of the leader takes it off.
package storageprotection

import (
	"context"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
)

type plugin struct{ *admission.Handler }

var _ admission.MutationInterface = &plugin{}

// New makes the plugin.
func New() admission.Interface {
	return &plugin{Handler: admission.NewHandler(admission.Create)}
}

// Admit adds the finalizer.
func (*plugin) Admit(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetSubresource() != "" {
		return nil
	}
	var finalizer string
	switch a.GetResource().GroupResource() {
	case corev1.Resource("persistentvolumeclaims"):
		finalizer = "kubernetes.io/pvc-protection"
	case corev1.Resource("persistentvolumes"):
		finalizer = "kubernetes.io/pv-protection"
	case storagev1.Resource("volumeattributesclasses"):
		finalizer = "kubernetes.io/vac-protection"
	default:
		return nil
	}
	if obj, ok := a.GetObject().(metav1.Object); ok && !slices.Contains(obj.GetFinalizers(), finalizer) {
		obj.SetFinalizers(append(obj.GetFinalizers(), finalizer))
	}
	return nil
}
