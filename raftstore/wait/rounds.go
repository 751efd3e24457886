package wait

import (
	"context"
	"errors"
	"sync"
)

// Rounds run a question once for all who joined before it began. A caller that joins while
// it runs waits for the next one.
type Rounds struct {
	do    func(ctx context.Context) (uint64, error)
	start func(func())
	stop  <-chan struct{}

	mu      sync.Mutex
	running bool
	next    *round // joined, not begun
}

type round struct {
	done  chan struct{}
	value uint64
	err   error
}

// NewRounds makes rounds of do. start runs a function in a goroutine; it may
// drop it once stop is closed: then all who wait get ErrStopped.
func NewRounds(do func(ctx context.Context) (uint64, error), start func(func()), stop <-chan struct{}) *Rounds {
	return &Rounds{do: do, start: start, stop: stop}
}

// ErrStopped is returned by Join when there will be no further round.
var ErrStopped = errors.New("stopped")

// Join waits for a round that begins after the call.
func (r *Rounds) Join(ctx context.Context) (uint64, error) {
	r.mu.Lock()
	if r.next == nil {
		r.next = &round{done: make(chan struct{})}
	}
	mine := r.next
	if !r.running {
		r.running = true
		r.start(r.run)
	}
	r.mu.Unlock()
	select {
	case <-mine.done:
		return mine.value, mine.err
	case <-ctx.Done():
		return 0, ctx.Err()
	case <-r.stop:
		return 0, ErrStopped
	}
}

// run works off rounds until no caller has joined the next one.
func (r *Rounds) run() {
	for {
		r.mu.Lock()
		cur := r.next
		r.next = nil
		if cur == nil {
			r.running = false
			r.mu.Unlock()
			return
		}
		r.mu.Unlock()
		cur.value, cur.err = r.do(context.Background())
		close(cur.done)
	}
}
