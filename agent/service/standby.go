package service

import (
	"context"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// standby (as VRRP has a backup, RFC 5798) takes over the addresses of load balancers from a node that is gone, before the
// API says so. Of the nodes that could have an address the one that comes next after the
// elected one is its standby (announce.go): it asks in the segment for that node's own
// address every questionEvery. The kernel answers, so that a busy node is not taken for
// a lost one. After missedQuestions without an answer, if nobody answers for the address
// either, the standby announces it, until the elected node answers for it again or another
// is elected. Nothing is taken over from a node that never answered: the segment may not
// let such questions through.
type standby struct {
	neighbours Announcer
	logger     *slog.Logger
	changed    func()      // called when held has changed
	known      func() bool // whether this node may announce at all

	mu        sync.Mutex
	takeovers map[netip.Addr][]netip.Addr // addresses to take over, by the elected node's own
	own       []netip.Addr                // those that this node is elected for
	held      map[netip.Addr]bool         // those that it has taken over
	wake      chan struct{}               // holds a value when the period is another

	// Owned by run.
	missed    map[netip.Addr]int       // questions without an answer since the last one, of nodes that have answered
	contested map[netip.Addr]bool      // of own, those that another machine answers for
	answered  map[netip.Addr]time.Time // of those held, since when another machine answers for them
}

const (
	// questionEvery is how often the elected node is asked, questionTime how long it has
	// to answer, and missedQuestions how many it may miss: it is replaced 0.5 to 0.7 s
	// after its last answer.
	questionEvery   = 150 * time.Millisecond
	questionTime    = 100 * time.Millisecond
	missedQuestions = 3
	// ownEvery is how often the elected node looks whether another answers for its
	// addresses; it has the neighbours learn again then that they are its own.
	ownEvery = time.Second
	// overlap is how long both have an address before the standby gives it back: the
	// elected node sees in that time that the neighbours are to learn again.
	overlap = 2500 * time.Millisecond
)

func newStandby(a Announcer, logger *slog.Logger, known func() bool, changed func()) *standby {
	return &standby{
		neighbours: a, logger: logger, changed: changed, known: known, wake: make(chan struct{}, 1),
		held: map[netip.Addr]bool{}, missed: map[netip.Addr]int{}, contested: map[netip.Addr]bool{}, answered: map[netip.Addr]time.Time{},
	}
}

// set says what this node is elected for and what it is the standby for. It returns the
// addresses that it has taken over, in order.
func (d *standby) set(own []netip.Addr, takeovers map[netip.Addr][]netip.Addr) []netip.Addr {
	d.mu.Lock()
	defer d.mu.Unlock()
	before := d.period()
	d.own, d.takeovers = own, takeovers
	stillHeld := map[netip.Addr]bool{}
	for _, addrs := range takeovers {
		for _, addr := range addrs {
			stillHeld[addr] = d.held[addr]
		}
	}
	maps.DeleteFunc(d.held, func(addr netip.Addr, _ bool) bool { return !stillHeld[addr] })
	if d.period() != before {
		select {
		case d.wake <- struct{}{}:
		default:
		}
	}
	return slices.SortedFunc(maps.Keys(d.held), netip.Addr.Compare)
}

// period is how often is asked, 0: there is nothing to ask for. The caller holds mu.
func (d *standby) period() time.Duration {
	switch {
	case len(d.takeovers) > 0:
		return questionEvery
	case len(d.own) > 0:
		return ownEvery
	}
	return 0
}

// run asks until ctx ends; while there is nothing to ask for it sleeps.
func (d *standby) run(ctx context.Context) {
	var looked, asked time.Time
	for {
		d.mu.Lock()
		period := d.period()
		d.mu.Unlock()
		var tick <-chan time.Time
		if period > 0 {
			tick = time.After(time.Until(asked.Add(period)))
		}
		select {
		case <-ctx.Done():
			return
		case <-d.wake:
			continue
		case <-tick:
		}
		d.mu.Lock()
		own, takeovers := d.own, d.takeovers
		d.mu.Unlock()
		asked = time.Now()
		if asked.Sub(looked) >= ownEvery {
			looked = asked
			d.lookAtOwn(own)
		}
		if d.round(takeovers) {
			d.changed()
		}
	}
}

// round asks once for the elected nodes and for what was taken over from them. It reports
// whether something was taken over or given back.
func (d *standby) round(takeovers map[netip.Addr][]netip.Addr) (changed bool) {
	if len(takeovers) == 0 {
		clear(d.missed)
		return false
	}
	d.mu.Lock()
	held := slices.Collect(maps.Keys(d.held))
	d.mu.Unlock()
	maps.DeleteFunc(d.missed, func(node netip.Addr, _ int) bool { return takeovers[node] == nil })
	answered, err := d.neighbours.Answered(slices.Concat(slices.Collect(maps.Keys(takeovers)), held), questionTime)
	if err != nil {
		d.logger.Debug("the nodes that have addresses of load balancers could not be asked", "err", err)
		return false
	}
	var lost []netip.Addr
	for node, addrs := range takeovers {
		if answered[node] {
			d.missed[node] = 0
			continue
		}
		if _, met := d.missed[node]; !met {
			continue
		}
		if d.missed[node]++; d.missed[node] >= missedQuestions {
			lost = append(lost, slices.DeleteFunc(slices.Clone(addrs), func(a netip.Addr) bool { return slices.Contains(held, a) })...)
		}
	}
	if len(lost) > 0 && d.known() {
		served, err := d.neighbours.Answered(lost, questionTime)
		if err != nil {
			return false
		}
		for _, addr := range lost {
			changed = d.hold(addr, !served[addr]) || changed
		}
	}
	maps.DeleteFunc(d.answered, func(addr netip.Addr, _ time.Time) bool { return !answered[addr] })
	for _, addr := range held {
		since, before := d.answered[addr]
		switch {
		case answered[addr] && !before:
			d.answered[addr] = time.Now()
		case answered[addr] && time.Since(since) >= overlap:
			changed = d.hold(addr, false) || changed
		}
	}
	return changed
}

// hold takes an address over or gives it back, and reports whether that is a change. What
// is no takeover any more is not taken.
func (d *standby) hold(addr netip.Addr, take bool) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if take == d.held[addr] {
		return false
	}
	if !take {
		delete(d.held, addr)
		d.logger.Info("an address of a load balancer is given back: the node that is elected for it answers again", "address", addr.String())
		return true
	}
	for node, addrs := range d.takeovers {
		if slices.Contains(addrs, addr) {
			d.held[addr] = true
			d.logger.Warn("an address of a load balancer is taken over: the node that is elected for it does not answer", "address", addr.String(), "node", node.String())
			return true
		}
	}
	return false
}

// lookAtOwn has the neighbours learn again which addresses are this node's, when another
// machine answers for them or has just stopped to do so: a standby that took them over has
// announced them.
func (d *standby) lookAtOwn(own []netip.Addr) {
	maps.DeleteFunc(d.contested, func(addr netip.Addr, _ bool) bool { return !slices.Contains(own, addr) })
	if len(own) == 0 {
		return
	}
	answered, err := d.neighbours.Answered(own, questionTime)
	if err != nil {
		return
	}
	var again []netip.Addr
	for _, addr := range own {
		if answered[addr] || d.contested[addr] {
			again = append(again, addr)
		}
		d.contested[addr] = answered[addr]
	}
	if len(again) == 0 {
		return
	}
	if err := d.neighbours.Tell(again); err != nil {
		d.logger.Warn("addresses of load balancers could not be announced again", "err", err)
	}
}
