package join

import (
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Token buckets of failed requests: for each source, and for all unauthenticated
// sources together. A source whose bucket is empty is refused before its request is
// examined.
const (
	failuresOfOne   = 8   // burst of one source
	failuresRateOne = 0.5 // a second
	failuresOfAll   = 64  // burst of all unauthenticated sources
	failuresRateAll = 16  // a second
	// maxSources bounds the number of buckets. When it is reached all are dropped:
	// the one for all sources still holds.
	maxSources = 4096
	// sourceBits is the prefix length by which IPv6 sources are told apart: whoever
	// has one address has the rest of its /64.
	sourceBits = 64
)

// asker is the source of a request: a member, which has proved a key that has a
// record, or an unauthenticated address. The bucket of all unauthenticated sources
// does not apply to members.
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
		bits = sourceBits
	}
	from, err := addr.Prefix(bits)
	if err != nil {
		return asker{}
	}
	return asker{from: from}
}

// failureLimiter bounds failed requests by source. Others cost nothing. Its zero value is ready.
type failureLimiter struct {
	mu  sync.Mutex
	all *rate.Limiter
	one map[asker]*rate.Limiter
}

// allow reports whether a request of that one is to be looked at.
func (s *failureLimiter) allow(who asker, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, one := s.limiters(who)
	return (who.member != "" || all.TokensAt(now) >= 1) && one.TokensAt(now) >= 1
}

// add counts a failed one.
func (s *failureLimiter) add(who asker, now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	all, one := s.limiters(who)
	if who.member == "" {
		all.AllowN(now, 1)
	}
	one.AllowN(now, 1)
}

// limiters are those of all strangers and of the one. mu is held.
func (s *failureLimiter) limiters(who asker) (all, one *rate.Limiter) {
	if s.all == nil {
		s.all = rate.NewLimiter(failuresRateAll, failuresOfAll)
	}
	one = s.one[who]
	if one == nil {
		if s.one == nil || len(s.one) >= maxSources {
			s.one = map[asker]*rate.Limiter{}
		}
		one = rate.NewLimiter(failuresRateOne, failuresOfOne)
		s.one[who] = one
	}
	return s.all, one
}
