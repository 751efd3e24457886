package wait

import "sync"

// Next are those who wait for the next value that is made.
type Next[T any] struct {
	mu      sync.Mutex
	waiting map[chan T]struct{}
}

// Ask waits for it. Forget it afterwards.
func (c *Next[T]) Ask() chan T {
	c.mu.Lock()
	defer c.mu.Unlock()
	ch := make(chan T, 1)
	if c.waiting == nil {
		c.waiting = map[chan T]struct{}{}
	}
	c.waiting[ch] = struct{}{}
	return ch
}

// Give gives it to all who have asked.
func (c *Next[T]) Give(value T) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for ch := range c.waiting {
		ch <- value
	}
	clear(c.waiting)
}

// Forget waits no longer.
func (c *Next[T]) Forget(ch chan T) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.waiting, ch)
}
