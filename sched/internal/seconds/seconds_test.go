package seconds

import (
	"math"
	"testing"
	"time"
)

func TestDuration(t *testing.T) {
	for n, want := range map[int64]time.Duration{
		0: 0, 90: 90 * time.Second, -5: -5 * time.Second,
		longest: time.Duration(longest) * time.Second, longest + 1: time.Duration(longest) * time.Second,
		math.MaxInt64: time.Duration(longest) * time.Second, math.MinInt64: -time.Duration(longest) * time.Second,
	} {
		if got := Duration(n); got != want {
			t.Errorf("%d: %s, want %s", n, got, want)
		}
	}
}
