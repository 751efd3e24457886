package kubestore

import (
	"context"
	"errors"

	"k8s.io/apiserver/pkg/storage"

	"github.com/clusterd/clusterd/raftstore"
)

// statsPage is how many keys Stats looks at in one go.
const statsPage = 1000

// EnableResourceSizeEstimation implements storage.Interface. The keyspace is in
// memory, so that sizes are looked up when asked for and keys need not be
// tracked.
func (s *Storage) EnableResourceSizeEstimation(keys storage.KeysFunc) error {
	if keys == nil {
		return errors.New("kubestore: size estimation needs a function that lists keys")
	}
	s.estimateSize.Store(true)
	return nil
}

// Stats implements storage.Interface, from this node's own copy.
func (s *Storage) Stats(ctx context.Context) (storage.Stats, error) {
	prefix, err := s.key(s.resourcePrefix, true)
	if err != nil {
		return storage.Stats{}, err
	}
	stale := raftstore.ReadOptions{Stale: true}
	if !s.estimateSize.Load() {
		res, err := s.store.List(ctx, prefix, raftstore.ListOptions{ReadOptions: stale, CountOnly: true})
		if err != nil {
			return storage.Stats{}, explain(err)
		}
		return storage.Stats{ObjectCount: res.Count}, nil
	}
	var stats storage.Stats
	var bytes int64
	for from := ""; ; {
		res, err := s.store.List(ctx, prefix, raftstore.ListOptions{ReadOptions: stale, From: from, Limit: statsPage, NoCount: true})
		if err != nil {
			return storage.Stats{}, explain(err)
		}
		for i := range res.KVs {
			bytes += int64(len(res.KVs[i].Value))
		}
		stats.ObjectCount += int64(len(res.KVs))
		if !res.More || len(res.KVs) == 0 {
			break
		}
		from = after(res.KVs[len(res.KVs)-1].Key)
	}
	if stats.ObjectCount > 0 {
		stats.EstimatedAverageObjectSizeBytes = bytes / stats.ObjectCount
	}
	return stats, nil
}

// after is the first key that sorts behind key.
func after(key string) string { return key + "\x00" }
