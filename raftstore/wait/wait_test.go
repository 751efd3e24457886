package wait

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
)

// TestRounds: who joins while a round runs is served by the next one, and all
// who have joined by one.
func TestRounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var wg sync.WaitGroup
		begun, goOn := uint64(0), make(chan struct{})
		stop := make(chan struct{})
		r := NewRounds(func(context.Context) (uint64, error) {
			begun++
			n := begun
			<-goOn
			return n, nil
		}, wg.Go, stop)
		join := func(want uint64) {
			wg.Go(func() {
				if n, err := r.Join(t.Context()); n != want || err != nil {
					t.Errorf("served by round %d, %v, want %d", n, err, want)
				}
			})
		}
		join(1)
		synctest.Wait()
		for range 3 {
			join(2)
		}
		synctest.Wait()
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := r.Join(ended); !errors.Is(err, context.Canceled) {
			t.Errorf("joined with a context that has ended: %v", err)
		}
		goOn <- struct{}{}
		synctest.Wait()
		goOn <- struct{}{}
		wg.Wait()
		close(stop)
		dropped := NewRounds(nil, func(func()) {}, stop)
		if _, err := dropped.Join(t.Context()); !errors.Is(err, ErrStopped) {
			t.Errorf("joined after the end: %v", err)
		}
	})
}

func TestOutcomes(t *testing.T) {
	o := NewOutcomes[string]()
	one, two, gone := o.Add(1), o.Add(2), o.Add(3)
	o.Remove(3)
	o.Resolve(1, "done")
	o.Resolve(1, "again") // decided once
	o.Resolve(3, "late")
	o.AskAgain()
	if got, ok := <-one; got != "done" || !ok {
		t.Errorf("the first: %q, %v", got, ok)
	}
	if _, ok := <-two; ok {
		t.Error("the second has an outcome")
	}
	select {
	case <-gone:
		t.Error("the third is waited for")
	default:
	}
}

func TestNextAndChange(t *testing.T) {
	var n Next[int]
	a, b := n.Ask(), n.Ask()
	n.Forget(b)
	n.Give(7)
	n.Give(8)
	if got := <-a; got != 7 || len(a) != 0 || len(b) != 0 {
		t.Errorf("got %d, %d and %d more", got, len(a), len(b))
	}
	var c Change
	c.Broadcast() // no goroutine waits
	before := c.Next()
	c.Broadcast()
	<-before
	select {
	case <-c.Next():
		t.Error("what changed before is not the next change")
	default:
	}
}
