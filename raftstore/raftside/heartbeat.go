package raftside

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
)

// raft derives the pause between heartbeats from the timeout after which a follower
// stands for election, and that timeout is long here: members of an overloaded machine
// do not depose a leader that is only slow. So the leader sends the same message more
// often than raft does, and its followers can still find out within a second that it is
// gone.

// heartbeats are those that a leader sends besides raft's. Its zero value is ready.
type heartbeats struct {
	// term is the latest in which raft has led here: that of the messages to its
	// followers. Who leads in a term does not change, so a message of that term is right
	// whenever it is sent.
	term atomic.Uint64
	wg   sync.WaitGroup

	mu   sync.Mutex
	busy map[raft.ServerID]bool // one is under way, or has just failed
}

// RunHeartbeats sends heartbeats while this member leads. It returns when the member
// stops.
func (p *Transport) RunHeartbeats() {
	defer p.beats.wg.Wait()
	for {
		changed := p.cfg.Changed()
		for p.leading() != nil {
			pause := p.cfg.Heartbeat + rand.N(p.cfg.Heartbeat)
			if !p.beat() {
				pause = 10 * p.cfg.Heartbeat // there is no other member yet
			}
			select {
			case <-time.After(pause):
				continue
			case <-changed:
			case <-p.cfg.Done:
			}
			break
		}
		select {
		case <-changed:
		case <-p.cfg.Done:
			return
		}
	}
}

// beat sends a heartbeat to each member that has answered the one before. It returns
// false when there is no other member.
func (p *Transport) beat() bool {
	r := p.leading()
	if r == nil {
		return true
	}
	cf := r.GetConfiguration()
	if cf.Error() != nil {
		return true
	}
	servers := cf.Configuration().Servers
	if len(servers) < 2 {
		return false
	}
	term := p.beats.term.Load()
	if r.CurrentTerm() != term || p.cfg.Disk.Stuck() {
		return true
	}
	p.beats.mu.Lock()
	defer p.beats.mu.Unlock()
	for _, m := range servers {
		if string(m.ID) == p.cfg.ID || p.beats.busy[m.ID] {
			continue
		}
		if p.beats.busy == nil {
			p.beats.busy = map[raft.ServerID]bool{}
		}
		p.beats.busy[m.ID] = true
		p.beats.wg.Go(func() { p.beatOne(m, term) })
	}
	return true
}

func (p *Transport) beatOne(m raft.Server, term uint64) {
	req := raft.AppendEntriesRequest{RPCHeader: p.header(), Term: term, Leader: []byte(p.cfg.ID)}
	if err := p.NetworkTransport.AppendEntries(m.ID, m.Address, &req, &raft.AppendEntriesResponse{}); err == nil {
		p.answered(m.ID)
	} else { // raft's own heartbeats log it
		select {
		case <-time.After(4 * p.cfg.Heartbeat):
		case <-p.cfg.Done:
		}
	}
	p.beats.mu.Lock()
	defer p.beats.mu.Unlock()
	delete(p.beats.busy, m.ID)
}

// leads notes the term of a message that raft sends as a leader.
func (b *heartbeats) leads(term uint64) {
	for {
		was := b.term.Load()
		if term <= was || b.term.CompareAndSwap(was, term) {
			return
		}
	}
}

// gapKept is for how long, at least, a gap is remembered; at most twice as long.
const gapKept = 15 * time.Second

// gaps are the pauses between the heartbeats of one leader as they are noticed here:
// how late a heartbeat may be without anything being wrong but that a machine is
// overloaded. Its zero value is ready.
type gaps struct {
	mu             sync.Mutex
	term           uint64
	heard          time.Time // the last heartbeat
	since          time.Time // latest are of the time from here on
	before, latest longest
}

// longest are the two longest of some durations, the longest one first.
type longest [2]time.Duration

func (l *longest) add(d time.Duration) {
	switch {
	case d > l[0]:
		l[0], l[1] = d, l[0]
	case d > l[1]:
		l[1] = d
	}
}

func (g *gaps) note(rpc raft.RPC, now time.Time) {
	req, ok := rpc.Command.(*raft.AppendEntriesRequest)
	if !ok {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.rotate(now)
	switch {
	case req.Term < g.term:
		return
	case req.Term == g.term:
		g.latest.add(now.Sub(g.heard))
	}
	g.term, g.heard = req.Term, now
}

// rotate forgets what is too old. mu is held.
func (g *gaps) rotate(now time.Time) {
	switch age := now.Sub(g.since); {
	case age > 2*gapKept:
		g.since, g.before, g.latest = now, longest{}, longest{}
	case age > gapKept:
		g.since, g.before, g.latest = now, g.latest, longest{}
	}
}

// typical is the second longest: one alone is a process that was stopped, or a
// link that was down, which says nothing of the next.
func (g *gaps) typical(now time.Time) time.Duration {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.rotate(now)
	all := g.latest
	all.add(g.before[0])
	all.add(g.before[1])
	return all[1]
}

// Gap is how long the pause between two heartbeats of one leader, which was heard again
// after it, has been at least twice of late.
func (p *Transport) Gap() time.Duration { return p.gaps.typical(time.Now()) }
