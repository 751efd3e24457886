package dns

import (
	"slices"
	"time"

	"github.com/miekg/dns"
	"k8s.io/utils/lru"
)

// Bounds of what is remembered of upstreams.
const (
	minTTL      = time.Second
	maxTTL      = time.Hour
	maxDenied   = 5 * time.Minute // "no such name" (RFC 2308, section 5)
	failedTTL   = 5 * time.Second // a server's failure (RFC 2308, section 7)
	staleFor    = time.Hour       // an expired answer, while no upstream can be asked (RFC 8767)
	staleTTL    = 30              // seconds, the TTL it is given
	maxRemember = 8 << 10         // bytes of a message that is remembered
)

// key is what an answer depends on.
type key struct {
	name  string // canonical
	kind  uint16
	do    bool // signatures are wanted
	check bool // checking is disabled
}

func keyOf(msg *dns.Msg, name string) key {
	k := key{name: name, kind: msg.Question[0].Qtype, check: msg.CheckingDisabled}
	if opt := msg.IsEdns0(); opt != nil {
		k.do = opt.Do()
	}
	return k
}

// answerCache remembers what upstreams said. What says that there is nothing has a place
// of its own: who asks for names that do not exist, one after the other, must not drive
// out those that do. Safe for concurrent use.
type answerCache struct {
	found, denied *lru.Cache
	now           func() time.Time
}

// remembered is never changed.
type remembered struct {
	msg    *dns.Msg
	packed *packed // nil: it is not for plain questions
	denied bool
	since  time.Time
	ttl    time.Duration
}

func newAnswerCache(found, denied int) *answerCache {
	return &answerCache{found: lru.New(found), denied: lru.New(denied), now: time.Now}
}

func (c *answerCache) put(k key, m *dns.Msg) {
	ttl, ok := lifetime(k.kind, m)
	if !ok || m.Len() > maxRemember {
		return
	}
	if m.Rcode == dns.RcodeServerFailure {
		if _, have := c.get(k, true); have != nil {
			return // better an old answer than a new failure
		}
	}
	place, other, denied := c.found, c.denied, denies(k.kind, m)
	if denied {
		place, other = other, place
	}
	other.Remove(k)
	place.Add(k, &remembered{msg: m, packed: pack(k, m), denied: denied, since: c.now(), ttl: ttl})
}

// get returns the answer to k; fresh says that it may be given without asking
// again. stale: one past its time will do.
func (c *answerCache) get(k key, stale bool) (fresh bool, r *remembered) {
	var at any = k
	v, ok := c.found.Get(at)
	if !ok {
		if v, ok = c.denied.Get(at); !ok {
			return false, nil
		}
	}
	r = v.(*remembered)
	age := c.now().Sub(r.since)
	switch {
	case age < r.ttl:
		return true, r
	case age > r.ttl+staleFor:
		c.found.Remove(at)
		c.denied.Remove(at)
		return false, nil
	case stale && r.msg.Rcode != dns.RcodeServerFailure:
		return false, r
	}
	return false, nil
}

// denies says whether an answer is that there is nothing: no such name, or, at the end of
// its aliases, nothing of the type that was asked for.
func denies(kind uint16, m *dns.Msg) bool {
	return m.Rcode != dns.RcodeSuccess || !slices.ContainsFunc(m.Answer, func(rr dns.RR) bool {
		return kind == dns.TypeANY || rr.Header().Rrtype == kind
	})
}

// lifetime is how long an answer to a question of that type may be remembered.
func lifetime(kind uint16, m *dns.Msg) (time.Duration, bool) {
	if m.Truncated {
		return 0, false
	}
	switch m.Rcode {
	case dns.RcodeServerFailure:
		return failedTTL, true
	case dns.RcodeSuccess, dns.RcodeNameError:
	default:
		return 0, false
	}
	least := maxTTL
	for _, rr := range m.Answer {
		least = min(least, time.Duration(rr.Header().Ttl)*time.Second)
	}
	if denies(kind, m) {
		// Without an SOA a denial must not be remembered (RFC 2308, section 5), but
		// each pod asks through its search domains: a few seconds.
		bound := failedTTL
		for _, rr := range m.Ns {
			if soa, ok := rr.(*dns.SOA); ok {
				bound = min(maxDenied, time.Duration(min(soa.Minttl, soa.Hdr.Ttl))*time.Second)
			}
		}
		least = min(least, bound)
	}
	return max(least, minTTL), true
}

// reply is the remembered answer as one to req, with the time that is left.
func (r *remembered) reply(req *dns.Msg, now time.Time) *dns.Msg {
	m := r.msg.Copy()
	m.Id, m.Question, m.Zero, m.CheckingDisabled = req.Id, req.Question, false, req.CheckingDisabled
	m.RecursionDesired, m.RecursionAvailable, m.Authoritative = req.RecursionDesired, true, false
	age := uint32(now.Sub(r.since) / time.Second)
	for _, section := range [][]dns.RR{m.Answer, m.Ns, m.Extra} {
		for _, rr := range section {
			h := rr.Header()
			switch {
			case h.Rrtype == dns.TypeOPT:
			case now.Sub(r.since) >= r.ttl:
				h.Ttl = staleTTL
			default:
				h.Ttl = left(h.Ttl, age)
			}
		}
	}
	shuffleAddresses(m.Answer)
	return m
}

// left is what is left of a time to live, in seconds.
func left(ttl, age uint32) uint32 {
	if ttl > age {
		return ttl - age
	}
	return 1
}

// shuffleAddresses gives the addresses another order, and leaves the aliases
// before them in theirs.
func shuffleAddresses(rrs []dns.RR) {
	shuffle(rrs[firstAddress(rrs):])
}

// firstAddress is where the addresses begin that make up the rest of rrs; len(rrs):
// there are none.
func firstAddress(rrs []dns.RR) int {
	first := len(rrs)
	for i, rr := range rrs {
		if t := rr.Header().Rrtype; t == dns.TypeA || t == dns.TypeAAAA {
			first = i
			break
		}
	}
	for _, rr := range rrs[first:] {
		if rr.Header().Rrtype != rrs[first].Header().Rrtype {
			return len(rrs) // signatures, or something strange: as it came
		}
	}
	return first
}
