package proxy

import (
	"crypto/tls"
	"errors"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/clusterd/clusterd/ingress/route"
)

const (
	// tries is how many endpoints a request is sent to before the proxy gives up.
	tries = 3
	// avoided is how long an endpoint that took no connection is asked last.
	avoided = 3 * time.Second
)

// endpoint is what is known of an address while requests are on it.
type endpoint struct {
	addr  netip.AddrPort
	calls atomic.Int64
}

// balancer is a RoundTripper that sends a call to one of its backend's
// endpoints.
type balancer struct {
	plain, secure, h2c *http.Transport
	// untimed and untimedSecure have no ResponseTimeout: the route bounds the time.
	untimed, untimedSecure *http.Transport
	verified               verified
	metrics                *metrics
	// silence is after what time a connection of HTTP/2 is given up.
	silence time.Duration

	mu sync.Mutex // guards both
	// busy are the endpoints that requests are on.
	busy map[netip.AddrPort]*endpoint
	// bad are those that took no connection or lost one, until when.
	bad map[netip.AddrPort]time.Time
}

func newBalancer(cfg Config, m *metrics) *balancer {
	dialer := &net.Dialer{Timeout: cfg.DialTimeout, KeepAlive: 30 * time.Second}
	transport := func(timeout time.Duration, set func(*http.Protocols)) *http.Transport {
		t := &http.Transport{
			DialContext:           dialer.DialContext,
			DisableCompression:    true, // what is asked for is the client's to say
			MaxIdleConnsPerHost:   32,
			IdleConnTimeout:       time.Minute,
			TLSHandshakeTimeout:   cfg.DialTimeout,
			ResponseHeaderTimeout: timeout,
			ExpectContinueTimeout: time.Second,
			Protocols:             new(http.Protocols),
		}
		set(t.Protocols)
		if t.Protocols.HTTP2() || t.Protocols.UnencryptedHTTP2() {
			t.DialContext = heardDialer(dialer)
			t.HTTP2 = &http.HTTP2Config{SendPingTimeout: cfg.pingAfter, PingTimeout: cfg.pingFor}
		}
		return t
	}
	one := func(p *http.Protocols) { p.SetHTTP1(true) }
	both := func(p *http.Protocols) { p.SetHTTP1(true); p.SetHTTP2(true) }
	b := &balancer{
		plain: transport(cfg.ResponseTimeout, one), untimed: transport(0, one),
		secure: transport(cfg.ResponseTimeout, both), untimedSecure: transport(0, both),
		h2c:     transport(0, func(p *http.Protocols) { p.SetUnencryptedHTTP2(true) }),
		metrics: m, silence: cfg.pingAfter + cfg.pingFor,
		busy: map[netip.AddrPort]*endpoint{},
		bad:  map[netip.AddrPort]time.Time{},
	}
	for _, t := range []*http.Transport{b.secure, b.untimedSecure} {
		// A pod's certificate names no address, and no authority is known for it.
		t.TLSClientConfig = &tls.Config{InsecureSkipVerify: true} //nolint:gosec // see above
	}
	return b
}

func (b *balancer) close() {
	for _, t := range []*http.Transport{b.plain, b.secure, b.h2c, b.untimed, b.untimedSecure} {
		t.CloseIdleConnections()
	}
	b.verified.close()
}

// RoundTrip implements http.RoundTripper. Unless a route says when to try again, a
// request that no endpoint has seen is sent to the next one; one that may have been
// seen only if sending it twice does no harm. One whose answer takes too long is at
// work somewhere, and would be at the next one.
func (b *balancer) RoundTrip(req *http.Request) (*http.Response, error) {
	c := callOf(req.Context())
	if c.rule.Do != nil && c.rule.Do.Retry != nil {
		return b.retry(req, c)
	}
	var held *heldBody
	body := req.Body
	if body != nil && body != http.NoBody {
		held = &heldBody{under: body}
		body = held
	}
	for {
		resp, err := b.once(req, c, body)
		if err == nil {
			return resp, nil
		}
		again := c.tries < tries && req.Context().Err() == nil && !errors.Is(err, errNone) && c.untried()
		if held != nil {
			again = again && isDial(err) && !held.seen.Load()
		} else {
			again = again && (isDial(err) || repeatable(req.Method) && !isLate(err))
		}
		if !again {
			return nil, err
		}
		b.metrics.retries.Inc()
	}
}

// once sends the request, with body, to one endpoint.
func (b *balancer) once(req *http.Request, c *call, body io.ReadCloser) (*http.Response, error) {
	addr, ok := b.choose(c.backend, c)
	if !ok {
		return nil, errNone
	}
	c.take(b, addr)
	out := *req
	u := *req.URL
	u.Scheme, u.Host = "http", addr.String()
	out.URL, out.Body = &u, body
	transport := b.transport(c.backend, &out, c.rule.Do != nil && c.rule.Do.NoResponseTimeout)
	send, watch := &out, lostWatch{}
	if transport != b.plain && transport != b.untimed {
		send = watch.watch(send)
	}
	resp, err := c.try(send, transport)
	if isDial(err) || err != nil && watch.lost(b.silence) {
		b.avoid(addr)
	}
	return resp, err
}

var errNone = errors.New("the backend has no endpoints")

func (b *balancer) transport(to *route.Backend, out *http.Request, untimed bool) *http.Transport {
	switch to.Protocol {
	case route.HTTPS:
		out.URL.Scheme = "https"
		t := b.secure
		if untimed {
			t = b.untimedSecure
		}
		if to.TLS != nil {
			return b.verified.of(to.TLS, untimed, t)
		}
		return t
	case route.H2C:
		if out.Header.Get("Upgrade") == "" { // HTTP/2 has none
			return b.h2c
		}
	}
	if untimed {
		return b.untimed
	}
	return b.plain
}

// repeatable: doing it twice is as good as once (RFC 9110, 9.2.2). PUT and
// DELETE belong to them; they are left out since few programs keep to it.
func repeatable(method string) bool {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace:
		return true
	}
	return false
}

// isLate: the request was sent, and the time for its answer is over.
func isLate(err error) bool {
	var timeout net.Error
	return errors.Is(err, errSlow) || errors.As(err, &timeout) && timeout.Timeout() && !isDial(err)
}

// isDial: no connection came about, so nothing of the request was sent.
func isDial(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) && op.Op == "dial"
}

// choose picks an endpoint: of four drawn by chance the one with the fewest
// requests on it, those that took no connection or lost one lately last, and behind
// them those that this call was on; for sticky
// backends always the same of those that stand. false: there is none.
func (b *balancer) choose(backend *route.Backend, c *call) (netip.AddrPort, bool) {
	all := backend.Endpoints
	if len(all) == 0 {
		return netip.AddrPort{}, false
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	rank := func(a netip.AddrPort) int64 {
		n := int64(0)
		if e := b.busy[a]; e != nil {
			n = e.calls.Load()
		}
		if slices.Contains(c.tried, a) {
			n += 1 << 33
		}
		if until, ok := b.bad[a]; ok {
			if now.Before(until) {
				return n + 1<<32
			}
			delete(b.bad, a)
		}
		return n
	}
	if backend.Sticky {
		return slices.MaxFunc(all, func(x, y netip.AddrPort) int {
			if bx, by := rank(x) >= 1<<32, rank(y) >= 1<<32; bx != by {
				if bx {
					return -1
				}
				return 1
			}
			wx, wy := weight(c.client, x), weight(c.client, y)
			switch {
			case wx < wy:
				return -1
			case wx > wy:
				return 1
			}
			return 0
		}), true
	}
	best, least := netip.AddrPort{}, int64(-1)
	for range min(len(all), 4) {
		a := all[rand.IntN(len(all))]
		if r := rank(a); least < 0 || r < least {
			best, least = a, r
		}
	}
	if least >= 1<<32 { // the draw has none that stands; there may be one
		for _, a := range all {
			if r := rank(a); r < least {
				best, least = a, r
			}
		}
	}
	return best, true
}

// weight is how much an endpoint is a client's: the highest of all has it, and
// when one goes, only its own clients get another (rendezvous hashing).
func weight(client netip.Addr, a netip.AddrPort) uint64 {
	h := fnv.New64a()
	raw, _ := a.MarshalBinary()
	from := client.As16()
	_, _ = h.Write(from[:])
	_, _ = h.Write(raw)
	x := h.Sum64() // FNV's high bits hardly follow the last bytes: mixed as in splitmix64
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

func (b *balancer) avoid(a netip.AddrPort) {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	b.bad[a] = now.Add(avoided)
	if len(b.bad) > 1024 { // addresses that no rule has any more
		for a, until := range b.bad {
			if now.After(until) {
				delete(b.bad, a)
			}
		}
	}
}

// take counts the call to an endpoint, and no longer to the one before.
func (c *call) take(b *balancer, a netip.AddrPort) {
	c.release()
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.busy[a]
	if e == nil {
		e = &endpoint{addr: a}
		b.busy[a] = e
	}
	e.calls.Add(1)
	c.endpoint, c.balance = e, b
	c.tries++
	c.tried = append(c.tried, a)
}

// untried reports whether the backend has an endpoint that the call was not on.
func (c *call) untried() bool {
	return slices.ContainsFunc(c.backend.Endpoints, func(a netip.AddrPort) bool { return !slices.Contains(c.tried, a) })
}

// release gives up the endpoint that the call is counted to.
func (c *call) release() {
	if c.balance == nil {
		return
	}
	b := c.balance
	b.mu.Lock()
	defer b.mu.Unlock()
	if c.endpoint.calls.Add(-1) == 0 {
		delete(b.busy, c.endpoint.addr)
	}
	c.balance = nil
}

// address is the endpoint's in words; "": none was tried.
func (c *call) address() string {
	if c.endpoint == nil {
		return ""
	}
	return c.endpoint.addr.String()
}

// heldBody keeps a transport that could not connect from closing the body, so
// that the next one may send it. ReverseProxy closes what is under it.
type heldBody struct {
	under io.ReadCloser
	seen  atomic.Bool // something of it was read
}

// Read implements io.Reader.
func (h *heldBody) Read(p []byte) (int, error) {
	h.seen.Store(true)
	return h.under.Read(p)
}

// Close implements io.Closer.
func (h *heldBody) Close() error { return nil }
