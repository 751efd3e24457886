package watch

import (
	"context"
	"errors"
	"sort"
	"sync"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// Batch is one delivery: the watcher's changes in order, whole revisions only.
type Batch struct {
	Events []mvcc.Event // may be empty: then it tells of progress only
	// Revision: every change of the prefix up to it has now been delivered.
	// It never goes back.
	Revision int64
}

// Watcher receives the changes of one prefix.
//
//	catching up ──(has read all that was dispatched)──▶ synced
//	     ▲                                                 │
//	     └──────────────(queue full: reads too slowly)─────┘
//
// Its goroutine owns ch and closes it at the end.
type Watcher struct {
	hub    *Hub
	prefix string
	ch     chan Batch
	signal chan struct{} // something below changed
	stop   chan struct{} // closed by the first end()

	mu       sync.Mutex
	synced   bool
	dirty    bool         // guarded by the hub's mu: has been pushed to in this dispatch
	next     int64        // not synced: first revision to read from the source; synced: older ones are skipped
	queue    []mvcc.Event // synced: dispatched, not delivered
	progress bool         // asked for
	ended    bool
	err      error
}

// C delivers the batches. It is closed when the watcher has ended; Err then
// says why. One reader is expected.
func (w *Watcher) C() <-chan Batch { return w.ch }

// Err is why the watcher ended: nil while it runs and after Stop, the
// context's error, a *mvcc.CompactedError when the reader was too slow or the
// history too short, ErrClosed.
func (w *Watcher) Err() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.err
}

// Stop ends the watcher. C is closed soon after; it need not be drained.
func (w *Watcher) Stop() { w.end(nil) }

// RequestProgress asks for a Batch whose Revision is at least the source's
// present one. Requests that come while one is waiting are answered together.
func (w *Watcher) RequestProgress() { w.hub.requestProgress(w) }

func (w *Watcher) end(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended {
		w.ended, w.err = true, err
		close(w.stop)
		if errors.Is(err, mvcc.ErrCompacted) && w.hub.listener.Cut != nil {
			w.hub.listener.Cut()
		}
	}
}

// misses reports whether changes of this watcher are lost when the hub goes on
// after rev.
func (w *Watcher) misses(rev int64) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.synced && w.next <= rev
}

func (w *Watcher) poke() {
	select {
	case w.signal <- struct{}{}:
	default:
	}
}

func (w *Watcher) wantProgress() {
	w.mu.Lock()
	w.progress = true
	w.mu.Unlock()
	w.poke()
}

// push queues a change; false: the queue is full and the watcher will catch up
// from the history, from this revision on. The hub calls it, with its mu held.
func (w *Watcher) push(e *mvcc.Event) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	rev := e.KV.ModRevision
	if rev < w.next {
		return true
	}
	if len(w.queue) >= maxQueue {
		n := len(w.queue)
		for n > 0 && w.queue[n-1].KV.ModRevision == rev {
			n--
		}
		w.queue = w.queue[:n]
		w.synced, w.next = false, rev
		return false
	}
	w.queue = append(w.queue, *e)
	return true
}

func (w *Watcher) run(ctx context.Context) {
	defer w.hub.wg.Done()
	defer close(w.ch)
	defer w.hub.remove(w)
	var sent int64 // the last batch's Revision
	for {
		b, state := w.take()
		switch {
		case state == catchingUp:
			var err error
			if b, err = w.read(); err != nil {
				w.end(err)
				return
			}
			if len(b.Events) == 0 && w.hub.sync(w) {
				continue
			}
		case state == idle:
			if !w.wait(ctx, nil, Batch{}) {
				return
			}
			continue
		}
		b.Revision = max(b.Revision, sent)
		if len(b.Events) == 0 && state == catchingUp {
			continue // read on: nothing of ours in this chunk
		}
		sent = b.Revision
		if !w.wait(ctx, w.ch, b) {
			return
		}
	}
}

type takeState int

const (
	idle takeState = iota
	ready
	catchingUp
)

// take returns what is to be delivered next.
func (w *Watcher) take() (Batch, takeState) {
	// Read before the queue: all up to it is in the queue if we are synced.
	dispatched := w.hub.dispatched.Load()
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.synced {
		n := len(w.queue)
		if n == 0 {
			return Batch{}, catchingUp
		}
		// Left over from before: whole revisions, push saw to that.
		b := Batch{Events: w.queue, Revision: w.queue[n-1].KV.ModRevision}
		w.queue = nil
		return b, ready
	}
	// The hub may be queueing the rest of a later revision right now.
	n := sort.Search(len(w.queue), func(i int) bool { return w.queue[i].KV.ModRevision > dispatched })
	if n > 0 {
		b := Batch{Events: w.queue[:n:n], Revision: dispatched}
		if w.queue = w.queue[n:]; len(w.queue) == 0 {
			w.queue = nil
		}
		return b, ready
	}
	if w.progress {
		w.progress = false
		return Batch{Revision: dispatched}, ready
	}
	return Batch{}, idle
}

// read takes the next chunk out of the history.
func (w *Watcher) read() (Batch, error) {
	events, through, err := w.hub.src.Events(w.next, chunk)
	if err != nil {
		return Batch{}, err
	}
	b := Batch{Revision: through}
	for i := range events {
		key := events[i].KV.Key
		if len(key) >= len(w.prefix) && key[:len(w.prefix)] == w.prefix {
			b.Events = append(b.Events, events[i])
		}
	}
	w.mu.Lock()
	w.next = through + 1
	w.mu.Unlock()
	return b, nil
}

// wait blocks until b is delivered to ch, or with a nil ch until there is a
// signal. It returns false when the watcher has ended.
func (w *Watcher) wait(ctx context.Context, ch chan<- Batch, b Batch) bool {
	var signal <-chan struct{}
	if ch == nil {
		signal = w.signal
	}
	select {
	case ch <- b:
		return true
	case <-signal:
		return true
	case <-ctx.Done():
		w.end(ctx.Err())
	case <-w.hub.done:
		w.end(ErrClosed)
	case <-w.stop:
	}
	return false
}
