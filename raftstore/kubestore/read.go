package kubestore

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// Get implements storage.Interface.
func (s *Storage) Get(ctx context.Context, key string, opts storage.GetOptions, out runtime.Object) error {
	stored, err := s.key(key, false)
	if err != nil {
		return err
	}
	least, err := s.leastRevision(opts.ResourceVersion)
	if err != nil {
		return err
	}
	read := s.freshness(opts.ResourceVersion, least)
	if opts.ResourceVersion == "" {
		read.Revision = revisionOf(ctx)
	}
	kv, rev, err := s.get(ctx, stored, read)
	if err != nil {
		return explain(err)
	}
	if rev < least {
		return storage.NewTooLargeResourceVersionError(uint64(least), uint64(rev), 0)
	}
	if kv == nil {
		if opts.IgnoreNotFound {
			return runtime.SetZeroValue(out)
		}
		return storage.NewKeyNotFoundError(stored, 0)
	}
	data, _, err := s.values.open(ctx, kv)
	if err != nil {
		return s.unreadable(stored, storage.NewInternalError(err))
	}
	return s.unreadable(stored, s.values.decode(data, out, kv.ModRevision))
}

// leastRevision is the revision that a read with this resource version must at
// least show; 0 when any will do.
func (s *Storage) leastRevision(resourceVersion string) (int64, error) {
	rev, err := s.versioner.ParseResourceVersion(resourceVersion)
	if err != nil {
		return 0, apierrors.NewBadRequest(fmt.Sprintf("invalid resource version: %v", err))
	}
	return int64(rev), nil
}

// freshness chooses between asking the leader and answering from this node's
// own copy. An empty resource version asks for the newest state. Any other is
// answered locally, even without a leader, once the copy has come that far.
//
// "0" asks for any state; but a member that has just started holds what it had
// when it stopped, or nothing at all, and a client that is shown an empty list
// cleans up. So the first read of a process is confirmed all the same.
func (s *Storage) freshness(resourceVersion string, least int64) raftstore.ReadOptions {
	known := least > 0 || s.confirmed.Load()
	return raftstore.ReadOptions{Stale: resourceVersion != "" && known && s.store.Revision() >= least}
}

// get reads one key of the store.
func (s *Storage) get(ctx context.Context, key string, o raftstore.ReadOptions) (*mvcc.KeyValue, int64, error) {
	kv, rev, err := s.store.Get(ctx, key, o)
	s.noteConfirmed(o, err)
	return kv, rev, err
}

// list reads a range of the store.
func (s *Storage) list(ctx context.Context, prefix string, o raftstore.ListOptions) (raftstore.ListResult, error) {
	res, err := s.store.List(ctx, prefix, o)
	s.noteConfirmed(o.ReadOptions, err)
	return res, err
}

// noteConfirmed remembers that the leader has once said how far this node's
// copy must be, and that it has come there.
func (s *Storage) noteConfirmed(o raftstore.ReadOptions, err error) {
	if err == nil && !o.Stale && o.Revision == 0 {
		s.confirmed.Store(true)
	}
}
