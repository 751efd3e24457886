// Package owned finds the dependents of a controller by owner reference, and
// adopts and releases them. It knows nothing of any particular kind.
package owned

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

const indexName = "clusterd-controller"

// Index makes dependents of the informer's kind findable by their controller.
// Call it before the informer starts; calling it again is harmless.
func Index(informer cache.SharedIndexInformer) error {
	if _, ok := informer.GetIndexer().GetIndexers()[indexName]; ok {
		return nil
	}
	return informer.AddIndexers(cache.Indexers{indexName: func(obj any) ([]string, error) {
		o, ok := obj.(metav1.Object)
		if !ok {
			return nil, nil
		}
		if ref := metav1.GetControllerOf(o); ref != nil {
			return []string{string(ref.UID)}, nil
		}
		return []string{orphans(o.GetNamespace())}, nil
	}})
}

func orphans(namespace string) string { return "orphan/" + namespace }

// By returns the objects whose controller has the given UID.
func By[T any](indexer cache.Indexer, uid types.UID) ([]*T, error) {
	return lookup[T](indexer, string(uid))
}

// Orphans returns the namespace's objects that have no controller.
func Orphans[T any](indexer cache.Indexer, namespace string) ([]*T, error) {
	return lookup[T](indexer, orphans(namespace))
}

func lookup[T any](indexer cache.Indexer, value string) ([]*T, error) {
	objs, err := indexer.ByIndex(indexName, value)
	if err != nil {
		return nil, err
	}
	out := make([]*T, 0, len(objs))
	for _, obj := range objs {
		if o, ok := obj.(*T); ok {
			out = append(out, o)
		}
	}
	return out, nil
}

// Claimer decides which objects belong to Owner and makes it so.
type Claimer struct {
	Owner    metav1.Object
	Kind     schema.GroupVersionKind
	Selector labels.Selector
	// Live reads the owner from the server. It is asked at most once, before
	// the first adoption: an owner that is being deleted must not adopt.
	Live func(ctx context.Context) (metav1.Object, error)
	// Patch sends a strategic merge patch for the named dependent.
	Patch func(ctx context.Context, name string, patch []byte) error

	mayAdopt error
	asked    bool
}

var errMayNotAdopt = errors.New("owner is gone or being deleted")

// Claim returns those of objs that the owner controls after adopting matching
// orphans and releasing owned objects that do not match any more. objs must be the
// owner's dependents and orphans of its namespace. When some could not be
// adopted or released it returns the others and an error.
func Claim[T any, P interface {
	*T
	metav1.Object
}](ctx context.Context, c *Claimer, objs []*T) ([]*T, error) {
	var mine []*T
	var errs []error
	for _, obj := range objs {
		ok, err := c.claim(ctx, P(obj))
		if err != nil {
			errs = append(errs, err)
		}
		if ok {
			mine = append(mine, obj)
		}
	}
	return mine, errors.Join(errs...)
}

func (c *Claimer) claim(ctx context.Context, obj metav1.Object) (bool, error) {
	matches := c.Selector.Matches(labels.Set(obj.GetLabels()))
	if ref := metav1.GetControllerOf(obj); ref != nil {
		if ref.UID != c.Owner.GetUID() {
			return false, nil
		}
		if matches {
			return true, nil
		}
		if c.Owner.GetDeletionTimestamp() != nil {
			return false, nil
		}
		return false, c.release(ctx, obj)
	}
	if !matches || c.Owner.GetDeletionTimestamp() != nil || obj.GetDeletionTimestamp() != nil {
		return false, nil
	}
	if err := c.adopt(ctx, obj); err != nil {
		if apierrors.IsNotFound(err) {
			return false, nil
		}
		return false, err
	}
	return true, nil
}

func (c *Claimer) adopt(ctx context.Context, obj metav1.Object) error {
	if !c.asked {
		live, err := c.Live(ctx)
		switch {
		case apierrors.IsNotFound(err):
			c.mayAdopt = errMayNotAdopt
		case err != nil:
			return fmt.Errorf("read owner before adopting: %w", err)
		case live.GetUID() != c.Owner.GetUID() || live.GetDeletionTimestamp() != nil:
			c.mayAdopt = errMayNotAdopt
		}
		c.asked = true
	}
	if c.mayAdopt != nil {
		return fmt.Errorf("adopt %s/%s: %w", obj.GetNamespace(), obj.GetName(), c.mayAdopt)
	}
	return c.patch(ctx, obj, []any{metav1.NewControllerRef(c.Owner, c.Kind)})
}

func (c *Claimer) release(ctx context.Context, obj metav1.Object) error {
	err := c.patch(ctx, obj, []any{map[string]any{"$patch": "delete", "uid": c.Owner.GetUID()}})
	if apierrors.IsNotFound(err) || apierrors.IsInvalid(err) {
		return nil // gone, replaced by another of the same name, or released before
	}
	return err
}

func (c *Claimer) patch(ctx context.Context, obj metav1.Object, refs []any) error {
	// The uid makes the server refuse the patch when the name now belongs to
	// another object.
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid":             obj.GetUID(),
		"ownerReferences": refs,
	}})
	if err != nil {
		return fmt.Errorf("encode owner patch: %w", err)
	}
	return c.Patch(ctx, obj.GetName(), patch)
}
