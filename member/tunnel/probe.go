package tunnel

import (
	"context"
	"time"

	"github.com/clusterd/clusterd/member/silence"
)

const (
	// probeEvery is how often an agent is pinged while the server leads.
	probeEvery = time.Second
	// probeTick is how often due pings are sent and answers looked for.
	probeTick = 100 * time.Millisecond
	// slowFor is how much later an agent is suspected whose machine acknowledges what is
	// sent to it: it waits for a processor, most likely, as do those who would be asked
	// about it. (One whose program has ended has closed its connection.)
	slowFor = 2 * silence.After
)

// probe is what is known of the agents that have been connected.
type probe struct {
	sessions map[string]*session // the last one of each, by the agent's id
	silence  silence.Tracker
}

// Probe pings each connected agent once a second until ctx ends, and sends to
// suspects the name of one that has been silent for silence.After: it left a ping
// unanswered, or its connection ended and it has not made another. An agent that answers
// none while its machine acknowledges them is suspected slowFor later. While that lasts
// the name is sent again every silence.Again. It is a hint only, as is a suspicion of
// gossip (SWIM, Das et al. 2002): the network between the two may be at fault, or
// this server slow. A receiver that is slow delays names and no ping. At most one
// Probe runs at a time. Without agents it waits for the first one.
func (h *Hub) Probe(ctx context.Context, suspects chan<- string) {
	p := probe{sessions: map[string]*session{}}
	var waiting []string        // names to be sent
	queued := map[string]bool{} // those in waiting
	tick := time.NewTicker(probeTick)
	defer tick.Stop()
	for {
		if len(waiting) == 0 && len(p.sessions) == 0 && !h.hasSessions() {
			tick.Stop()
			select {
			case <-ctx.Done():
				return
			case <-h.connected:
			}
			tick.Reset(probeTick)
		}
		var to chan<- string // nil, which blocks, while there is none
		var first string
		if len(waiting) > 0 {
			to, first = suspects, waiting[0]
		}
		select {
		case <-ctx.Done():
			return
		case to <- first:
			waiting = waiting[1:]
			delete(queued, first)
		case <-tick.C:
			now := time.Now()
			p.silence.Tick(now)
			for _, name := range h.probeOnce(&p, now) {
				if !queued[name] {
					queued[name] = true
					waiting = append(waiting, name)
				}
			}
		}
	}
}

func (h *Hub) hasSessions() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.sessions) > 0
}

// probeOnce sends the pings that are due and returns the names of agents to be
// suspected.
func (h *Hub) probeOnce(p *probe, now time.Time) (silent []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, s := range h.sessions {
		p.sessions[id] = s
		if !p.silence.Knows(id) {
			p.silence.Heard(id, s.name, now)
		}
		s.ping(now)
	}
	for id, s := range p.sessions { // also of those that have ended
		if p.silence.Knows(id) {
			p.silence.Heard(id, s.name, s.sign(now))
		}
	}
	silent = p.silence.Suspects(now)
	for id := range p.sessions {
		if !p.silence.Knows(id) {
			delete(p.sessions, id)
		}
	}
	return silent
}

// ping sends a ping if it is time for one and none is under way. The answer sets
// heard. Its goroutine ends with the answer, with the session, or after the limit
// of config.
func (s *session) ping(now time.Time) {
	if now.Before(s.nextPing) || !s.pinging.CompareAndSwap(false, true) {
		return
	}
	s.nextPing = now.Add(probeEvery)
	go func() {
		defer s.pinging.Store(false)
		if _, err := s.Ping(); err == nil {
			s.hear()
		}
	}()
}

// sign is the last sign of life at a time: one of the agent's, or for slowFor after
// that of its machine, which has acknowledged all that was sent.
func (s *session) sign(now time.Time) time.Time {
	heard := *s.heard.Load()
	if now.Sub(heard) <= silence.After/2 || s.IsClosed() {
		return heard
	}
	link, err := s.link()
	if err != nil || link.Unacked || !now.Add(-link.Acked).After(heard) {
		return heard
	}
	if until := heard.Add(slowFor); until.Before(now) {
		return until
	}
	return now
}

// hear notes a sign of life of the agent.
func (s *session) hear() {
	now := time.Now()
	s.heard.Store(&now)
}
