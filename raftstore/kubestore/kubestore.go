// Package kubestore makes the replicated keyspace look like the storage that
// k8s.io/apiserver expects: objects under keys, with optimistic updates,
// chunked lists at one revision, and watches that resume. It is the only
// package of raftstore that knows anything of Kubernetes.
//
// The parts, in the order a request meets them: decorator.go hands one storage
// per resource to the API server; read.go, list.go, write.go and watch.go
// answer its calls; value.go turns objects into stored bytes and back;
// errors.go says in Kubernetes' words what went wrong below.
package kubestore

import (
	"context"
	"fmt"
	"path"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// Store is what kubestore needs of the keyspace; *raftstore.Store is one.
// Reads are linearizable unless they say Stale. Values are shared with the
// keyspace: kubestore never changes the bytes it is given, and never again
// touches those it has handed over.
type Store interface {
	Txn(ctx context.Context, txn mvcc.Txn) (mvcc.TxnResult, error)
	// Delete deletes those keys that have the revisions named; see raftstore.
	Delete(ctx context.Context, keys []mvcc.Compare, origin string) ([]*mvcc.KeyValue, error)
	Get(ctx context.Context, key string, o raftstore.ReadOptions) (*mvcc.KeyValue, int64, error)
	List(ctx context.Context, prefix string, o raftstore.ListOptions) (raftstore.ListResult, error)
	Watch(ctx context.Context, prefix string, o raftstore.WatchOptions) (*raftstore.Watcher, error)
	Revision() int64
	OldestRevision() int64
	WaitRevision(ctx context.Context, rev int64) error
	// Time is the store's clock, which keys expire by.
	Time() time.Time
}

var _ Store = (*raftstore.Store)(nil)

// Options describe the storage of one resource.
type Options struct {
	Store Store
	// Prefix comes before every key; "" means DefaultPrefix.
	Prefix string
	// ResourcePrefix is the folder of the resource, such as "/pods". Keys
	// outside of it are refused.
	ResourcePrefix string
	GroupResource  schema.GroupResource
	// Codec encodes into the stored version and decodes every version that was
	// ever stored.
	Codec runtime.Codec
	// Transformer seals values at rest; nil stores them as they are.
	Transformer value.Transformer
	// Origin says who makes a request; nil: no writer is named.
	Origin func(context.Context) string
	// Reserve is Config.Reserve.
	Reserve ReserveFunc
	// NewFunc returns an empty object of the resource, for bookmarks.
	NewFunc func() runtime.Object
	// TolerateCorrupt marks values that cannot be read as corrupt, so that an
	// administrator may delete them by force, and lets a list name all of them
	// instead of the first.
	TolerateCorrupt bool
}

// ReserveFunc lets a write of an origin begin that takes so many bytes of the
// history, or says in an API error why not. done is called when its outcome is
// known. Called concurrently.
type ReserveFunc func(ctx context.Context, origin string, bytes int64) (done func(), err error)

// DefaultPrefix is the folder that holds all objects of the API.
const DefaultPrefix = "/registry"

// Storage is the storage.Interface of one resource. It is safe for concurrent
// use, holds nothing that would need saving, and needs no Close: reads end
// with their context, watches with theirs or with Stop.
type Storage struct {
	store          Store
	values         values
	versioner      storage.Versioner
	prefix         string // ends in "/"
	resourcePrefix string
	resource       schema.GroupResource
	newFunc        func() runtime.Object
	origin         func(context.Context) string
	reserve        ReserveFunc

	estimateSize atomic.Bool
	confirmed    atomic.Bool // this node's copy is no older than this process

	mu       sync.Mutex
	progress map[*stream]struct{} // streams that want bookmarks
}

var _ storage.Interface = (*Storage)(nil)

// New returns the storage of one resource.
func New(o Options) (*Storage, error) {
	switch {
	case o.Store == nil:
		return nil, fmt.Errorf("kubestore: %s: no store given", o.GroupResource)
	case o.Codec == nil:
		return nil, fmt.Errorf("kubestore: %s: no codec given", o.GroupResource)
	case !strings.HasPrefix(o.ResourcePrefix, "/") || o.ResourcePrefix == "/":
		return nil, fmt.Errorf("kubestore: %s: resource prefix %q must be a folder such as /pods", o.GroupResource, o.ResourcePrefix)
	}
	if o.Prefix == "" {
		o.Prefix = DefaultPrefix
	}
	if o.Transformer == nil {
		o.Transformer = identity.NewEncryptCheckTransformer()
	}
	if o.Origin == nil {
		o.Origin = func(context.Context) string { return "" }
	}
	if o.Reserve == nil {
		o.Reserve = func(context.Context, string, int64) (func(), error) { return func() {}, nil }
	}
	if o.TolerateCorrupt {
		o.Transformer = corruptMarker{o.Transformer}
	}
	versioner := storage.APIObjectVersioner{}
	return &Storage{
		store: o.Store,
		values: values{
			codec:       o.Codec,
			versioner:   versioner,
			transformer: o.Transformer,
			markCorrupt: o.TolerateCorrupt,
		},
		versioner:      versioner,
		prefix:         strings.TrimSuffix(path.Join("/", o.Prefix), "/") + "/",
		resourcePrefix: o.ResourcePrefix,
		resource:       o.GroupResource,
		newFunc:        o.NewFunc,
		origin:         o.Origin,
		reserve:        o.Reserve,
		progress:       make(map[*stream]struct{}),
	}, nil
}

// Versioner implements storage.Interface.
func (s *Storage) Versioner() storage.Versioner { return s.versioner }

// ReadinessCheck implements storage.Interface: a store that holds no revision
// at all has not yet caught up with the cluster.
func (s *Storage) ReadinessCheck() error {
	if s.store.Revision() == 0 {
		return storage.ErrStorageNotReady
	}
	return nil
}

// CompactRevision implements storage.Interface: everything older is gone. 0
// says that nothing is.
func (s *Storage) CompactRevision() int64 {
	if oldest := s.store.OldestRevision(); oldest > 1 {
		return oldest
	}
	return 0
}

// GetCurrentResourceVersion implements storage.Interface: the revision of the
// whole keyspace, confirmed by the leader. Its callers go on to wait until
// their watch has come this far, so the watches are asked to say how far they
// are; without that a quiet resource would wait for the next periodic request.
func (s *Storage) GetCurrentResourceVersion(ctx context.Context) (uint64, error) {
	key, err := s.key(s.resourcePrefix, false)
	if err != nil {
		return 0, err
	}
	_, rev, err := s.get(ctx, key, raftstore.ReadOptions{})
	if err != nil {
		return 0, explain(err)
	}
	if rev == 0 {
		return 0, storage.ErrStorageNotReady
	}
	s.requestProgress()
	return uint64(rev), nil
}

// RequestWatchProgress implements storage.Interface.
func (s *Storage) RequestWatchProgress(context.Context) error {
	s.requestProgress()
	return nil
}

func (s *Storage) requestProgress() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for w := range s.progress {
		w.source.RequestProgress()
	}
}

// key checks a key of the API server and puts it under the prefix. A recursive
// key is a folder and gets a trailing slash, so that /pods/a does not find
// /pods/ab.
func (s *Storage) key(key string, recursive bool) (string, error) {
	key, err := storage.PrepareKey(s.resourcePrefix, key, recursive)
	if err != nil {
		return "", err
	}
	return s.prefix + strings.TrimPrefix(key, "/"), nil
}

// shownKey is a stored key as the API server named it.
func (s *Storage) shownKey(stored string) string {
	return "/" + strings.TrimPrefix(stored, s.prefix)
}
