// Package autoprovision implements NamespaceAutoProvision: it creates the namespace of a
// new object if it does not exist. It is off by default.
package autoprovision

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/client-go/kubernetes"
)

// Namespaces finds a namespace, or fails with a NotFound StatusError.
type Namespaces interface {
	Namespace(ctx context.Context, name string) (*corev1.Namespace, error)
}

type plugin struct {
	*admission.Handler
	namespaces Namespaces
	client     kubernetes.Interface
}

var _ admission.MutationInterface = &plugin{}

// New makes the plugin; client creates the namespaces.
func New(namespaces Namespaces, client kubernetes.Interface) admission.Interface {
	return &plugin{admission.NewHandler(admission.Create), namespaces, client}
}

// Admit makes the namespace. A dry run makes nothing, and is refused as it
// would be without the plugin.
func (p *plugin) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetNamespace() == "" || a.IsDryRun() || a.GetKind().GroupKind() == corev1.SchemeGroupVersion.WithKind("Namespace").GroupKind() {
		return nil
	}
	_, err := p.namespaces.Namespace(ctx, a.GetNamespace())
	if apierrors.IsNotFound(err) {
		namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: a.GetNamespace()}}
		if _, err = p.client.CoreV1().Namespaces().Create(ctx, namespace, metav1.CreateOptions{}); apierrors.IsAlreadyExists(err) {
			return nil
		}
	}
	if err != nil {
		return admission.NewForbidden(a, fmt.Errorf("make namespace %s: %w", a.GetNamespace(), err))
	}
	return nil
}
