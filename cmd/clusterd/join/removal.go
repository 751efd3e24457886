package join

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// Removal is the cluster's word that a key belongs to no member any more. It
// is kept for good. A missing Record would not do in its place: a member that
// is behind lacks the records of those who joined last, and if it refused them
// it could never hear from a leader among them. No key ever comes back, since
// each join makes a new one.
type Removal struct {
	Name    string    `json:"name"`
	Removed time.Time `json:"removed"`
}

func removalOps(r Record, now time.Time) []mvcc.Op {
	return []mvcc.Op{
		{Type: mvcc.OpDelete, Key: memberPrefix + r.ID},
		put(removed+r.ID, Removal{Name: r.Name, Removed: now.UTC()}),
	}
}

// IsRemoved reports whether this member knows that the key was removed. It
// asks nobody and does not wait.
func IsRemoved(ctx context.Context, s Store, id string) (bool, error) {
	kv, _, err := s.Get(ctx, removed+id, raftstore.ReadOptions{Stale: true})
	if err != nil {
		return false, fmt.Errorf("look up whether %s was removed: %w", id, err)
	}
	return kv != nil, nil
}

// Watched is a Store that can be watched.
type Watched interface {
	Store
	Watch(ctx context.Context, prefix string, o raftstore.WatchOptions) (*raftstore.Watcher, error)
}

// Removals tells each of every removed key, those of the past first, until ctx
// ends or each returns an error. A key may be told of again.
func Removals(ctx context.Context, s Watched, each func(id string) error) error {
	for {
		err := removals(ctx, s, each)
		var compacted *mvcc.CompactedError
		if !errors.As(err, &compacted) {
			return err
		}
	}
}

func removals(ctx context.Context, s Watched, each func(id string) error) error {
	past, err := s.List(ctx, removed, raftstore.ListOptions{ReadOptions: raftstore.ReadOptions{Stale: true}})
	if err != nil {
		return fmt.Errorf("list the removed members: %w", err)
	}
	for _, kv := range past.KVs {
		if err := each(idOf(kv.Key, removed)); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w, err := s.Watch(ctx, removed, raftstore.WatchOptions{Revision: past.Revision + 1})
	if err != nil {
		return fmt.Errorf("watch for removed members: %w", err)
	}
	for batch := range w.C() {
		for _, e := range batch.Events {
			if e.Type == mvcc.Delete {
				continue
			}
			if err := each(idOf(e.KV.Key, removed)); err != nil {
				return err
			}
		}
	}
	return w.Err()
}
