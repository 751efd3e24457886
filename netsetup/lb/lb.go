package lb

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/slack"
)

// Kernel holds tables: *nft.Tables.
type Kernel interface {
	Replace(nft.Table) error
	Commit(def nft.Table, c nft.Change) error
	Read(def nft.Table, elements bool) (nft.State, error)
	Elements(table string, s nft.Set) (nft.Elements, error)
	Generation() (uint32, error)
	Delete(nft.Table) error
}

// Balancer keeps the kernel's table in step with frontends. Safe for concurrent
// use.
type Balancer struct {
	kernel Kernel
	log    *slog.Logger

	// Repaired is called when another program's change of the table was undone; see
	// nft.KeeperConfig. Set it before the first call of another method. Default:
	// none.
	Repaired func(table, what string)

	mu        sync.Mutex // guards all below
	base      Base
	frontends map[Frontend]Backend
	// How many frontends need each: what they share.
	classes      map[classKey]int
	idle         map[classKey]bool // in the kernel, and used by none
	own, virtual map[netip.Addr]int
	begun        bool // the kernel's table was looked at
	stale        bool // the kernel may hold something else
	unread       int  // tries in a row to read the table, in vain
	// The generations of the packet filter at the last full look and at the last
	// one without elements.
	gen, light uint32
}

// New returns a Balancer without frontends; it changes nothing yet.
func New(k Kernel, log *slog.Logger) *Balancer {
	if log == nil {
		log = slog.Default()
	}
	return &Balancer{
		kernel: k, log: log, stale: true, frontends: map[Frontend]Backend{},
		classes: map[classKey]int{}, idle: map[classKey]bool{}, own: map[netip.Addr]int{}, virtual: map[netip.Addr]int{},
	}
}

// Update sets frontends; a nil Backend removes one. The first call, and the one
// after a failure, looks at what the kernel holds and alters what differs.
func (b *Balancer) Update(changed map[Frontend]*Backend) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for f, backend := range changed {
		if err := check(f, backend); err != nil {
			return err
		}
	}
	var c nft.Change
	for _, f := range slices.SortedFunc(maps.Keys(changed), compareFrontend) {
		b.change(&c, f, changed[f])
	}
	if b.stale {
		return b.restore()
	}
	if c.Empty() {
		return nil
	}
	if err := b.kernel.Commit(skeleton(b.base), c); err != nil {
		b.stale = true
		b.log.Warn("the packet filter refused a change; its rules are read and corrected", "err", err)
		return b.restore()
	}
	return nil
}

// SetBase sets what does not belong to one frontend.
func (b *Balancer) SetBase(base Base) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.stale && slices.Equal(b.base.Inside, base.Inside) && slices.Equal(b.base.Ranges, base.Ranges) {
		return nil
	}
	b.base, b.stale = base, true // what differs now is our change
	return b.restore()
}

// change gathers what altering one frontend alters in the table.
func (b *Balancer) change(c *nft.Change, f Frontend, to *Backend) {
	was, had := b.frontends[f]
	var before, after contribution
	if had {
		before = contribute(f, was)
	}
	if to != nil {
		next := *to
		next.Endpoints, next.Near = settle(was.Endpoints, next.Endpoints), settle(was.Near, next.Near)
		b.frontends[f] = next
		after = contribute(f, next)
	} else {
		delete(b.frontends, f)
	}
	old := map[element]bool{}
	for _, e := range before.elements {
		old[e] = true
	}
	for _, e := range after.elements {
		if old[e] {
			delete(old, e)
		} else {
			c.Put(e.set, e.key, e.data)
		}
	}
	for e := range old {
		c.Take(e.set, e.key, e.data)
	}
	// An unused class stays until the next full check: else one endpoint
	// more or less would create and delete chains all the time.
	for _, k := range after.classes {
		if count(b.classes, k, 1) && !b.idle[k] {
			if k.class != 0 {
				c.Chains = append(c.Chains, k.nftChain())
			}
			c.Put(k.element())
		}
		delete(b.idle, k)
	}
	for _, k := range before.classes {
		if count(b.classes, k, -1) {
			b.idle[k] = true
		}
	}
	share(c, b.own, after.own, before.own, hairpin)
	share(c, b.virtual, valid(after.virtual), valid(before.virtual), virtual)
}

func valid(a netip.Addr) []netip.Addr {
	if !a.IsValid() {
		return nil
	}
	return []netip.Addr{a}
}

// share counts the users of elements that frontends have in common.
func share(c *nft.Change, users map[netip.Addr]int, more, less []netip.Addr, element func(netip.Addr) (set, key, data string)) {
	for _, a := range more {
		if count(users, a, 1) {
			set, key, data := element(a)
			if _, taken := c.Remove[set][key]; taken {
				delete(c.Remove[set], key)
			} else {
				c.Put(set, key, data)
			}
		}
	}
	for _, a := range less {
		if count(users, a, -1) {
			set, key, data := element(a)
			if _, put := c.Add[set][key]; put {
				delete(c.Add[set], key)
			} else {
				c.Take(set, key, data)
			}
		}
	}
}

// count reports whether the first came, or the last went.
func count[K comparable](m map[K]int, k K, by int) bool {
	m[k] += by
	if m[k] == 0 {
		delete(m, k)
		return true
	}
	return by > 0 && m[k] == by
}

// settle orders endpoints so that each keeps the number it had: then one that
// goes or comes alters its own element and at most one other.
func settle(was, now []Endpoint) []Endpoint {
	if len(now) == 0 {
		return nil
	}
	left := make(map[Endpoint]bool, len(now))
	for _, e := range now {
		left[e] = true
	}
	out := make([]Endpoint, len(left))
	taken := make([]bool, len(out))
	for i, e := range was {
		if i < len(out) && left[e] {
			out[i], taken[i] = e, true
			delete(left, e)
		}
	}
	i := 0
	for _, e := range now {
		if !left[e] {
			continue
		}
		delete(left, e)
		for taken[i] {
			i++
		}
		out[i], taken[i] = e, true
	}
	return out
}

// restore reads the kernel's table and alters what differs; the caller holds mu.
func (b *Balancer) restore() error {
	want := Compile(b.base, b.frontends)
	have, err := b.kernel.Read(want, true)
	if errors.Is(err, nft.ErrChanging) {
		// They may be right, and hold what is known of clients; but a change of ours must
		// not wait for ever.
		if b.unread++; !b.stale || b.unread < nft.UnreadTries {
			return fmt.Errorf("rules for Services: %w", err)
		}
	}
	if err == nil && have.Whole {
		c := nft.Diff(have, want)
		if c.Empty() {
			b.settled()
			return nil
		}
		if b.begun && !b.stale && !b.leftovers(c) {
			defer b.tell(fmt.Sprintf("%d of its chains and %d of its elements differed", len(c.Chains)+len(c.Drop), c.Elements()))
			b.log.Warn("the rules for Services were changed by another program and are restored", "table", TableName, "elements", c.Elements(), "chains", len(c.Chains))
		}
		if err = b.kernel.Commit(want, c); err == nil {
			b.settled()
			return nil
		}
	}
	if b.begun {
		b.log.Warn("the rules for Services are rebuilt", "table", TableName, "err", err)
	}
	gone := b.begun && !b.stale && err == nil
	if err := b.kernel.Replace(want); err != nil {
		b.stale = true
		return fmt.Errorf("rules for Services: %w", err)
	}
	b.settled()
	if gone {
		b.tell("the table was gone or another one")
	}
	return nil
}

func (b *Balancer) tell(what string) {
	if b.Repaired != nil {
		b.Repaired(TableName, what)
	}
}

// leftovers reports whether the change does nothing but clear away classes that
// were left when the last frontend ceased to use them; the caller holds mu.
func (b *Balancer) leftovers(c nft.Change) bool {
	if len(c.Chains) > 0 || len(c.Add) > 0 {
		return false
	}
	chains, elements := map[string]bool{}, map[[2]string]bool{}
	for k := range b.idle {
		set, key, _ := k.element()
		chains[k.chain()], elements[[2]string{set, key}] = true, true
	}
	for _, name := range c.Drop {
		if !chains[name] {
			return false
		}
	}
	for set, gone := range c.Remove {
		for key := range gone {
			if !elements[[2]string{set, key}] {
				return false
			}
		}
	}
	return true
}

func (b *Balancer) settled() {
	b.stale, b.begun, b.unread = false, true, 0
	clear(b.idle)
}

// CheckEvery is how often Run checks whether rules were changed, and FullCheck
// how often it then reads all of them.
const (
	CheckEvery = 2 * time.Second
	FullCheck  = time.Minute
)

// Run undoes changes of other programs until ctx ends: a table that was deleted
// within CheckEvery, a single element within FullCheck. While no rule
// changes it reads none.
func (b *Balancer) Run(ctx context.Context) {
	tick := slack.NewTicker(CheckEvery)
	defer tick.Stop()
	var full time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			if err := b.Check(now.Sub(full) >= FullCheck); err != nil {
				b.log.Warn("the rules for Services are not as they should be", "err", err)
				continue
			}
			if now.Sub(full) >= FullCheck {
				full = now
			}
		}
	}
}

// Check looks whether the table is as it should be: its definitions and chains,
// or with full all elements. It is a look at one number when no rule of any
// table was changed.
func (b *Balancer) Check(full bool) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.begun {
		return nil // the first Update will
	}
	gen, err := b.kernel.Generation()
	if err != nil {
		return err
	}
	if gen == b.gen && !b.stale {
		return nil
	}
	if full || b.stale {
		if err := b.restore(); err != nil {
			return err
		}
		// Ours are seen with the next look, at the cost of one more.
		b.gen = gen
		return nil
	}
	if gen == b.light {
		return nil
	}
	have, err := b.kernel.Read(skeleton(b.base), false)
	if errors.Is(err, nft.ErrChanging) {
		return err
	}
	if err != nil || !have.Whole {
		return errors.Join(err, b.restore())
	}
	b.light = gen
	return nil
}

// Forget drops what is remembered of clients whose endpoint their frontend does
// not have any more, by this process' doing or before it began.
func (b *Balancer) Forget() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	def := skeleton(b.base)
	byKey := make(map[string]Frontend, len(b.frontends))
	for f := range b.frontends {
		byKey[f.key()] = f
	}
	has := map[Frontend]map[string]bool{} // of those that are remembered: the data of their endpoints
	serves := func(key, data string) bool {
		f, ok := byKey[key]
		if !ok {
			return false
		}
		if has[f] == nil {
			has[f] = map[string]bool{}
			for _, e := range slices.Concat(b.frontends[f].Endpoints, b.frontends[f].Near) {
				has[f][nft.Key(e.Addr.Addr(), e.Addr.Port())] = true
			}
		}
		return has[f][data]
	}
	for _, f := range families {
		i := slices.IndexFunc(def.Sets, func(s nft.Set) bool { return s.Name == affinitySet+f.suffix })
		have, err := b.kernel.Elements(TableName, def.Sets[i])
		if err != nil {
			return err
		}
		client := len(nft.Key(f.any)) // a key begins with the client
		var gone []element
		for key, data := range have {
			if !serves(key[client:], data) {
				gone = append(gone, element{def.Sets[i].Name, key, data})
			}
		}
		if err := b.take(def, gone); err != nil {
			return fmt.Errorf("forget clients of endpoints that are gone: %w", err)
		}
	}
	return nil
}

// take removes elements. The kernel drops some by itself meanwhile, and refuses a
// change that names such a one: then it is made in halves.
func (b *Balancer) take(def nft.Table, gone []element) error {
	if len(gone) == 0 {
		return nil
	}
	var c nft.Change
	for _, e := range gone {
		c.Take(e.set, e.key, e.data)
	}
	err := b.kernel.Commit(def, c)
	switch {
	case !errors.Is(err, fs.ErrNotExist):
		return err
	case len(gone) == 1:
		return nil
	}
	return errors.Join(b.take(def, gone[:len(gone)/2]), b.take(def, gone[len(gone)/2:]))
}

// Remembers reports whether any frontend has an affinity.
func (b *Balancer) Remembers() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for k := range b.classes {
		if k.class.affinity() > 0 {
			return true
		}
	}
	return false
}

// CleanUp removes the table.
func (b *Balancer) CleanUp() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.stale, b.begun = true, false
	return b.kernel.Delete(nft.Table{Name: TableName})
}

func check(f Frontend, b *Backend) error {
	if !f.Addr.IsValid() || f.Addr.Is4In6() || f.Port == 0 || f.Proto != tcp && f.Proto != udp && f.Proto != sctp {
		return fmt.Errorf("frontend %s: an address, tcp, udp or sctp, and a port are required", f)
	}
	if b == nil {
		return nil
	}
	for _, e := range append(slices.Clone(b.Endpoints), b.Near...) {
		if e.Addr.Addr().Is4() != f.Addr.Is4() || e.Addr.Port() == 0 {
			return fmt.Errorf("frontend %s: its endpoint %s is of another family or has no port", f, e.Addr)
		}
	}
	return nil
}

func compareFrontend(a, b Frontend) int {
	if c := a.Addr.Compare(b.Addr); c != 0 {
		return c
	}
	if a.Port != b.Port {
		return int(a.Port) - int(b.Port)
	}
	return int(a.Proto) - int(b.Proto)
}
