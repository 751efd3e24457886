package clock

import (
	"testing"
	"time"
)

func TestClock(t *testing.T) {
	wall := time.UnixMilli(1_000_000)
	c := New(func() time.Time { return wall }, nil)
	steps := []struct {
		name string
		do   func()
		want int64
	}{
		{"nothing heard", func() {}, 0},
		{"replayed log", func() { c.Observe(500_000, false) }, 500_000},
		{"first leader after an outage takes the time of its wall clock", func() { c.Lead(500_000) }, 1_000_000},
		{"time passes", func() { wall = wall.Add(time.Second) }, 1_001_000},
		{"set back an hour: it stands", func() { wall = wall.Add(-time.Hour) }, 1_001_000},
		{"a new term goes on from the log", func() { c.Follow(); c.Lead(1_001_000) }, 1_001_000},
		{"another leads, ahead of us", func() { c.Follow(); c.Observe(2_000_000, true) }, 2_000_000},
		{"set forward while following, before we lead: only what passed counts", func() { wall = wall.Add(time.Second) }, 2_001_000},
		{"leads again, whatever the wall says", func() { c.Lead(2_000_500) }, 2_001_000},
	}
	for _, s := range steps {
		s.do()
		if got := c.Millis(); got != s.want {
			t.Errorf("%s: %d, want %d", s.name, got, s.want)
		}
	}
}
