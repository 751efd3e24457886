package raftside

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"
)

// Gate stands before raft in a member that has lost its state. raft's promises
// rest on what a voter has written down: one that forgets entries it had
// acknowledged, or whom it voted for, can let acknowledged writes be lost. So
// nothing reaches raft, and nothing is answered in its name, until the leader
// has taken this member out of the membership, by a majority of the others.
// After that it comes back like a new machine.
//
//	state lost ──▶ shut ──(removed, by a leader's word)──▶ open
//
// The gate learns who leads from the calls that it refuses.
type Gate struct {
	shut atomic.Bool
	in   chan raft.RPC // what raft consumes; nil: the gate was never shut

	mu      sync.Mutex
	callers []string // members that have called as leaders, the last one first
	refused int      // calls
	called  chan struct{}
}

var errLostState = errors.New("this member has lost its state and must be taken out of the membership first")

func newGate(shut bool) *Gate {
	g := &Gate{called: make(chan struct{}, 1)}
	g.shut.Store(shut)
	if shut {
		g.in = make(chan raft.RPC)
	}
	return g
}

// Shut reports whether nothing passes.
func (g *Gate) Shut() bool { return g.shut.Load() }

// Open lets everything pass from now on.
func (g *Gate) Open() { g.shut.Store(false) }

// Called delivers when a member has called as a leader since.
func (g *Gate) Called() <-chan struct{} { return g.called }

// Refused is how many calls were refused.
func (g *Gate) Refused() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.refused
}

// RunGate hands raft the calls that pass the gate, until the member stops. It
// returns at once if the gate was never shut.
func (p *Transport) RunGate() {
	if p.Gate.in != nil {
		p.Gate.run(p.cfg.Done, p.NetworkTransport.Consumer())
	}
}

// run hands the transport's calls on, or refuses them.
func (g *Gate) run(done <-chan struct{}, from <-chan raft.RPC) {
	for {
		select {
		case rpc := <-from:
			if g.refuse(rpc) {
				continue
			}
			select {
			case g.in <- rpc:
			case <-done:
				return
			}
		case <-done:
			return
		}
	}
}

// refuse answers a call if the gate is shut.
func (g *Gate) refuse(rpc raft.RPC) bool {
	if !g.shut.Load() {
		return false
	}
	g.mu.Lock()
	g.refused++
	g.mu.Unlock()
	switch c := rpc.Command.(type) {
	case *raft.AppendEntriesRequest:
		g.note(c.RPCHeader)
		rpc.Respond(&raft.AppendEntriesResponse{}, errLostState)
	case *raft.InstallSnapshotRequest:
		g.note(c.RPCHeader)
		// The stream cannot be used again after an unread snapshot; the caller
		// opens another one.
		rpc.Respond(&raft.InstallSnapshotResponse{}, errLostState)
	case *raft.RequestVoteRequest:
		rpc.Respond(&raft.RequestVoteResponse{}, errLostState)
	case *raft.RequestPreVoteRequest:
		rpc.Respond(&raft.RequestPreVoteResponse{}, errLostState)
	case *raft.TimeoutNowRequest:
		rpc.Respond(&raft.TimeoutNowResponse{}, errLostState)
	default:
		rpc.Respond(nil, errLostState)
	}
	return true
}

func (g *Gate) note(h raft.RPCHeader) {
	id := string(h.ID)
	g.mu.Lock()
	g.callers = append([]string{id}, slices.DeleteFunc(g.callers, func(c string) bool { return c == id })...)
	g.mu.Unlock()
	select {
	case g.called <- struct{}{}:
	default:
	}
}

// Leaders are the members that have called as leaders, the last one first.
func (g *Gate) Leaders() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.callers)
}
