// Package storepast lets the API server look back: it is the store's history in
// the form that apis/server asks for.
package storepast

import (
	"cmp"
	"context"
	"time"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// Past is the history of one member's store.
type Past struct {
	store   *raftstore.Store
	changes *kubestore.Past
	// Name is the name of the member with an id; "" or nil: it is not known.
	Name func(ctx context.Context, id string) string
}

var _ server.Past = (*Past)(nil)

// New makes the history of what kubestore keeps in store.
func New(store *raftstore.Store) *Past {
	return &Past{store: store, changes: kubestore.NewPast(store, "")}
}

// Extent implements server.Past.
func (p *Past) Extent(ctx context.Context, least int64) (server.Extent, error) {
	if p.store.Revision() < least {
		if err := p.catchUp(ctx); err != nil {
			return server.Extent{}, err
		}
	}
	e := p.store.Extent()
	return server.Extent{Oldest: e.Oldest, OldestTime: time.UnixMilli(e.OldestTime), Newest: e.Newest, Now: p.store.Time()}, nil
}

// RevisionAt implements server.Past. What lies before the last log entry that
// is known here is known for certain; what lies after it may have been changed
// elsewhere.
func (p *Past) RevisionAt(ctx context.Context, at time.Time) (int64, error) {
	if at.UnixMilli() >= p.store.Extent().NewestTime {
		if err := p.catchUp(ctx); err != nil {
			return 0, err
		}
	}
	rev, err := p.store.RevisionAt(at)
	return rev, kubestore.Explain(err)
}

// catchUp returns when this node knows what the cluster knew when it was called.
func (p *Past) catchUp(ctx context.Context) error {
	_, _, err := p.store.Get(ctx, "/clusterd/cluster", raftstore.ReadOptions{})
	return kubestore.Explain(err)
}

// Created implements server.Past.
func (p *Past) Created(ctx context.Context, key string) (int64, error) {
	return p.changes.Created(ctx, key)
}

// At implements server.Past.
func (p *Past) At(ctx context.Context, revision int64) context.Context {
	return kubestore.WithRevision(ctx, revision)
}

// Changes implements server.Past.
func (p *Past) Changes(ctx context.Context, key string, limit int) (server.Changes, error) {
	c, err := p.changes.Changes(ctx, key, limit)
	if err != nil {
		return server.Changes{}, err
	}
	res := server.Changes{Base: c.Base, More: c.More, Extent: server.Extent{
		Oldest: c.Oldest, OldestTime: c.OldestTime, Newest: c.Newest, Now: p.store.Time(),
	}}
	for _, change := range c.List {
		res.List = append(res.List, p.named(ctx, change))
	}
	return res, nil
}

// named tells apart who asked for a change and which member passed that on.
func (p *Past) named(ctx context.Context, c kubestore.Change) server.StoredChange {
	who, from := mvcc.SplitOrigin(c.Origin)
	res := server.StoredChange{Revision: c.Revision, Time: c.Time, Previous: c.Previous, Deleted: c.Deleted, Origin: who, Server: from}
	if from != "" && p.Name != nil {
		res.Server = cmp.Or(p.Name(ctx, from), from)
	}
	return res
}
