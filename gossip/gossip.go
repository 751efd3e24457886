// Package gossip provides cluster membership and failure hints on top of
// hashicorp/memberlist. It makes no decisions: a hint must be confirmed over a
// connection to the node, and nothing durable follows from it without passing
// through Raft.
package gossip

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/clusterd/clusterd/loglimit"
	"github.com/clusterd/clusterd/slack"
)

// State is a member's state as gossip sees it.
type State string

const (
	Alive State = "alive"
	// Dead did not answer and did not refute in time. It is a hint only: the
	// member may be overloaded, or just this node's line may be cut.
	Dead State = "dead"
	Left State = "left" // left deliberately: it does not come back by itself
)

// Member is one node as gossip sees it.
type Member struct {
	Meta
	Addr  netip.AddrPort // its control-plane port, for gossip, API, raft and node calls
	State State
	// Since is when this node first saw the member in this state.
	Since time.Time
}

// Config is what a Members needs. All fields are required unless they say
// otherwise.
type Config struct {
	Meta Meta
	Addr netip.AddrPort // advertised; also where packets are received
	// Keys are of 32 bytes, shared by the cluster: AES-256-GCM. The first encrypts,
	// all decrypt. SetKeys changes them.
	Keys   [][]byte
	Stream Stream
	// Seeds are tried until one answers, and again whenever this node is
	// alone. May return none: this is the first node.
	Seeds func() []netip.AddrPort
	// Admits says whether a member may be here, by what it says of itself; nil:
	// any that holds the key. It is called for every message about a member, and again
	// and again while it is here, and must not wait.
	Admits func(Meta) bool
	// Expect are the members that should be here, by id, and where they might
	// be: those that are not known are looked for. May be nil; must not wait.
	Expect func() map[string]netip.AddrPort
	Logger *slog.Logger
	// Probe is the time between two probes of a random member; default 1 s.
	// With a few members a dead one is noticed after about four of them.
	Probe time.Duration
}

// Stream carries gossip's connection-oriented part (anti-entropy, fallback
// probes) over the node's TLS port.
type Stream struct {
	Listener net.Listener
	Dial     func(ctx context.Context, addr netip.AddrPort) (net.Conn, error)
}

// Members is the running view. Its methods may be called concurrently, before
// and after Run as well.
type Members struct {
	cfg Config

	mu      sync.Mutex
	table   map[string]Member // by id; never forgets a dead member (Forget does)
	present map[string]Member // whom gossip takes for alive, admitted or not
	list    *memberlist.Memberlist
	ring    *memberlist.Keyring // of list
	leaving bool
	keys    [][]byte
	changed chan struct{} // closed and replaced at each change of table

	// addressConflict is signalled (capacity 1) when others know this node at another address.
	addressConflict chan struct{}
	// rekeyed is signalled (capacity 1) when the keys have changed: others may be heard now.
	rekeyed chan struct{}
}

const rejoinPeriod = 5 * time.Second

// insistence is for how many probes a node that moved keeps announcing its
// new address: the others accept it once no node answers at the old one.
const insistence = 30

// New checks cfg. It starts nothing.
func New(cfg Config) (*Members, error) {
	if cfg.Meta.ID == "" || cfg.Meta.Name == "" {
		return nil, errors.New("gossip: Meta.ID and Meta.Name are required")
	}
	if !cfg.Addr.IsValid() || cfg.Addr.Port() == 0 {
		return nil, fmt.Errorf("gossip: Addr %q: an address and port are required", cfg.Addr)
	}
	if err := checkKeys(cfg.Keys); err != nil {
		return nil, err
	}
	if _, err := cfg.Meta.encode(memberlist.MetaMaxSize - len(`"l":true,`)); err != nil {
		return nil, err
	}
	if cfg.Probe == 0 {
		cfg.Probe = time.Second
	}
	m := &Members{
		cfg: cfg, table: map[string]Member{}, present: map[string]Member{}, keys: cfg.Keys,
		changed: make(chan struct{}), addressConflict: make(chan struct{}, 1), rekeyed: make(chan struct{}, 1),
	}
	m.table[cfg.Meta.ID] = Member{Meta: cfg.Meta, Addr: cfg.Addr, State: Alive, Since: time.Now()}
	return m, nil
}

// Run gossips until ctx ends. It returns when everything it started has
// ended. It does not say goodbye: to its peers a stopped node looks like a
// dead one, so that a quick restart passes unnoticed. Leave says goodbye.
func (m *Members) Run(ctx context.Context) error {
	transport, err := newTransport(ctx, m.cfg.Addr, m.cfg.Stream, loglimit.New(m.cfg.Logger, linesEvery))
	if err != nil {
		return err
	}
	m.mu.Lock()
	ring, err := memberlist.NewKeyring(m.keys, m.keys[0])
	m.ring = ring
	m.mu.Unlock()
	if err != nil {
		transport.Shutdown()
		return fmt.Errorf("gossip's keys: %w", err)
	}
	list, err := memberlist.Create(m.memberlistConfig(transport, ring))
	if err != nil {
		transport.Shutdown()
		return fmt.Errorf("start gossip on %s: %w", m.cfg.Addr, err)
	}
	m.mu.Lock()
	m.list = list
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		m.list, m.ring = nil, nil
		m.mu.Unlock()
		list.Shutdown()
	}()

	rejoin := slack.NewTicker(rejoinPeriod)
	defer rejoin.Stop()
	m.reach(list)
	var announce <-chan time.Time
	times := 0
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-rejoin.C:
			m.prune()
			m.reach(list)
		case <-m.rekeyed:
			m.reach(list)
		case <-m.addressConflict:
			if times == 0 {
				announce = time.After(m.cfg.Probe)
			}
			times = insistence
		case <-announce:
			m.meet(list, func(mem Member) bool { return mem.State == Alive })
			announce = nil
			if times--; times > 0 {
				announce = time.After(m.cfg.Probe)
			}
		}
	}
}

func (m *Members) memberlistConfig(t memberlist.Transport, ring *memberlist.Keyring) *memberlist.Config {
	c := memberlist.DefaultLANConfig()
	c.Name = m.cfg.Meta.ID
	c.AdvertiseAddr = m.cfg.Addr.Addr().String()
	c.AdvertisePort = int(m.cfg.Addr.Port())
	c.BindAddr, c.BindPort = c.AdvertiseAddr, c.AdvertisePort
	c.Transport = t
	c.Keyring = ring
	c.ProbeInterval = m.cfg.Probe
	c.ProbeTimeout = m.cfg.Probe / 2
	// A false alarm costs one confirmation over a connection, so be quick.
	c.SuspicionMult = 2
	// A member may come back on another address: its key is its identity.
	c.DeadNodeReclaimTime = time.Nanosecond // 0 would mean never
	c.Events = (*events)(m)
	c.Delegate = (*delegate)(m)
	c.Alive = (*aliveDelegate)(m)
	c.Conflict = (*aliveDelegate)(m)
	c.LogOutput = logWriter{m.cfg.Logger, loglimit.New(m.cfg.Logger, linesEvery)}
	return c
}

// reach tries to meet every member that is known but not alive, and the seeds
// while no other member is alive. memberlist alone forgets a dead member, and a healed
// partition would stay two clusters.
func (m *Members) reach(list *memberlist.Memberlist) {
	alone := !slices.ContainsFunc(m.All(), func(mem Member) bool {
		return mem.ID != m.cfg.Meta.ID && mem.State == Alive
	})
	var seeds []netip.AddrPort
	if alone && m.cfg.Seeds != nil {
		seeds = m.cfg.Seeds()
	}
	if m.cfg.Expect != nil {
		for id, addr := range m.cfg.Expect() {
			if _, known := m.Get(id); !known {
				seeds = append(seeds, addr)
			}
		}
	}
	m.meet(list, func(mem Member) bool { return mem.State == Dead }, seeds...)
}

// meet exchanges all that is known with the members wanted and the seeds.
func (m *Members) meet(list *memberlist.Memberlist, wanted func(Member) bool, seeds ...netip.AddrPort) {
	var addrs []string
	for _, mem := range m.All() {
		if mem.ID != m.cfg.Meta.ID && wanted(mem) {
			addrs = append(addrs, mem.ID+"/"+mem.Addr.String())
		}
	}
	for _, s := range seeds {
		if s != m.cfg.Addr {
			addrs = append(addrs, s.String())
		}
	}
	if len(addrs) == 0 {
		return
	}
	if _, err := list.Join(addrs); err != nil {
		m.cfg.Logger.Debug("no other member could be reached", "tried", len(addrs), "err", err)
	}
}

// Leave tells the others that this node leaves permanently, and waits until
// the word has spread or timeout has passed.
func (m *Members) Leave(timeout time.Duration) error {
	m.mu.Lock()
	list := m.list
	m.leaving = true
	m.mu.Unlock()
	if list == nil {
		return nil
	}
	if err := list.UpdateNode(timeout); err != nil {
		return fmt.Errorf("say that this node leaves: %w", err)
	}
	return list.Leave(timeout)
}

// All returns every member ever seen and not forgotten, this node included,
// in the order of their names.
func (m *Members) All() []Member {
	m.mu.Lock()
	defer m.mu.Unlock()
	all := make([]Member, 0, len(m.table))
	for _, mem := range m.table {
		all = append(all, mem)
	}
	slices.SortFunc(all, func(a, b Member) int {
		return strings.Compare(a.Name+"\x00"+a.ID, b.Name+"\x00"+b.ID)
	})
	return all
}

// Get returns the member with that id.
func (m *Members) Get(id string) (Member, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	mem, ok := m.table[id]
	return mem, ok
}

// ByName returns the member with that node name; of several (a machine that
// was rebuilt under its old name) the one that is alive, else the latest.
func (m *Members) ByName(name string) (Member, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var best Member
	found := false
	for _, mem := range m.table {
		if mem.Name != name {
			continue
		}
		if !found || (mem.State == Alive) != (best.State == Alive) && mem.State == Alive ||
			(mem.State == Alive) == (best.State == Alive) && mem.Since.After(best.Since) {
			best, found = mem, true
		}
	}
	return best, found
}

// Forget drops a member that will not come back from the table.
func (m *Members) Forget(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, ok := m.table[id]; ok && id != m.cfg.Meta.ID {
		delete(m.table, id)
		m.signal()
	}
}

// Changed returns a channel that is closed at the next change. Take it before
// reading All, so that no change is missed.
func (m *Members) Changed() <-chan struct{} {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.changed
}

// set records what gossip says of a node; n is read only here, where memberlist
// holds its lock: it changes nodes in place. mu is taken here.
func (m *Members) set(n *memberlist.Node, state State) {
	meta, err := decodeMeta(n.Meta)
	if err != nil {
		m.cfg.Logger.Warn("a member says something of itself that cannot be read", "peer", n.Name, "err", err)
		return
	}
	meta.ID = n.Name
	ip, ok := netip.AddrFromSlice(n.Addr)
	if !ok {
		return
	}
	mem := Member{Meta: meta, Addr: netip.AddrPortFrom(ip.Unmap(), n.Port), State: state}
	m.mu.Lock()
	if state == Alive {
		m.present[mem.ID] = mem
	} else {
		delete(m.present, mem.ID)
	}
	m.mu.Unlock()
	m.put(mem)
}

// put enters a member into the table, if it may be here. mu is taken here.
func (m *Members) put(next Member) {
	if !m.admits(next.Meta) {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if have, ok := m.present[next.ID]; ok != (next.State == Alive) || ok && have != next {
		return // there is a later state
	}
	old, known := m.table[next.ID]
	next.Since = old.Since
	if !known || old.State != next.State {
		next.Since = time.Now()
	}
	if known && old == next {
		return
	}
	m.table[next.ID] = next
	m.signal()
	if !known || old.State != next.State {
		m.cfg.Logger.Info("member", "node", next.Name, "state", next.State, "addr", next.Addr)
	}
}

// admits reports whether a member may be here; this one always may.
func (m *Members) admits(meta Meta) bool {
	return m.cfg.Admits == nil || meta.ID == m.cfg.Meta.ID || m.cfg.Admits(meta)
}

// prune drops members that may not be here any more, or were taken for
// members while nothing better was known, and takes in those who now may.
func (m *Members) prune() {
	for _, mem := range m.All() {
		if !m.admits(mem.Meta) {
			m.Forget(mem.ID)
		}
	}
	m.mu.Lock()
	present := slices.Collect(maps.Values(m.present))
	m.mu.Unlock()
	for _, mem := range present { // some may have become members since
		m.put(mem)
	}
}

// aliveDelegate judges who comes. It keeps those out who may not be here: a removed
// member still has the cluster's gossip key.
type aliveDelegate Members

var errNotAdmitted = errors.New("it may not take part")

func (d *aliveDelegate) NotifyAlive(n *memberlist.Node) error {
	meta, err := decodeMeta(n.Meta)
	meta.ID = n.Name
	if err != nil || !(*Members)(d).admits(meta) {
		return errNotAdmitted
	}
	return nil
}

// NotifyConflict is called when a member is said to be at two addresses. Members
// that know the old one accept no other until the member is dead there, and by
// then the announcement of the new one is over. So this node repeats it.
func (d *aliveDelegate) NotifyConflict(existing, _ *memberlist.Node) {
	if existing.Name != d.cfg.Meta.ID {
		return
	}
	select {
	case d.addressConflict <- struct{}{}:
	default:
	}
}

// signal wakes those who wait on Changed. mu is held.
func (m *Members) signal() {
	close(m.changed)
	m.changed = make(chan struct{})
}

// events receives memberlist's callbacks; it never blocks.
type events Members

func (e *events) NotifyJoin(n *memberlist.Node)   { (*Members)(e).set(n, Alive) }
func (e *events) NotifyUpdate(n *memberlist.Node) { (*Members)(e).set(n, Alive) }
func (e *events) NotifyLeave(n *memberlist.Node) {
	state := Dead
	if meta, err := decodeMeta(n.Meta); err == nil && meta.Leaving {
		state = Left
	}
	(*Members)(e).set(n, state)
}

// delegate only hands out this node's meta; no user data is gossiped.
type delegate Members

func (d *delegate) NodeMeta(limit int) []byte {
	d.mu.Lock()
	meta := d.cfg.Meta
	meta.Leaving = d.leaving
	d.mu.Unlock()
	b, err := meta.encode(limit)
	if err != nil { // New has checked it
		panic(err)
	}
	return b
}
func (*delegate) NotifyMsg([]byte)                {}
func (*delegate) GetBroadcasts(int, int) [][]byte { return nil }
func (*delegate) LocalState(bool) []byte          { return nil }
func (*delegate) MergeRemoteState([]byte, bool)   {}

// linesEvery is how often a line of one cause is written: any program that reaches the port
// causes some of them, without the key.
const linesEvery = time.Minute

// logWriter turns memberlist's "[WARN] memberlist: …" lines into records.
type logWriter struct {
	plain   *slog.Logger
	limited *loglimit.Logger
}

var _ io.Writer = logWriter{}

func (w logWriter) Write(p []byte) (int, error) {
	line := strings.TrimSpace(string(p))
	level := slog.LevelDebug
	if i := strings.IndexByte(line, '['); i >= 0 {
		if j := strings.IndexByte(line[i:], ']'); j > 0 {
			switch line[i+1 : i+j] {
			case "WARN":
				level = slog.LevelWarn
			case "ERR", "ERROR":
				// memberlist calls every unanswered dial an error; it retries by itself.
				level = slog.LevelWarn
			}
			line = strings.TrimPrefix(strings.TrimSpace(line[i+j+1:]), "memberlist: ")
		}
	}
	if level == slog.LevelDebug {
		w.plain.Debug(line)
	} else {
		w.limited.Log(context.Background(), level, lineCause(line), line)
	}
	return len(p), nil
}

// lineCause is what a line of memberlist begins with, up to what differs from one to
// the next: addresses, names, numbers, what went wrong.
func lineCause(line string) string {
	if i := strings.IndexAny(line, ":('\"0123456789"); i >= 0 {
		line = line[:i]
	}
	if i := strings.Index(line, " from="); i >= 0 {
		line = line[:i]
	}
	return line
}
