package raftstore

import (
	"context"
	"fmt"
	"slices"
	"time"
)

// rejoin leads a member that has lost its state back into the membership.
func (s *Store) rejoin() {
	s.untilDone("be taken out of the membership", func(ctx context.Context, leader string) error {
		return s.changeThere(ctx, leader, remove, s.cfg.ID, nil)
	})
	if s.ctx.Err() != nil {
		return
	}
	if err := s.state.Rejoined(); err != nil {
		s.cfg.Logger.Error("a member that was replaced stays out of the store until it is started again", "err", err)
		return
	}
	s.raftSide.Gate.Open()
	s.cfg.Logger.Info("taken out of the membership, coming back as a new member")
	s.untilDone("be added to the membership", func(ctx context.Context, leader string) error {
		if ms, err := s.Members(); err == nil && slices.ContainsFunc(ms, func(m Member) bool { return m.ID == s.cfg.ID }) {
			return nil // an earlier request added it
		}
		return s.changeThere(ctx, leader, addNonvoter, s.cfg.ID, nil)
	})
}

// untilDone asks those who have called as leaders, the latest first, until one
// of them has done it or the store closes.
func (s *Store) untilDone(what string, ask func(ctx context.Context, leader string) error) {
	said := ""
	for {
		for _, leader := range s.raftSide.Gate.Leaders() {
			ctx, cancel := context.WithTimeout(s.ctx, s.cfg.LeaderWait)
			err := ask(ctx, leader)
			cancel()
			if err == nil || s.ctx.Err() != nil {
				return
			}
			if text := err.Error(); text != said {
				said = text
				s.cfg.Logger.Warn(fmt.Sprintf("waiting to %s", what), "asked", leader, "err", err)
			}
		}
		select {
		case <-s.raftSide.Gate.Called():
		case <-time.After(time.Second):
		case <-s.ctx.Done():
			return
		}
	}
}

// votes reports whether this member may be counted as a voter by the asking member:
// it knows itself to be one.
func (s *Store) votes() bool {
	if s.raftSide.Gate.Shut() {
		return false
	}
	ms, err := s.Members()
	return err == nil && slices.Contains(ms, Member{ID: s.cfg.ID, Voter: true})
}
