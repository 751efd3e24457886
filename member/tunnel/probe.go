package tunnel

import (
	"context"
	"time"

	"github.com/clusterd/clusterd/member/transport"
)

const (
	// probeEvery is how often an agent is pinged while the server leads.
	probeEvery = time.Second
	// Silence is how long an agent may leave a ping unanswered, or be without a
	// connection, before it is suspected.
	Silence = 2 * time.Second
	// again is how long after a suspicion the next one follows while an agent is
	// silent: it may be well and then die.
	again = 5 * time.Second
	// probeTick is how often due pings are sent and answers looked for.
	probeTick = 100 * time.Millisecond
	// forgetAfter bounds how long an agent is remembered that was suspected.
	forgetAfter = 10 * time.Minute
)

// probed is what the probe knows of one agent.
type probed struct {
	name    string
	session *session  // its last one
	heard   time.Time // its last sign of life
	next    time.Time // when it is pinged again
	suspect time.Time // when it is suspected, if it stays silent
}

// Probe pings each connected agent once a second until ctx ends, and sends to
// suspects the name of one that has been silent for Silence: it left a ping
// unanswered, or its connection ended and it has not made another. While that lasts
// the name is sent again every five seconds. It is a hint only, as is a suspicion of gossip (SWIM,
// Das et al. 2002): the network between the two may be at fault, or this server
// slow. A receiver that is slow delays names and no ping. At most one Probe runs
// at a time.
func (h *Hub) Probe(ctx context.Context, suspects chan<- string) {
	known := map[string]*probed{} // by the agent's id
	var waiting []string          // names to be sent
	tick := time.NewTicker(probeTick)
	defer tick.Stop()
	last := time.Now()
	for {
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
		case <-tick.C:
			now := time.Now()
			if pause := now.Sub(last); pause > Silence/2 { // this process stood still, so answers could not be read
				for _, p := range known {
					p.suspect = p.suspect.Add(pause)
				}
			}
			last = now
			waiting = append(waiting, h.probeOnce(known, now)...)
		}
	}
}

// probeOnce sends the pings that are due and returns the names of agents to be
// suspected.
func (h *Hub) probeOnce(known map[string]*probed, now time.Time) (silent []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, s := range h.sessions {
		p := known[id]
		if p == nil {
			_, name := transport.PeerOf(s.conn)
			p = &probed{name: name, heard: now, suspect: now.Add(Silence)}
			known[id] = p
		}
		p.session = s
		if !now.Before(p.next) && s.ping() {
			p.next = now.Add(probeEvery)
		}
	}
	for id, p := range known {
		if at := *p.session.heard.Load(); at.After(p.heard) {
			p.heard, p.suspect = at, at.Add(Silence)
		}
		switch {
		case now.Sub(p.heard) > forgetAfter:
			delete(known, id)
		case now.After(p.suspect):
			p.suspect = now.Add(again)
			silent = append(silent, p.name)
		}
	}
	return silent
}

// ping sends a ping unless one is under way, and reports whether it did. The
// answer sets heardAt.
func (s *session) ping() bool {
	if !s.pinging.CompareAndSwap(false, true) {
		return false
	}
	go func() { // ends with the answer, after silence at the latest, or with the session
		defer s.pinging.Store(false)
		if _, err := s.Ping(); err == nil {
			s.hear()
		}
	}()
	return true
}

// hear notes a sign of life of the agent.
func (s *session) hear() {
	now := time.Now()
	s.heard.Store(&now)
}
