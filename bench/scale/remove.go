package main

import (
	"context"
	"fmt"
	"time"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// remove deletes some objects as a list has shown them, the way the deletion of
// a namespace does, and returns how many seconds that took.
func remove(ctx context.Context, s *raftstore.Store, o options) (float64, error) {
	l, err := s.List(ctx, folder, raftstore.ListOptions{Limit: min(deletes, o.objects)})
	if err != nil {
		return 0, err
	}
	keys := make([]mvcc.Compare, len(l.KVs))
	for i := range l.KVs {
		keys[i] = mvcc.Compare{Key: l.KVs[i].Key, ModRevision: l.KVs[i].ModRevision}
	}
	began := time.Now()
	gone, err := s.Delete(ctx, keys, "bench")
	took := time.Since(began).Seconds()
	if err != nil {
		return 0, err
	}
	for i := range gone {
		if gone[i] == nil {
			return 0, fmt.Errorf("%s was not deleted", keys[i].Key)
		}
	}
	return took, nil
}
