package resource

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage"
	storeerr "k8s.io/apiserver/pkg/storage/errors"
	"k8s.io/apiserver/pkg/util/dryrun"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/clusterd/clusterd/apis/core"
)

// Namespaces is the resource of Namespace. Its deletion takes two steps: a
// namespace is marked Terminating, and goes when the namespace controller has
// emptied it and taken the last entry out of spec.finalizers. A collection of
// namespaces cannot be deleted in one request.
type Namespaces struct {
	namespaceVerbs
	store *Store
}

// namespaceVerbs are the parts of Store that Namespaces shares.
type namespaceVerbs interface {
	rest.Getter
	rest.Lister
	rest.CreaterUpdater
	rest.Watcher
	rest.Scoper
	rest.SingularNameProvider
	rest.ShortNamesProvider
	rest.CategoriesProvider
	rest.ResetFieldsStrategy
	rest.StorageVersionProvider
	rest.StorageWithReadiness
}

var _ rest.GracefulDeleter = &Namespaces{}

// NewNamespaces makes the resource of Namespace on its store.
func NewNamespaces(store *Store) *Namespaces {
	store.ShouldDeleteDuringUpdate = emptied
	return &Namespaces{namespaceVerbs: store, store: store}
}

// emptied reports whether an update took the last finalizer of a namespace
// that is being deleted.
func emptied(_ context.Context, _ string, obj, _ runtime.Object) bool {
	ns, ok := obj.(*corev1.Namespace)
	return ok && ns.DeletionTimestamp != nil && len(ns.Spec.Finalizers) == 0 && len(ns.Finalizers) == 0
}

// Delete marks the namespace called name for deletion; once it has no
// finalizer left, Delete removes it.
func (n *Namespaces) Delete(ctx context.Context, name string, validate rest.ValidateObjectFunc, options *metav1.DeleteOptions) (runtime.Object, bool, error) {
	obj, err := n.Get(ctx, name, &metav1.GetOptions{})
	if err != nil {
		return nil, false, err
	}
	ns, ok := obj.(*corev1.Namespace)
	if !ok {
		return nil, false, errors.NewInternalError(fmt.Errorf("delete namespace %s: stored as a %T", name, obj))
	}
	if options == nil {
		options = &metav1.DeleteOptions{}
	}
	if options.Preconditions == nil {
		options.Preconditions = &metav1.Preconditions{}
	}
	// What is decided here holds for the namespace just read and no other.
	if options.Preconditions.UID == nil {
		options.Preconditions.UID = &ns.UID
	}
	switch {
	case ns.DeletionTimestamp == nil:
		marked, err := n.mark(ctx, name, validate, options)
		return marked, false, err
	case len(ns.Spec.Finalizers) > 0:
		return ns, false, nil
	}
	return n.store.Delete(ctx, name, validate, options)
}

// mark makes the namespace Terminating. A namespace without finalizers of its
// spec (none is created so) goes with the update.
func (n *Namespaces) mark(ctx context.Context, name string, validate rest.ValidateObjectFunc, options *metav1.DeleteOptions) (*corev1.Namespace, error) {
	key, err := n.store.KeyFunc(ctx, name)
	if err != nil {
		return nil, err
	}
	conditions := &storage.Preconditions{UID: options.Preconditions.UID, ResourceVersion: options.Preconditions.ResourceVersion}
	out := &corev1.Namespace{}
	err = n.store.Storage.GuaranteedUpdate(ctx, key, out, false, conditions,
		storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
			ns, ok := obj.(*corev1.Namespace)
			if !ok {
				return nil, fmt.Errorf("delete namespace %s: stored as a %T", name, obj)
			}
			if err := validate(ctx, ns); err != nil {
				return nil, err
			}
			if ns.DeletionTimestamp == nil {
				now := metav1.Now()
				ns.DeletionTimestamp = &now
			}
			ns.Status.Phase = corev1.NamespaceTerminating
			propagate(ns, options)
			return ns, nil
		}), dryrun.IsDryRun(options.DryRun), nil)
	if err != nil {
		return nil, storeerr.InterpretUpdateError(err, corev1.Resource("namespaces"), name)
	}
	return out, nil
}

// propagate gives a namespace the finalizer by which the garbage collector learns what
// its deletion means for what it owns, as the options say; without a word there, what it
// has stays.
func propagate(ns *corev1.Namespace, options *metav1.DeleteOptions) {
	var orphan, foreground bool
	switch {
	case options.OrphanDependents != nil: //nolint:staticcheck // older clients name it so
		orphan = *options.OrphanDependents //nolint:staticcheck // as above
	case options.PropagationPolicy != nil:
		orphan = *options.PropagationPolicy == metav1.DeletePropagationOrphan
		foreground = *options.PropagationPolicy == metav1.DeletePropagationForeground
	default:
		return
	}
	ns.Finalizers = slices.DeleteFunc(ns.Finalizers, func(f string) bool {
		return f == metav1.FinalizerOrphanDependents || f == metav1.FinalizerDeleteDependents
	})
	if orphan {
		ns.Finalizers = append(ns.Finalizers, metav1.FinalizerOrphanDependents)
	}
	if foreground {
		ns.Finalizers = append(ns.Finalizers, metav1.FinalizerDeleteDependents)
	}
}

// Finalize is namespaces/finalize: how the namespace controller takes its
// finalizer out of spec.finalizers, which no other update may change.
type Finalize struct{ status *Status }

var (
	_ rest.Patcher             = &Finalize{}
	_ rest.ResetFieldsStrategy = &Finalize{}
)

// NewFinalize makes the finalize subresource of namespaces.
func NewFinalize(main *Namespaces) *Finalize {
	store := *main.store.Store
	base := store.CreateStrategy.(strategy)
	store.UpdateStrategy = finalizeStrategy{statusStrategy{base}}
	return &Finalize{status: &Status{writer{&store}}}
}

// New returns an empty Namespace.
func (f *Finalize) New() runtime.Object { return f.status.New() }

// Destroy does nothing: the storage belongs to the namespaces.
func (f *Finalize) Destroy() {}

// Get reads the namespace.
func (f *Finalize) Get(ctx context.Context, name string, options *metav1.GetOptions) (runtime.Object, error) {
	return f.status.Get(ctx, name, options)
}

// Update writes spec.finalizers. Taking the last one from a namespace that is
// being deleted removes it.
func (f *Finalize) Update(ctx context.Context, name string, info rest.UpdatedObjectInfo, create rest.ValidateObjectFunc, update rest.ValidateObjectUpdateFunc, _ bool, options *metav1.UpdateOptions) (runtime.Object, bool, error) {
	return f.status.Update(ctx, name, info, create, update, false, options)
}

// GetResetFields names what this subresource does not write.
func (f *Finalize) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return f.status.store.CreateStrategy.(strategy).reset("status")
}

// finalizeStrategy keeps everything but spec.finalizers.
type finalizeStrategy struct{ statusStrategy }

func (s finalizeStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	core.PrepareNamespaceFinalize(obj.(*corev1.Namespace), old.(*corev1.Namespace))
}

func (s finalizeStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	return core.ValidateNamespaceFinalize(obj.(*corev1.Namespace), old.(*corev1.Namespace))
}
