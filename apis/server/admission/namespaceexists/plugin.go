// Package namespaceexists implements NamespaceExists: it refuses requests in a namespace
// that does not exist, updates and deletions included. It is off by default:
// namespacelifecycle does what creation needs.
package namespaceexists

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"
)

// Namespaces finds a namespace, or fails with a NotFound StatusError.
type Namespaces interface {
	Namespace(ctx context.Context, name string) (*corev1.Namespace, error)
}

type plugin struct {
	*admission.Handler
	namespaces Namespaces
}

var _ admission.ValidationInterface = &plugin{}

// New makes the plugin.
func New(namespaces Namespaces) admission.Interface {
	return &plugin{admission.NewHandler(admission.Create, admission.Update, admission.Delete), namespaces}
}

// Validate looks the namespace up.
func (p *plugin) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetNamespace() == "" || a.GetKind().GroupKind() == corev1.SchemeGroupVersion.WithKind("Namespace").GroupKind() {
		return nil
	}
	_, err := p.namespaces.Namespace(ctx, a.GetNamespace())
	if err == nil || apierrors.IsNotFound(err) {
		return err
	}
	return apierrors.NewInternalError(fmt.Errorf("look up namespace %s: %w", a.GetNamespace(), err))
}
