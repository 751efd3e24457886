package raftstore

import (
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// leads says whether raft takes commands from this member right now. Being
// wrong about it costs a detour, not safety.
func (s *Store) leads() bool { return s.raft().State() == raft.Leader }

func (s *Store) isCurrentTerm(term uint64) bool {
	r := s.raftPtr.Load()
	return r != nil && r.CurrentTerm() == term
}

// IsLeader reports whether this member leads and has applied everything that
// was committed before its term.
func (s *Store) IsLeader() bool {
	term := s.readyTerm.Load()
	return term != 0 && s.leads() && s.raft().CurrentTerm() == term
}

// Leader is the ID of the leader as far as this member has heard; "" if there
// is none.
func (s *Store) Leader() string {
	id, _ := s.leader.Current()
	return id
}

// Answered returns when each other member last answered a heartbeat that this
// member sent as leader, now or in an earlier term, by id. Heartbeats go out several
// times a second.
func (s *Store) Answered() map[string]time.Time {
	out := map[string]time.Time{}
	for id, at := range s.raftSide.Answered() {
		out[string(id)] = at
	}
	return out
}

// LeaderCh delivers true when this member has become leader and has applied
// everything committed before, and false when it no longer is. The values
// alternate, beginning with true; a loss is never skipped, however slow the
// reader, though several in a row show as one. It is meant for one reader and
// is closed by Close.
func (s *Store) LeaderCh() <-chan bool { return s.leadership.Ch() }

// leaderLoop follows raft's state until the store closes. It looks at the
// present state whenever something was observed, so that no order of
// observations can mislead it.
func (s *Store) leaderLoop(observed <-chan raft.Observation) {
	for {
		s.lookAtLeader()
		var again <-chan time.Time
		if s.leads() && s.readyTerm.Load() == 0 {
			// The term's first command did not get through, and nothing that
			// will be observed need follow from that.
			again = time.After(retryAfter)
		}
		select {
		case <-observed:
		case <-again:
		case <-s.ctx.Done():
			s.readyTerm.Store(0)
			s.leadership.Set(0)
			return
		}
	}
}

func (s *Store) lookAtLeader() {
	r := s.raft()
	_, id := r.LeaderWithID()
	term := r.CurrentTerm()
	was, _ := s.leader.Current()
	if s.leader.Set(string(id), term) {
		if was != "" && id == "" {
			s.leader.Silent(s.lastHeard(was))
		}
		s.cfg.Logger.Info("leader changed", "leader", string(id), "term", term)
		if fn := s.cfg.Events.LeaderChanged; fn != nil {
			fn(string(id), term)
		}
	}
	ready := s.readyTerm.Load()
	if ready != 0 && (ready != term || r.State() != raft.Leader) {
		s.readyTerm.Store(0)
		s.leadership.Set(0)
		s.clock.Follow()
		s.cfg.Logger.Info("no longer leading", "term", ready)
		ready = 0
	}
	if ready == 0 && r.State() == raft.Leader {
		s.beginTerm(term)
	}
}

// lastHeard is when a leader that has just been lost had last been heard, or, if it is
// this member, can last have been sure of a majority.
func (s *Store) lastHeard(leader string) time.Time {
	if leader == s.cfg.ID {
		return time.Now().Add(-s.cfg.LeaderLease)
	}
	if heard := s.raft().LastContact(); !heard.IsZero() {
		return heard
	}
	return time.Now()
}

// beginTerm puts the term's first command into the log and waits until it is
// applied here: then so is all that was committed before, the commit index is
// this term's, and what follows in the log are entries that the keyspace sees
// (raft's no-op at the beginning of the term is not one).
func (s *Store) beginTerm(term uint64) {
	s.clock.Lead(s.keyspace().Time())
	cmd := mvcc.Command{
		Type:   mvcc.CmdLimits,
		ID:     s.commands.id(),
		Limits: s.cfg.limits(),
	}
	entry := wire.AppendBatch(nil, s.clock.Millis(), [][]byte{wire.AppendCommand(nil, &cmd)})
	r := s.raft()
	err := s.errorOf(r.Apply(entry, 0))
	if err != nil || r.State() != raft.Leader || r.CurrentTerm() != term {
		// A change of state will be, or was, observed: we are called again.
		s.clock.Follow()
		s.cfg.Logger.Info("lost the term before it began", "term", term, "err", err)
		return
	}
	// The state may have come from a log that was applied only now.
	s.clock.Lead(s.keyspace().Time())
	s.readyTerm.Store(term)
	s.leadership.Set(term)
	s.cfg.Logger.Info("leading", "term", term)
}
