package volume

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"
)

// hungCalls bounds the wait for calls that can hang in the kernel, on a network
// or FUSE file system whose server does not answer. Such a call cannot be taken
// back: it is left alone, and the same thing is not tried again before it has
// returned.
type hungCalls struct {
	mu   sync.Mutex
	hung map[string]time.Time // by key: when the call under way began
}

// do calls fn and waits for it until ctx ends. what names the thing that may
// hang, for people; key says which calls exclude each other.
func (p *hungCalls) do(ctx context.Context, key, what string, fn func() error) error {
	began := time.Now()
	p.mu.Lock()
	if p.hung == nil {
		p.hung = map[string]time.Time{}
	}
	if since, ok := p.hung[key]; ok {
		p.mu.Unlock()
		return hungError(what, since)
	}
	p.hung[key] = began
	p.mu.Unlock()
	done := make(chan error, 1)
	go func() { // outlives this call when it hangs: nothing can end it
		err := fn()
		p.mu.Lock()
		delete(p.hung, key)
		p.mu.Unlock()
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	select { // both may have come
	case err := <-done:
		return err
	default:
		return hungError(what, began)
	}
}

// below reports a call under way whose key begins with prefix.
func (p *hungCalls) below(prefix string) (since time.Time, hangs bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, t := range p.hung {
		if strings.HasPrefix(key, prefix) {
			return t, true
		}
	}
	return time.Time{}, false
}

func hungError(what string, since time.Time) error {
	return fmt.Errorf("%s has not answered since %s UTC", what, since.UTC().Format(time.TimeOnly))
}
