// Package slack aligns periodic timers, so that an idle process wakes up once for many of
// them (like the kernel's timer slack): wake-ups are what an idle program costs. It is for
// periodic checks of what seldom changes, not for timeouts and backoff. It depends on the
// standard library only, so that every room can import it.
//
// Timers fire at multiples of their period since 1970, plus the offset that Shift set.
// A multiple of 2 s is one of 1 s, so timers of different periods coincide, too.
package slack

import (
	"sync"
	"sync/atomic"
	"time"
)

var shift atomic.Int64

// Shift moves the moments of this process by d, so that machines whose clocks
// agree do not all work at the same moment. It is called once, at the start.
func Shift(d time.Duration) { shift.Store(int64(d)) }

// Align returns how long it is until the multiple of grid that is closest to d from
// now: between d-grid/2 and d+grid/2. The grid is at most d, or half of it could be
// no time at all; a larger one counts as d.
func Align(d, grid time.Duration) time.Duration {
	return align(time.Now(), d, min(d, grid))
}

func align(now time.Time, d, grid time.Duration) time.Duration {
	if grid <= 0 {
		return d
	}
	since := now.UnixNano() - shift.Load() + int64(d) + int64(grid)/2
	return d + grid/2 - time.Duration(since%int64(grid))
}

// After is time.After for the next look of a loop that looks every d: the moment is
// aligned, and between half of d and one and a half of it away.
func After(d time.Duration) <-chan time.Time { return time.After(Align(d, d)) }

// Ticker is a time.Ticker whose ticks are aligned. The first comes after half to one
// and a half of the period.
type Ticker struct {
	C <-chan time.Time

	mu      sync.Mutex
	timer   *time.Timer
	stopped bool
}

// NewTicker returns a Ticker of period d, which has to be greater than zero. As with
// time.NewTicker, ticks are dropped for a slow receiver.
func NewTicker(d time.Duration) *Ticker {
	if d <= 0 {
		panic("slack: the period of a Ticker has to be greater than zero")
	}
	c := make(chan time.Time, 1)
	t := &Ticker{C: c}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.timer = time.AfterFunc(Align(d, d), func() {
		select {
		case c <- time.Now():
		default:
		}
		t.mu.Lock()
		defer t.mu.Unlock()
		if !t.stopped {
			t.timer.Reset(Align(d, d))
		}
	})
	return t
}

// Stop ends the ticks. It does not close C.
func (t *Ticker) Stop() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.stopped = true
	t.timer.Stop()
}
