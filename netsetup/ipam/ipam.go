// Package ipam hands out the addresses of one node's range. What it gave out
// survives a restart of the process, and an address that came back is not
// given out again at once: packets for its old holder may still be under way.
package ipam

import (
	"errors"
	"fmt"
	"net/netip"
	"sort"
	"sync"
	"time"
)

// DefaultQuarantine is how long an address rests after its release.
const DefaultQuarantine = 10 * time.Second

// ExhaustedError is returned by Allocate when no address is free. It ends
// when addresses are released and rested.
type ExhaustedError struct {
	Prefix      netip.Prefix
	Usable      int // addresses that could ever be given out
	InUse       int
	Quarantined int
}

func (e *ExhaustedError) Error() string {
	return fmt.Sprintf("no address free in %s: %d usable, %d in use, %d released a moment ago", e.Prefix, e.Usable, e.InUse, e.Quarantined)
}

// Config of a Pool.
type Config struct {
	// File keeps the allocations; its directory must exist. Required.
	File string
	// Prefix is the range; required. The network and broadcast addresses are
	// never given out.
	Prefix netip.Prefix
	// Reserved are further addresses never given out, the gateway first of all.
	Reserved []netip.Addr
	// Quarantine is how long a released address rests; default
	// DefaultQuarantine, negative: not at all.
	Quarantine time.Duration
}

// Pool is safe for concurrent use. Every change is on disk before the call
// returns.
type Pool struct {
	cfg Config

	mu       sync.Mutex // guards all below
	byID     map[string]netip.Addr
	byAddr   map[netip.Addr]string
	resting  map[netip.Addr]time.Time // when it was released
	last     netip.Addr               // where the search went on last time
	reserved map[netip.Addr]bool
	ahead    map[netip.Addr]bool // see Reserve
}

// Open reads the allocations. Those outside the range, after the range was
// changed, are dropped: their pods must be created again.
func Open(cfg Config) (*Pool, error) {
	if !cfg.Prefix.IsValid() || cfg.Prefix != cfg.Prefix.Masked() {
		return nil, fmt.Errorf("address pool %s: not a range", cfg.Prefix)
	}
	if cfg.Quarantine == 0 {
		cfg.Quarantine = DefaultQuarantine
	}
	p := &Pool{
		cfg:      cfg,
		byID:     map[string]netip.Addr{},
		byAddr:   map[netip.Addr]string{},
		resting:  map[netip.Addr]time.Time{},
		reserved: map[netip.Addr]bool{},
		ahead:    map[netip.Addr]bool{},
	}
	for _, a := range cfg.Reserved {
		p.reserved[a] = true
	}
	if p.usable() < 1 {
		return nil, fmt.Errorf("address pool %s: no usable address", cfg.Prefix)
	}
	st, err := readState(cfg.File)
	if err != nil {
		return nil, fmt.Errorf("address pool %s: %w", cfg.Prefix, err)
	}
	for id, a := range st.Allocated {
		if p.canGive(a) && p.byAddr[a] == "" {
			p.byID[id] = a
			p.byAddr[a] = id
		}
	}
	for a, at := range st.Resting {
		if p.canGive(a) && p.byAddr[a] == "" {
			p.resting[a] = at
		}
	}
	if p.canGive(st.Last) {
		p.last = st.Last
	}
	return p, nil
}

// Allocated reads which id has which address by what file says, whatever range
// it was of; nothing when there is no such file.
func Allocated(file string) (map[string]netip.Addr, error) {
	st, err := readState(file)
	if err != nil {
		return nil, fmt.Errorf("addresses on record: %w", err)
	}
	return st.Allocated, nil
}

// Allocate gives id an address with the range's length. Asked again for the
// same id it answers the same.
func (p *Pool) Allocate(id string) (netip.Prefix, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if id == "" {
		return netip.Prefix{}, errors.New("allocate an address: no id given")
	}
	if a, ok := p.byID[id]; ok {
		return p.withLength(a), nil
	}
	a, ok := p.findFree(time.Now())
	if !ok {
		return netip.Prefix{}, &ExhaustedError{Prefix: p.cfg.Prefix, Usable: p.usable(), InUse: len(p.byAddr), Quarantined: len(p.resting)}
	}
	rested, wasResting := p.resting[a]
	lastBefore := p.last
	p.byID[id], p.byAddr[a], p.last = a, id, a
	delete(p.resting, a)
	if err := p.save(); err != nil {
		delete(p.byID, id)
		delete(p.byAddr, a)
		p.last = lastBefore
		if wasResting {
			p.resting[a] = rested
		}
		return netip.Prefix{}, fmt.Errorf("allocate an address: %w", err)
	}
	return p.withLength(a), nil
}

// Reserve takes an address out of the free ones for an id that is not known yet:
// Claim gives it to one, Forget makes it free again. Only this process knows of
// it. An address is kept for the future only while there are plenty: the answer
// is no when a sixteenth of the usable ones are.
func (p *Pool) Reserve() (netip.Prefix, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.ahead) >= p.usable()/16 {
		return netip.Prefix{}, false
	}
	a, ok := p.findFree(time.Now())
	if !ok {
		return netip.Prefix{}, false
	}
	p.ahead[a], p.last = true, a
	return p.withLength(a), true
}

// Claim gives a reserved address to id, which must have none.
func (p *Pool) Claim(id string, reserved netip.Prefix) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	a := reserved.Addr()
	if id == "" || p.byID[id].IsValid() || !p.ahead[a] {
		return fmt.Errorf("claim address %s for %q: it has one already, or this one is not reserved", a, id)
	}
	delete(p.ahead, a)
	p.byID[id], p.byAddr[a] = a, id
	if err := p.save(); err != nil {
		delete(p.byID, id)
		delete(p.byAddr, a)
		p.ahead[a] = true
		return fmt.Errorf("claim an address: %w", err)
	}
	return nil
}

// Forget puts a reserved address to rest; one that is not reserved is no error.
func (p *Pool) Forget(reserved netip.Prefix) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if a := reserved.Addr(); p.ahead[a] {
		delete(p.ahead, a)
		if p.cfg.Quarantine > 0 {
			p.resting[a] = time.Now()
		}
	}
}

// Lookup says which address id has.
func (p *Pool) Lookup(id string) (netip.Prefix, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a, ok := p.byID[id]
	if !ok {
		return netip.Prefix{}, false
	}
	return p.withLength(a), true
}

// Release puts id's address to rest; an unknown id is no error.
func (p *Pool) Release(id string) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, err := p.releaseLocked([]string{id}); err != nil {
		return fmt.Errorf("release the address of %s: %w", id, err)
	}
	return nil
}

// Reconcile releases every address whose id is not among the live ones, and
// returns their ids, sorted. Call it after a restart with the sandboxes that
// are really there.
func (p *Pool) Reconcile(live []string) ([]string, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	keep := make(map[string]bool, len(live))
	for _, id := range live {
		keep[id] = true
	}
	var gone []string
	for id := range p.byID {
		if !keep[id] {
			gone = append(gone, id)
		}
	}
	sort.Strings(gone)
	released, err := p.releaseLocked(gone)
	if err != nil {
		return nil, fmt.Errorf("reconcile addresses: %w", err)
	}
	return released, nil
}

// releaseLocked releases all ids that are known, or none.
func (p *Pool) releaseLocked(ids []string) ([]string, error) {
	freed := map[string]netip.Addr{}
	var released []string
	now := time.Now()
	for _, id := range ids {
		a, ok := p.byID[id]
		if !ok {
			continue
		}
		freed[id] = a
		released = append(released, id)
		delete(p.byID, id)
		delete(p.byAddr, a)
		if p.cfg.Quarantine > 0 {
			p.resting[a] = now
		}
	}
	if len(freed) == 0 {
		return nil, nil
	}
	if err := p.save(); err != nil {
		for id, a := range freed {
			p.byID[id], p.byAddr[a] = a, id
			delete(p.resting, a)
		}
		return nil, err
	}
	return released, nil
}

// findFree looks for an address from the one after the last given, once round.
func (p *Pool) findFree(now time.Time) (netip.Addr, bool) {
	for a, at := range p.resting {
		// A clock that was set back must not keep an address permanently.
		if rested := now.Sub(at); rested >= p.cfg.Quarantine || rested < 0 {
			delete(p.resting, a)
		}
	}
	start := p.cfg.Prefix.Addr()
	if p.last.IsValid() {
		start = p.last
	}
	a := start
	// One more than could be taken is enough to find a free one.
	for range len(p.byAddr) + len(p.resting) + len(p.reserved) + len(p.ahead) + 4 {
		a = a.Next()
		if !a.IsValid() || !p.cfg.Prefix.Contains(a) {
			a = p.cfg.Prefix.Addr()
		}
		if _, resting := p.resting[a]; !resting && p.byAddr[a] == "" && !p.ahead[a] && p.canGive(a) {
			return a, true
		}
	}
	return netip.Addr{}, false
}

// canGive says whether the address may be given out at all.
func (p *Pool) canGive(a netip.Addr) bool {
	return a.IsValid() && p.cfg.Prefix.Contains(a) && !p.reserved[a] && !isEdge(p.cfg.Prefix, a)
}

// isEdge says whether a is the network's first address or, in IPv4, its
// broadcast address. Ranges of one or two addresses have no edges.
func isEdge(prefix netip.Prefix, a netip.Addr) bool {
	if prefix.Addr().BitLen()-prefix.Bits() < 2 {
		return false
	}
	return a == prefix.Addr() || a.Is4() && !prefix.Contains(a.Next())
}

// usable counts the addresses that could be given out, up to a large number.
func (p *Pool) usable() int {
	const large = 1 << 30
	hostBits := p.cfg.Prefix.Addr().BitLen() - p.cfg.Prefix.Bits()
	if hostBits > 30 {
		return large
	}
	n := 1 << hostBits
	if hostBits >= 2 {
		n--
		if p.cfg.Prefix.Addr().Is4() {
			n--
		}
	}
	for a := range p.reserved {
		if p.cfg.Prefix.Contains(a) && !isEdge(p.cfg.Prefix, a) {
			n--
		}
	}
	return n
}

func (p *Pool) withLength(a netip.Addr) netip.Prefix {
	return netip.PrefixFrom(a, p.cfg.Prefix.Bits())
}

func (p *Pool) save() error {
	return writeState(p.cfg.File, state{Allocated: p.byID, Resting: p.resting, Last: p.last})
}
