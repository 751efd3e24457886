package pod

import (
	"testing"
	"time"
)

// TestWallClock: while nothing sets the clock, it was not set. (That it is noticed when it was,
// TestE2EExpired shows: a time of this process has no other wall clock.)
func TestWallClock(t *testing.T) {
	c := wallClock{last: time.Now()}
	for range 3 {
		if c.wasSet(time.Now().Add(time.Minute)) {
			t.Error("a minute passed, and the clock counts as set")
		}
	}
	c.again = 2
	for i, want := range []bool{true, true, false} {
		if got := c.wasSet(time.Now()); got != want {
			t.Errorf("look %d: %t, want %t", i+1, got, want)
		}
	}
}
