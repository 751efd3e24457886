package volume

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestHungCalls: a call that hangs is given up at the deadline, named, and not
// made a second time; others go on, and when it has returned it may be made
// again.
func TestHungCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p hungCalls
		answers := make(chan struct{})
		calls := 0
		stat := func(key string, answer bool) error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			return p.do(ctx, key, "hostPath /mnt/"+key, func() error {
				calls++
				if !answer {
					<-answers
				}
				return nil
			})
		}
		for range 3 {
			began := time.Now()
			err := stat("uid/nfs", false)
			if err == nil || !strings.HasPrefix(err.Error(), "hostPath /mnt/uid/nfs has not answered since ") {
				t.Fatal(err)
			}
			if calls == 1 && time.Since(began) > time.Minute {
				t.Errorf("given up after %s", time.Since(began))
			}
		}
		if calls != 1 {
			t.Errorf("%d calls", calls)
		}
		if err := stat("other/nfs", true); err != nil {
			t.Errorf("another pod's: %v", err)
		}
		if _, hangs := p.below("uid/"); !hangs {
			t.Error("not told as hanging")
		}
		close(answers)
		synctest.Wait()
		if err := stat("uid/nfs", true); err != nil {
			t.Errorf("after the server came back: %v", err)
		}
		if _, hangs := p.below("uid/"); hangs {
			t.Error("still told as hanging")
		}
		broken := errors.New("stale file handle")
		if err := p.do(t.Context(), "uid/nfs", "x", func() error { return broken }); !errors.Is(err, broken) {
			t.Errorf("got %v", err)
		}
	})
}
