package image

import (
	"context"
	"sync"
)

// flights lets callers that want the same thing at the same time share the
// work. The work goes on while anyone waits for it and is canceled when the
// last one has given up. The zero value is ready.
type flights[K comparable, V any] struct {
	mu     sync.Mutex // guards all below and each call's waiters
	calls  map[K]*call[V]
	wg     sync.WaitGroup
	closed bool
}

type call[V any] struct {
	cancel  context.CancelFunc
	waiters int
	done    chan struct{} // closed when value and err are set
	value   V
	err     error
}

// do returns fn's answer, from a run that began before or begins now.
func (f *flights[K, V]) do(ctx context.Context, key K, fn func(context.Context) (V, error)) (V, error) {
	var zero V
	if err := ctx.Err(); err != nil {
		return zero, err
	}
	f.mu.Lock()
	if f.closed {
		f.mu.Unlock()
		return zero, ErrClosed
	}
	c, ok := f.calls[key]
	if !ok {
		c = f.start(ctx, key, fn)
	}
	c.waiters++
	f.mu.Unlock()

	select {
	case <-c.done:
		return c.value, c.err
	case <-ctx.Done():
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	c.waiters--
	if c.waiters == 0 {
		c.cancel()
		if f.calls[key] == c {
			delete(f.calls, key) // later callers must not join a dying call
		}
	}
	return zero, ctx.Err()
}

// start runs fn in the background; mu is held.
func (f *flights[K, V]) start(ctx context.Context, key K, fn func(context.Context) (V, error)) *call[V] {
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	c := &call[V]{cancel: cancel, done: make(chan struct{})}
	if f.calls == nil {
		f.calls = map[K]*call[V]{}
	}
	f.calls[key] = c
	f.wg.Go(func() {
		defer cancel()
		c.value, c.err = fn(run)
		f.mu.Lock()
		if f.calls[key] == c {
			delete(f.calls, key)
		}
		f.mu.Unlock()
		close(c.done)
	})
	return c
}

// close cancels all calls, waits for them and lets no new one begin.
func (f *flights[K, V]) close() {
	f.mu.Lock()
	f.closed = true
	for _, c := range f.calls {
		c.cancel()
	}
	f.mu.Unlock()
	f.wg.Wait()
}
