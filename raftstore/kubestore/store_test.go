package kubestore

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/client/v3/kubernetes"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// openStore opens a store of one member, on disk.
func openStore(t testing.TB, change func(*raftstore.Config)) *raftstore.Store {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	cfg := raftstore.Config{
		ID:       "only",
		Dir:      t.TempDir(),
		Listener: l,
		Dial: func(context.Context, string) (net.Conn, error) {
			return nil, errors.New("there is no other member")
		},
		Logger: slog.New(slog.DiscardHandler),
		// Alone one is elected as soon as one has waited for a leader.
		HeartbeatTimeout: 10 * time.Millisecond,
	}
	if change != nil {
		change(&cfg)
	}
	s, err := raftstore.Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close the store: %v", err)
		}
	})
	if err := s.Bootstrap(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the store has a leader", s.IsLeader)
	return s
}

// compactable is a store whose history's beginning can be set, which the
// real one decides by age and size.
type compactable struct {
	*raftstore.Store
	oldest atomic.Int64
}

func (c *compactable) OldestRevision() int64 { return max(c.oldest.Load(), c.Store.OldestRevision()) }

func (c *compactable) readable(rev int64) error {
	if oldest := c.oldest.Load(); rev != 0 && rev < oldest {
		return &mvcc.CompactedError{Requested: rev, Oldest: oldest}
	}
	return nil
}

func (c *compactable) Get(ctx context.Context, key string, o raftstore.ReadOptions) (*mvcc.KeyValue, int64, error) {
	if err := c.readable(o.Revision); err != nil {
		return nil, 0, err
	}
	return c.Store.Get(ctx, key, o)
}

func (c *compactable) List(ctx context.Context, prefix string, o raftstore.ListOptions) (raftstore.ListResult, error) {
	if err := c.readable(o.Revision); err != nil {
		return raftstore.ListResult{}, err
	}
	return c.Store.List(ctx, prefix, o)
}

func (c *compactable) Watch(ctx context.Context, prefix string, o raftstore.WatchOptions) (*raftstore.Watcher, error) {
	if err := c.readable(max(o.Revision-1, 0)); err != nil {
		return nil, err
	}
	return c.Store.Watch(ctx, prefix, o)
}

// recordingStore counts and records the lists that reach the store, in the form
// in which upstream's suite checks them.
type recordingStore struct {
	compactable
	lists    atomic.Uint64
	recorder *storagetesting.KubernetesRecorder
}

func newRecordingStore(s *raftstore.Store) *recordingStore {
	return &recordingStore{compactable: compactable{Store: s}, recorder: storagetesting.NewKubernetesRecorder(noEtcd{})}
}

func (r *recordingStore) List(ctx context.Context, prefix string, o raftstore.ListOptions) (raftstore.ListResult, error) {
	r.lists.Add(1)
	if _, err := r.recorder.List(ctx, prefix, kubernetes.ListOptions{Revision: o.Revision, Limit: int64(o.Limit), Continue: o.From}); err != nil {
		return raftstore.ListResult{}, err
	}
	return r.compactable.List(ctx, prefix, o)
}

// noEtcd is the far end of the recorder, where nothing happens.
type noEtcd struct{ kubernetes.Interface }

func (noEtcd) List(context.Context, string, kubernetes.ListOptions) (kubernetes.ListResponse, error) {
	return kubernetes.ListResponse{}, nil
}
