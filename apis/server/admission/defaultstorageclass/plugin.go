// Package defaultstorageclass implements DefaultStorageClass: claims without a storage
// class get the one that is marked as the default. A claim with "" gets none.
package defaultstorageclass

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"

	"github.com/clusterd/clusterd/apis/storage"
)

// Classes lists the storage classes. They may be a moment old.
type Classes interface {
	StorageClasses(ctx context.Context) ([]storagev1.StorageClass, error)
}

type plugin struct {
	*admission.Handler
	classes Classes
}

var _ admission.MutationInterface = &plugin{}

// New makes the plugin.
func New(classes Classes) admission.Interface {
	return &plugin{Handler: admission.NewHandler(admission.Create), classes: classes}
}

// Admit fills in the class. If there is no default, the claim stays without
// one, and gets it when there is.
func (p *plugin) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().GroupResource() != corev1.Resource("persistentvolumeclaims") || a.GetSubresource() != "" {
		return nil
	}
	claim, ok := a.GetObject().(*corev1.PersistentVolumeClaim)
	if !ok {
		return errors.NewBadRequest(fmt.Sprintf("expected a PersistentVolumeClaim, got %T", a.GetObject()))
	}
	if _, beta := claim.Annotations[corev1.BetaStorageClassAnnotation]; beta || claim.Spec.StorageClassName != nil {
		return nil
	}
	classes, err := p.classes.StorageClasses(ctx)
	if err != nil {
		return errors.NewInternalError(fmt.Errorf("find the default storage class of claim %s: %w", claim.Name, err))
	}
	if class := storage.Default(classes); class != nil {
		claim.Spec.StorageClassName = &class.Name
	}
	return nil
}
