package node

import (
	"testing"
	"time"
)

// The bug: a machine that had slept for an hour took its lease for renewed when it woke,
// and nobody saw that renewals had paused if the next came soon enough.
func TestFresh(t *testing.T) {
	var now time.Duration
	n := New(Config{Name: "n1", LeaseTime: 40 * time.Second, Clock: func() int64 { return int64(now) }})
	for _, step := range []struct {
		at      time.Duration
		renewed bool
		want    uint64
	}{
		{0, false, 0},
		{time.Second, true, 1},
		{11 * time.Second, true, 1},
		{30 * time.Second, false, 1},
		{31 * time.Second, false, 0}, // half the lease's time
		{35 * time.Second, true, 2},
		{45 * time.Second, true, 2},
		{time.Hour, false, 0}, // it has slept
		{time.Hour, true, 3},
		{time.Hour + 10*time.Second, true, 3},
		{2 * time.Hour, true, 4}, // and was not looked at before the next renewal
	} {
		if now = step.at; step.renewed {
			n.renewal.Store(n.renewal.Load().next(int64(now), n.cfg.LeaseTime/2))
		}
		if got := n.Fresh(); got != step.want {
			t.Errorf("at %s: %d, want %d", step.at, got, step.want)
		}
	}
}
