package fairness

import (
	"context"
	"fmt"

	"golang.org/x/sync/errgroup"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// writer is what a typed client can do that is needed here.
type writer[T any] interface {
	Create(ctx context.Context, obj T, options metav1.CreateOptions) (T, error)
	Update(ctx context.Context, obj T, options metav1.UpdateOptions) (T, error)
}

// object is a kind's Go type.
type object[T any] interface {
	runtime.Object
	metav1.Object
	DeepCopy() T
}

// objects are the default objects of one kind: those that every server needs,
// and those that it suggests.
type objects[T object[T]] struct {
	kind                 string
	get                  func(name string) (T, error) // from the cache
	writer               writer[T]
	mandatory, suggested []T
	copySpec             func(to, from T)
}

// ensure writes what is missing, and if whole is set also what differs.
func (o *objects[T]) ensure(ctx context.Context, group *errgroup.Group, whole bool) {
	for i, want := range append(o.mandatory[:len(o.mandatory):len(o.mandatory)], o.suggested...) {
		group.Go(func() error {
			if err := o.ensureOne(ctx, want, i < len(o.mandatory), whole); err != nil {
				return fmt.Errorf("%s %s: %w", o.kind, want.GetName(), err)
			}
			return nil
		})
	}
}

func (o *objects[T]) ensureOne(ctx context.Context, want T, mandatory, whole bool) error {
	have, err := o.get(want.GetName())
	switch {
	case apierrors.IsNotFound(err):
		_, err := o.writer.Create(ctx, want.DeepCopy(), metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) {
			return nil // another server was quicker
		}
		return err
	case err != nil:
		return err
	case !whole || !mandatory && !ours(have):
		return nil
	}
	put := have.DeepCopy()
	o.copySpec(put, want)
	if equality.Semantic.DeepEqual(put, have) {
		return nil
	}
	_, err = o.writer.Update(ctx, put, metav1.UpdateOptions{})
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return nil // changed meanwhile: looked at again in a while
	}
	return err
}

// ours says whether a suggested object is kept as it is suggested: its
// annotation says so, or without one, that it was not changed since it was
// made.
func ours(obj metav1.Object) bool {
	switch obj.GetAnnotations()[flowcontrolv1.AutoUpdateAnnotationKey] {
	case "true":
		return true
	case "false":
		return false
	}
	return obj.GetGeneration() == 1
}
