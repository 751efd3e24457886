package raftstore_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// raft forgets what waits for its FSM when it shuts down; a store that is
// closed under writes ends all the same, and each write has an answer.
func TestCloseUnderWrites(t *testing.T) {
	t.Parallel()
	const times, writers = 10, 16
	c := raftstoretest.New(t, 1, func(c *raftstore.Config) {
		// Slow to apply, so that something waits.
		c.Inject(raftstore.Faults{Mangle: func(*mvcc.Batch) { time.Sleep(2 * time.Millisecond) }})
	})
	for range times {
		s := c.Leader()
		var wg sync.WaitGroup
		for i := range writers {
			wg.Go(func() {
				for n := 0; ; n++ {
					_, err := s.Txn(context.Background(), put(fmt.Sprintf("/%d", i), fmt.Sprint(n)))
					if errors.Is(err, raftstore.ErrClosed) || errors.Is(err, raftstore.ErrUnknownOutcome) {
						return
					}
					if err != nil {
						t.Errorf("a write as the store is closed: %v", err)
						return
					}
				}
			})
		}
		before := s.Revision()
		c.Wait("writes", func() bool { return s.Revision() > before+writers })
		killed := make(chan struct{})
		go func() {
			defer close(killed)
			c.Kill("n0")
			wg.Wait()
		}()
		select {
		case <-killed:
		case <-time.After(raftstoretest.Timeout):
			t.Fatal("the store does not end")
		}
		c.Start("n0")
	}
}
