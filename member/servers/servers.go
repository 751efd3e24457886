// Package servers is how an agent finds a server: it keeps a list of all of
// them on disk, dials one after the other until one answers, stays with that
// one while it lasts, and leaves one that failed alone for a while. It decides
// nothing about who is a server: the certificate at the other end does.
package servers

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

const (
	// attemptTimeout is what one server may take to answer before the next is
	// tried.
	attemptTimeout = 2 * time.Second
	// avoidFor is how long one that failed is tried last.
	avoidFor = 30 * time.Second
	// A connection on which nothing comes is asked after pingAfter. When it is given up
	// is in ping.go; net/http's own limit comes after that.
	pingAfter   = 2 * time.Second
	pingTimeout = 2 * slowLast
	// The list is asked for after refreshFirst, and while it does not change ever
	// more rarely, up to refreshLast.
	refreshFirst = time.Second
	refreshLast  = 30 * time.Second
	// That none answers is said at once, and again this often.
	warnAgain = 5 * time.Minute
)

// List is the servers an agent knows. Its methods may be called concurrently.
type List struct {
	cfg     Config
	attempt time.Duration // attemptTimeout, outside of tests

	mu      sync.Mutex
	servers []join.ServerAddr // in the order they are tried
	current string            // the id of the one that answered last
	failed  map[string]time.Time
	now     func() time.Time
	removal removal

	savingRemoved  sync.Mutex // guards unsavedRemoved, and the order in which SaveRemoved is called
	unsavedRemoved bool

	slow  slowness
	asked chan struct{} // signalled (capacity 1) when the list is to be asked for now
}

// Config is what a List needs.
type Config struct {
	Identity transport.Identity
	ID       string         // this node's; spreads the nodes over the servers
	Self     netip.AddrPort // where this node listens; sent to the servers
	Known    []byte         // the list as Save was given it last
	Save     func([]byte) error
	// KnownRemoved are the ids of servers that were removed from the cluster, as
	// SaveRemoved was given them last; empty: none. SaveRemoved may be nil.
	KnownRemoved []byte
	SaveRemoved  func([]byte) error
	// Cut is called with the id of a server that was removed: what it has open here is to
	// be closed. What this List has opened is closed already. May be nil.
	Cut func(id string)
	// Extra are addresses of servers that a person named, tried last.
	Extra []netip.AddrPort
	// Role is called with what this node is by the cluster's record, with each answer of
	// a server. It must not block. May be nil.
	Role func(pki.Role)
	// Trust is called with the authorities to trust, from servers whose key is in the
	// list. It must not block for long. May be nil.
	Trust func(join.TrustBundle)
	// TrustNumber returns the number of the last state of the authority that this node
	// has; nil: it does not say.
	TrustNumber func() uint64
	// Warn is called with what cannot be repaired here.
	Warn func(msg string, err error)
}

// ErrNone is returned when no server could be reached.
var ErrNone = errors.New("no server could be reached")

// New reads the list.
func New(cfg Config) (*List, error) {
	l := &List{cfg: cfg, attempt: attemptTimeout, failed: map[string]time.Time{}, now: time.Now, asked: make(chan struct{}, 1)}
	var known []join.ServerAddr
	if err := json.Unmarshal(cfg.Known, &known); err != nil {
		return nil, fmt.Errorf("the list of servers: %w", err)
	}
	var err error
	if l.removal, err = newRemoval(cfg.KnownRemoved); err != nil {
		return nil, err
	}
	l.servers = l.notRemoved(order(cfg.ID, known))
	return l, nil
}

// Encode is the form of a list that Config.Known takes.
func Encode(servers []join.ServerAddr) ([]byte, error) { return json.Marshal(servers) }

// order gives each node an order of its own, so that the nodes of a server
// that fails spread over all others.
func order(id string, servers []join.ServerAddr) []join.ServerAddr {
	rank := func(s join.ServerAddr) uint64 {
		sum := sha256.Sum256([]byte(id + "\x00" + s.ID))
		return binary.BigEndian.Uint64(sum[:])
	}
	servers = slices.Clone(servers)
	slices.SortFunc(servers, func(a, b join.ServerAddr) int { return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.ID, b.ID)) })
	return servers
}

// All are the servers known now.
func (l *List) All() []join.ServerAddr {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.servers)
}

// candidates are whom to try, in turn: first, the others, those that failed
// lately, the one that failed last last. l.mu is held.
func (l *List) candidates(first string) []join.ServerAddr {
	now := l.now()
	all := slices.Clone(l.servers)
	for _, addr := range l.cfg.Extra {
		if !slices.ContainsFunc(all, func(s join.ServerAddr) bool { return s.Addr == addr }) {
			all = append(all, join.ServerAddr{Addr: addr})
		}
	}
	avoided := func(s join.ServerAddr) time.Time {
		if at, ok := l.failed[key(s)]; ok && now.Sub(at) < avoidFor {
			return at
		}
		return time.Time{}
	}
	slices.SortStableFunc(all, func(a, b join.ServerAddr) int {
		if c := avoided(a).Compare(avoided(b)); c != 0 {
			return c
		}
		switch first {
		case key(a):
			return -1
		case key(b):
			return 1
		}
		return 0
	})
	return all
}

func key(s join.ServerAddr) string { return cmp.Or(s.ID, s.Addr.String()) }

// Dial connects to a server for one of the nodes' protocols.
func (l *List) Dial(ctx context.Context, protocol string) (net.Conn, error) {
	return l.dial(ctx, func(ctx context.Context, s join.ServerAddr) (net.Conn, error) {
		return conn(l.cfg.Identity.Dial(ctx, s.Addr, s.ID, protocol))
	})
}

// dialAPI connects to a server's API.
func (l *List) dialAPI(ctx context.Context, _, _ string) (net.Conn, error) {
	return l.dial(ctx, func(ctx context.Context, s join.ServerAddr) (net.Conn, error) {
		return conn(l.cfg.Identity.DialAPI(ctx, s.Addr, s.ID, func(c net.Conn) net.Conn { return l.watch(c, s) }))
	})
}

// conn keeps a nil pointer from becoming a connection.
func conn[C net.Conn](c C, err error) (net.Conn, error) {
	if err != nil {
		return nil, err
	}
	return c, nil
}

type dialOne func(context.Context, join.ServerAddr) (net.Conn, error)

// dial stays with the server that answered last.
func (l *List) dial(ctx context.Context, one dialOne) (net.Conn, error) {
	l.mu.Lock()
	who := l.candidates(l.current)
	l.mu.Unlock()
	c, s, err := l.dialOneOf(ctx, who, one)
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.current = key(s)
	return c, nil
}

// dialAnother asks another server each time: of one that was removed and does
// not know it, or does not say so, only others tell.
func (l *List) dialAnother(ctx context.Context, one dialOne) (net.Conn, error) {
	l.mu.Lock()
	first := l.current
	if len(l.servers) > 0 {
		first = key(l.servers[rand.N(len(l.servers))])
	}
	who := l.candidates(first)
	l.mu.Unlock()
	c, _, err := l.dialOneOf(ctx, who, one)
	return c, err
}

func (l *List) dialOneOf(ctx context.Context, who []join.ServerAddr, one dialOne) (net.Conn, join.ServerAddr, error) {
	errs := []error{ErrNone}
	for _, s := range who {
		attempt, cancel := context.WithTimeout(ctx, l.attempt)
		c, err := one(attempt, s)
		cancel()
		if t, ok := c.(*tls.Conn); ok && err == nil {
			l.mu.Lock()
			if !l.removal.remember(idOf(t), t) {
				err = errors.New("it was removed from the cluster")
			}
			l.mu.Unlock()
			if err != nil {
				_ = c.Close()
			}
		}
		if err == nil {
			l.mu.Lock()
			delete(l.failed, key(s))
			l.mu.Unlock()
			return c, s, nil
		}
		if ctx.Err() != nil {
			return nil, join.ServerAddr{}, ctx.Err()
		}
		l.mu.Lock()
		l.failed[key(s)] = l.now()
		l.mu.Unlock()
		errs = append(errs, fmt.Errorf("%s: %w", cmp.Or(s.Name, s.Addr.String()), err))
	}
	return nil, join.ServerAddr{}, errors.Join(errs...)
}

// Transport returns a round tripper to the API of whatever server answers. One
// that falls silent is given up within seconds. Each Transport has a
// connection of its own, and another one for what is asked after the node has got
// another certificate: a server judges each request by that of its connection.
func (l *List) Transport() http.RoundTripper { return &renewed{list: l} }

// renewed is the way to the API by the node's certificate of the moment.
type renewed struct {
	list *List

	mu   sync.Mutex
	cert *tls.Certificate
	way  *http.Transport
}

// RoundTrip implements http.RoundTripper.
func (r *renewed) RoundTrip(req *http.Request) (*http.Response, error) {
	return r.now().RoundTrip(req)
}

// CloseIdleConnections is what http.Client calls.
func (r *renewed) CloseIdleConnections() { r.now().CloseIdleConnections() }

func (r *renewed) now() *http.Transport {
	cert := r.list.cfg.Identity.Certificate()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.way == nil || r.cert != cert {
		if r.way != nil {
			r.way.CloseIdleConnections() // watches go on to their end, and then it is idle
		}
		r.cert, r.way = cert, r.list.transport()
	}
	return r.way
}

func (l *List) transport() *http.Transport {
	return &http.Transport{
		DialTLSContext:    l.dialAPI,
		ForceAttemptHTTP2: true,
		HTTP2:             &http.HTTP2Config{SendPingTimeout: pingAfter, PingTimeout: pingTimeout, WriteByteTimeout: pingTimeout},
		IdleConnTimeout:   90 * time.Second,
	}
}

// Run keeps the list true until ctx ends. refused is called when a server says
// that this node is no member; its error ends Run.
func (l *List) Run(ctx context.Context, refused func(context.Context) error) error {
	wait := refreshFirst
	var warned time.Time // zero: a server has answered since
	for {
		changed, err := l.Refresh(ctx)
		var no *join.Refusal
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			warned = time.Time{}
		case !errors.As(err, &no) && l.cfg.Warn != nil && l.now().Sub(warned) >= warnAgain:
			l.cfg.Warn("no server answers; pods go on, and what is known of the servers is tried again every second", err)
			warned = l.now()
		}
		if err != nil {
			if err := refused(ctx); err != nil {
				return err
			}
		}
		wait = min(2*wait, refreshLast)
		if err != nil || changed {
			wait = refreshFirst
		}
		select {
		case <-ctx.Done():
			return nil
		case <-l.asked:
		// Nodes that began together do not keep asking at the same time.
		case <-time.After(wait + rand.N(wait/4+1)):
		}
	}
}

// RequestRefresh has Run ask now: a server said that there are changes.
func (l *List) RequestRefresh() {
	select {
	case l.asked <- struct{}{}:
	default:
	}
}

// Refresh asks a server where all of them are, and reports whether that
// changed the list.
func (l *List) Refresh(ctx context.Context) (changed bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	known := false // whether its key was in the list, and not only its authority's name on it
	dial := func(ctx context.Context) (net.Conn, error) {
		return l.dialAnother(ctx, func(ctx context.Context, s join.ServerAddr) (net.Conn, error) {
			known = s.ID != ""
			return conn(l.cfg.Identity.Dial(ctx, s.Addr, s.ID, transport.Member))
		})
	}
	var trust uint64
	if l.cfg.TrustNumber != nil {
		trust = l.cfg.TrustNumber()
	}
	list, err := join.FetchServers(ctx, dial, l.cfg.Self, trust)
	if err != nil {
		return false, err
	}
	_ = l.remove(list.Removed) // it has warned
	if l.cfg.Trust != nil && list.Trust != nil && known {
		l.cfg.Trust(*list.Trust)
	}
	if l.cfg.Role != nil && list.Role != "" {
		l.cfg.Role(list.Role)
	}
	l.mu.Lock()
	found := l.notRemoved(order(l.cfg.ID, list.Servers))
	if len(found) == 0 {
		l.mu.Unlock()
		return false, nil
	}
	changed = !slices.Equal(found, l.servers)
	l.servers = found
	l.mu.Unlock()
	if !changed {
		return false, nil
	}
	b, err := Encode(found)
	if err == nil {
		err = l.cfg.Save(b)
	}
	if err != nil && l.cfg.Warn != nil {
		l.cfg.Warn("the list of servers could not be written down", err)
	}
	return true, nil
}
