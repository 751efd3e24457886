// Package dns answers the names of the cluster on each node, at an address that
// every node has for itself: no packet of a lookup leaves the node unless the
// name is outside the cluster domain. Such names are forwarded to the node's own
// name servers and cached.
//
// Answers about the cluster are made from watches at the moment of the
// question, so they are as old as the last event that arrived. Without the API
// the last state goes on being answered.
//
// It follows the specification "Kubernetes DNS-Based Service Discovery" 1.1.0.
package dns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/slack"
)

// Config of a Server.
type Config struct {
	// Addrs are served, port 53; required. Each is put on the node's loopback
	// by Address.
	Addrs []netip.Addr
	Port  uint16 // default 53
	// Domain is the cluster's, default "cluster.local".
	Domain string
	// Client watches endpoints and namespaces; required.
	Client kubernetes.Interface
	// Services is the watch of all Services; required. Its owner runs it.
	Services cache.SharedIndexInformer
	// Slices is the watch of all EndpointSlices. Its owner runs it. Default: one of
	// Client.
	Slices cache.SharedIndexInformer
	// Settings reads the ConfigMap of SettingsName; nil: there is none.
	Settings kubernetes.Interface
	// Upstreams are the node's name servers as they are now, "192.0.2.53" or
	// with a port; required. It is called every few seconds.
	Upstreams func() ([]string, error)
	// Ranges are the cluster's now: of pods and Services. A client outside of them
	// that is not this node is refused, and reverse names of their addresses are
	// never sent upstream. It is called for each question. Default: there are none.
	Ranges func() []netip.Prefix
	// Address puts an address on the node, or finds it there; nil: it is there.
	Address func(netip.Addr) error
}

// Bounds of a Server: what a flood of questions may cost.
const (
	maxForwards          = 512  // questions that wait for an upstream at one time
	maxForwardsPerClient = 96   // of one client
	maxStreams           = 512  // TCP connections
	maxStreamsPerClient  = 32   // of one client
	maxStreamQueries     = 64   // questions on one connection
	foundSize            = 8192 // answers of upstreams
	deniedSize           = 4096 // and those that say that there is nothing
	udpPayload           = 1232 // bytes of an answer that fit unfragmented everywhere (DNS flag day 2020)
	ttl                  = 5    // seconds, of the cluster's own names
)

// Server answers questions.
type Server struct {
	cfg      Config
	zone     *zone
	forward  *forwarder
	metrics  *metrics
	catalog  *catalog
	settings settings
	clients  *limiter
	own      localAddresses
	bound    atomic.Int32 // addresses that are served now
}

// New checks the configuration and binds to nothing yet.
func New(cfg Config) (*Server, error) {
	if len(cfg.Addrs) == 0 || cfg.Client == nil || cfg.Services == nil || cfg.Upstreams == nil {
		return nil, errors.New("dns: Addrs, Client, Services and Upstreams are required")
	}
	if cfg.Domain == "" {
		cfg.Domain = "cluster.local"
	}
	if cfg.Port == 0 {
		cfg.Port = 53
	}
	if cfg.Ranges == nil {
		cfg.Ranges = func() []netip.Prefix { return nil }
	}
	c, err := newCatalog(cfg.Client, cfg.Services, cfg.Slices)
	if err != nil {
		return nil, fmt.Errorf("dns: %w", err)
	}
	m := newMetrics()
	s := &Server{
		cfg: cfg, catalog: c, metrics: m, clients: newLimiter(maxForwards, maxForwardsPerClient),
		zone: newZone(cfg.Domain, cfg.Addrs, cfg.Ranges, c),
	}
	s.forward = newForwarder(m)
	s.settings.watch(cfg.Settings)
	return s, nil
}

// Metrics are the server's, by the names that CoreDNS gives them.
func (s *Server) Metrics() prometheus.Collector { return s.metrics }

// Serving says whether all addresses are served.
func (s *Server) Serving() bool { return int(s.bound.Load()) == len(s.cfg.Addrs) }

// Run answers until ctx ends. What it cannot bind to yet it tries again: a node
// is of use without DNS.
func (s *Server) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer s.forward.close()
	s.catalog.run(ctx, &wg)
	s.settings.run(ctx, &wg)
	wg.Go(func() { s.keepUpstreams(ctx) })
	for _, addr := range s.cfg.Addrs {
		wg.Go(func() { s.keepServing(ctx, addr) })
	}
	<-ctx.Done()
	return nil
}

// keepServing binds to an address and answers there until ctx ends.
func (s *Server) keepServing(ctx context.Context, addr netip.Addr) {
	log := klog.FromContext(ctx)
	for delay := 250 * time.Millisecond; ctx.Err() == nil; delay = min(2*delay, 30*time.Second) {
		began := time.Now()
		err := s.serve(ctx, netip.AddrPortFrom(addr, s.cfg.Port))
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > time.Minute {
			delay = 250 * time.Millisecond
		}
		log.Error(err, "Cluster DNS is not served, will retry; pods of this node resolve no names", "address", addr, "after", delay)
		select {
		case <-ctx.Done():
		case <-time.After(delay):
		}
	}
}

// addressCheck is how often the address is looked after: an administrator may
// have taken it away.
const addressCheck = 10 * time.Second

func (s *Server) serve(ctx context.Context, addr netip.AddrPort) error {
	if s.cfg.Address != nil {
		if err := s.cfg.Address(addr.Addr()); err != nil {
			return fmt.Errorf("put the address on this node: %w", err)
		}
	}
	udp, tcp, err := listen(ctx, addr)
	if err != nil {
		return err
	}
	return s.serveSockets(ctx, addr.Addr(), udp, tcp)
}

// serveSockets answers by the sockets of an address until ctx ends, and closes them.
func (s *Server) serveSockets(ctx context.Context, addr netip.Addr, udp []*net.UDPConn, tcp *net.TCPListener) error {
	s.bound.Add(1)
	defer s.bound.Add(-1)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, conn := range udp {
		wg.Go(func() { cancel(s.servePackets(ctx, conn)) })
	}
	wg.Go(func() { cancel(s.serveStreams(ctx, tcp)) })
	tick := slack.NewTicker(addressCheck)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
			if s.cfg.Address != nil {
				if err := s.cfg.Address(addr); err != nil {
					klog.FromContext(ctx).Error(err, "The address of cluster DNS cannot be kept on this node", "address", addr)
				}
			}
		}
	}
}

// question is one that may be answered: its message is well-formed.
type question struct {
	msg    *dns.Msg
	name   string // canonical: lower case, with the dot at its end
	client netip.Addr
	stream bool // came by TCP
	size   int  // bytes
}

// accept looks at a message. It returns the refusal if it must not be
// answered; both nil: it deserves no answer at all.
func (s *Server) accept(msg *dns.Msg, client netip.Addr, stream bool) (*question, *dns.Msg) {
	refuse := func(rcode int) (*question, *dns.Msg) {
		r := new(dns.Msg).SetRcode(msg, rcode)
		r.RecursionAvailable = true
		if len(r.Question) > 1 {
			r.Question = r.Question[:1]
		}
		return nil, r
	}
	switch {
	case msg.Response:
		return nil, nil // two servers must not talk to each other for ever
	case msg.Opcode != dns.OpcodeQuery:
		return refuse(dns.RcodeNotImplemented)
	case len(msg.Question) != 1:
		return refuse(dns.RcodeFormatError)
	}
	if opts := optCount(msg); opts > 1 {
		return refuse(dns.RcodeFormatError)
	}
	q := msg.Question[0]
	switch q.Qtype {
	case dns.TypeAXFR, dns.TypeIXFR, dns.TypeMAILA, dns.TypeMAILB:
		return refuse(dns.RcodeRefused)
	case dns.TypeOPT, dns.TypeTSIG, dns.TypeTKEY:
		return refuse(dns.RcodeFormatError)
	}
	if q.Qclass != dns.ClassINET || !s.mayAsk(client) {
		return refuse(dns.RcodeRefused)
	}
	if opt := msg.IsEdns0(); opt != nil && opt.Version() != 0 {
		return refuse(dns.RcodeBadVers)
	}
	return &question{msg: msg, name: dns.CanonicalName(q.Name), client: client, stream: stream}, nil
}

// withoutOPT is a copy of rrs, which may have been remembered, without that record.
func withoutOPT(rrs []dns.RR) []dns.RR {
	var out []dns.RR
	for _, rr := range rrs {
		if rr.Header().Rrtype != dns.TypeOPT {
			out = append(out, rr)
		}
	}
	return out
}

func optCount(msg *dns.Msg) int {
	n := 0
	for _, rr := range msg.Extra {
		if rr.Header().Rrtype == dns.TypeOPT {
			n++
		}
	}
	return n
}

// mayAsk says whether a client is the cluster's: one that others on the network
// reach would answer the whole world.
func (s *Server) mayAsk(client netip.Addr) bool {
	client = client.Unmap()
	if client.IsLoopback() || slices.Contains(s.cfg.Addrs, client) ||
		slices.ContainsFunc(s.zone.ranges(), func(r netip.Prefix) bool { return r.Contains(client) }) {
		return true
	}
	return s.own.has(client) // a process that bound to an address of the node's
}

// localAddresses are the node's, looked for once a second at most: the kernel's list
// takes longer than an answer, and strangers must not make it work. Safe for
// concurrent use.
type localAddresses struct {
	list func() ([]net.Addr, error) // default net.InterfaceAddrs

	mu    sync.Mutex // guards all below
	read  time.Time
	addrs map[netip.Addr]bool
}

const localAddressesFor = time.Second

func (o *localAddresses) has(a netip.Addr) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if now := time.Now(); now.Sub(o.read) >= localAddressesFor {
		o.read = now
		list := o.list
		if list == nil {
			list = net.InterfaceAddrs
		}
		addrs, err := list()
		if err == nil { // else the former ones
			o.addrs = map[netip.Addr]bool{}
			for _, x := range addrs {
				if p, err := netip.ParsePrefix(x.String()); err == nil {
					o.addrs[p.Addr()] = true
				}
			}
		}
	}
	return o.addrs[a]
}

// now answers what needs no waiting: the cluster's names, and what is
// remembered of others. False: answer has to be asked.
func (s *Server) now(q *question) (*dns.Msg, bool) {
	if token, ok := strings.CutSuffix(q.name, loopDomain); ok {
		s.forward.heard(token)
		return new(dns.Msg).SetRcode(q.msg, dns.RcodeNameError), true
	}
	if a, ours := s.zone.answer(q.name, askedBy(q.msg.Question[0], q.stream)); ours {
		m := a.message(q.msg, s.zone)
		if a.target == "" {
			return m, true
		}
		return m, s.chaseNow(q, m, a.target)
	}
	return s.forward.remembered(q.msg, q.name)
}

// wait answers a question that now could not.
func (s *Server) wait(ctx context.Context, q *question) *dns.Msg {
	if a, ours := s.zone.answer(q.name, askedBy(q.msg.Question[0], q.stream)); ours {
		m := a.message(q.msg, s.zone)
		if a.target != "" {
			s.chase(ctx, q, m, a.target)
		}
		return m
	}
	return s.forward.ask(ctx, q.msg, q.name)
}

// maxChain bounds how many ExternalNames may lead to each other.
const maxChain = 8

// chaseNow follows an alias as far as no waiting is needed.
func (s *Server) chaseNow(q *question, m *dns.Msg, target string) bool {
	return s.follow(q, m, target, s.forward.remembered)
}

// chase follows an alias, for stub resolvers do not.
func (s *Server) chase(ctx context.Context, q *question, m *dns.Msg, target string) {
	s.follow(q, m, target, func(msg *dns.Msg, name string) (*dns.Msg, bool) {
		return s.forward.ask(ctx, msg, name), true
	})
}

// follow adds to m what target leads to; false: outside could not say yet.
func (s *Server) follow(q *question, m *dns.Msg, target string, outside func(*dns.Msg, string) (*dns.Msg, bool)) bool {
	for range maxChain {
		next := q.msg.Copy()
		next.Question[0].Name = target
		name := dns.CanonicalName(target)
		a, ours := s.zone.answer(name, askedBy(next.Question[0], q.stream))
		if !ours {
			r, ok := outside(next, name)
			if !ok {
				return false
			}
			m.Answer = append(m.Answer, r.Answer...)
			m.Rcode, m.Ns, m.Authoritative = r.Rcode, r.Ns, false
			return true
		}
		r := a.message(next, s.zone)
		m.Answer = append(m.Answer, r.Answer...)
		m.Rcode, m.Ns = r.Rcode, r.Ns
		if a.target == "" {
			return true
		}
		target = a.target
	}
	m.Rcode, m.Answer, m.Ns = dns.RcodeServerFailure, nil, nil
	return true
}

// finish makes a message fit for its way back.
func finish(q *question, m *dns.Msg) *dns.Msg {
	m.Extra = withoutOPT(m.Extra)
	size := dns.MinMsgSize
	if opt := q.msg.IsEdns0(); opt != nil {
		size = answerSize(opt.UDPSize())
		m.SetEdns0(udpPayload, opt.Do())
	}
	if q.stream {
		size = dns.MaxMsgSize
	}
	m.Compress = true
	m.Truncate(size)
	return m
}
