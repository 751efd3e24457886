package storepast

import (
	"context"
	"path"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/kubestore"
)

// Keys tells the API server which folders of one member's store are empty.
type Keys struct{ store *raftstore.Store }

var _ server.Keys = (*Keys)(nil)

// NewKeys makes the Keys of what kubestore keeps in store.
func NewKeys(store *raftstore.Store) *Keys { return &Keys{store} }

// folder is a prefix of the API server as kubestore keeps it.
func folder(prefix string) string { return path.Join("/", kubestore.DefaultPrefix, prefix) + "/" }

// Empty implements server.Keys.
func (k *Keys) Empty(ctx context.Context, prefix string) (bool, int64, error) {
	found, err := k.store.List(ctx, folder(prefix), raftstore.ListOptions{Limit: 1, NoCount: true})
	if err != nil {
		return false, 0, kubestore.Explain(err)
	}
	return len(found.KVs) == 0, found.Revision, nil
}

// Watch implements server.Keys.
func (k *Keys) Watch(ctx context.Context, prefix string, revision int64) (<-chan struct{}, error) {
	watcher, err := k.store.Watch(ctx, folder(prefix), raftstore.WatchOptions{Revision: revision + 1})
	if err != nil {
		return nil, kubestore.Explain(err)
	}
	// The first batch is about the present: it has what was written until now.
	watcher.RequestProgress()
	batch, ok := <-watcher.C()
	switch {
	case !ok:
		return nil, kubestore.Explain(watcher.Err())
	case len(batch.Events) > 0:
		watcher.Stop()
		return nil, server.ErrWritten
	}
	written := make(chan struct{})
	go func() {
		defer close(written)
		defer watcher.Stop()
		for batch := range watcher.C() {
			if len(batch.Events) > 0 {
				return
			}
		}
	}()
	return written, nil
}
