package raftstore

import (
	"sync"
	"time"

	"github.com/clusterd/clusterd/raftstore/wire"
)

// entriesInFlight is how many log entries the leader has under way at once:
// while one is being written and replicated the next one gathers commands, and
// a third would only make both smaller.
const entriesInFlight = 2

// proposal is one encoded command on its way into a log entry.
type proposal struct {
	raw []byte
	// failed is called once if the command did not get through, and never if it
	// did: its outcome is then found in the log. It must not block.
	failed func(verdict)
}

// proposals gathers commands into log entries (group commit): one fsync for
// all that came while the one before was under way.
type proposals struct {
	mu    sync.Mutex
	queue []proposal
	wake  chan struct{}
	// late are those that may wait. They join the queue behind the next that may not,
	// or when the first of them has waited for gatherFor.
	late      []proposal
	gatherFor time.Duration
	gathered  *time.Timer // nil: none of them waits
}

func newProposals(gatherFor time.Duration) *proposals {
	return &proposals{wake: make(chan struct{}, 1), gatherFor: gatherFor}
}

// add queues p without blocking. The number of waiting commands is bounded by
// what each member may have under way.
func (p *proposals) add(ps ...proposal) {
	p.mu.Lock()
	p.queue = append(p.queue, ps...)
	p.joinLate()
	p.mu.Unlock()
	p.poke()
}

// addLate is add for one that may wait.
func (p *proposals) addLate(one proposal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.late = append(p.late, one)
	if p.gathered == nil {
		p.gathered = time.AfterFunc(p.gatherFor, func() { p.add() })
	}
}

// joinLate lets those that wait into the queue. mu is held.
func (p *proposals) joinLate() {
	if p.gathered == nil {
		return
	}
	p.gathered.Stop()
	p.queue = append(p.queue, p.late...)
	p.late, p.gathered = nil, nil
}

func (p *proposals) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// take removes the next entry's commands from the queue.
func (p *proposals) take(maxCommands, maxBytes int) []proposal {
	p.mu.Lock()
	defer p.mu.Unlock()
	n, size := 0, 0
	for n < len(p.queue) && n < maxCommands {
		size += wire.Weight(p.queue[n].raw)
		if n > 0 && size > maxBytes {
			break
		}
		n++
	}
	batch := p.queue[:n:n]
	p.queue = p.queue[n:]
	if len(p.queue) == 0 {
		p.queue = nil
	} else {
		p.poke()
	}
	return batch
}

// proposeLoop is one of entriesInFlight loops that each carry one log entry at
// a time through raft.
func (s *Store) proposeLoop() {
	for {
		select {
		case <-s.commands.proposals.wake:
		case <-s.ctx.Done():
			s.commands.proposals.add() // those that may wait, too
			for _, p := range s.commands.proposals.take(1<<30, 1<<40) {
				p.failed(refused)
			}
			return
		}
		for {
			batch := s.commands.proposals.take(s.cfg.MaxBatchCommands, s.cfg.MaxBatchBytes)
			if len(batch) == 0 {
				break
			}
			s.propose(batch)
		}
	}
}

// enqueue hands a command to the loops, at once or after a while.
func (s *Store) enqueue(p proposal) {
	if s.cfg.MayWait != nil {
		if origin, key, ok := wire.Put(p.raw); ok && s.cfg.MayWait(origin, key) {
			s.commands.proposals.addLate(p)
			return
		}
	}
	s.commands.proposals.add(p)
}

func (s *Store) propose(batch []proposal) {
	start := time.Now()
	raws := make([][]byte, len(batch))
	size := 64
	for i := range batch {
		raws[i] = batch[i].raw
		size += len(raws[i]) + 8
	}
	entry := wire.AppendBatch(make([]byte, 0, size), s.clock.Millis(), raws)
	// No timeout, or a command could be called refused that is in the log.
	if err := s.errorOf(s.raft().Apply(entry, 0)); err != nil {
		v := judge(err)
		s.cfg.Logger.Debug("log entry did not get through", "commands", len(batch), "err", err)
		for _, p := range batch {
			p.failed(v)
		}
		return
	}
	if fn := s.cfg.Events.Committed; fn != nil {
		fn(len(batch), len(entry), time.Since(start))
	}
}
