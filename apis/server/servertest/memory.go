// Package servertest runs an API server in a test: on a store in memory, with
// no listener unless asked for one.
package servertest

import (
	"bytes"
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"
	"k8s.io/client-go/tools/cache"
)

// Memory is a revisioned keyspace in memory: the twin of the real store for
// tests. It keeps every event permanently and objects past their time to live.
type Memory struct {
	mu       sync.Mutex
	changed  *sync.Cond
	revision uint64
	entries  map[string]entry
	events   []event // in the order of revisions
	// unready, if not nil, is why reads and writes fail.
	unready error
}

type entry struct {
	data     []byte
	revision uint64
}

// event is one change: before and after, either of which may be missing.
type event struct {
	key           string
	revision      uint64
	before, after []byte
	was           uint64 // revision of before
}

// NewMemory makes an empty keyspace.
func NewMemory() *Memory {
	m := &Memory{entries: map[string]entry{}, revision: 1}
	m.changed = sync.NewCond(&m.mu)
	return m
}

// SetReady makes every read and write fail with err until it is called with
// nil, as a store without a leader does.
func (m *Memory) SetReady(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.unready = err
}

// Decorator hands out the keyspace as storage.
func (m *Memory) Decorator() generic.StorageDecorator {
	return func(config *storagebackend.ConfigForResource, prefix string, _ func(runtime.Object) (string, error),
		newFunc, newListFunc func() runtime.Object, _ storage.AttrFunc, _ storage.IndexerFuncs, _ *cache.Indexers,
	) (storage.Interface, factory.DestroyFunc, error) {
		return &memoryStorage{m: m, codec: config.Codec, newFunc: newFunc, newListFunc: newListFunc, prefix: prefix}, func() {}, nil
	}
}

// put needs mu.
func (m *Memory) put(key string, data []byte) uint64 {
	old, had := m.entries[key]
	m.revision++
	e := event{key: key, revision: m.revision, after: data}
	if had {
		e.before, e.was = old.data, old.revision
	}
	m.entries[key] = entry{data: data, revision: m.revision}
	m.events = append(m.events, e)
	m.changed.Broadcast()
	return m.revision
}

// remove needs mu.
func (m *Memory) remove(key string) uint64 {
	old := m.entries[key]
	delete(m.entries, key)
	m.revision++
	m.events = append(m.events, event{key: key, revision: m.revision, before: old.data, was: old.revision})
	m.changed.Broadcast()
	return m.revision
}

// memoryStorage is one resource's view of a Memory.
type memoryStorage struct {
	m                    *Memory
	codec                runtime.Codec
	newFunc, newListFunc func() runtime.Object
	prefix               string
	versioner            storage.APIObjectVersioner
}

var _ storage.Interface = &memoryStorage{}

func (s *memoryStorage) Versioner() storage.Versioner { return s.versioner }

func (s *memoryStorage) decode(data []byte, revision uint64, into runtime.Object) error {
	if _, _, err := s.codec.Decode(data, nil, into); err != nil {
		return fmt.Errorf("decode: %w", err)
	}
	return s.versioner.UpdateObject(into, revision)
}

func (s *memoryStorage) encode(obj runtime.Object) ([]byte, error) {
	if err := s.versioner.PrepareObjectForStorage(obj); err != nil {
		return nil, err
	}
	return runtime.Encode(s.codec, obj)
}

func (s *memoryStorage) Create(_ context.Context, key string, obj, out runtime.Object, _ uint64) error {
	if version, err := s.versioner.ObjectResourceVersion(obj); err == nil && version != 0 {
		return storage.ErrResourceVersionSetOnCreate
	}
	data, err := s.encode(obj.DeepCopyObject())
	if err != nil {
		return err
	}
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if s.m.unready != nil {
		return s.m.unready
	}
	if _, ok := s.m.entries[key]; ok {
		return storage.NewKeyExistsError(key, 0)
	}
	revision := s.m.put(key, data)
	if out == nil {
		return nil
	}
	return s.decode(data, revision, out)
}

func (s *memoryStorage) Delete(ctx context.Context, key string, out runtime.Object, preconditions *storage.Preconditions, validate storage.ValidateObjectFunc, _ runtime.Object, _ storage.DeleteOptions) error {
	for {
		e, err := s.read(key)
		if err != nil {
			return err
		}
		obj := s.newFunc()
		if err := s.decode(e.data, e.revision, obj); err != nil {
			return err
		}
		if err := preconditions.Check(key, obj); err != nil {
			return err
		}
		if err := validate(ctx, obj); err != nil {
			return err
		}
		s.m.mu.Lock()
		if s.m.entries[key].revision != e.revision {
			s.m.mu.Unlock()
			continue
		}
		revision := s.m.remove(key)
		s.m.mu.Unlock()
		return s.decode(e.data, revision, out)
	}
}

// DeleteEach is resource.EachDeleter's.
func (s *memoryStorage) DeleteEach(_ context.Context, keys []string, versions []uint64) ([]bool, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if s.m.unready != nil {
		return nil, s.m.unready
	}
	deleted := make([]bool, len(keys))
	for i, key := range keys {
		if i > 0 && key <= keys[i-1] {
			return deleted, fmt.Errorf("delete %s after %s: the keys do not ascend", key, keys[i-1])
		}
		if e, ok := s.m.entries[key]; ok && e.revision == versions[i] {
			s.m.remove(key)
			deleted[i] = true
		}
	}
	return deleted, nil
}

func (s *memoryStorage) read(key string) (entry, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if s.m.unready != nil {
		return entry{}, s.m.unready
	}
	e, ok := s.m.entries[key]
	if !ok {
		return entry{}, storage.NewKeyNotFoundError(key, 0)
	}
	return e, nil
}

func (s *memoryStorage) Get(_ context.Context, key string, opts storage.GetOptions, into runtime.Object) error {
	least, err := s.versioner.ParseResourceVersion(opts.ResourceVersion)
	if err != nil {
		return err
	}
	s.m.mu.Lock()
	revision := s.m.revision
	s.m.mu.Unlock()
	if least > revision {
		return storage.NewTooLargeResourceVersionError(least, revision, 0)
	}
	e, err := s.read(key)
	if storage.IsNotFound(err) && opts.IgnoreNotFound {
		return runtime.SetZeroValue(into)
	}
	if err != nil {
		return err
	}
	return s.decode(e.data, e.revision, into)
}

func (s *memoryStorage) GuaranteedUpdate(_ context.Context, key string, destination runtime.Object, ignoreNotFound bool, preconditions *storage.Preconditions, tryUpdate storage.UpdateFunc, _ runtime.Object) error {
	for {
		obj := s.newFunc()
		e, err := s.read(key)
		switch {
		case storage.IsNotFound(err) && ignoreNotFound:
		case err != nil:
			return err
		default:
			if err := s.decode(e.data, e.revision, obj); err != nil {
				return err
			}
		}
		if err := preconditions.Check(key, obj); err != nil {
			return err
		}
		updated, _, err := tryUpdate(obj, storage.ResponseMeta{ResourceVersion: e.revision})
		if err != nil {
			return err
		}
		data, err := s.encode(updated.DeepCopyObject())
		if err != nil {
			return err
		}
		if e.data != nil && bytes.Equal(data, e.data) {
			return s.decode(data, e.revision, destination)
		}
		s.m.mu.Lock()
		if s.m.entries[key].revision != e.revision {
			s.m.mu.Unlock()
			continue
		}
		revision := s.m.put(key, data)
		s.m.mu.Unlock()
		return s.decode(data, revision, destination)
	}
}

func (s *memoryStorage) GetList(_ context.Context, key string, opts storage.ListOptions, list runtime.Object) error {
	_, from, err := storage.ValidateListOptions(s.prefix+"/", s.versioner, opts)
	if err != nil {
		return err
	}
	s.m.mu.Lock()
	if err := s.m.unready; err != nil {
		s.m.mu.Unlock()
		return err
	}
	revision := s.m.revision
	keys, entries := s.m.selected(key, opts.Recursive)
	s.m.mu.Unlock()

	items, err := meta.GetItemsPtr(list)
	if err != nil {
		return fmt.Errorf("list %s: %w", key, err)
	}
	v, err := conversion.EnforcePtr(items)
	if err != nil {
		return fmt.Errorf("list %s: %w", key, err)
	}
	v.Set(reflect.MakeSlice(v.Type(), 0, 0))
	next := ""
	for i, k := range keys {
		if k < from {
			continue
		}
		if opts.Predicate.Limit > 0 && int64(v.Len()) == opts.Predicate.Limit {
			if next, err = storage.EncodeContinue(keys[i-1]+"\x00", s.prefix+"/", int64(revision)); err != nil {
				return err
			}
			break
		}
		obj := s.newFunc()
		if err := s.decode(entries[i].data, entries[i].revision, obj); err != nil {
			return err
		}
		ok, err := opts.Predicate.Matches(obj)
		if err != nil {
			return err
		}
		if ok {
			v.Set(reflect.Append(v, reflect.ValueOf(obj).Elem()))
		}
	}
	return s.versioner.UpdateList(list, revision, next, nil)
}

// selected needs mu. The keys are sorted.
func (m *Memory) selected(key string, recursive bool) ([]string, []entry) {
	var keys []string
	for k := range m.entries {
		if within(k, key, recursive) {
			keys = append(keys, k)
		}
	}
	slices.Sort(keys)
	entries := make([]entry, len(keys))
	for i, k := range keys {
		entries[i] = m.entries[k]
	}
	return keys, entries
}

func within(k, key string, recursive bool) bool {
	if !recursive {
		return k == key
	}
	return strings.HasPrefix(k, strings.TrimSuffix(key, "/")+"/")
}

func (s *memoryStorage) Stats(context.Context) (storage.Stats, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	keys, _ := s.m.selected(s.prefix, true)
	return storage.Stats{ObjectCount: int64(len(keys))}, nil
}

func (s *memoryStorage) ReadinessCheck() error {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	return s.m.unready
}

func (s *memoryStorage) RequestWatchProgress(context.Context) error { return nil }

func (s *memoryStorage) GetCurrentResourceVersion(context.Context) (uint64, error) {
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	return s.m.revision, nil
}

func (s *memoryStorage) EnableResourceSizeEstimation(storage.KeysFunc) error { return nil }

func (s *memoryStorage) CompactRevision() int64 { return 0 }

// bookmarkEvery is how often a watch that allows it gets a bookmark of the revision.
const bookmarkEvery = time.Second

func (s *memoryStorage) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	since, err := s.versioner.ParseResourceVersion(opts.ResourceVersion)
	if err != nil {
		return nil, err
	}
	if opts.Predicate.Field == nil {
		opts.Predicate = storage.Everything
	}
	ctx, cancel := context.WithCancel(ctx)
	w := &memoryWatch{s: s, key: key, opts: opts, events: make(chan watch.Event, 100), cancel: cancel}
	s.m.mu.Lock()
	defer s.m.mu.Unlock()
	if s.m.unready != nil {
		cancel()
		return nil, s.m.unready
	}
	var initial []event
	if since == 0 || opts.SendInitialEvents != nil && *opts.SendInitialEvents {
		if opts.SendInitialEvents == nil || *opts.SendInitialEvents {
			keys, entries := s.m.selected(key, opts.Recursive)
			for i, k := range keys {
				initial = append(initial, event{key: k, after: entries[i].data, revision: entries[i].revision})
			}
		}
		since = s.m.revision
	}
	go w.run(ctx, initial, since)
	return w, nil
}

type memoryWatch struct {
	s      *memoryStorage
	key    string
	opts   storage.ListOptions
	events chan watch.Event
	cancel context.CancelFunc
}

func (w *memoryWatch) ResultChan() <-chan watch.Event { return w.events }
func (w *memoryWatch) Stop()                          { w.cancel() }

func (w *memoryWatch) run(ctx context.Context, initial []event, since uint64) {
	defer close(w.events)
	defer w.cancel()
	m := w.s.m
	wake := func() {
		m.mu.Lock()
		m.changed.Broadcast()
		m.mu.Unlock()
	}
	defer context.AfterFunc(ctx, wake)()
	tick := time.NewTicker(bookmarkEvery)
	defer tick.Stop()

	for _, e := range initial {
		if !w.send(ctx, e) {
			return
		}
	}
	utilflowcontrol.WatchInitialized(ctx)
	if w.opts.SendInitialEvents != nil && *w.opts.SendInitialEvents && w.opts.Predicate.AllowWatchBookmarks && !w.bookmark(ctx, since, true) {
		return
	}
	for {
		select {
		case <-tick.C:
			if w.opts.Predicate.AllowWatchBookmarks && !w.bookmark(ctx, since, false) {
				return
			}
		default:
		}
		batch := w.next(ctx, since)
		if batch == nil {
			return
		}
		for _, e := range batch {
			since = e.revision
			if within(e.key, w.key, w.opts.Recursive) && !w.send(ctx, e) {
				return
			}
		}
	}
}

// next waits for events after since; nil means that ctx ended.
func (w *memoryWatch) next(ctx context.Context, since uint64) []event {
	m := w.s.m
	m.mu.Lock()
	defer m.mu.Unlock()
	for {
		if ctx.Err() != nil {
			return nil
		}
		i, _ := slices.BinarySearchFunc(m.events, since+1, func(e event, r uint64) int { return int(int64(e.revision) - int64(r)) })
		if i < len(m.events) {
			return slices.Clone(m.events[i:])
		}
		m.changed.Wait()
	}
}

// send tells the watcher of e as its selector sees it.
func (w *memoryWatch) send(ctx context.Context, e event) bool {
	var before, after runtime.Object
	if e.before != nil {
		before = w.object(e.before, e.revision)
	}
	if e.after != nil {
		after = w.object(e.after, e.revision)
	}
	switch {
	case before == nil && after == nil:
		return true
	case before == nil:
		return w.emit(ctx, watch.Event{Type: watch.Added, Object: after})
	case after == nil:
		return w.emit(ctx, watch.Event{Type: watch.Deleted, Object: before})
	}
	return w.emit(ctx, watch.Event{Type: watch.Modified, Object: after})
}

// object decodes data, or gives nil if the watch does not select it.
func (w *memoryWatch) object(data []byte, revision uint64) runtime.Object {
	obj := w.s.newFunc()
	if err := w.s.decode(data, revision, obj); err != nil {
		return nil
	}
	if ok, err := w.opts.Predicate.Matches(obj); err != nil || !ok {
		return nil
	}
	return obj
}

func (w *memoryWatch) bookmark(ctx context.Context, revision uint64, initial bool) bool {
	obj := w.s.newFunc()
	if err := w.s.versioner.UpdateObject(obj, revision); err != nil {
		return false
	}
	if initial {
		if err := storage.AnnotateInitialEventsEndBookmark(obj); err != nil {
			return false
		}
	}
	return w.emit(ctx, watch.Event{Type: watch.Bookmark, Object: obj})
}

func (w *memoryWatch) emit(ctx context.Context, e watch.Event) bool {
	select {
	case w.events <- e:
		return true
	case <-ctx.Done():
		return false
	}
}

// ErrUnready is what to give SetReady for a store without a leader.
var ErrUnready = apierrors.NewServiceUnavailable("the store has no leader")
