package raftside

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
// is committed. A follower that does not hold it yet refuses it, without any other
// effect, and it is sent again a moment later, until raft's own message is due. That
// happens often to the slowest follower: the others are a majority without it.
type commitNotifier struct {
	p  *Transport
	wg sync.WaitGroup

	mu     sync.Mutex
	closed bool
	peers  map[raft.ServerID]*notified
}

// notified is what one follower is being sent.
type notified struct {
	busy        bool
	index, term uint64 // to be sent next
}

// CommitPause is raft's CommitTimeout: after it raft sends the commit index to an
// idle follower. It may be long, as commitNotifier has sent the index before.
const CommitPause = 200 * time.Millisecond

// Committed tells the followers that an entry has been committed, if this member
// leads in the term that it is of. It does not wait.
func (p *Transport) Committed(index, term uint64) {
	r := p.leading()
	if r == nil || r.CurrentTerm() != term {
		return
	}
	cf := r.GetConfiguration()
	if cf.Error() != nil {
		return
	}
	n := &p.commit
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.closed {
		return
	}
	for _, m := range cf.Configuration().Servers {
		if string(m.ID) == p.cfg.ID {
			continue
		}
		to := n.peers[m.ID]
		if to == nil {
			to = &notified{}
			n.peers[m.ID] = to
		}
		to.index, to.term = index, term
		if !to.busy {
			to.busy = true
			n.wg.Add(1)
			go n.tell(m, to)
		}
	}
}

func (n *commitNotifier) tell(m raft.Server, to *notified) {
	defer n.wg.Done()
	notified := uint64(0)
	var refused time.Duration // how long it has refused for
	for {
		n.mu.Lock()
		index, term := to.index, to.term
		if n.closed || index == notified {
			to.busy = false
			n.mu.Unlock()
			return
		}
		n.mu.Unlock()
		notified = index
		req := raft.AppendEntriesRequest{
			RPCHeader:         n.p.header(),
			Term:              term,
			Leader:            []byte(n.p.cfg.ID),
			PrevLogEntry:      index,
			PrevLogTerm:       term,
			LeaderCommitIndex: index,
		}
		var resp raft.AppendEntriesResponse
		if err := n.p.NetworkTransport.AppendEntries(m.ID, m.Address, &req, &resp); err != nil {
			n.p.cfg.Logger.Debug("notify of a commit", "peer", string(m.ID), "err", err)
			continue
		}
		if resp.Success || resp.Term != term || refused >= CommitPause {
			refused = 0
			continue
		}
		pause := max(notifyAgain, refused/2)
		select {
		case <-time.After(pause):
		case <-n.p.cfg.Done:
		}
		refused += pause
		notified = 0
	}
}

// notifyAgain is the first pause before a follower that did not hold the entry
// is sent again: about as long as it takes to sync one.
const notifyAgain = 500 * time.Microsecond

func (n *commitNotifier) close() {
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
}
