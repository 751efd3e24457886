// Package namespacelifecycle keeps objects out of namespaces that do not exist
// or are going away, and keeps the system's namespaces from being deleted.
//
// The library has a plugin of this name. It works from an informer; this one
// reads the namespace from the store, which is in this process' memory, so
// that it is never stale and holds no second copy.
package namespacelifecycle

import (
	"context"
	stderrors "errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
)

// Immortal are the namespaces the system is made of.
var Immortal = []string{metav1.NamespaceDefault, metav1.NamespaceSystem, metav1.NamespacePublic, corev1.NamespaceNodeLease}

// Namespaces finds a namespace, or fails with a NotFound StatusError.
type Namespaces interface {
	Namespace(ctx context.Context, name string) (*corev1.Namespace, error)
}

type plugin struct {
	*admission.Handler
	namespaces Namespaces
}

var _ admission.MutationInterface = &plugin{}

// New makes the plugin.
func New(namespaces Namespaces) admission.Interface {
	return &plugin{Handler: admission.NewHandler(admission.Create, admission.Delete), namespaces: namespaces}
}

// Admit refuses the deletion of an immortal namespace and any creation in a
// namespace that is missing or terminating. It changes nothing: it is asked with
// the plugins that do, so that who errs in the namespace learns that, and not
// what else another plugin misses in it.
func (p *plugin) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetKind().GroupKind() == corev1.SchemeGroupVersion.WithKind("Namespace").GroupKind() {
		if a.GetOperation() == admission.Delete && slices.Contains(Immortal, a.GetName()) {
			return errors.NewForbidden(a.GetResource().GroupResource(), a.GetName(), fmt.Errorf("this namespace may not be deleted"))
		}
		return nil
	}
	if a.GetOperation() != admission.Create || a.GetNamespace() == "" || a.GetResource().Group == "authorization.k8s.io" {
		return nil
	}
	ns, err := p.namespaces.Namespace(ctx, a.GetNamespace())
	switch {
	case errors.IsNotFound(err):
		return err
	case err != nil:
		return errors.NewInternalError(fmt.Errorf("look up namespace %s: %w", a.GetNamespace(), err))
	case ns.DeletionTimestamp == nil && ns.Status.Phase != corev1.NamespaceTerminating:
		return nil
	}
	refusal := admission.NewForbidden(a, fmt.Errorf("unable to create new content in namespace %s because it is being terminated", ns.Name))
	var status *errors.StatusError
	if stderrors.As(refusal, &status) {
		status.ErrStatus.Details.Causes = append(status.ErrStatus.Details.Causes, metav1.StatusCause{
			Type:    corev1.NamespaceTerminatingCause,
			Message: fmt.Sprintf("namespace %s is being terminated", ns.Name),
			Field:   "metadata.namespace",
		})
	}
	return refusal
}
