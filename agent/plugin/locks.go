package plugin

import (
	"context"
	"sync"
)

// Locks are one lock a name. The zero value is ready.
type Locks struct {
	mu   sync.Mutex
	held map[string]*nameLock
}

type nameLock struct {
	free  chan struct{} // holds one token while the lock is free
	users int
}

// Lock waits for the name's lock; unlock must be called once if err is nil,
// which it is unless ctx ended before.
func (l *Locks) Lock(ctx context.Context, name string) (unlock func(), err error) {
	l.mu.Lock()
	if l.held == nil {
		l.held = map[string]*nameLock{}
	}
	n := l.held[name]
	if n == nil {
		n = &nameLock{free: make(chan struct{}, 1)}
		n.free <- struct{}{}
		l.held[name] = n
	}
	n.users++
	l.mu.Unlock()
	leave := func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if n.users--; n.users == 0 {
			delete(l.held, name)
		}
	}
	select {
	case <-n.free:
		return func() { n.free <- struct{}{}; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
}
