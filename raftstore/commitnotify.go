package raftstore

import (
	"sync"
	"time"

	"github.com/hashicorp/raft"
)

// commitNotifier tells the followers of a commit at once. raft itself tells them with
// the next entries, or after CommitTimeout: a write that was forwarded, and
// every watch on a follower, would wait for that.
//
// What it sends is an ordinary AppendEntries message without entries, of the
// kind the leader may send at any time: the entry at index, of this very term,
// is committed. A follower that does not hold it yet refuses; nothing else
// comes of it but that it is told again a moment later, for as long as raft
// would take to tell it. The slowest follower is in that place often: the
// others are a majority without it.
type commitNotifier struct {
	s  *Store
	wg sync.WaitGroup

	mu     sync.Mutex
	closed bool
	peers  map[raft.ServerID]*notified
}

// notified is what one follower is being told.
type notified struct {
	busy        bool
	index, term uint64 // to be told next
}

func (n *commitNotifier) committed(index, term uint64) {
	r := n.s.raftPtr.Load()
	if r == nil || r.State() != raft.Leader || r.CurrentTerm() != term {
		return
	}
	cf := r.GetConfiguration()
	if cf.Error() != nil {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return
	}
	for _, m := range cf.Configuration().Servers {
		if string(m.ID) == n.s.cfg.ID {
			continue
		}
		p := n.peers[m.ID]
		if p == nil {
			p = &notified{}
			n.peers[m.ID] = p
		}
		p.index, p.term = index, term
		if !p.busy {
			p.busy = true
			n.wg.Add(1)
			go n.tell(m, p)
		}
	}
}

func (n *commitNotifier) tell(m raft.Server, p *notified) {
	defer n.wg.Done()
	told := uint64(0)
	var refused time.Duration // how long it has refused for
	for {
		n.mu.Lock()
		index, term := p.index, p.term
		if n.closed || index == told {
			p.busy = false
			n.mu.Unlock()
			return
		}
		n.mu.Unlock()
		told = index
		self := []byte(n.s.cfg.ID)
		req := raft.AppendEntriesRequest{
			RPCHeader:         raft.RPCHeader{ProtocolVersion: raft.ProtocolVersionMax, ID: self, Addr: self},
			Term:              term,
			Leader:            self,
			PrevLogEntry:      index,
			PrevLogTerm:       term,
			LeaderCommitIndex: index,
		}
		var resp raft.AppendEntriesResponse
		if err := n.s.transport.AppendEntries(m.ID, m.Address, &req, &resp); err != nil {
			n.s.cfg.Logger.Debug("notify of a commit", "peer", string(m.ID), "err", err)
			continue
		}
		if resp.Success || resp.Term != term || refused >= raftCommitPause {
			refused = 0
			continue
		}
		pause := max(notifyAgain, refused/2)
		select {
		case <-time.After(pause):
		case <-n.s.ctx.Done():
		}
		refused += pause
		told = 0
	}
}

// notifyAgain is the first pause before a follower that did not hold the entry
// is told again: about as long as it takes to sync one.
const notifyAgain = 500 * time.Microsecond

func (n *commitNotifier) close() {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
}

// wait returns when nothing is being told any more; the streams are closed.
func (n *commitNotifier) wait() { n.wg.Wait() }
