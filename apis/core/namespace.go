package core

import (
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// Namespace is the kind Namespace. Its spec.finalizers, beside those of
// metadata, hold it back until its contents are gone; they are taken away
// through its finalize subresource (PrepareNamespaceFinalize).
func Namespace() kind.Kind {
	return kind.Typed[*corev1.Namespace]{
		GVK:        corev1.SchemeGroupVersion.WithKind("Namespace"),
		Resource:   "namespaces",
		Singular:   "namespace",
		ShortNames: []string{"ns"},

		New:     func() runtime.Object { return &corev1.Namespace{} },
		NewList: func() runtime.Object { return &corev1.NamespaceList{} },

		Default:       defaultNamespace,
		PrepareCreate: prepareNamespaceCreate,
		PrepareUpdate: func(n, old *corev1.Namespace) {
			n.Spec.Finalizers = old.Spec.Finalizers
			n.Status = old.Status
		},
		Validate: validateNamespace,
		ValidateUpdate: func(n, old *corev1.Namespace) field.ErrorList {
			return apivalidation.ValidateObjectMetaUpdate(&n.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Status", "Active, or Terminating while its contents are deleted."),
			cells.Age,
		},
		Row: func(n *corev1.Namespace, now time.Time) []any {
			return []any{n.Name, string(n.Status.Phase), cells.Since(n.CreationTimestamp, now)}
		},
		Fields: func(n *corev1.Namespace) fields.Set {
			return fields.Set{"name": n.Name, "status.phase": string(n.Status.Phase)}
		},

		Status: &kind.TypedStatus[*corev1.Namespace]{
			PrepareUpdate:  func(n, old *corev1.Namespace) { n.Spec = old.Spec },
			ValidateUpdate: validateNamespaceStatusUpdate,
		},
		UnconditionalUpdate: true,
	}.Kind()
}

// defaultNamespace labels the namespace with its name, so that selectors can
// name it.
func defaultNamespace(n *corev1.Namespace) {
	if n.Status.Phase == "" {
		n.Status.Phase = corev1.NamespaceActive
	}
	if n.Name == "" || n.Labels[corev1.LabelMetadataName] == n.Name {
		return
	}
	if n.Labels == nil {
		n.Labels = map[string]string{}
	}
	n.Labels[corev1.LabelMetadataName] = n.Name
}

func prepareNamespaceCreate(n *corev1.Namespace) {
	n.Status = corev1.NamespaceStatus{Phase: corev1.NamespaceActive}
	if !slices.Contains(n.Spec.Finalizers, corev1.FinalizerKubernetes) {
		n.Spec.Finalizers = append(n.Spec.Finalizers, corev1.FinalizerKubernetes)
	}
	defaultNamespace(n) // the name may have been generated since decoding
}

func validateNamespace(n *corev1.Namespace) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&n.ObjectMeta, false, apivalidation.ValidateNamespaceName, field.NewPath("metadata"))
	return append(errs, validateNamespaceFinalizers(n, nil)...)
}

func validateNamespaceFinalizers(n *corev1.Namespace, had []corev1.FinalizerName) field.ErrorList {
	var errs field.ErrorList
	at, old := field.NewPath("spec", "finalizers"), sets.New(had...)
	for i, finalizer := range n.Spec.Finalizers {
		if !old.Has(finalizer) {
			errs = append(errs, check.Finalizer(at.Index(i), string(finalizer))...)
		}
	}
	return errs
}

func validateNamespaceStatusUpdate(n, old *corev1.Namespace) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&n.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	at := field.NewPath("status", "phase")
	switch {
	case n.DeletionTimestamp.IsZero() && n.Status.Phase != corev1.NamespaceActive:
		errs = append(errs, field.Invalid(at, n.Status.Phase, "may only be 'Active' if `deletionTimestamp` is empty"))
	case !n.DeletionTimestamp.IsZero() && n.Status.Phase != corev1.NamespaceTerminating:
		errs = append(errs, field.Invalid(at, n.Status.Phase, "may only be 'Terminating' if `deletionTimestamp` is not empty"))
	}
	return errs
}

// PrepareNamespaceFinalize is PrepareUpdate of the finalize subresource: it
// keeps everything of old but spec.finalizers.
func PrepareNamespaceFinalize(n, old *corev1.Namespace) {
	finalizers := n.Spec.Finalizers
	version := n.ResourceVersion
	old.DeepCopyInto(n)
	n.Spec.Finalizers, n.ResourceVersion = finalizers, version
}

// ValidateNamespaceFinalize is ValidateUpdate of the finalize subresource.
func ValidateNamespaceFinalize(n, old *corev1.Namespace) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&n.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	return append(errs, validateNamespaceFinalizers(n, old.Spec.Finalizers)...)
}
