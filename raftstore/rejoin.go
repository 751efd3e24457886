package raftstore

import (
	"io"
	"sync"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/disk"
)

// rejoinTransport is raft's transport without raft's back-off for members that were
// away.
//
// When a member does not answer, raft's replication waits twice as long before
// each further attempt, up to 20 s; a member that comes back after a minute
// would get its log that much later, and could neither read nor be Ready.
// Heartbeats go on all the while at a short interval. So a failed replication
// call returns only when a heartbeat was answered: then it was the one failure
// of the whole absence.
type rejoinTransport struct {
	*raft.NetworkTransport
	s *Store

	mu       sync.Mutex
	met      map[raft.ServerID]chan struct{} // closed at the next answered heartbeat
	removed  map[raft.ServerID]bool          // nobody waits for these
	absences int                             // how often a call had to wait
}

func newRejoinTransport(t *raft.NetworkTransport, s *Store) *rejoinTransport {
	return &rejoinTransport{
		NetworkTransport: t, s: s,
		met: make(map[raft.ServerID]chan struct{}), removed: make(map[raft.ServerID]bool),
	}
}

// AppendEntries implements raft.Transport.
func (p *rejoinTransport) AppendEntries(id raft.ServerID, target raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	err := disk.ErrStuck
	if !p.s.disk.Stuck() {
		err = p.NetworkTransport.AppendEntries(id, target, req, resp)
	}
	switch {
	case isHeartbeat(req):
		if err == nil {
			p.answered(id)
		}
	case err != nil:
		p.wait(id)
	}
	return err
}

// InstallSnapshot implements raft.Transport.
func (p *rejoinTransport) InstallSnapshot(id raft.ServerID, target raft.ServerAddress, req *raft.InstallSnapshotRequest, resp *raft.InstallSnapshotResponse, data io.Reader) error {
	err := p.NetworkTransport.InstallSnapshot(id, target, req, resp, data)
	if err != nil {
		p.wait(id)
	}
	return err
}

// isHeartbeat tells raft's heartbeats from its replication, as raft itself
// does.
func isHeartbeat(req *raft.AppendEntriesRequest) bool {
	return len(req.Entries) == 0 && req.PrevLogEntry == 0 && req.PrevLogTerm == 0 && req.LeaderCommitIndex == 0
}

func (p *rejoinTransport) answered(id raft.ServerID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.release(id)
}

// setRemoved notes that a member was removed, or that it is one again. raft
// ends its heartbeats to a removed member only after the call that waits for
// one has returned.
func (p *rejoinTransport) setRemoved(id raft.ServerID, removed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.removed[id] = removed
	if removed {
		p.release(id)
	}
}

// release lets the calls to a member return. mu is held.
func (p *rejoinTransport) release(id raft.ServerID) {
	if ch := p.met[id]; ch != nil {
		close(ch)
		delete(p.met, id)
	}
}

// wait returns when the member answers again, when another leads, or when the
// store closes.
func (p *rejoinTransport) wait(id raft.ServerID) {
	_, changed := p.s.leader.current()
	if p.s.raftPtr.Load() == nil || !p.s.leads() {
		return
	}
	p.mu.Lock()
	if p.removed[id] {
		p.mu.Unlock()
		return
	}
	p.absences++
	ch := p.met[id]
	if ch == nil {
		ch = make(chan struct{})
		p.met[id] = ch
	}
	p.mu.Unlock()
	select {
	case <-ch:
	case <-changed:
	case <-p.s.ctx.Done():
	}
}

// Consumer implements raft.Transport.
func (p *rejoinTransport) Consumer() <-chan raft.RPC {
	if in := p.s.gate.in; in != nil {
		return in
	}
	return p.NetworkTransport.Consumer()
}

// SetHeartbeatHandler implements raft.Transport.
func (p *rejoinTransport) SetHeartbeatHandler(handle func(raft.RPC)) {
	p.NetworkTransport.SetHeartbeatHandler(func(rpc raft.RPC) {
		if !p.s.gate.refuse(rpc) {
			handle(rpc)
		}
	})
}
