package gossipkey

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/slack"
)

// Node is a server's part in rotations of the gossip key: it follows the state of the
// store, records when it has what that names, and hands keys to other servers.
//
// Keys are never in the store and never in gossip. The leader makes one and keeps it
// in memory until the state names it; the others ask each other for it, over
// connections that prove keys of the records. So does a server that was away and
// cannot be heard any more. Run, Lead and Answer may be called concurrently.
type Node struct {
	Store join.Store
	ID    string // of this member
	// HasLeader reports whether the store has one: without it nothing is written.
	HasLeader func() bool
	// Ring is what this server holds.
	Ring func() Ring
	// Adopt makes a ring this server's: on disk in one step, then in use.
	Adopt func(Ring) error
	// Addr is where a server is now, Known where others may be; this server's own address is Self.
	Addr  func(id string) netip.AddrPort
	Known func() []netip.AddrPort
	Self  netip.AddrPort
	// Fetch asks the server at an address for its keys; id is what its key must be, empty: any
	// server's. It may block until ctx ends.
	Fetch func(ctx context.Context, addr netip.AddrPort, id string) (*join.Keys, error)
	// Every is how long a key is used at most; 0: until another is asked for.
	Every time.Duration
	// Now is the cluster's time.
	Now func() time.Time
	Log *slog.Logger

	made keyBox // by this server as leader
}

const (
	followPeriod = time.Second
	// keysTimeout is how long another server may take to send its keys.
	keysTimeout = 5 * time.Second
	// lonelyPeriod is how often a server without a leader asks others for the keys.
	lonelyPeriod = 2 * time.Second
	// worthLogging is after how many failures in a row the log says so: the first
	// server that asks for a key may be quicker than the one that made it.
	worthLogging = 3
)

// Run follows the state until ctx ends.
func (g *Node) Run(ctx context.Context) error {
	var asked time.Time
	failed := 0 // times in a row
	for {
		err := g.follow(ctx)
		if err == nil && !g.HasLeader() && time.Since(asked) >= lonelyPeriod {
			err = g.askAround(ctx)
			asked = time.Now()
		}
		if err == nil {
			failed = 0
		} else if failed++; failed == worthLogging && ctx.Err() == nil {
			g.Log.Warn("the rotation of the gossip key cannot be followed yet, trying again", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-slack.After(followPeriod):
		}
	}
}

func (g *Node) follow(ctx context.Context) error {
	state, err := Get(ctx, g.Store, true)
	if err != nil {
		return err
	}
	ring := g.Ring()
	if state.Number != 0 && !ring.Names(state.Keys) {
		if state.Number <= ring.Number {
			// It has keys of a state that its store does not have yet; or the cluster was
			// recovered from one that had not.
			now, cancel := context.WithTimeout(ctx, keysTimeout)
			defer cancel()
			if state, err = Get(now, g.Store, false); err != nil || ring.Names(state.Keys) {
				return nil // there is no leader just now, or the store comes to it
			}
		}
		if ring, err = g.ringOf(ctx, state); err != nil {
			return err
		}
		if err := g.Adopt(ring); err != nil {
			return err
		}
		g.Log.Info("this server follows the rotation of the gossip key", "phase", state.Phase, "number", state.Number)
	} else if state.Number > ring.Number { // the same keys as before
		ring.Number = state.Number
		if err := g.Adopt(ring); err != nil {
			return err
		}
	}
	if !g.HasLeader() || ring.Number != state.Number {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, keysTimeout)
	defer cancel()
	return RecordState(ctx, g.Store, g.ID, state.Number)
}

// ringOf finds the keys that a state names: here, or with another server.
func (g *Node) ringOf(ctx context.Context, state State) (Ring, error) {
	ring := Ring{Number: state.Number}
	have := g.Ring()
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
			found, err := g.fetch(ctx, func(theirs Ring) bool { return theirs.Find(id) != nil })
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
func (g *Node) fetch(ctx context.Context, wanted func(Ring) bool) (Ring, error) {
	records, err := join.Records(ctx, g.Store, true)
	if err != nil {
		return Ring{}, err
	}
	for _, rec := range join.Servers(records) {
		if rec.ID == g.ID {
			continue
		}
		ring, err := g.ask(ctx, g.Addr(rec.ID), rec.ID)
		if err != nil {
			g.Log.Debug("ask a server for the gossip keys", "node", rec.Name, "err", err)
			continue
		}
		if wanted(ring) {
			return ring, nil
		}
	}
	return Ring{}, nil
}

// ask asks the server at an address; want is the id that it must have; empty: any.
func (g *Node) ask(ctx context.Context, addr netip.AddrPort, want string) (Ring, error) {
	ctx, cancel := context.WithTimeout(ctx, keysTimeout)
	defer cancel()
	keys, err := g.Fetch(ctx, addr, want)
	if err != nil {
		return Ring{}, err
	}
	return RingIn(keys)
}

// askAround takes up a later ring from any server that has one: the key was changed
// while this server was away, and the others do not accept its messages.
func (g *Node) askAround(ctx context.Context) error {
	addrs := g.Known()
	slices.SortFunc(addrs, netip.AddrPort.Compare)
	for _, addr := range slices.Compact(addrs) {
		if addr == g.Self {
			continue
		}
		ring, err := g.ask(ctx, addr, "")
		if err != nil {
			g.Log.Debug("ask a server for the gossip keys", "peer", addr, "err", err)
			continue
		}
		if ring.Number <= g.Ring().Number {
			continue
		}
		if err := g.Adopt(ring); err != nil {
			return err
		}
		g.Log.Info("the gossip key was changed while this server was away: it has the keys of now", "number", ring.Number)
	}
	return nil
}

// Answer is what other servers get. A server hands out no keys of a state that its
// own store has not applied: it would not know yet who was removed before that key was
// made.
func (g *Node) Answer(ctx context.Context) (join.GossipKeys, error) {
	ring := g.Ring()
	state, err := Get(ctx, g.Store, true)
	if err != nil {
		return join.GossipKeys{}, err
	}
	if ring.Number > state.Number {
		return join.GossipKeys{}, errors.New("this server has not caught up with the others yet")
	}
	return join.GossipKeys{Number: ring.Number, Keys: ring.Keys}, nil
}

// RingIn is the ring in a server's answer.
func RingIn(keys *join.Keys) (Ring, error) {
	ring := Ring{Keys: [][]byte{keys.GossipKey}}
	if keys.Gossip != nil {
		ring = Ring(*keys.Gossip)
	}
	return ring, ring.Validate()
}

// Lead rotates the key while this node leads.
func (g *Node) Lead(ctx context.Context) error {
	leader := Leader{
		Store: g.Store,
		Every: g.Every,
		Log:   g.Log,
		Now:   g.Now,
		Make: func() (first, id string) {
			key := New()
			g.made.put(key)
			return ID(g.Ring().Keys[0]), ID(key)
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
	b.keys = map[string][]byte{ID(key): key}
}

func (b *keyBox) get(id string) []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.keys[id]
}
