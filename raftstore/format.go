package raftstore

import (
	"context"
	"fmt"
	"time"

	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/peer"
	"github.com/clusterd/clusterd/raftstore/settle"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// openFormat reads which format this member writes, see package settle. Each
// member decides for itself: a snapshot is its own, and a command comes into the
// log only when all members say that they take it.
func (s *Store) openFormat() error {
	last, err := s.state.Log.LastIndex()
	if err != nil {
		return err
	}
	newest, _, err := s.state.Snapshots.Latest()
	if err != nil {
		return err
	}
	if s.settling, err = settle.Open(s.cfg.Dir, s.state.Had, max(last, newest), s.cfg.FormatAfter, s.cfg.knows); err != nil {
		return err
	}
	s.state.Snapshots.Pack = func() bool { return !s.cfg.older && s.settling.Uses() >= settle.Packed }
	return nil
}

// formatLoop asks the others what they know until the newest format is in use.
func (s *Store) formatLoop() {
	if s.cfg.older {
		return
	}
	wait := min(s.cfg.lookAt, time.Second)
	for s.settling.Uses() < s.settling.Newest() {
		select {
		case <-time.After(wait):
		case <-s.ctx.Done():
			return
		}
		if s.keyspace().Index() > 0 && !s.raftSide.Gate.Shut() { // else it is no member yet
			s.lookAtFormats()
		}
		if s.settling.Uses() != 0 {
			wait = s.cfg.lookAt
		}
	}
}

func (s *Store) lookAtFormats() {
	s.founding.Lock()
	defer s.founding.Unlock()
	others, err := s.askFormats()
	if err != nil {
		return
	}
	changed, err := s.settling.Look(others, s.clock.Millis(), s.raft().LastIndex())
	if err != nil {
		s.cfg.Logger.Warn("look at the members' formats", "err", err)
	}
	if changed {
		s.cfg.Logger.Info("format of the store", "inUse", s.settling.Uses(), "newest", s.settling.Newest())
	}
}

// askFormats asks all other members of the configuration, voters or not.
func (s *Store) askFormats() ([]settle.Other, error) {
	ids, err := s.memberIDs()
	if err != nil {
		return nil, err
	}
	others := make(map[string]settle.Other, len(ids))
	var asked []string
	member := false
	for _, id := range ids {
		if id == s.cfg.ID {
			member = true
			continue
		}
		others[id] = settle.Other{ID: id}
		asked = append(asked, id)
	}
	if !member {
		return nil, fmt.Errorf("%s is no member", s.cfg.ID)
	}
	ctx, cancel := context.WithTimeout(s.ctx, 2*max(s.cfg.LeaderLease, s.cfg.ElectionTimeout))
	defer cancel()
	answers, forget := s.peers.Ask(asked, peer.KindFormats, nil)
	defer forget()
	for range asked {
		select {
		case a := <-answers:
			n, ok := a.Number()
			// Any other answer is that of a version which does not know the question.
			others[a.ID] = settle.Other{ID: a.ID, Answered: a.Err == nil, Knows: int(uint32(n)), Uses: int(n >> 32)}
			if !ok && a.Err == nil && a.Frame.Kind == peer.KindVerdict {
				others[a.ID] = settle.Other{ID: a.ID} // it does not know this member
			}
		case <-ctx.Done():
		}
	}
	all := make([]settle.Other, 0, len(asked))
	for _, id := range asked {
		all = append(all, others[id])
	}
	return all, nil
}

// formats is the answer to that.
func (s *Store) formats() uint64 { return uint64(s.settling.Uses())<<32 | uint64(s.settling.Newest()) }

// speaks is the highest number of a command that may be in this member's log; 0:
// it does not know the question. A member that has not decided on a format can
// read what the others write.
func (s *Store) speaks() uint64 {
	uses := s.settling.Uses()
	if uses == 0 {
		uses = s.settling.Newest()
	}
	switch {
	case s.cfg.older:
		return 0
	case uses < settle.Packed:
		return uint64(mvcc.CmdDelete) - 1
	case uses < settle.Patched:
		return uint64(mvcc.CmdDelete)
	}
	return wire.Newest
}
