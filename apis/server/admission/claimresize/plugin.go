// Package claimresize implements PersistentVolumeClaimResize: bound claims may grow only
// if their storage class allows expansion.
package claimresize

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"
)

// Classes finds a storage class, or fails with a NotFound StatusError.
type Classes interface {
	StorageClass(ctx context.Context, name string) (*storagev1.StorageClass, error)
}

type plugin struct {
	*admission.Handler
	classes Classes
}

var _ admission.ValidationInterface = &plugin{}

// New makes the plugin.
func New(classes Classes) admission.Interface {
	return &plugin{Handler: admission.NewHandler(admission.Update), classes: classes}
}

// errNoGrowth is the refusal.
var errNoGrowth = errors.New("only dynamically provisioned pvc can be resized and the storageclass that provisions the pvc must support resize")

// Validate looks at claims that ask for more than before.
func (p *plugin) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().GroupResource() != corev1.Resource("persistentvolumeclaims") || a.GetSubresource() != "" {
		return nil
	}
	claim, ok := a.GetObject().(*corev1.PersistentVolumeClaim)
	old, wasOK := a.GetOldObject().(*corev1.PersistentVolumeClaim)
	if !ok || !wasOK {
		return nil
	}
	size, was := claim.Spec.Resources.Requests[corev1.ResourceStorage], old.Spec.Resources.Requests[corev1.ResourceStorage]
	if size.Cmp(was) <= 0 {
		return nil
	}
	if old.Status.Phase != corev1.ClaimBound {
		return admission.NewForbidden(a, errors.New("only bound persistent volume claims can be expanded"))
	}
	name := ""
	if old.Spec.StorageClassName != nil {
		name = *old.Spec.StorageClassName
	}
	if name == "" {
		return admission.NewForbidden(a, errNoGrowth)
	}
	class, err := p.classes.StorageClass(ctx, name)
	if apierrors.IsNotFound(err) {
		return admission.NewForbidden(a, errNoGrowth)
	}
	if err != nil {
		return apierrors.NewInternalError(fmt.Errorf("read storage class %s: %w", name, err))
	}
	if class.AllowVolumeExpansion == nil || !*class.AllowVolumeExpansion {
		return admission.NewForbidden(a, errNoGrowth)
	}
	return nil
}
