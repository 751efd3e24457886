// Package clock finds out whether this machine's wall clock is right: by those of the
// cluster's servers, and by what is older than any moment in which the program can run.
// Judge decides, Watch looks when it is time, Yield hands leadership over while the clock
// is wrong. It sets no clock.
package clock

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

const (
	// Tolerance is how far a clock may be from the others' and count as right: less than
	// certificates are backdated, more than what readings of whole seconds over a busy
	// network differ by.
	Tolerance = time.Minute
	// agree is how far servers' clocks may be from their median to count for it.
	agree = 30 * time.Second
	// set is by how much wall and monotonic clock may differ until the wall clock counts
	// as set, or the machine as having slept.
	set = 5 * time.Second
)

const cure = "set it (timedatectl set-time) and run chrony or systemd-timesyncd; nothing is lost until then, and clusterd goes on by itself when it is right"

// Reading is what a server's clock showed.
type Reading struct {
	ID, Name string
	// Ahead is how far its clock is ahead of this machine's, as that is.
	Ahead time.Duration
}

// Verdict is what is known of this machine's clock. The zero value: nothing is wrong.
type Verdict struct {
	// Ahead is how far the cluster's clocks are ahead of this machine's; 0: not known, or right.
	Ahead time.Duration
	// Agreed: most of the cluster's servers say so; or those that answer, of a clock that is before the floor.
	Agreed bool
	// By are the ids of the servers whose clocks say so.
	By []string
	// Undecided: too few servers answered, or too few agree, to tell more than was known before.
	Undecided bool
	// Why says what is wrong, and how it is put right; empty: nothing.
	Why string
	// Differs says that this clock and another one are not the same, where it is not known which is
	// right; empty: none is known to differ, or Why says more.
	Differs string
}

// Wrong reports whether this machine's clock is.
func (v Verdict) Wrong() bool { return v.Why != "" }

// MaySign reports whether the clock is good enough to sign certificates by: one that is known to be
// wrong, without being known by how much, makes certificates of a time that others refuse.
func (v Verdict) MaySign() bool { return !v.Wrong() || v.Ahead != 0 }

// Judge decides at now, by this machine's clock. floor is a moment that has passed for certain, and
// what it is. servers is how many the cluster has, self whether this machine is one of them, and readings
// are of the others that answered. A clock is wrong if it is before floor, or if more
// than half of all servers agree on another time: two clocks that differ do not tell which is right.
func Judge(now, floor time.Time, what string, readings []Reading, servers int, self bool) Verdict {
	if self {
		servers = max(servers, len(readings)+1)
	}
	servers = max(servers, len(readings))
	readings = slices.Clone(readings)
	slices.SortFunc(readings, func(a, b Reading) int { return cmp.Compare(a.Ahead, b.Ahead) })
	var names, ids []string
	var ahead time.Duration
	if len(readings) > 0 {
		ahead = readings[len(readings)/2].Ahead
	}
	for _, r := range readings {
		if (r.Ahead - ahead).Abs() <= agree {
			names, ids = append(names, r.Name), append(ids, r.ID)
		}
	}
	stamp := now.UTC().Format(time.RFC3339)
	if 2*len(names) > servers && ahead.Abs() > Tolerance {
		return Verdict{Ahead: ahead, Agreed: true, By: ids, Why: fmt.Sprintf("this machine's clock is wrong: it says %s, and the servers %s agree on %s: %s",
			stamp, strings.Join(names, ", "), now.Add(ahead).UTC().Format(time.RFC3339), cure)}
	}
	if now.Before(floor) {
		v := Verdict{Why: fmt.Sprintf("this machine's clock is wrong: it says %s, which is before %s (%s): %s", stamp, what, floor.UTC().Format(time.RFC3339), cure)}
		if len(names) > 0 && !now.Add(ahead).Before(floor) {
			// This machine's own clock has no say: those that answered are the ones that can be right.
			v.Ahead, v.Agreed, v.By = ahead, true, ids
		}
		v.Undecided = v.Ahead == 0
		return v
	}
	same := 0 // that this machine's agrees with, it included
	if self {
		same++
	}
	for _, r := range readings {
		if r.Ahead.Abs() <= agree {
			same++
		}
	}
	undecided := 2*max(same, len(names)) <= servers
	for _, r := range readings {
		switch {
		case r.Ahead.Abs() <= Tolerance:
		case 2*same > servers:
			return Verdict{Differs: fmt.Sprintf("the clock of %s is wrong: it says %s, and most servers agree with this machine's, %s: set it there", r.Name, now.Add(r.Ahead).UTC().Format(time.RFC3339), stamp)}
		default:
			return Verdict{Undecided: undecided, Differs: fmt.Sprintf("this machine's clock, %s, and that of %s, %s, differ, and there is no majority of the servers that tells which is right: set both", stamp, r.Name, now.Add(r.Ahead).UTC().Format(time.RFC3339))}
		}
	}
	return Verdict{Undecided: undecided}
}

// Clock is this machine's clock with what is known of it. The zero value is ready, and
// shows the machine's time. It may be used concurrently.
type Clock struct {
	judged atomic.Pointer[judged]
	now    func() time.Time // time.Now but in tests
}

type judged struct {
	Verdict
	at time.Time
}

func (c *Clock) wall() time.Time {
	if c.now != nil {
		return c.now()
	}
	return time.Now()
}

// Now is the cluster's time, as well as it is known: the machine's unless that is wrong. When the
// clock is set, time goes on as before until it is judged again. It has no monotonic reading, which
// would be wrong when the verdict changes. A nil Clock shows the machine's time.
func (c *Clock) Now() time.Time {
	if c == nil {
		return time.Now().Round(0)
	}
	now := c.wall()
	j := c.judged.Load()
	switch {
	case j == nil:
		return now.Round(0)
	case WasSet(j.at, now):
		return j.at.Round(0).Add(now.Sub(j.at) + j.Ahead)
	}
	return now.Round(0).Add(j.Ahead)
}

// Doubtful reports whether the clock was set, or the machine slept, since it was judged.
func (c *Clock) Doubtful() bool {
	j := c.judged.Load()
	return j != nil && WasSet(j.at, c.wall())
}

// Note takes note of a verdict of now.
func (c *Clock) Note(v Verdict) { c.judged.Store(&judged{v, c.wall()}) }

// Keep is a new verdict, or the last one where the new one is undecided: a clock that most servers
// said is wrong stays so until most say that it is right, or it was set to the time that goes on here.
func (c *Clock) Keep(v Verdict) Verdict {
	last := c.Verdict()
	if !v.Undecided || !last.Agreed {
		return v
	}
	right, now := c.Now(), c.wall().Round(0)
	ahead := right.Sub(now)
	if ahead.Abs() <= Tolerance {
		return v
	}
	last.Ahead, last.Undecided = ahead, true
	last.Why = fmt.Sprintf("this machine's clock is wrong: it says %s, and by what most servers last agreed on it is %s: %s",
		now.UTC().Format(time.RFC3339), right.UTC().Format(time.RFC3339), cure)
	return last
}

// Verdict is the last one.
func (c *Clock) Verdict() Verdict {
	if j := c.judged.Load(); j != nil {
		return j.Verdict
	}
	return Verdict{}
}

// WasSet reports whether between two moments of this process the clock was set or the
// machine slept: wall and monotonic clock have then counted differently.
func WasSet(before, after time.Time) bool {
	return (after.Round(0).Sub(before.Round(0)) - after.Sub(before)).Abs() > set
}
