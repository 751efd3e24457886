package raftstore

import (
	"testing"
	"time"
)

func TestClock(t *testing.T) {
	wall := time.UnixMilli(1_000_000)
	c := newClock(func() time.Time { return wall })
	steps := []struct {
		name string
		do   func()
		want int64
	}{
		{"nothing heard", func() {}, 0},
		{"replayed log", func() { c.observe(500_000, false) }, 500_000},
		{"first leader after an outage believes its wall clock", func() { c.lead(500_000) }, 1_000_000},
		{"time passes", func() { wall = wall.Add(time.Second) }, 1_001_000},
		{"set back an hour: it stands", func() { wall = wall.Add(-time.Hour) }, 1_001_000},
		{"a new term goes on from the log", func() { c.follow(); c.lead(1_001_000) }, 1_001_000},
		{"another leads, ahead of us", func() { c.follow(); c.observe(2_000_000, true) }, 2_000_000},
		{"set forward while following, before we lead: only what passed counts", func() { wall = wall.Add(time.Second) }, 2_001_000},
		{"leads again, whatever the wall says", func() { c.lead(2_000_500) }, 2_001_000},
	}
	for _, s := range steps {
		s.do()
		if got := c.millis(); got != s.want {
			t.Errorf("%s: %d, want %d", s.name, got, s.want)
		}
	}
}

func TestStuckDisk(t *testing.T) {
	for _, tc := range []struct {
		usual, now time.Duration
		stuck      bool
	}{
		{0, 0, false},
		{time.Millisecond, time.Millisecond, false},
		{time.Millisecond, 3 * time.Second, true},
		{2 * time.Second, 3 * time.Second, false}, // as all of them
		{2 * time.Second, time.Minute, true},
	} {
		d := &disk{slow: time.Second, usual: tc.usual}
		done := d.write()
		d.since = d.since.Add(-tc.now)
		if got := d.stuck(); got != tc.stuck {
			t.Errorf("a write for %v where %v is usual: stuck %v", tc.now, tc.usual, got)
		}
		done()
		if d.stuck() {
			t.Error("stuck without a write")
		}
		if tc.now > tc.usual && d.usual <= tc.usual {
			t.Errorf("usual is %v after a write of %v", d.usual, tc.now)
		}
	}
}

func TestProposalsAreBounded(t *testing.T) {
	p := newProposals()
	raw := make([]byte, 100)
	for range 10 {
		p.add(proposal{raw: raw})
	}
	p.add(proposal{raw: make([]byte, 5000)})
	for i, want := range []int{3, 5, 2, 1, 0} {
		max := 1000
		if i == 0 {
			max = 3
		}
		if got := len(p.take(max, 599)); got != want {
			t.Errorf("take %d: %d commands, want %d", i, got, want)
		}
	}
}

// TestGrowthIsSnapshotted: a store that only grows takes snapshots, and not more
// often than its state doubles.
func TestGrowthIsSnapshotted(t *testing.T) {
	const least = 64 << 20
	var log, state, snapped int64
	snapshots := 0
	for range 4 << 10 { // a mebibyte of new objects each
		log, state = log+1<<20, state+1<<20
		if log >= enoughLog(least, snapped, "n1") {
			log, snapped = 0, state
			snapshots++
		}
	}
	if snapshots < 4 || snapshots > 7 {
		t.Errorf("%d snapshots while 4 GiB were written", snapshots)
	}
}
