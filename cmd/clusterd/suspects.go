package main

import (
	"cmp"
	"context"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"github.com/clusterd/clusterd/gossip"
)

const (
	// relays is how many other servers are asked whether a node answers them.
	relays = 2
	// reachPath/NODE is what a leader asks another server: does the node answer you?
	reachPath    = "/clusterd/v1/reach/"
	reachTimeout = 5 * time.Second
)

// suspects is the controllers' view of the nodes' liveness while this node leads.
type suspects struct {
	*peers
	self  string // this server's id
	names chan string
}

// Suspects delivers the names of servers that gossip calls dead, once per change,
// and all that are dead when the leadership begins; and those of agents that do not
// answer on the connection that they keep to this server.
func (s *suspects) Suspects() <-chan string { return s.names }

// Confirm returns nil when the agent of the node answers, this server or another
// one: the path between two machines may be broken while both are well (SWIM's
// indirect probes). The first answer counts.
func (s *suspects) Confirm(ctx context.Context, node string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	others := s.others(node)
	answers := make(chan error, 1+len(others))
	go func() { answers <- s.confirm(ctx, node) }()
	for _, server := range others {
		go func() { answers <- s.call(ctx, server, http.MethodGet, reachPath+node, nil, nil) }()
	}
	var first error
	for range cap(answers) {
		err := <-answers
		if err == nil {
			return nil
		}
		first = cmp.Or(first, err)
	}
	return first
}

// others are up to relays servers that live, without this one and the node, chosen
// at random.
func (s *suspects) others(node string) (out []string) {
	for _, m := range s.members.All() {
		if m.State == gossip.Alive && m.ID != s.self && m.Name != node {
			out = append(out, m.Name)
		}
	}
	rand.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out[:min(len(out), relays)]
}

// run feeds the channel until ctx ends.
func (s *suspects) run(ctx context.Context) error {
	var probe sync.WaitGroup
	defer probe.Wait()
	probe.Go(func() { s.agents.Probe(ctx, s.names) })
	seen := map[string]gossip.State{} // by id
	for {
		changed := s.members.Changed()
		for _, m := range s.members.All() {
			if m.State == seen[m.ID] {
				continue
			}
			seen[m.ID] = m.State
			if m.State == gossip.Alive {
				continue
			}
			select {
			case s.names <- m.Name:
			case <-ctx.Done():
				return nil
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}

// getReach says to another server whether the agent of the node answers this one.
func (p *peers) getReach(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), reachTimeout)
	defer cancel()
	if err := p.confirm(ctx, r.PathValue("node")); err != nil {
		refuse(w, http.StatusBadGateway, err.Error())
		return
	}
	w.WriteHeader(http.StatusNoContent)
}
