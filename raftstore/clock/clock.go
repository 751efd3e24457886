// Package clock keeps store time: the clock of the log, which leaders stamp and
// which never goes back.
package clock

import (
	"sync"
	"time"
)

// Clock is store time as one node sees it: the latest time it has found in the
// log, plus what its own clock has counted since. It never goes back.
//
// A leader stamps its log entries with it. While a member follows, its own
// clock's readings do not matter, only how much time passes: a clock that is
// set forward or back by an hour does no harm, as Go counts monotonically. Only
// a node that has heard no living leader since it started (the first one after
// all were down) takes the time of its wall clock, so that the outage counts as elapsed time.
type Clock struct {
	now     func() time.Time
	elapsed func() time.Duration // since some moment of the past; not moved by setting the clock

	mu     sync.Mutex
	store  int64         // store time, unix ms …
	seen   time.Duration // … when elapsed said this
	heard  bool          // seen was set
	last   int64         // highest value returned
	live   bool          // store was stamped by a leader while we listened
	leader bool          // we stamp
}

// New makes a clock over the machine's own. elapsed counts the time that has
// passed since some moment of the past, whatever the machine's clock is set to;
// nil: it is taken from now, which Go counts monotonically.
func New(now func() time.Time, elapsed func() time.Duration) *Clock {
	if elapsed == nil {
		start := now()
		elapsed = func() time.Duration { return now().Sub(start) }
	}
	return &Clock{now: now, elapsed: elapsed}
}

// Observe notes the time of an applied entry. live: a leader stamped it just
// now, it is not replayed.
func (c *Clock) Observe(stamp int64, live bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.leader {
		return
	}
	if stamp > c.store || (live && !c.live) {
		c.set(max(c.store, stamp))
	}
	c.live = c.live || live
}

// Lead makes this node the one who stamps, never before floor.
func (c *Clock) Lead(floor int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.read()
	if !c.live {
		at = max(at, c.now().UnixMilli())
	}
	c.set(max(at, floor))
	c.live, c.leader = true, true
}

func (c *Clock) set(store int64) {
	c.store, c.seen, c.heard = store, c.elapsed(), true
}

// Follow makes it one who listens again.
func (c *Clock) Follow() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.set(c.read())
	c.leader = false
}

// Millis is the store time now.
func (c *Clock) Millis() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.read()
}

// read also remembers what it returns: a clock without a monotonic reading may
// be set back between two calls.
func (c *Clock) read() int64 {
	if c.heard {
		c.last = max(c.last, c.store+(c.elapsed()-c.seen).Milliseconds())
	}
	c.last = max(c.last, c.store)
	return c.last
}
