package join

import (
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// How many wrong requests are looked at: an address may be wrong so often in
// one go and so often a second after that, all strangers together so often.
const (
	strikesOfOne   = 8
	strikesOfAll   = 64
	strikesRateOne = 0.5
	strikesRateAll = 16
	// maxStrikers bounds the memory of addresses. When it is full all are
	// forgotten: the bound of all still holds.
	maxStrikers = 4096
)

// strikes counts wrong requests of strangers. Right ones cost nothing. Its zero
// value is ready.
type strikes struct {
	mu  sync.Mutex
	all *rate.Limiter
	one map[netip.Addr]*rate.Limiter
}

// allow reports whether a request from there is to be looked at.
func (s *strikes) allow(from string, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, one := s.limiters(from)
	return all.TokensAt(now) >= 1 && one.TokensAt(now) >= 1
}

// add counts a wrong one.
func (s *strikes) add(from string, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, one := s.limiters(from)
	all.AllowN(now, 1)
	one.AllowN(now, 1)
}

// limiters are those of all and of the address. mu is held.
func (s *strikes) limiters(from string) (all, one *rate.Limiter) {
	if s.all == nil {
		s.all = rate.NewLimiter(strikesRateAll, strikesOfAll)
	}
	var addr netip.Addr // one for all that cannot be read
	if ap, err := netip.ParseAddrPort(from); err == nil {
		addr = ap.Addr().Unmap()
	}
	one = s.one[addr]
	if one == nil {
		if s.one == nil || len(s.one) >= maxStrikers {
			s.one = map[netip.Addr]*rate.Limiter{}
		}
		one = rate.NewLimiter(strikesRateOne, strikesOfOne)
		s.one[addr] = one
	}
	return s.all, one
}
