package kubestore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/apiserver/pkg/util/flowcontrol"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/slack"
)

// resultBuffer is how many events wait for a slow reader before its stream
// stops reading from the store, which then keeps them in its shared history.
const resultBuffer = 100

// progressPeriod is how often a watch with ProgressNotify tells how far it is
// while others' resources change: a watch cache that stands still would hand
// out versions that soon are too old to go on from.
const progressPeriod = 5 * time.Second

// Watch implements storage.Interface. The resource version and
// SendInitialEvents decide where the stream begins:
//
//	""        the newest state as ADDED events, then every change
//	"0"       the same, of what this node happens to know
//	N         every change after revision N
//	any, SendInitialEvents=false   as above, "" and "0" without the state
//	any, SendInitialEvents=true    the newest state, not older than N, a
//	          bookmark that marks its end if bookmarks are allowed, then changes
//
// Faults after the arguments have been understood come as an ERROR event, the
// last of the stream.
func (s *Storage) Watch(ctx context.Context, key string, opts storage.ListOptions) (watch.Interface, error) {
	key, err := s.key(key, opts.Recursive)
	if err != nil {
		return nil, err
	}
	rev, err := s.versioner.ParseResourceVersion(opts.ResourceVersion)
	if err != nil {
		return nil, err
	}
	if opts.ProgressNotify && s.newFunc == nil {
		return nil, storage.NewInternalError(errors.New("progress of a watch needs a function that makes empty objects"))
	}
	if !utilfeature.DefaultFeatureGate.Enabled(features.WatchList) {
		opts.SendInitialEvents = nil
	}
	if initial := opts.SendInitialEvents; initial != nil && !*initial && rev == 0 {
		// Decided before returning: what the caller writes next must be seen.
		if rev, err = s.GetCurrentResourceVersion(ctx); err != nil {
			return nil, err
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	w := &stream{
		s:       s,
		ctx:     ctx,
		cancel:  cancel,
		key:     key,
		opts:    opts,
		rev:     int64(rev),
		results: make(chan watch.Event, resultBuffer),
	}
	go w.run()
	return w, nil
}

// stream is one open watch: a single goroutine that reads, decodes, selects
// and delivers, in the order of the store's history.
type stream struct {
	s       *Storage
	ctx     context.Context
	cancel  context.CancelFunc
	key     string
	opts    storage.ListOptions
	rev     int64 // everything up to here has been delivered
	source  *raftstore.Watcher
	results chan watch.Event
}

// errStopped ends a stream whose reader has gone.
var errStopped = errors.New("watch stopped")

// Stop implements watch.Interface.
func (w *stream) Stop() { w.cancel() }

// ResultChan implements watch.Interface.
func (w *stream) ResultChan() <-chan watch.Event { return w.results }

func (w *stream) run() {
	defer close(w.results)
	defer w.cancel()
	// Callers that wait for the start must not wait for a stream that failed.
	defer flowcontrol.WatchInitialized(w.ctx)
	err := w.deliver()
	if err == nil || w.ctx.Err() != nil {
		return
	}
	select {
	case w.results <- watch.Event{Type: watch.Error, Object: watchStatus(err)}:
	case <-w.ctx.Done():
	}
}

func (w *stream) deliver() error {
	if err := w.begin(); err != nil {
		return err
	}
	flowcontrol.WatchInitialized(w.ctx)
	source, err := w.s.store.Watch(w.ctx, w.key, raftstore.WatchOptions{Revision: w.rev + 1})
	if err != nil {
		return err
	}
	defer source.Stop()
	w.source = source
	if w.opts.ProgressNotify {
		w.s.addProgress(w)
		defer w.s.removeProgress(w)
	}
	var ask <-chan time.Time
	if w.opts.ProgressNotify {
		ticker := slack.NewTicker(progressPeriod)
		defer ticker.Stop()
		ask = ticker.C
	}
	for {
		select {
		case batch, ok := <-source.C():
			if !ok {
				return source.Err()
			}
			if err := w.batch(batch); err != nil {
				return err
			}
		case <-ask:
			if w.s.store.Revision() > w.rev {
				source.RequestProgress()
			}
		}
	}
}

// batch delivers what one batch of the store says.
func (w *stream) batch(b raftstore.Batch) error {
	for i := range b.Events {
		if err := w.change(&b.Events[i]); err != nil {
			return err
		}
	}
	w.rev = b.Revision
	if w.opts.ProgressNotify && len(b.Events) == 0 {
		return w.bookmark(b.Revision, false)
	}
	return nil
}

// begin delivers the initial state if it was asked for, and moves to the
// revision after which changes are delivered.
func (w *stream) begin() error {
	initial := w.opts.SendInitialEvents
	if initial == nil && w.rev > 0 || initial != nil && !*initial {
		return nil
	}
	if err := w.state(); err != nil {
		return err
	}
	if initial != nil && w.opts.Predicate.AllowWatchBookmarks {
		return w.bookmark(w.rev, true)
	}
	return nil
}

// state delivers what exists as ADDED events and moves to its revision. Only a
// watch from "0" may be shown an old state; one with a minimum fails where the
// cluster itself has not come that far.
func (w *stream) state() error {
	var read raftstore.ReadOptions
	if w.opts.ResourceVersion == "0" {
		read = w.s.freshness("0", 0)
	}
	least := w.rev
	var kvs []mvcc.KeyValue
	if w.opts.Recursive {
		res, err := w.s.list(w.ctx, w.key, raftstore.ListOptions{ReadOptions: read})
		if err != nil {
			return err
		}
		kvs, w.rev = res.KVs, res.Revision
	} else {
		kv, rev, err := w.s.get(w.ctx, w.key, read)
		if err != nil {
			return err
		}
		if kv != nil {
			kvs = append(kvs, *kv)
		}
		w.rev = rev
	}
	if w.rev < least {
		return w.s.tooLarge(least)
	}
	for i := range kvs {
		obj, err := w.object(&kvs[i], kvs[i].ModRevision)
		if err != nil {
			return err
		}
		if !w.selects(obj) {
			continue
		}
		if err := w.send(watch.Event{Type: watch.Added, Object: obj}); err != nil {
			return err
		}
	}
	return nil
}

// change delivers one event of the history, as what it is to this watcher: an
// object that enters its selection is ADDED, one that leaves it DELETED.
func (w *stream) change(e *mvcc.Event) error {
	if !w.opts.Recursive && e.KV.Key != w.key {
		return nil // the store watches prefixes
	}
	recorded := time.Now()
	event, err := w.event(e)
	if err != nil || event.Object == nil {
		return err
	}
	if w.opts.RecordTimestamps {
		event.Object = &timed{Object: event.Object, at: recorded}
	}
	return w.send(event)
}

// event translates e; an event without an object is not for this watcher.
func (w *stream) event(e *mvcc.Event) (watch.Event, error) {
	rev := e.KV.ModRevision
	if e.Type == mvcc.Delete {
		old, err := w.object(e.Prev, rev)
		if isCorrupt(err) {
			err = &corruptDeletedError{err}
		}
		if err != nil || !w.selects(old) {
			return watch.Event{}, err
		}
		return watch.Event{Type: watch.Deleted, Object: old}, nil
	}
	obj, err := w.object(&e.KV, rev)
	if err != nil {
		return watch.Event{}, err
	}
	now := w.selects(obj)
	switch {
	case e.Prev == nil && now:
		return watch.Event{Type: watch.Added, Object: obj}, nil
	case e.Prev == nil:
		return watch.Event{}, nil
	case w.opts.Predicate.Empty():
		return watch.Event{Type: watch.Modified, Object: obj}, nil
	}
	old, err := w.object(e.Prev, rev)
	if err != nil {
		return watch.Event{}, err
	}
	switch before := w.selects(old); {
	case before && now:
		return watch.Event{Type: watch.Modified, Object: obj}, nil
	case now:
		return watch.Event{Type: watch.Added, Object: obj}, nil
	case before:
		return watch.Event{Type: watch.Deleted, Object: old}, nil
	}
	return watch.Event{}, nil
}

// object decodes a stored value as of revision rev, which for a deletion is
// not the value's own.
func (w *stream) object(kv *mvcc.KeyValue, rev int64) (runtime.Object, error) {
	if kv == nil {
		return nil, fmt.Errorf("kubestore: event at revision %d of %s comes without the previous value", rev, w.key)
	}
	data, _, err := w.s.values.open(w.ctx, kv)
	if err != nil {
		return nil, err
	}
	return w.s.values.decodeNew(w.ctx, data, nil, rev)
}

func (w *stream) selects(obj runtime.Object) bool {
	if w.opts.Predicate.Empty() {
		return true
	}
	ok, err := w.opts.Predicate.Matches(obj)
	return err == nil && ok
}

// bookmark tells the reader that it has seen everything up to rev.
func (w *stream) bookmark(rev int64, endOfInitial bool) error {
	if w.s.newFunc == nil {
		return storage.NewInternalError(errors.New("a bookmark needs a function that makes empty objects"))
	}
	obj := w.s.newFunc()
	if err := w.s.versioner.UpdateObject(obj, uint64(rev)); err != nil {
		return fmt.Errorf("set resource version of a bookmark: %w", err)
	}
	if endOfInitial {
		if err := storage.AnnotateInitialEventsEndBookmark(obj); err != nil {
			return fmt.Errorf("annotate bookmark: %w", err)
		}
	}
	return w.send(watch.Event{Type: watch.Bookmark, Object: obj})
}

func (w *stream) send(e watch.Event) error {
	select {
	case w.results <- e:
		return nil
	case <-w.ctx.Done():
		return errStopped
	}
}

func (s *Storage) addProgress(w *stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.progress[w] = struct{}{}
}

func (s *Storage) removeProgress(w *stream) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.progress, w)
}

// timed carries the time at which an event left the store to the watch cache,
// which unwraps it again and measures its own delay.
type timed struct {
	runtime.Object
	at time.Time
}

var _ storage.WatchEventWithRecordTime = (*timed)(nil)

// GetObjectMeta lets the reflector read the metadata through the wrapper.
func (t *timed) GetObjectMeta() metav1.Object {
	m, err := meta.Accessor(t.Object)
	if err != nil {
		return nil
	}
	return m
}

// DeepCopyObject implements runtime.Object.
func (t *timed) DeepCopyObject() runtime.Object {
	return &timed{Object: t.Object.DeepCopyObject(), at: t.at}
}

// RecordTime implements storage.WatchEventWithRecordTime.
func (t *timed) RecordTime() time.Time { return t.at }

// Unwrap implements storage.WatchEventWithRecordTime.
func (t *timed) Unwrap() runtime.Object { return t.Object }
