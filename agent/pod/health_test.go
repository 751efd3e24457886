package pod

import (
	"context"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// silent is a runtime that answers as long as it does not hang.
type silent struct {
	Runtime
	hangs atomic.Bool
}

func (s *silent) Ping(ctx context.Context) error {
	if !s.hangs.Load() {
		return nil
	}
	<-ctx.Done()
	return ctx.Err()
}

// TestARuntimeThatHangs: the node is told soon, and soon again when it is over.
func TestARuntimeThatHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &silent{}
		told := 0
		m := NewManager(Config{Runtime: r, OnRuntime: func() { told++ }})
		m.setFault("")
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			m.watchRuntime(ctx)
		}()
		time.Sleep(time.Minute)
		synctest.Wait()
		if why := m.RuntimeFault(); why != "" || told != 1 {
			t.Errorf("fault %q, told %d times", why, told)
		}
		r.hangs.Store(true)
		time.Sleep(healthPeriod + healthDeadline + time.Second)
		synctest.Wait()
		if why := m.RuntimeFault(); !strings.Contains(why, "does not answer") || told != 2 {
			t.Errorf("fault %q, told %d times", why, told)
		}
		r.hangs.Store(false)
		time.Sleep(healthDeadline + healthPeriod)
		synctest.Wait()
		if why := m.RuntimeFault(); why != "" || told != 3 {
			t.Errorf("fault %q, told %d times", why, told)
		}
		cancel()
		<-done
	})
}
