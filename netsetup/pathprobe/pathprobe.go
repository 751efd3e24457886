// Package pathprobe continuously measures the paths between this node and others with
// little traffic: packet loss in each direction, round-trip time, path MTU, and whether a
// stream of bytes arrives intact.
//
// Packets go from one node's first pod address to another's, so that they take the path
// of pod traffic: host route or tunnel. It reports and changes nothing.
package pathprobe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/clusterd/clusterd/slack"
)

// Config of a Prober.
type Config struct {
	// Port is where nodes answer, UDP and TCP, at their own addresses alone;
	// required, all nodes need the same.
	Port int
	// MTU is how long a packet to addr may be, with its IP header, by the interface
	// that it leaves by; default: asked by netlink. It may block for milliseconds.
	MTU    func(addr netip.Addr) (int, error)
	Logger *slog.Logger // default slog.Default()
}

// Peer is an address of another node.
type Peer struct {
	Name string
	Addr netip.Addr
	// Way names what the way to it depends on, such as the nodes' own addresses. When it
	// is another one, what was found of the way's length counts no more.
	Way string
}

// Found is how long a packet to a peer may be, as a former process found.
type Found struct {
	Peer
	Carries int
}

// Result is what is known of the way to a peer.
type Result struct {
	Peer
	Counts
	Since time.Time // of the first ping
	// Answered and Heard are when the last answer and the last of the peer's own
	// pings came; zero: none.
	Answered, Heard time.Time
	// MTU is that of the interface, in bytes; 0: not known.
	// Carries is what it does carry where that is less; 0: nothing says so. It may be
	// what Recall was given, while nothing else is found.
	MTU, Carries int
	// Damaged are packets of the last ten minutes that came with other bytes than were
	// sent.
	Damaged int
	// Stream says why a stream of bytes did not come through at the last try; nil
	// while Streamed is zero or when it did.
	Stream   error
	Streamed time.Time
}

// The rates. A node sends a ping a second to each other node and never more than
// 20 a second in all, so that a thousand nodes are asked each 50 s.
const (
	pingPeriod   = time.Second
	pingPause    = 50 * time.Millisecond
	sizePeriod   = 10 * time.Second       // between long pings to one peer
	searchPeriod = time.Second            // while a length is looked for
	sizeTimeout  = 500 * time.Millisecond // and four of the last round trips: for long pings
	streamPeriod = time.Minute
	streamRetry  = 5 * time.Second // after one that failed
	streamPause  = time.Second     // between two, to whichever peer
	bindRetry    = time.Second
)

// peer is what a Prober knows about one.
type peer struct {
	Peer
	window   window
	sizes    sizes
	since    time.Time
	answered time.Time
	rtt      time.Duration // of the last answer
	heard    time.Time
	run      uint64 // of the peer's pings
	received uint32 // of that run
	damaged  recent
	asked    time.Time // when the MTU was looked up
	streamed time.Time
	stream   error
}

// Prober measures the ways to its peers. Its methods may be called at any time.
type Prober struct {
	cfg Config
	run uint64 // of short pings; long ones are of run+1

	changed chan struct{} // holds one: Set was called

	mu    sync.Mutex // guards all below
	own   []netip.Addr
	peers map[netip.Addr]*peer
	found map[Peer]int          // by former processes, of peers that are not set yet
	conns map[bool]*net.UDPConn // by Is4 of the address
}

// New returns a Prober without peers; it opens nothing.
func New(cfg Config) *Prober {
	if cfg.MTU == nil {
		cfg.MTU = kernelMTU
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	return &Prober{cfg: cfg, run: rand.Uint64() &^ 1, changed: make(chan struct{}, 1), peers: map[netip.Addr]*peer{}, conns: map[bool]*net.UDPConn{}}
}

// Recall has the prober begin with what former processes found, until it finds
// something else itself: of peers that are set afterwards.
func (p *Prober) Recall(found []Found) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.found = map[Peer]int{}
	for _, f := range found {
		if f.Carries > 0 {
			p.found[f.Peer] = f.Carries
		}
	}
}

// Set says what this node's addresses are and which others there are. What is
// known of those that stay is kept.
func (p *Prober) Set(own []netip.Addr, peers []Peer) {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := map[netip.Addr]*peer{}
	for _, want := range peers {
		have := p.peers[want.Addr]
		switch {
		case have == nil || have.Name != want.Name:
			have = &peer{Peer: want, sizes: sizes{found: p.found[want]}}
			delete(p.found, want)
		case have.Way != want.Way:
			have.Way, have.sizes, have.asked = want.Way, sizes{}, time.Time{}
		}
		now[want.Addr] = have
	}
	p.peers = now
	if !slices.Equal(p.own, own) {
		p.own = slices.Clone(own)
		select {
		case p.changed <- struct{}{}:
		default:
		}
	}
}

// Results are those of all peers, sorted by name and address.
func (p *Prober) Results() []Result {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	out := make([]Result, 0, len(p.peers))
	for _, o := range p.peers {
		out = append(out, Result{
			Peer: o.Peer, Counts: o.window.count(now), Since: o.since, Answered: o.answered, Heard: o.heard,
			MTU: o.sizes.want, Carries: o.sizes.carries(), Damaged: o.damaged.sum(now), Stream: o.stream, Streamed: o.streamed,
		})
	}
	slices.SortFunc(out, func(a, b Result) int {
		if a.Name != b.Name {
			if a.Name < b.Name {
				return -1
			}
			return 1
		}
		return a.Addr.Compare(b.Addr)
	})
	return out
}

// Run measures until ctx ends.
func (p *Prober) Run(ctx context.Context) {
	for ctx.Err() == nil {
		p.mu.Lock()
		own := slices.Clone(p.own)
		p.mu.Unlock()
		if len(own) > 0 {
			if err := p.serve(ctx, own); err != nil {
				p.cfg.Logger.Debug("ways to other nodes are not measured at present", "err", err)
			} else {
				continue // other addresses
			}
		}
		select {
		case <-ctx.Done():
		case <-p.changed:
		case <-retryAfter(len(own) > 0):
		}
	}
}

// retryAfter is nil, which never comes, where there is nothing to retry.
func retryAfter(retry bool) <-chan time.Time {
	if !retry {
		return nil
	}
	return time.After(bindRetry)
}

// serve answers at the addresses and measures from them, until they change or
// ctx ends.
func (p *Prober) serve(ctx context.Context, own []netip.Addr) error {
	ctx, stop := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	var closers []func()
	defer func() {
		for _, c := range closers {
			c()
		}
		p.mu.Lock()
		clear(p.conns)
		p.mu.Unlock()
	}()
	for _, addr := range own {
		at := netip.AddrPortFrom(addr, uint16(p.cfg.Port))
		conn, err := listenUDP(at)
		if err != nil {
			return fmt.Errorf("answer at %s: %w", at, err)
		}
		closers = append(closers, func() { conn.Close() })
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(at))
		if err != nil {
			return fmt.Errorf("answer at %s: %w", at, err)
		}
		closers = append(closers, func() { l.Close() })
		p.mu.Lock()
		p.conns[addr.Is4()] = conn
		p.mu.Unlock()
		wg.Go(func() { p.read(conn) })
		wg.Go(func() { p.accept(ctx, l) })
	}
	wg.Go(func() { p.ping(ctx) })
	wg.Go(func() { p.stream(ctx) })
	select {
	case <-ctx.Done():
	case <-p.changed:
	}
	return nil
}

// read answers pings and takes answers, until conn is closed.
func (p *Prober) read(conn *net.UDPConn) {
	buf := make([]byte, longestFrame)
	for {
		n, from, err := conn.ReadFromUDPAddrPort(buf)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue // of an ICMP message about a former packet
		}
		b := buf[:n]
		if p.take(b, from.Addr().Unmap(), time.Now()) {
			_, _ = conn.WriteToUDPAddrPort(b, from) // a lost answer is a lost packet
		}
	}
}

// take looks at a packet. It reports whether b, which holds the answer then, is
// to be sent back: to peers alone.
func (p *Prober) take(b []byte, from netip.Addr, now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	o := p.peers[from]
	if o == nil {
		return false
	}
	m, v := parse(b)
	switch {
	case v == damaged:
		o.damaged.add(now)
		return false
	case v == foreign:
		return false
	case m.kind == kindPing:
		if m.run != o.run && m.run&1 == 0 {
			o.run, o.received = m.run, 0
		}
		if m.run == o.run {
			o.received++
		}
		o.heard = now
		message{kind: kindAnswer, run: m.run, seq: m.seq, received: o.received}.put(b)
		return true
	case m.run == p.run:
		if o.window.answer(m.seq, m.received, now) {
			o.answered, o.rtt = now, o.window.pings[m.seq%windowLen].rtt
		}
	case m.run == p.run+1:
		if !o.sizes.sent.IsZero() && m.seq == o.sizes.seq && len(b) == payload(o.sizes.size, from) {
			o.sizes.passed()
		}
	}
	return false
}

// payload is how many bytes of UDP make an IP packet of a size.
func payload(size int, addr netip.Addr) int {
	if addr.Is4() {
		return size - 20 - 8
	}
	return size - 40 - 8
}

// ping sends to one peer after the other.
func (p *Prober) ping(ctx context.Context) {
	var round []*peer
	for {
		pause := pingPeriod
		p.mu.Lock()
		if len(round) == 0 {
			round = p.inOrder()
		}
		if len(round) > 0 {
			pause = max(pingPeriod/time.Duration(len(p.peers)), pingPause)
			if p.peers[round[0].Addr] == round[0] {
				p.pingOne(round[0], time.Now())
			}
			round = round[1:]
		}
		peers := len(p.peers)
		p.mu.Unlock()
		var due <-chan time.Time
		if peers > 0 {
			due = time.After(pause)
		} else {
			due = slack.After(pause)
		}
		select {
		case <-ctx.Done():
			return
		case <-due:
		}
	}
}

// inOrder are the peers; p.mu is held.
func (p *Prober) inOrder() []*peer {
	out := make([]*peer, 0, len(p.peers))
	for _, o := range p.peers {
		out = append(out, o)
	}
	slices.SortFunc(out, func(a, b *peer) int { return a.Addr.Compare(b.Addr) })
	return out
}

// pingOne sends what is due; p.mu is held. Writing to a UDP socket does not
// block: what has no room is lost, as on the way.
func (p *Prober) pingOne(o *peer, now time.Time) {
	conn := p.conns[o.Addr.Is4()]
	if conn == nil {
		return
	}
	if o.since.IsZero() {
		o.since = now
	}
	to := netip.AddrPortFrom(o.Addr, uint16(p.cfg.Port))
	b := make([]byte, headerLen)
	message{kind: kindPing, run: p.run, seq: o.window.send(now)}.put(b)
	_, _ = conn.WriteToUDPAddrPort(b, to) // counted as lost

	if now.Sub(o.asked) > time.Minute {
		o.asked = now
		if mtu, err := p.cfg.MTU(o.Addr); err == nil {
			o.sizes.aim(mtu)
		}
	}
	s := &o.sizes
	if !s.sent.IsZero() {
		if now.Sub(s.sent) <= min(answerTimeout, sizeTimeout+4*o.rtt) {
			return
		}
		s.failed(o.answered.After(s.sent))
	}
	wait := sizePeriod
	if s.searching() {
		wait = searchPeriod
	}
	if n := payload(s.try(), o.Addr); n >= headerLen && n <= longestFrame && now.Sub(s.last) >= wait {
		s.seq++
		s.size, s.sent, s.last = s.try(), now, now
		b := make([]byte, n)
		for i := headerLen; i < n; i++ {
			b[i] = byte(rand.Uint32())
		}
		message{kind: kindPing, run: p.run + 1, seq: s.seq}.put(b)
		_, _ = conn.WriteToUDPAddrPort(b, to) // counted as lost
	}
}
