package kubestore

import (
	"context"
	"path"
	"strings"
	"time"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

type revisionKey struct{}

// WithRevision makes reads of single objects without a resource version, in the
// context it returns, show the object as of revision. Lists need no such thing:
// their resourceVersionMatch may be Exact.
func WithRevision(ctx context.Context, revision int64) context.Context {
	return context.WithValue(ctx, revisionKey{}, revision)
}

// revisionOf is the revision that WithRevision asked for; 0: none.
func revisionOf(ctx context.Context) int64 {
	rev, _ := ctx.Value(revisionKey{}).(int64)
	return rev
}

// Change is one change of one object, as far as the store knows it.
type Change struct {
	Revision int64
	Time     time.Time
	// Previous is the revision of the state that was replaced or deleted; 0:
	// the object was created.
	Previous int64
	Deleted  bool
	Origin   string // who asked for it; "" when it is not known
}

// Changes tells the latest changes of the object stored under an API server's
// key, at most limit of them, oldest first.
type Changes struct {
	List []Change
	// Base is the revision of the object's state before the first change, if
	// it existed then and that is still known; else 0.
	Base int64
	// More: older changes are left out.
	More bool
	// Oldest revision that can be read, since when, and the newest one.
	Oldest     int64
	OldestTime time.Time
	Newest     int64
}

// Past is what the history of the store tells of objects.
type Past struct {
	store  *raftstore.Store
	prefix string
}

// NewPast makes a Past of the objects that a decorator with the same store and
// prefix keeps; "" is DefaultPrefix.
func NewPast(store *raftstore.Store, prefix string) *Past {
	if prefix == "" {
		prefix = DefaultPrefix
	}
	return &Past{store: store, prefix: prefix}
}

// Changes reads the history of one key, as new as the leader's word.
func (p *Past) Changes(ctx context.Context, key string, limit int) (Changes, error) {
	h, err := p.store.History(ctx, path.Join("/", p.prefix, key), limit, raftstore.ReadOptions{})
	if err != nil {
		return Changes{}, explain(err)
	}
	res := Changes{
		More: h.More, Oldest: h.Extent.Oldest, OldestTime: time.UnixMilli(h.Extent.OldestTime), Newest: h.Extent.Newest,
	}
	if h.Base != nil {
		res.Base = h.Base.ModRevision
	}
	for _, c := range h.Changes {
		change := Change{Revision: c.KV.ModRevision, Time: time.UnixMilli(c.Time), Deleted: c.Type == mvcc.Delete, Origin: c.Origin}
		if c.Prev != nil {
			change.Previous = c.Prev.ModRevision
		}
		res.List = append(res.List, change)
	}
	return res, nil
}

// Created is the revision at which what this member has under key was created; 0: it
// has nothing there.
func (p *Past) Created(ctx context.Context, key string) (int64, error) {
	kv, _, err := p.store.Get(ctx, path.Join("/", p.prefix, key), raftstore.ReadOptions{Stale: true})
	if err != nil || kv == nil {
		return 0, explain(err)
	}
	return kv.CreateRevision, nil
}

// Folder is the folder of the store that holds a resource's objects, of one
// namespace or of all ("").
func Folder(resourcePrefix, namespace string) string {
	return strings.TrimSuffix(path.Join("/", DefaultPrefix, resourcePrefix, namespace), "/") + "/"
}
