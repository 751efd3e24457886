package join

import (
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// How many wrong requests are looked at: one may be wrong so often in one go and
// so often a second after that, all strangers together so often.
const (
	strikesOfOne   = 8
	strikesOfAll   = 64
	strikesRateOne = 0.5
	strikesRateAll = 16
	// maxStrikers bounds the memory of those who ask. When it is full all are
	// forgotten: the bound of all still holds.
	maxStrikers = 4096
	// strikerBits is how much of an IPv6 address counts: an owner of one has the
	// rest of its network.
	strikerBits = 64
)

// asker is who makes a request: a member, which has proved a key that has a record,
// or a stranger at an address. The bound of all strangers is none of a member's.
type asker struct {
	member string       // its id
	from   netip.Prefix // of a stranger; the zero value for all that cannot be read
}

// strangerAt is the stranger at an address and port.
func strangerAt(remote string) asker {
	ap, err := netip.ParseAddrPort(remote)
	if err != nil {
		return asker{}
	}
	addr := ap.Addr().Unmap().WithZone("")
	bits := addr.BitLen()
	if addr.Is6() {
		bits = strikerBits
	}
	from, err := addr.Prefix(bits)
	if err != nil {
		return asker{}
	}
	return asker{from: from}
}

// strikes counts wrong requests. Right ones cost nothing. Its zero value is ready.
type strikes struct {
	mu  sync.Mutex
	all *rate.Limiter
	one map[asker]*rate.Limiter
}

// allow reports whether a request of that one is to be looked at.
func (s *strikes) allow(who asker, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, one := s.limiters(who)
	return (who.member != "" || all.TokensAt(now) >= 1) && one.TokensAt(now) >= 1
}

// add counts a wrong one.
func (s *strikes) add(who asker, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, one := s.limiters(who)
	if who.member == "" {
		all.AllowN(now, 1)
	}
	one.AllowN(now, 1)
}

// limiters are those of all strangers and of the one. mu is held.
func (s *strikes) limiters(who asker) (all, one *rate.Limiter) {
	if s.all == nil {
		s.all = rate.NewLimiter(strikesRateAll, strikesOfAll)
	}
	one = s.one[who]
	if one == nil {
		if s.one == nil || len(s.one) >= maxStrikers {
			s.one = map[asker]*rate.Limiter{}
		}
		one = rate.NewLimiter(strikesRateOne, strikesOfOne)
		s.one[who] = one
	}
	return s.all, one
}
