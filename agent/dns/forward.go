package dns

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sync/singleflight"
)

// times of a question to upstreams.
type times struct{ attempt, ask, stale, down time.Duration }

// The times outside of tests. A resolver gives up after 5 s (resolv.conf(5)), and should
// hear before.
const (
	attemptTimeout = 1500 * time.Millisecond // one server, one protocol
	askTimeout     = 4500 * time.Millisecond // all of them
	staleTimeout   = 1800 * time.Millisecond // RFC 8767, section 5: then an old answer is better
	downTimeout    = 500 * time.Millisecond  // with servers that all did not answer just now
)

// loopDomain is asked of each upstream, with a number: who hears the number
// back is its own upstream.
const loopDomain = ".loop.clusterd.invalid."

var (
	errNoUpstream = errors.New("no name server outside of the cluster is known: the node's resolv.conf names none that is not this one")
	errPanicked   = errors.New("a fault of this program: see its log")
)

// route is which servers are asked for a domain; "." is all others.
type route struct {
	domain  string // canonical
	servers []*upstream
}

// forwarder asks the servers outside and remembers what they say.
type forwarder struct {
	cache   *answerCache
	metrics *metrics
	flights singleflight.Group
	routes  atomic.Pointer[[]route] // the longest domain first
	// life ends the questions under way, whichever client asked them.
	life  context.Context
	close context.CancelFunc
	times times

	mu    sync.Mutex // guards known
	known map[string]*upstream
}

func newForwarder(m *metrics) *forwarder {
	f := &forwarder{cache: newAnswerCache(foundSize, deniedSize), metrics: m, known: map[string]*upstream{}, times: times{attemptTimeout, askTimeout, staleTimeout, downTimeout}}
	f.life, f.close = context.WithCancel(context.Background())
	f.routes.Store(&[]route{})
	m.entries = [2]func() int{f.cache.found.Len, f.cache.denied.Len}
	return f
}

// set replaces the routes: servers by domain. Servers that stay keep what is
// known of them; questions under way are not disturbed. It returns those that
// are new.
func (f *forwarder) set(byDomain map[string][]string) []*upstream {
	f.mu.Lock()
	defer f.mu.Unlock()
	known := map[string]*upstream{}
	var routes []route
	var fresh []*upstream
	for domain, addrs := range byDomain {
		r := route{domain: dns.CanonicalName(domain)}
		for _, a := range addrs {
			u := known[a]
			if u == nil {
				u = f.known[a]
			}
			if u == nil {
				u = &upstream{addr: a, token: fmt.Sprintf("%x", rand.Uint64())}
				fresh = append(fresh, u)
			}
			known[a] = u
			r.servers = append(r.servers, u)
		}
		routes = append(routes, r)
	}
	slices.SortFunc(routes, func(a, b route) int {
		return cmp.Or(cmp.Compare(len(b.domain), len(a.domain)), cmp.Compare(a.domain, b.domain))
	})
	f.known = known
	f.routes.Store(&routes)
	return fresh
}

// serversFor are the servers that know a name best, those that answer first.
func (f *forwarder) serversFor(k key) []*upstream {
	for _, r := range *f.routes.Load() {
		if !dns.IsSubDomain(r.domain, k.name) {
			continue
		}
		now := time.Now()
		var up, down []*upstream
		for _, u := range r.servers {
			switch {
			case u.loops.Load():
			case u.down(k, now):
				down = append(down, u)
			default:
				up = append(up, u)
			}
		}
		return append(up, down...)
	}
	return nil
}

// remembered answers from memory; false: it has to be asked.
func (f *forwarder) remembered(req *dns.Msg, name string) (*dns.Msg, bool) {
	fresh, r := f.cache.get(keyOf(req, name), false)
	f.metrics.asked.Inc()
	if !fresh {
		return nil, false
	}
	f.metrics.hit(r.denied)
	return r.reply(req, f.cache.now()), true
}

// ask asks the servers, or answers from memory when they do not.
func (f *forwarder) ask(ctx context.Context, req *dns.Msg, name string) *dns.Msg {
	k := keyOf(req, name)
	f.metrics.misses.Inc()
	_, old := f.cache.get(k, true)
	servers := f.serversFor(k)
	down := len(servers) > 0 && servers[0].down(k, time.Now()) // those that answer come first
	limit := f.times.ask
	if down {
		limit = f.times.attempt // enough to notice that one is back
	}
	done := f.flights.DoChan(fmt.Sprint(k), func() (m any, err error) {
		// It has a goroutine of its own, in which a panic would end the process.
		defer func() {
			if p := recover(); p != nil {
				f.metrics.panicked(p)
				m, err = nil, errPanicked
			}
		}()
		// Who asked first may go; the others still wait.
		ctx, cancel := context.WithTimeout(f.life, limit)
		defer cancel()
		said, err := f.exchange(ctx, k)
		if err != nil {
			return nil, err
		}
		f.cache.put(k, said)
		return said, nil
	})
	// The question goes on after that, for the next one who asks.
	wait := f.times.ask
	switch {
	case old != nil && (down || len(servers) == 0):
		wait = 0
	case old != nil:
		wait = f.times.stale
	case down:
		wait = f.times.down
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case r := <-done:
		if r.Err == nil && (old == nil || r.Val.(*dns.Msg).Rcode != dns.RcodeServerFailure) {
			return (&remembered{msg: r.Val.(*dns.Msg), since: f.cache.now(), ttl: maxTTL}).reply(req, f.cache.now())
		}
	case <-timer.C:
	case <-ctx.Done():
	}
	if old != nil {
		f.metrics.stale.Inc()
		return old.reply(req, f.cache.now())
	}
	m := new(dns.Msg).SetRcode(req, dns.RcodeServerFailure)
	m.RecursionAvailable = true
	return m
}

// exchange asks one server after the other, first by UDP, then by TCP.
func (f *forwarder) exchange(ctx context.Context, k key) (*dns.Msg, error) {
	servers := f.serversFor(k)
	if len(servers) == 0 {
		return nil, errNoUpstream
	}
	var last, cut *dns.Msg
	var errs []error
	silent := map[*upstream]time.Time{} // since when
	for _, network := range []string{"udp", "tcp"} {
		for _, u := range servers {
			if ctx.Err() != nil {
				break
			}
			began := time.Now()
			m, err := f.try(ctx, network, u, k)
			if err != nil && m != nil { // another one may have all of it
				cut = m
				errs = append(errs, fmt.Errorf("%s: %w", u.addr, err))
				continue
			}
			if err != nil {
				// Many servers do not speak TCP.
				u.ignores(k, began, time.Now(), network == "udp" && isRefusal(err))
				if _, asked := silent[u]; !asked {
					silent[u] = began
				}
				f.metrics.broken.Inc()
				errs = append(errs, fmt.Errorf("%s: %w", u.addr, err))
				continue
			}
			u.answers(k, time.Now())
			switch m.Rcode {
			case dns.RcodeServerFailure, dns.RcodeRefused, dns.RcodeNotImplemented, dns.RcodeFormatError:
				last = m // another one may know better
				continue
			}
			for other, since := range silent {
				if other != u {
					other.outdone(since, time.Now())
				}
			}
			return m, nil
		}
		if cut != nil {
			return cut, nil // it says so, and is not remembered
		}
		if last != nil {
			last.Rcode, last.Answer, last.Ns = dns.RcodeServerFailure, nil, nil
			return last, nil
		}
	}
	if len(errs) == 0 { // it has ended before the first was asked
		errs = append(errs, ctx.Err())
	}
	return nil, errors.Join(errs...)
}

// try asks one server. With an error there may be what fit a datagram, of an answer that
// could not be had whole.
func (f *forwarder) try(ctx context.Context, network string, u *upstream, k key) (*dns.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, f.times.attempt)
	defer cancel()
	began := time.Now()
	m, err := query(ctx, network, u.addr, k)
	var part *dns.Msg
	if err == nil && m.Truncated && network == "udp" {
		u.answers(k, time.Now())
		if len(m.Answer) > 0 { // else it might be taken for a denial
			part = m
		}
		m, err = query(ctx, "tcp", u.addr, k)
	}
	if err == nil && m.Truncated { // by TCP: there is no more of it, and what there is may be nothing
		err = errors.New("the answer is cut off over TCP, too")
	}
	if err != nil {
		m = part
	}
	rcode := "error"
	if err == nil {
		rcode = dns.RcodeToString[m.Rcode]
	}
	f.metrics.forwards.WithLabelValues("forward", u.addr, rcode).Observe(time.Since(began).Seconds())
	return m, err
}

// query asks one server once. Each question has a socket of its own, and with
// it a port and a number that others would have to guess.
func query(ctx context.Context, network, addr string, k key) (*dns.Msg, error) {
	req := new(dns.Msg).SetQuestion(k.name, k.kind)
	req.CheckingDisabled = k.check
	req.SetEdns0(udpPayload, k.do)
	var d net.Dialer
	c, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	conn := &dns.Conn{Conn: c, UDPSize: 4096}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) }) // of a server that ends
	defer stop()
	if err := conn.WriteMsg(req); err != nil {
		return nil, err
	}
	for {
		m, err := conn.ReadMsg()
		switch {
		case err == nil && isReply(req, m):
			return clean(m)
		case err == nil && network == "udp":
			continue // not ours, perhaps forged: the true one may still come
		case err == nil:
			return nil, errors.New("the answer is to another question")
		case isNetworkError(err) || network != "udp":
			return nil, err
		}
	}
}

// clean takes what belongs to one exchange alone out of an answer, and refuses one that
// could not be passed on: some records that can be read cannot be read again when they
// were written, such as those without the data that their type has.
func clean(m *dns.Msg) (*dns.Msg, error) {
	for _, section := range []*[]dns.RR{&m.Answer, &m.Ns, &m.Extra} {
		*section = slices.DeleteFunc(*section, func(rr dns.RR) bool {
			switch rr.Header().Rrtype {
			case dns.TypeTSIG, dns.TypeTKEY:
				return true
			case dns.TypeOPT:
				return section != &m.Extra
			}
			return false
		})
	}
	b, err := m.Pack()
	if err == nil {
		err = new(dns.Msg).Unpack(b)
	}
	if err != nil {
		return nil, fmt.Errorf("the answer is malformed: %w", err)
	}
	return m, nil
}

// isReply says whether m is a reply to req.
func isReply(req, m *dns.Msg) bool {
	if !m.Response || m.Id != req.Id || m.Opcode != req.Opcode {
		return false
	}
	if len(m.Question) == 0 {
		return m.Rcode != dns.RcodeSuccess && m.Rcode != dns.RcodeNameError // some servers' way to complain
	}
	q, p := req.Question[0], m.Question[0]
	return len(m.Question) == 1 && q.Qtype == p.Qtype && q.Qclass == p.Qclass && strings.EqualFold(q.Name, p.Name)
}

func isNetworkError(err error) bool {
	var n net.Error
	return errors.As(err, &n)
}

// probe asks a new server who it is: this one itself hears the question if it
// is the server's upstream. heard marks it then.
func (f *forwarder) probe(ctx context.Context, u *upstream) {
	ctx, cancel := context.WithTimeout(ctx, f.times.attempt)
	defer cancel()
	_, _ = query(ctx, "udp", u.addr, key{name: u.token + loopDomain, kind: dns.TypeHINFO})
}

// heard is called with the number of an answer.
func (f *forwarder) heard(token string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, u := range f.known {
		if u.token == token {
			u.loops.Store(true)
		}
	}
}

// withPort completes the address of a name server; "": it is none.
func withPort(server string) string {
	if a, err := netip.ParseAddr(server); err == nil {
		return netip.AddrPortFrom(a, 53).String()
	}
	if a, err := netip.ParseAddrPort(server); err == nil && a.Port() != 0 {
		return a.String()
	}
	return ""
}
