package silence

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/clusterd/clusterd/gossip"
	"github.com/clusterd/clusterd/member/join"
)

const (
	// relays is how many other servers are asked whether a node answers them.
	relays     = 2
	relayDelay = 100 * time.Millisecond
	// serverSilent is how long a server may leave this leader's heartbeats unanswered
	// before it is suspected. They come ten times a second, so that a few that are lost
	// do not fill it; and an answer to one of them ends the questions that follow.
	serverSilent = 1200 * time.Millisecond
	// heartbeatTick is how often the answers to heartbeats are looked at.
	heartbeatTick = 200 * time.Millisecond
)

// Members are the servers that gossip knows, as gossip.Members has them.
type Members interface {
	All() []gossip.Member
	Get(id string) (gossip.Member, bool)
	// Changed is closed when All has become another list.
	Changed() <-chan struct{}
}

// Agents are the agents that keep a connection to this server, as tunnel.Hub has them.
type Agents interface {
	// Probe sends the names of those that are silent until ctx ends.
	Probe(ctx context.Context, suspects chan<- string)
	// Awaits reports whether the agent with that id has had no time to connect yet.
	Awaits(id string) bool
}

// Sources are where signs of life come from. All functions may be called concurrently.
type Sources struct {
	Self    string // this server's id
	Members Members
	Agents  Agents
	// Record is the record of a node name, as far as this server knows.
	Record func(node string) (join.Record, error)
	// Answered is when servers answered this leader's heartbeats, by id.
	Answered func() map[string]time.Time
	// Ask returns nil if the agent of the node answers this server, AskVia if it answers another
	// one. They may block until ctx ends.
	Ask    func(ctx context.Context, node string) error
	AskVia func(ctx context.Context, server, node string) error
}

// Suspects is the controllers' view of the nodes' liveness while this node leads.
type Suspects struct {
	Sources
	names chan string
}

// NewSuspects makes one, whose Run finds them.
func NewSuspects(from Sources) *Suspects {
	return &Suspects{Sources: from, names: make(chan string)}
}

// Suspects delivers the names of servers that gossip calls dead or that do not answer
// this leader's heartbeats, and of agents that do not answer on the connection that
// they keep to this server.
func (s *Suspects) Suspects() <-chan string { return s.names }

// Confirm returns nil when the agent of the node answers, this server or another
// one: the path between two machines may be broken while both are well (SWIM's
// indirect probes), which begin a little later than the direct one. The first answer
// counts, and so does an answer to a heartbeat of the store meanwhile; without one
// the error is that of the direct question.
func (s *Suspects) Confirm(ctx context.Context, node string) error {
	began := time.Now()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	others := s.others(node)
	direct, relayed := make(chan error, 1), make(chan error, len(others))
	go func() { direct <- s.Ask(ctx, node) }()
	for _, server := range others {
		go func() {
			select {
			case <-time.After(relayDelay):
				relayed <- s.AskVia(ctx, server, node)
			case <-ctx.Done():
				relayed <- ctx.Err()
			}
		}()
	}
	var err error
	for range 1 + len(others) {
		select {
		case err = <-direct:
			if err == nil {
				return nil
			}
		case answer := <-relayed:
			if answer == nil {
				return nil
			}
		}
	}
	if s.excused(node, began) {
		return nil
	}
	return err
}

// excused reports whether the node is not to be taken for dead although it has answered
// no server since began: a server that has answered a heartbeat meanwhile is busy, and
// an agent that had no time to connect yet is judged by its Lease.
func (s *Suspects) excused(node string, began time.Time) bool {
	rec, err := s.Record(node)
	switch {
	case err != nil:
		return false
	case rec.IsServer():
		return s.Answered()[rec.ID].After(began)
	}
	return s.Agents.Awaits(rec.ID)
}

// others are up to relays servers that live, without this one and the node, chosen
// at random.
func (s *Suspects) others(node string) (out []string) {
	for _, m := range s.Members.All() {
		if m.State == gossip.Alive && m.ID != s.Self && m.Name != node {
			out = append(out, m.Name)
		}
	}
	rand.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out[:min(len(out), relays)]
}

// Run feeds the channel until ctx ends.
func (s *Suspects) Run(ctx context.Context) error {
	var sources sync.WaitGroup
	defer sources.Wait()
	sources.Go(func() { s.Agents.Probe(ctx, s.names) })
	sources.Go(func() { s.heartbeats(ctx) })
	seen := map[string]gossip.State{} // by id
	for {
		changed := s.Members.Changed()
		for _, m := range s.Members.All() {
			if m.State == seen[m.ID] {
				continue
			}
			seen[m.ID] = m.State
			if m.State != gossip.Alive && !s.send(ctx, m.Name) {
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

// heartbeats suspects servers that leave the heartbeats of the store unanswered. While
// this server is alone it waits for another member.
func (s *Suspects) heartbeats(ctx context.Context) {
	known := Tracker{After: serverSilent}
	tick := time.NewTicker(heartbeatTick)
	defer tick.Stop()
	for {
		if len(s.Members.All()) == 1 {
			tick.Stop()
			if !hasOthers(ctx, s.Members) {
				return
			}
			tick.Reset(heartbeatTick)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := time.Now()
		known.Tick(now)
		for id, at := range s.Answered() {
			if m, ok := s.Members.Get(id); ok && m.ID != s.Self {
				if !known.Knows(id) {
					known.Heard(id, m.Name, now) // it may be of an earlier term
				}
				known.Heard(id, m.Name, at)
			}
		}
		for _, name := range known.Suspects(now) {
			if !s.send(ctx, name) {
				return
			}
		}
	}
}

// hasOthers waits until gossip knows another member than this one, which may be dead. It
// reports false when ctx has ended.
func hasOthers(ctx context.Context, members interface {
	All() []gossip.Member
	Changed() <-chan struct{}
}) bool {
	for {
		changed := members.Changed()
		if len(members.All()) > 1 {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// send reports false when ctx has ended.
func (s *Suspects) send(ctx context.Context, name string) bool {
	select {
	case s.names <- name:
		return true
	case <-ctx.Done():
		return false
	}
}
