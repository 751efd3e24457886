// Package wait is what many goroutines of a member wait for together: that
// something has changed, the next round of a question, the outcome of a command,
// the next snapshot.
package wait

import "sync"

// Change wakes everyone who waits for something to have changed.
type Change struct {
	mu sync.Mutex
	ch chan struct{} // nil: no goroutine waits
}

// Next is closed by the next Broadcast. Take it before looking at what is
// waited for.
func (n *Change) Next() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch == nil {
		n.ch = make(chan struct{})
	}
	return n.ch
}

// Broadcast wakes all who wait now.
func (n *Change) Broadcast() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch != nil {
		close(n.ch)
		n.ch = nil
	}
}
