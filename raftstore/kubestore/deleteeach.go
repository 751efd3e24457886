package kubestore

import (
	"context"
	"fmt"

	"k8s.io/apiserver/pkg/storage"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// reserveStep is how many deletions the history's budget is asked for at once.
const reserveStep = 512

// DeleteEach deletes those objects that still have the resource version named,
// each for itself; watchers see each go, with its last state, under a resource
// version of its own. The keys ascend. It says of each whether it was deleted:
// one that was not has changed or is gone. With an error part of the objects
// may be gone, also some that it does not name.
//
// Nothing is asked and nothing decoded: what has finalizers, or may not be
// deleted, is for the caller to keep out.
func (s *Storage) DeleteEach(ctx context.Context, keys []string, versions []uint64) ([]bool, error) {
	if len(keys) != len(versions) {
		return nil, storage.NewInternalError(fmt.Errorf("delete %d keys of %d versions", len(keys), len(versions)))
	}
	wanted := make([]mvcc.Compare, len(keys))
	for i := range keys {
		key, err := s.key(keys[i], false)
		if err != nil {
			return nil, err
		}
		wanted[i] = mvcc.Compare{Key: key, ModRevision: int64(versions[i])}
	}
	deleted := make([]bool, len(keys))
	for at := 0; at < len(wanted); at += reserveStep {
		end := min(at+reserveStep, len(wanted))
		if err := s.deleteEach(ctx, wanted[at:end], deleted[at:end]); err != nil {
			return deleted, err
		}
	}
	return deleted, nil
}

func (s *Storage) deleteEach(ctx context.Context, keys []mvcc.Compare, deleted []bool) error {
	origin := s.originOf(ctx)
	d := mvcc.Deletion{Keys: keys}
	done, err := s.reserve(ctx, origin, d.HistoryBytes())
	if err != nil {
		return err
	}
	defer done()
	held, err := s.store.Delete(ctx, keys, origin)
	for i := range held {
		deleted[i] = held[i] != nil
	}
	if err != nil {
		return explain(err)
	}
	return nil
}

// DeleteEach is Storage's: the cache sees it like every other change.
func (r *resuming) DeleteEach(ctx context.Context, keys []string, versions []uint64) ([]bool, error) {
	return r.raw.DeleteEach(ctx, keys, versions)
}
