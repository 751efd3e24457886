package resource

import (
	"context"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/warning"
)

// EachDeleter is a storage that takes many objects away at once.
type EachDeleter interface {
	// DeleteEach deletes those objects that still have the resource version
	// named, each for itself. The keys ascend. It says of each whether it was
	// deleted; one that was not has changed or is gone. With an error part of
	// them may be gone.
	DeleteEach(ctx context.Context, keys []string, versions []uint64) (deleted []bool, err error)
}

const (
	// collectionPage is how many objects a deletion of many lists at a time.
	collectionPage = 10_000
	// collectionStep is how many of them are then deleted together.
	collectionStep = 500
)

// Delete deletes one object.
func (s *Store) Delete(ctx context.Context, name string, validate rest.ValidateObjectFunc, options *metav1.DeleteOptions) (runtime.Object, bool, error) {
	s.warnOfOrphans(ctx, options)
	return s.Store.Delete(ctx, name, validate, options)
}

func (s *Store) warnOfOrphans(ctx context.Context, options *metav1.DeleteOptions) {
	if s.kind.OrphanWarning != "" && options != nil && options.PropagationPolicy == nil && options.OrphanDependents == nil { //nolint:staticcheck // older clients name it so
		warning.AddWarning(ctx, "", s.kind.OrphanWarning)
	}
}

// DeleteCollection deletes the objects that a list shows. Those that nothing
// holds go together: each is asked about (admission, preconditions) as it was
// listed, and goes only if it is still as it was then. What has finalizers, or
// has changed meanwhile, is deleted one by one, some at a time; so are all
// objects of kinds with a grace period, and where the options ask for a
// finalizer or for a dry run.
func (s *Store) DeleteCollection(ctx context.Context, validate rest.ValidateObjectFunc, options *metav1.DeleteOptions, listOptions *metainternalversion.ListOptions) (runtime.Object, error) {
	s.warnOfOrphans(ctx, options)
	storage, ok := s.Storage.Storage.(EachDeleter)
	if !ok || !together(ctx, s.DeleteStrategy, options) {
		return s.Store.DeleteCollection(ctx, validate, options, listOptions)
	}
	if listOptions == nil {
		listOptions = &metainternalversion.ListOptions{}
	}
	listOptions = listOptions.DeepCopy()
	limited := listOptions.Limit > 0
	if !limited {
		listOptions.Limit = collectionPage
	}
	c := &collection{store: s, storage: storage, validate: validate, options: options}
	var first runtime.Object
	var all []runtime.Object
	for {
		list, err := s.List(ctx, listOptions)
		if err != nil {
			return nil, err
		}
		items, err := meta.ExtractList(list)
		if err != nil {
			return nil, apierrors.NewInternalError(err)
		}
		if err := c.remove(ctx, items); err != nil {
			return nil, err
		}
		if limited {
			if c.refused.first != nil {
				return nil, c.refused.first
			}
			return list, nil
		}
		if all = append(all, items...); first == nil {
			first = list
		}
		page, err := meta.ListAccessor(list)
		if err != nil {
			return nil, apierrors.NewInternalError(err)
		}
		if page.GetContinue() == "" {
			if c.refused.first != nil {
				return nil, c.refused.first
			}
			return first, meta.SetList(first, all)
		}
		listOptions.Continue = page.GetContinue()
		listOptions.ResourceVersion, listOptions.ResourceVersionMatch = "", ""
	}
}

// together reports whether objects without finalizers are gone at once when
// they are deleted with these options.
func together(ctx context.Context, strategy rest.RESTDeleteStrategy, options *metav1.DeleteOptions) bool {
	if _, graceful := strategy.(rest.RESTGracefulDeleteStrategy); graceful || options == nil || len(options.DryRun) > 0 {
		return false
	}
	if options.OrphanDependents != nil { //nolint:staticcheck // SA1019: clients may still send it
		return false
	}
	if options.PropagationPolicy != nil {
		return *options.PropagationPolicy == metav1.DeletePropagationBackground
	}
	kind, ok := strategy.(rest.GarbageCollectionDeleteStrategy)
	return !ok || kind.DefaultGarbageCollectionPolicy(ctx) != rest.OrphanDependents
}

// collection is the deletion of what lists show.
type collection struct {
	store    *Store
	storage  EachDeleter
	validate rest.ValidateObjectFunc
	options  *metav1.DeleteOptions
	refused  refusals
}

// refusals are why objects stay. As upstream, one object that stays keeps no
// other; only as many as there are workers end the deletion.
type refusals struct {
	mu    sync.Mutex
	first error
	n     int
}

func (r *refusals) add(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.n++; r.first == nil {
		r.first = err
	}
}

// enough returns the first error once there are limit of them.
func (r *refusals) enough(limit int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.n < limit {
		return nil
	}
	return r.first
}

// candidate is one object that was listed.
type candidate struct {
	obj     runtime.Object
	name    string
	key     string
	version uint64
	alone   bool // it does not go together with others
	stays   bool // it may not be deleted
}

func (c *collection) remove(ctx context.Context, items []runtime.Object) error {
	candidates := make([]candidate, len(items))
	for i, obj := range items {
		var err error
		if candidates[i], err = c.candidate(ctx, obj); err != nil {
			return err
		}
	}
	slices.SortFunc(candidates, func(a, b candidate) int { return strings.Compare(a.key, b.key) })
	for step := range slices.Chunk(candidates, collectionStep) {
		alone, err := c.removeTogether(ctx, step)
		if err != nil {
			return err
		}
		if err := c.removeAlone(ctx, alone); err != nil {
			return err
		}
	}
	return nil
}

func (c *collection) candidate(ctx context.Context, obj runtime.Object) (candidate, error) {
	object, err := meta.Accessor(obj)
	if err != nil {
		return candidate{}, apierrors.NewInternalError(err)
	}
	// Another namespace's objects are in no list of this one's.
	key, err := c.store.KeyFunc(ctx, object.GetName())
	if err != nil {
		return candidate{}, err
	}
	version, err := strconv.ParseUint(object.GetResourceVersion(), 10, 64)
	return candidate{
		obj: obj, name: object.GetName(), key: key, version: version,
		alone: err != nil || version == 0 || len(object.GetFinalizers()) > 0,
	}, nil
}

// each calls do for the candidates, some at a time, until too many were refused.
func (c *collection) each(ctx context.Context, of []candidate, do func(*candidate) error) error {
	workers := max(1, c.store.DeleteCollectionWorkers)
	var group errgroup.Group // whose calls go on when one fails
	group.SetLimit(workers)
	for i := range of {
		if ctx.Err() != nil || c.refused.enough(workers) != nil {
			break
		}
		group.Go(func() error {
			if err := do(&of[i]); err != nil {
				c.refused.add(err)
			}
			return nil
		})
	}
	_ = group.Wait() // returns nothing: all is in refused
	if err := c.refused.enough(workers); err != nil {
		return err
	}
	return ctx.Err()
}

// removeTogether returns those that have to be deleted one by one.
func (c *collection) removeTogether(ctx context.Context, step []candidate) (alone []candidate, err error) {
	err = c.each(ctx, step, func(o *candidate) error {
		if o.alone {
			return nil
		}
		err := c.ask(ctx, o.obj)
		o.stays = err != nil
		return err
	})
	if err != nil {
		return nil, err
	}
	var going []candidate
	var keys []string
	var versions []uint64
	for _, o := range step {
		switch {
		case o.stays:
			continue
		case o.alone:
			alone = append(alone, o)
			continue
		}
		going, keys, versions = append(going, o), append(keys, o.key), append(versions, o.version)
	}
	if len(going) == 0 {
		return alone, nil
	}
	deleted, err := c.storage.DeleteEach(ctx, keys, versions)
	for i, gone := range deleted {
		switch {
		case !gone:
			alone = append(alone, going[i])
		case c.store.AfterDelete != nil:
			c.store.AfterDelete(going[i].obj, c.options)
		}
	}
	return alone, err
}

// ask says why an object may not be deleted as it is.
func (c *collection) ask(ctx context.Context, obj runtime.Object) error {
	// The options may be completed for the object.
	if _, _, err := rest.BeforeDelete(c.store.DeleteStrategy, ctx, obj, c.options.DeepCopy()); err != nil {
		return err
	}
	if c.validate == nil {
		return nil
	}
	return c.validate(ctx, obj)
}

func (c *collection) removeAlone(ctx context.Context, alone []candidate) error {
	return c.each(ctx, alone, func(o *candidate) error {
		_, _, err := c.store.Delete(ctx, o.name, c.validate, c.options.DeepCopy())
		if apierrors.IsNotFound(err) {
			return nil
		}
		return err
	})
}
