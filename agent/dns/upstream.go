package dns

import (
	"errors"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/miekg/dns"
)

// When a server counts as one that does not answer. A name whose own servers are
// dead looks the same from here: one such name, or many of one domain, must not
// cost all others their time.
const (
	downFor      = 10 * time.Second // how long a server that did not answer comes last
	silentZones  = 3                // of names that it did not answer, one after the other: then it is down
	answersFor   = 5 * time.Second  // after an answer it is not, unless it refuses or another server answers
	silentMemory = 256              // questions that it did not answer, at most
)

// upstream is one name server.
type upstream struct {
	addr  string // with a port
	token string // of the question that shows a loop
	loops atomic.Bool

	mu       sync.Mutex // guards all below
	answered time.Time  // when it last answered anything
	failed   time.Time  // when it was last found not to answer at all, since then
	silent   map[key]time.Time
	zones    map[string]bool // of names that it did not answer since it last answered
}

// down reports whether no answer to the question is to be expected of it.
func (u *upstream) down(k key, now time.Time) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return now.Sub(u.failed) < downFor || now.Sub(u.silent[k]) < downFor
}

// answers notes that it answered the question.
func (u *upstream) answers(k key, now time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.answered, u.failed = now, time.Time{}
	delete(u.silent, k)
	clear(u.zones)
}

// ignores notes that it did not answer the question, which it was asked at began:
// that says something about itself only if it answered no other one meanwhile.
// refused: there is no such server.
func (u *upstream) ignores(k key, began, now time.Time, refused bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.silent == nil {
		u.silent, u.zones = map[key]time.Time{}, map[string]bool{}
	}
	for old, at := range u.silent {
		if now.Sub(at) >= downFor {
			delete(u.silent, old)
		}
	}
	if len(u.silent) < silentMemory {
		u.silent[k] = now
	}
	if u.answered.After(began) {
		return
	}
	if len(u.zones) < silentZones {
		u.zones[zoneOf(k.name)] = true
	}
	if refused || len(u.zones) >= silentZones && now.Sub(u.answered) >= answersFor {
		u.failed = now
	}
}

// outdone notes that another server answered a question that this one, asked at
// began, did not.
func (u *upstream) outdone(began, now time.Time) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if !u.answered.After(began) {
		u.failed = now
	}
}

// zoneOf is about what one owner is responsible for: the last two labels.
func zoneOf(name string) string {
	if i, start := dns.PrevLabel(name, 2); !start {
		return name[i:]
	}
	return name
}

// isRefusal reports whether the machine, or the way to it, says that there is no
// server.
func isRefusal(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.EHOSTUNREACH) || errors.Is(err, syscall.ENETUNREACH)
}
