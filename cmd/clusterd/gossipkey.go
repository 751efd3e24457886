package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/clusterd/clusterd/member/gossipkey"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/slack"
)

// gossipKeys is what this server does of changes of the gossip key: it follows the
// cluster's state, says so when it has what that names, and tells other servers.
//
// Keys are never in the store and never in gossip. The leader makes one and keeps it
// in memory until the state names it; the others ask each other for it, over
// connections that prove keys of the records. So does a server that was away and
// cannot be heard any more.
type gossipKeys struct {
	main *Main
	// made are keys that this server made as leader, by id.
	made keyBox
}

const (
	gossipKeyPeriod = time.Second
	// keysTimeout is how long another server may take to send its keys.
	keysTimeout = 5 * time.Second
	// lonelyPeriod is how often a server without a leader asks others for the keys.
	lonelyPeriod = 2 * time.Second
	// worthTelling is after how many failures in a row the log says so: the first
	// server that asks for a key may be quicker than the one that made it.
	worthTelling = 3
)

// run follows the state until ctx ends.
func (g *gossipKeys) run(ctx context.Context) error {
	var asked time.Time
	failed := 0 // times in a row
	for {
		err := g.follow(ctx)
		if err == nil && g.main.store.Leader() == "" && time.Since(asked) >= lonelyPeriod {
			err = g.askAround(ctx)
			asked = time.Now()
		}
		if err == nil {
			failed = 0
		} else if failed++; failed == worthTelling && ctx.Err() == nil {
			g.main.log.Warn("the change of the gossip key cannot be followed yet, trying again", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-slack.After(gossipKeyPeriod):
		}
	}
}

// ring is what this server holds.
func (g *gossipKeys) ring() gossipkey.Ring {
	g.main.idMu.Lock()
	defer g.main.idMu.Unlock()
	return g.main.id.ring
}

func (g *gossipKeys) follow(ctx context.Context) error {
	m := g.main
	state, err := gossipkey.Get(ctx, m.store, true)
	if err != nil {
		return err
	}
	ring := g.ring()
	if state.Number != 0 && !ring.Names(state.Keys) {
		if state.Number <= ring.Number {
			// It has keys of a state that its store does not have yet; or the cluster was
			// recovered from one that had not.
			now, cancel := context.WithTimeout(ctx, keysTimeout)
			defer cancel()
			if state, err = gossipkey.Get(now, m.store, false); err != nil || ring.Names(state.Keys) {
				return nil // there is no leader just now, or the store comes to it
			}
		}
		if ring, err = g.ringOf(ctx, state); err != nil {
			return err
		}
		if err := g.adopt(ring); err != nil {
			return err
		}
		m.log.Info("this server follows the change of the gossip key", "phase", state.Phase, "number", state.Number)
	} else if state.Number > ring.Number { // the same keys as before
		ring.Number = state.Number
		if err := g.adopt(ring); err != nil {
			return err
		}
	}
	if m.store.Leader() == "" || ring.Number != state.Number {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, keysTimeout)
	defer cancel()
	return gossipkey.RecordState(ctx, m.store, m.id.nodeID(), state.Number)
}

// ringOf finds the keys that a state names: here, or with another server.
func (g *gossipKeys) ringOf(ctx context.Context, state gossipkey.State) (gossipkey.Ring, error) {
	ring := gossipkey.Ring{Number: state.Number}
	have := g.ring()
	others := func(string) []byte { return nil }
	for _, id := range state.Keys {
		key := have.Find(id)
		if key == nil {
			key = g.made.get(id)
		}
		if key == nil {
			key = others(id)
		}
		if key == nil {
			found, err := g.fetch(ctx, func(theirs gossipkey.Ring) bool { return theirs.Find(id) != nil })
			if err != nil {
				return ring, err
			}
			if others = found.Find; found.Keys == nil {
				return ring, fmt.Errorf("no server that answers has gossip key %s yet", id)
			}
			key = found.Find(id)
		}
		ring.Keys = append(ring.Keys, key)
	}
	return ring, nil
}

// fetch asks the servers of the records for their rings until one is wanted. It has
// no keys when none is.
func (g *gossipKeys) fetch(ctx context.Context, wanted func(gossipkey.Ring) bool) (gossipkey.Ring, error) {
	m := g.main
	records, err := join.Records(ctx, m.store, true)
	if err != nil {
		return gossipkey.Ring{}, err
	}
	for _, rec := range join.Servers(records) {
		if rec.ID == m.id.nodeID() {
			continue
		}
		ring, err := g.ask(ctx, m.serverAddr(rec.ID), rec.ID)
		if err != nil {
			m.log.Debug("ask a server for the gossip keys", "node", rec.Name, "err", err)
			continue
		}
		if wanted(ring) {
			return ring, nil
		}
	}
	return gossipkey.Ring{}, nil
}

// ask asks the server at an address; want is the id that it must have; empty: any.
func (g *gossipKeys) ask(ctx context.Context, addr netip.AddrPort, want string) (gossipkey.Ring, error) {
	ctx, cancel := context.WithTimeout(ctx, keysTimeout)
	defer cancel()
	keys, err := join.FetchKeys(ctx, func(ctx context.Context) (net.Conn, error) {
		return g.main.tid.Dial(ctx, addr, want, transport.Member)
	})
	if err != nil {
		return gossipkey.Ring{}, err
	}
	return ringIn(keys)
}

// askAround takes up a later ring from any server that has one: the key was changed
// while this server was away, and the others do not accept its messages.
func (g *gossipKeys) askAround(ctx context.Context) error {
	addrs := g.main.memberAddrs()
	slices.SortFunc(addrs, netip.AddrPort.Compare)
	for _, addr := range slices.Compact(addrs) {
		if addr == g.main.cfg.addr() {
			continue
		}
		ring, err := g.ask(ctx, addr, "")
		if err != nil {
			g.main.log.Debug("ask a server for the gossip keys", "peer", addr, "err", err)
			continue
		}
		if ring.Number <= g.ring().Number {
			continue
		}
		if err := g.adopt(ring); err != nil {
			return err
		}
		g.main.log.Info("the gossip key was changed while this server was away: it has the keys of now", "number", ring.Number)
	}
	return nil
}

// adopt makes a ring this server's: on disk in one step, then in use.
func (g *gossipKeys) adopt(ring gossipkey.Ring) error {
	m := g.main
	m.idMu.Lock()
	defer m.idMu.Unlock()
	id := *m.id
	id.ring = ring
	if err := m.dir.replaceIdentity(&id); err != nil {
		return err
	}
	m.id.ring = ring
	return m.members.SetKeys(ring.Keys)
}

// tell is what other servers get. A server hands out no keys of a state that its
// own store has not applied: it would not know yet who was removed before that key was
// made.
func (g *gossipKeys) tell(ctx context.Context) (join.GossipKeys, error) {
	ring := g.ring()
	state, err := gossipkey.Get(ctx, g.main.store, true)
	if err != nil {
		return join.GossipKeys{}, err
	}
	if ring.Number > state.Number {
		return join.GossipKeys{}, errors.New("this server has not caught up with the others yet")
	}
	return join.GossipKeys{Number: ring.Number, Keys: ring.Keys}, nil
}

// ringIn is the ring in a server's answer.
func ringIn(keys *join.Keys) (gossipkey.Ring, error) {
	ring := gossipkey.Ring{Keys: [][]byte{keys.GossipKey}}
	if keys.Gossip != nil {
		ring = gossipkey.Ring(*keys.Gossip)
	}
	return ring, ring.Validate()
}

// lead changes the key while this node leads.
func (g *gossipKeys) lead(ctx context.Context) error {
	leader := gossipkey.Leader{
		Store: g.main.store,
		Every: g.main.cfg.GossipKeyAge.Duration,
		Log:   room(g.main.log, "gossipkey"),
		Now:   g.main.clock.Now,
		Make: func() (first, id string) {
			key := gossipkey.New()
			g.made.put(key)
			return gossipkey.ID(g.ring().Keys[0]), gossipkey.ID(key)
		},
	}
	return leader.Run(ctx)
}

// keyBox holds keys by their id. Its zero value is ready.
type keyBox struct {
	mu   sync.Mutex
	keys map[string][]byte
}

// put takes the place of what was put before: at most one is on its way.
func (b *keyBox) put(key []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.keys = map[string][]byte{gossipkey.ID(key): key}
}

func (b *keyBox) get(id string) []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.keys[id]
}
