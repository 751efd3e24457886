package raftside

import (
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// ahead sends the leader's entries to the voters while its own log writes them
// (Ongaro's thesis, 10.2.1). raft itself writes first and sends after that: two
// syncs, one after the other, for every write of a single client.
//
// What it sends is an ordinary AppendEntries message of this term, behind the
// last entry that this member's log has. Its answer is ignored: raft sends the
// same entries itself once they are on this member's disk, the follower finds
// that it has them, and only that answer counts. The leader counts itself when
// its own write has returned, as in raft without this. If the leader crashes
// before that, followers may hold entries that it has lost. That is safe: it can
// lead again only in a later term, so no other entries with the same index and
// term can exist.
//
// Entries go over the network twice, so only small ones of a disk whose syncs
// take longer than that are sent.
type ahead struct {
	p    *Transport
	wg   sync.WaitGroup
	last struct{ index, term uint64 } // of the last entry written; raft's main loop's own

	mu     sync.Mutex
	closed bool
	busy   map[raft.ServerID]bool
}

// aheadBytes is how much is sent twice at most: what few clients write. With
// many, syncs are shared anyhow, and processors are what is short.
const aheadBytes = 16 << 10

// SlowSync is from when on a sync is worth a second message.
const SlowSync = time.Millisecond

// Wrote notes the last entry that this member's log has.
func (p *Transport) Wrote(es []*raft.Log) {
	e := es[len(es)-1]
	p.ahead.last.index, p.ahead.last.term = e.Index, e.Term
}

// Send begins to send entries that are about to be written, if this member leads
// and it is worth it. It does not wait.
func (p *Transport) Send(es []*raft.Log) {
	a, r := &p.ahead, p.leading()
	if r == nil || p.cfg.Disk.Usually() < p.cfg.SlowSync {
		return
	}
	term, size := r.CurrentTerm(), 0
	for i, e := range es {
		size += len(e.Data)
		if e.Type != raft.LogCommand || e.Term != term || e.Index != a.last.index+1+uint64(i) || size > aheadBytes {
			return
		}
	}
	cf := r.GetConfiguration()
	if cf.Error() != nil {
		return
	}
	req := &raft.AppendEntriesRequest{
		RPCHeader:         p.header(),
		Term:              term,
		Leader:            []byte(p.cfg.ID),
		PrevLogEntry:      a.last.index,
		PrevLogTerm:       a.last.term,
		Entries:           es,
		LeaderCommitIndex: r.CommitIndex(),
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, m := range cf.Configuration().Servers {
		if a.closed || a.busy[m.ID] || m.Suffrage != raft.Voter || string(m.ID) == p.cfg.ID {
			continue
		}
		a.busy[m.ID] = true
		a.wg.Add(1)
		go a.tell(m, req)
	}
}

func (a *ahead) tell(m raft.Server, req *raft.AppendEntriesRequest) {
	defer a.wg.Done()
	var resp raft.AppendEntriesResponse
	if err := a.p.NetworkTransport.AppendEntries(m.ID, m.Address, req, &resp); err != nil {
		a.p.cfg.Logger.Debug("entries sent ahead", "peer", string(m.ID), "err", err)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.busy[m.ID] = false
}

func (a *ahead) close() {
	a.mu.Lock()
	a.closed = true
	a.mu.Unlock()
}
