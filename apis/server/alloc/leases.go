package alloc

import (
	"context"
	"fmt"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/utils/ptr"
)

// leases are names that belong to one Service each: one object in the store for
// each name that is taken.
type leases struct {
	storage storage.Interface
	prefix  string
	holds   func(ctx context.Context, owner Owner, name string) (bool, error)
	now     func() time.Time
}

func newLeases(store storage.Interface, prefix string, holds func(context.Context, Owner, string) (bool, error)) leases {
	return leases{storage: store, prefix: prefix, holds: holds, now: time.Now}
}

// Key gives where a lease is stored below a prefix.
func Key(prefix string) func(lease runtime.Object) (string, error) {
	return func(lease runtime.Object) (string, error) {
		object, err := meta.Accessor(lease)
		if err != nil {
			return "", fmt.Errorf("key of a lease: %w", err)
		}
		return prefix + "/" + object.GetName(), nil
	}
}

// take reserves a name for owner, also one whose holder does not exist any more.
func (l leases) take(ctx context.Context, name string, owner Owner) error {
	err := l.reserve(ctx, name, owner)
	if !storage.IsExist(err) {
		return err
	}
	switch freed, err := l.takeBack(ctx, name, owner); {
	case err != nil:
		return err
	case !freed:
		return ErrTaken
	}
	if err := l.reserve(ctx, name, owner); storage.IsExist(err) {
		return ErrTaken // another allocation was faster
	} else if err != nil {
		return err
	}
	return nil
}

// takeBack frees a name whose Service does not exist any more, or never came to
// exist because its server died in between.
func (l leases) takeBack(ctx context.Context, name string, wants Owner) (bool, error) {
	record, err := l.read(ctx, name, "")
	if err != nil {
		return false, fmt.Errorf("look at %s: %w", name, err)
	}
	free, err := l.free(ctx, name, record, wants)
	if err != nil || !free || record.Name == "" {
		return free, err
	}
	return true, l.remove(ctx, name, record)
}

// try is ErrTaken when take would fail so; it changes nothing.
func (l leases) try(ctx context.Context, name string, owner Owner) error {
	record, err := l.read(ctx, name, "")
	if err != nil {
		return fmt.Errorf("look at %s: %w", name, err)
	}
	if free, err := l.free(ctx, name, record, owner); err != nil {
		return err
	} else if !free {
		return ErrTaken
	}
	return nil
}

// free reports whether wants may have the name of which record was read.
func (l leases) free(ctx context.Context, name string, record *coordinationv1.Lease, wants Owner) (bool, error) {
	if record.Name == "" {
		return true, nil
	}
	holder := ownerOf(record)
	if holder != wants && l.now().Sub(record.CreationTimestamp.Time) < abandoned {
		return false, nil
	}
	held, err := l.holds(ctx, holder, name)
	if err != nil {
		return false, fmt.Errorf("look for the holder of %s: %w", name, err)
	}
	return !held, nil
}

// release gives a name back, if it is owner's.
func (l leases) release(ctx context.Context, name string, owner Owner) error {
	record, err := l.read(ctx, name, "")
	if err != nil {
		return fmt.Errorf("release %s: %w", name, err)
	}
	if record.Name == "" || ownerOf(record) != owner {
		return nil
	}
	return l.remove(ctx, name, record)
}

func ownerOf(record *coordinationv1.Lease) Owner {
	namespace, name, _ := strings.Cut(ptr.Deref(record.Spec.HolderIdentity, ""), "/")
	return Owner{Namespace: namespace, Name: name, UID: record.UID}
}

func (l leases) key(name string) string { return l.prefix + "/" + name }

// reserve fails with storage's "exists" if the name is taken.
func (l leases) reserve(ctx context.Context, name string, owner Owner) error {
	record := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{
			Name:              name,
			UID:               owner.UID,
			CreationTimestamp: metav1.NewTime(l.now()),
		},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: ptr.To(owner.String())},
	}
	return l.storage.Create(ctx, l.key(name), record, &coordinationv1.Lease{}, 0)
}

// read gives an empty record for a free name.
func (l leases) read(ctx context.Context, name, version string) (*coordinationv1.Lease, error) {
	record := &coordinationv1.Lease{}
	err := l.storage.Get(ctx, l.key(name), storage.GetOptions{IgnoreNotFound: true, ResourceVersion: version}, record)
	return record, err
}

func (l leases) remove(ctx context.Context, name string, record *coordinationv1.Lease) error {
	err := l.storage.Delete(ctx, l.key(name), &coordinationv1.Lease{},
		&storage.Preconditions{ResourceVersion: &record.ResourceVersion}, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{})
	if err != nil && !storage.IsNotFound(err) {
		return fmt.Errorf("release %s: %w", name, err)
	}
	return nil
}

// taken are the names in use.
func (l leases) taken(ctx context.Context) (map[string]bool, error) {
	list := &coordinationv1.LeaseList{}
	if err := l.storage.GetList(ctx, l.prefix, storage.ListOptions{Recursive: true, Predicate: storage.Everything}, list); err != nil {
		return nil, fmt.Errorf("list what is in use below %s: %w", l.prefix, err)
	}
	taken := make(map[string]bool, len(list.Items))
	for _, item := range list.Items {
		taken[item.Name] = true
	}
	return taken, nil
}
