package raftstore

import "sync"

// notifier wakes everyone who waits for something to have changed.
type notifier struct {
	mu sync.Mutex
	ch chan struct{} // nil: nobody waits
}

// changed is closed by the next broadcast. Take it before looking at what is
// waited for.
func (n *notifier) changed() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch == nil {
		n.ch = make(chan struct{})
	}
	return n.ch
}

func (n *notifier) broadcast() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch != nil {
		close(n.ch)
		n.ch = nil
	}
}
