// Package watch hands the changes of a keyspace to any number of watchers. The
// one who applies changes only calls Notify, which never blocks: a hub
// goroutine reads the history and queues each change for the watchers of its
// key; a watcher that reads too slowly loses its queue and reads the history
// itself until it has caught up, or is cut with a *mvcc.CompactedError when
// the history has moved past it. No change is ever left out in silence.
package watch

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// Errors that end a Watcher.
var (
	// ErrClosed is returned when the hub was closed.
	ErrClosed = errors.New("watch hub is closed")
	// ErrRewound is returned when the keyspace was replaced by an older one.
	ErrRewound = errors.New("keyspace was restored to an older revision")
)

// Source is where changes are read from: a mvcc.Keyspace, or what stands for
// the present one. It is called concurrently.
type Source interface {
	Revision() int64
	// Events is mvcc.Keyspace.Events.
	Events(from int64, limit int) (events []mvcc.Event, through int64, err error)
}

const (
	chunk    = 1000 // events read from the source in one go
	maxQueue = 2000 // events queued for one watcher before it has to catch up
)

// Listener is called for what happens in a Hub; any function may be nil. They are
// called from the hub's goroutines and must return at once.
type Listener struct {
	// Dispatched: changes were queued for their watchers, so long after the hub
	// was first notified of them.
	Dispatched func(changes int, lag time.Duration)
	// FellBehind: a watcher read too slowly and has to catch up from the history.
	FellBehind func()
	// Cut: a watcher ended because the history no longer holds what it needs.
	Cut func()
}

// Hub is the fan-out. The zero value is not usable: call NewHub.
type Hub struct {
	src      Source
	wake     chan struct{}
	done     chan struct{}
	wg       sync.WaitGroup
	listener Listener
	// notified is when changes that are not dispatched yet were first reported,
	// unix nanoseconds; 0: there are none.
	notified atomic.Int64

	// dispatched: every change up to this revision is in the queue of each
	// synced watcher it concerns, or was. Written with mu held, after queueing.
	dispatched atomic.Int64

	mu       sync.Mutex
	closed   bool
	watchers map[*Watcher]struct{}            // all
	synced   map[string]map[*Watcher]struct{} // by prefix
	lengths  map[int]int                      // of the prefixes in synced: how many there are
	dirty    []*Watcher                       // pushed to in the dispatch under way
	progress map[*Watcher]int64               // asked for, not yet reached
}

// NewHub starts a hub at the source's present revision.
func NewHub(src Source, listener Listener) *Hub {
	h := &Hub{
		src:      src,
		listener: listener,
		wake:     make(chan struct{}, 1),
		done:     make(chan struct{}),
		watchers: make(map[*Watcher]struct{}),
		synced:   make(map[string]map[*Watcher]struct{}),
		lengths:  make(map[int]int),
		progress: make(map[*Watcher]int64),
	}
	h.dispatched.Store(src.Revision())
	h.wg.Add(1)
	go h.run()
	return h
}

// Notify says that the source may have changed. It never blocks.
func (h *Hub) Notify() {
	h.notified.CompareAndSwap(0, time.Now().UnixNano())
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// Close ends all watchers with ErrClosed and waits for every goroutine.
func (h *Hub) Close() {
	h.mu.Lock()
	if !h.closed {
		h.closed = true
		close(h.done)
	}
	h.mu.Unlock()
	h.wg.Wait()
}

// Len is the number of watchers.
func (h *Hub) Len() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.watchers)
}

func (h *Hub) run() {
	defer h.wg.Done()
	for {
		select {
		case <-h.wake:
			since := h.notified.Swap(0)
			for h.dispatch(since) {
			}
		case <-h.done:
			return
		}
	}
}

// dispatch queues one chunk of changes and reports whether there may be more.
func (h *Hub) dispatch(since int64) bool {
	at := h.dispatched.Load()
	if now := h.src.Revision(); now < at {
		h.cut(ErrRewound, now)
		return true
	}
	events, through, err := h.src.Events(at+1, chunk)
	var compacted *mvcc.CompactedError
	switch {
	case errors.As(err, &compacted):
		h.cut(err, compacted.Oldest)
		return true
	case err != nil || through == at:
		return false
	}

	h.mu.Lock()
	defer h.mu.Unlock()
	for i := range events {
		key := events[i].KV.Key
		for n := range h.lengths {
			if n > len(key) {
				continue
			}
			for w := range h.synced[key[:n]] {
				if !w.push(&events[i]) {
					h.unsync(w)
					if h.listener.FellBehind != nil {
						h.listener.FellBehind()
					}
				}
				if !w.dirty {
					w.dirty = true
					h.dirty = append(h.dirty, w)
				}
			}
		}
	}
	h.dispatched.Store(through)
	for i, w := range h.dirty {
		w.dirty = false
		w.poke()
		h.dirty[i] = nil
	}
	h.dirty = h.dirty[:0]
	if h.listener.Dispatched != nil && since > 0 {
		h.listener.Dispatched(len(events), time.Duration(time.Now().UnixNano()-since))
	}
	for w, target := range h.progress {
		if through >= target {
			delete(h.progress, w)
			w.wantProgress()
		}
	}
	return true
}

// cut ends the synced watchers whose next change is gone, and goes on at rev.
// Those that began later than that lack nothing: the hub alone is behind. The
// others find out by themselves when they read, unless time was rewound.
func (h *Hub) cut(err error, rev int64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for w := range h.watchers {
		if errors.Is(err, ErrRewound) || w.misses(rev) {
			w.end(err)
		}
	}
	h.dispatched.Store(rev)
}

// Watch starts a watcher of the keys beginning with prefix, from revision from
// on (0: from the next change on). It ends with ctx.
func (h *Hub) Watch(ctx context.Context, prefix string, from int64) (*Watcher, error) {
	if from == 0 {
		from = h.src.Revision() + 1
	} else if _, _, err := h.src.Events(from, 0); err != nil {
		return nil, err
	}
	w := &Watcher{
		hub: h, prefix: prefix, next: from,
		ch:     make(chan Batch, 16),
		signal: make(chan struct{}, 1),
		stop:   make(chan struct{}),
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, ErrClosed
	}
	h.watchers[w] = struct{}{}
	h.wg.Add(1)
	go w.run(ctx)
	return w, nil
}

// sync makes w a synced watcher if it has read all that was dispatched. w.next
// is its goroutine's own until then.
func (h *Hub) sync(w *Watcher) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if w.next <= h.dispatched.Load() {
		return false
	}
	ws := h.synced[w.prefix]
	if ws == nil {
		ws = make(map[*Watcher]struct{})
		h.synced[w.prefix] = ws
		h.lengths[len(w.prefix)]++
	}
	ws[w] = struct{}{}
	w.mu.Lock()
	w.synced = true
	w.mu.Unlock()
	return true
}

// unsync takes w out of the index. Caller holds mu.
func (h *Hub) unsync(w *Watcher) {
	ws, ok := h.synced[w.prefix]
	if !ok {
		return
	}
	delete(ws, w)
	if len(ws) > 0 {
		return
	}
	delete(h.synced, w.prefix)
	if h.lengths[len(w.prefix)]--; h.lengths[len(w.prefix)] == 0 {
		delete(h.lengths, len(w.prefix))
	}
}

func (h *Hub) remove(w *Watcher) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.unsync(w)
	delete(h.watchers, w)
	delete(h.progress, w)
}

func (h *Hub) requestProgress(w *Watcher) {
	target := h.src.Revision()
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.watchers[w]; !ok {
		return
	}
	if h.dispatched.Load() >= target {
		w.wantProgress()
		return
	}
	h.progress[w] = target
	h.Notify()
}
