// Package raftside is what a member puts around hashicorp/raft: a transport that
// does what raft leaves undone (Transport), a gate before a raft whose state is
// lost (Gate), its lines in slog (NewLogger) and an end for its futures (ErrorOf).
// Nothing of raft's safety rests on it, and it knows no Store.
package raftside

import (
	"io"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/disk"
)

// Transport is raft's transport. It notifies followers of a commit (Committed)
// and entries that are still being written (Send), is silent while the disk is
// stuck, and does without raft's back-off for members that were away:
//
// When a member does not answer, raft's replication waits twice as long before
// each further attempt, up to 20 s; a member that comes back after a minute
// would get its log that much later, and could neither read nor be Ready.
// Heartbeats go on all the while at a short interval. So a failed replication
// call returns only when a heartbeat was answered: then it was the one failure
// of the whole absence.
type Transport struct {
	*raft.NetworkTransport
	Gate *Gate

	cfg    Config
	raft   atomic.Pointer[raft.Raft] // nil: it has not begun
	commit commitNotifier
	ahead  ahead
	votes  sync.WaitGroup
	beats  heartbeats
	gaps   gaps

	mu       sync.Mutex
	met      map[raft.ServerID]chan struct{} // closed at the next answered heartbeat
	heard    map[raft.ServerID]time.Time     // when one was answered last
	removed  map[raft.ServerID]bool          // no call waits for these
	absences int                             // how often a call had to wait
}

// Config says what a Transport works with. All fields are required.
type Config struct {
	ID      string // this member's
	Streams raft.StreamLayer
	Logger  *slog.Logger
	Disk    *disk.Disk
	// Changed returns a channel that is closed when another leads.
	Changed func() <-chan struct{}
	Done    <-chan struct{} // closed when the member stops
	// SlowSync is from when on a sync of the log is worth a second message.
	SlowSync time.Duration
	// Heartbeat is the shortest pause between two heartbeats to a member; the longest
	// is twice that.
	Heartbeat time.Duration
	Lost      bool // the gate is shut
}

const (
	rpcTimeout = 10 * time.Second // of one of raft's RPCs
	poolSize   = 4                // connections to a member that raft keeps for later
)

// New makes a transport for a raft that is yet to be made, see Begin.
func New(cfg Config) *Transport {
	p := &Transport{
		NetworkTransport: raft.NewNetworkTransportWithConfig(&raft.NetworkTransportConfig{
			Stream: cfg.Streams, MaxPool: poolSize, Timeout: rpcTimeout, Logger: NewLogger(cfg.Logger),
		}),
		cfg: cfg, Gate: newGate(cfg.Lost),
		met: make(map[raft.ServerID]chan struct{}), heard: make(map[raft.ServerID]time.Time), removed: make(map[raft.ServerID]bool),
	}
	p.commit = commitNotifier{p: p, peers: make(map[raft.ServerID]*notified)}
	p.ahead = ahead{p: p, busy: make(map[raft.ServerID]bool)}
	return p
}

// Begin tells it the raft that it is the transport of.
func (p *Transport) Begin(r *raft.Raft) { p.raft.Store(r) }

// leading is raft while this member leads, else nil.
func (p *Transport) leading() *raft.Raft {
	if r := p.raft.Load(); r != nil && r.State() == raft.Leader {
		return r
	}
	return nil
}

// Stop begins nothing of its own any more. What is under way ends with the
// streams.
func (p *Transport) Stop() {
	p.commit.close()
	p.ahead.close()
}

// Wait returns when nothing of its own is under way.
func (p *Transport) Wait() {
	p.commit.wg.Wait()
	p.ahead.wg.Wait()
	p.votes.Wait()
}

// header is that of what this member sends in raft's name.
func (p *Transport) header() raft.RPCHeader {
	self := []byte(p.cfg.ID)
	return raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax, ID: self, Addr: self}
}

// StandForElection makes this member a candidate at once. To raft it is the
// message with which a leader hands over.
func (p *Transport) StandForElection() error {
	req := raft.TimeoutNowRequest{RPCHeader: p.header()}
	return p.TimeoutNow(raft.ServerID(p.cfg.ID), raft.ServerAddress(p.cfg.ID), &req, &raft.TimeoutNowResponse{})
}

// GiveUpElection makes this member, a candidate whose election does not end, a
// follower again, in the term after. raft would wait for its own timeout. To raft it is
// a request for a vote from a candidate whose log is empty: it is refused, and a member
// that leads, or has a leader, takes no notice of it.
func (p *Transport) GiveUpElection(term uint64) error {
	req := raft.RequestVoteRequest{RPCHeader: raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax}, Term: term + 1}
	return p.NetworkTransport.RequestVote(raft.ServerID(p.cfg.ID), raft.ServerAddress(p.cfg.ID), &req, &raft.RequestVoteResponse{})
}

// AppendEntries implements raft.Transport.
func (p *Transport) AppendEntries(id raft.ServerID, target raft.ServerAddress, req *raft.AppendEntriesRequest, resp *raft.AppendEntriesResponse) error {
	p.beats.leads(req.Term)
	err := disk.ErrStuck
	if !p.cfg.Disk.Stuck() {
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
func (p *Transport) InstallSnapshot(id raft.ServerID, target raft.ServerAddress, req *raft.InstallSnapshotRequest, resp *raft.InstallSnapshotResponse, data io.Reader) error {
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

func (p *Transport) answered(id raft.ServerID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.heard[id] = time.Now()
	p.release(id)
}

// Answered returns when each member answered a heartbeat of this one last, also
// in an earlier term.
func (p *Transport) Answered() map[raft.ServerID]time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return maps.Clone(p.heard)
}

// SetRemoved notes that a member was removed, or that it is one again. raft
// ends its heartbeats to a removed member only after the call that waits for
// one has returned.
func (p *Transport) SetRemoved(id raft.ServerID, removed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.removed[id] = removed
	if removed {
		delete(p.heard, id)
		p.release(id)
	}
}

// release lets the calls to a member return. mu is held.
func (p *Transport) release(id raft.ServerID) {
	if ch := p.met[id]; ch != nil {
		close(ch)
		delete(p.met, id)
	}
}

// wait returns when the member answers again, when another leads, or when the
// store closes.
func (p *Transport) wait(id raft.ServerID) {
	changed := p.cfg.Changed()
	if p.leading() == nil {
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
	case <-p.cfg.Done:
	}
}

// Absences is how often replication had to wait for a member.
func (p *Transport) Absences() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.absences
}

// Consumer implements raft.Transport.
func (p *Transport) Consumer() <-chan raft.RPC {
	if in := p.Gate.in; in != nil {
		return in
	}
	return p.NetworkTransport.Consumer()
}

// SetHeartbeatHandler implements raft.Transport.
func (p *Transport) SetHeartbeatHandler(handle func(raft.RPC)) {
	p.NetworkTransport.SetHeartbeatHandler(func(rpc raft.RPC) {
		if !p.Gate.refuse(rpc) {
			p.gaps.note(rpc, time.Now())
			handle(rpc)
		}
	})
}
