package raftstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/peer"
)

// Members returns the configuration as this member knows it.
func (s *Store) Members() ([]Member, error) {
	f := s.raft().GetConfiguration()
	if err := f.Error(); err != nil {
		return nil, fmt.Errorf("read the members: %w", err)
	}
	var ms []Member
	for _, m := range f.Configuration().Servers {
		ms = append(ms, Member{ID: string(m.ID), Voter: m.Suffrage == raft.Voter})
	}
	return ms, nil
}

// memberOp is a change of the configuration. Numbers are part of the call
// protocol.
type memberOp byte

const (
	addVoter    memberOp = 1
	addNonvoter memberOp = 2
	remove      memberOp = 3
	transfer    memberOp = 4
	demote      memberOp = 5
)

// AddVoter makes id a voting member; a non-voter is promoted. Like the other
// changes of membership it can be asked of any member and returns once the
// change is committed.
func (s *Store) AddVoter(ctx context.Context, id string) error { return s.change(ctx, addVoter, id) }

// AddNonvoter makes id a member that receives everything and does not vote. A
// voter stays one.
func (s *Store) AddNonvoter(ctx context.Context, id string) error {
	return s.change(ctx, addNonvoter, id)
}

// DemoteVoter takes id's vote away; it goes on receiving everything. A leader
// hands over first.
func (s *Store) DemoteVoter(ctx context.Context, id string) error { return s.change(ctx, demote, id) }

// RemoveMember takes id out of the configuration; a leader hands over first.
// Removing one that is not in it is no error; removing the last voter is
// ErrLastVoter. Every change that would leave the store without a majority of
// voters that answer is refused with a *QuorumError (in its words, if another
// member leads).
func (s *Store) RemoveMember(ctx context.Context, id string) error {
	return s.change(ctx, remove, id)
}

// TransferLeadership makes the leader hand over to another voter.
func (s *Store) TransferLeadership(ctx context.Context) error { return s.change(ctx, transfer, "") }

// TransferLeadershipTo makes this member hand over to the voter id. It asks no other member: if this
// one does not lead, nothing happens, and it returns ErrNoLeader.
func (s *Store) TransferLeadershipTo(ctx context.Context, id string) error {
	ms, err := s.Members()
	if err != nil {
		return err
	}
	if id == s.cfg.ID || !slices.Contains(ms, Member{ID: id, Voter: true}) {
		return fmt.Errorf("%w: leadership cannot go to %q, which is no other voter", ErrInvalid, id)
	}
	if err := s.changeHere(ctx, transfer, id); !elsewhere(err) {
		return err
	}
	return ErrNoLeader
}

func (s *Store) change(ctx context.Context, op memberOp, id string) error {
	if id == "" && op != transfer {
		return fmt.Errorf("%w: empty member id", ErrInvalid)
	}
	deadline := time.Now().Add(s.cfg.LeaderWait)
	for {
		leader, changed := s.leader.Current()
		var err error
		switch leader {
		case "":
			err = ErrNoLeader
		case s.cfg.ID:
			err = s.changeHere(ctx, op, id)
		default:
			err = s.changeThere(ctx, leader, op, id, changed)
		}
		// These are certain not to have happened, and all changes can be
		// repeated.
		if !elsewhere(err) && !errors.Is(err, ErrNoLeader) {
			return err
		}
		left := time.Until(deadline)
		if left <= 0 {
			return ErrNoLeader
		}
		if leader != "" {
			left = min(left, retryAfter)
		}
		select {
		case <-changed:
		case <-time.After(left):
		case <-ctx.Done():
			return ctx.Err()
		case <-s.ctx.Done():
			return ErrClosed
		}
	}
}

// elsewhere reports whether the change was not made because this member does
// not lead, or not for long.
func elsewhere(err error) bool {
	return errors.Is(err, raft.ErrNotLeader) || errors.Is(err, raft.ErrLeadershipTransferInProgress)
}

// changeHere does it as the leader.
func (s *Store) changeHere(ctx context.Context, op memberOp, id string) (err error) {
	timeout := s.cfg.LeaderWait
	if d, ok := ctx.Deadline(); ok {
		timeout = max(time.Until(d), time.Millisecond)
	}
	// The check and the change are one step: two that pass the check side by side
	// could together take the majority away.
	select {
	case s.changing <- struct{}{}:
	case <-ctx.Done():
		return ctx.Err()
	case <-s.ctx.Done():
		return ErrClosed
	}
	if err := s.checkChange(ctx, op, id); err != nil {
		<-s.changing
		return err
	}
	r := s.raft()
	if (op == remove || op == demote) && id == s.cfg.ID {
		// It could not see its own change committed.
		op, id = transfer, ""
		defer func() {
			if err == nil {
				err = raft.ErrNotLeader // the next leader is asked
			}
		}()
	}
	done := make(chan error, 1)
	s.start(func() {
		defer func() { <-s.changing }() // also when nobody waits for the end any more
		var f raft.Future
		switch op {
		case addVoter:
			s.raftSide.SetRemoved(raft.ServerID(id), false)
			f = r.AddVoter(raft.ServerID(id), raft.ServerAddress(id), 0, timeout)
		case addNonvoter:
			s.raftSide.SetRemoved(raft.ServerID(id), false)
			f = r.AddNonvoter(raft.ServerID(id), raft.ServerAddress(id), 0, timeout)
		case remove:
			f = r.RemoveServer(raft.ServerID(id), 0, timeout)
		case demote:
			f = r.DemoteVoter(raft.ServerID(id), 0, timeout)
		case transfer:
			if id == "" {
				f = r.LeadershipTransfer()
			} else {
				f = r.LeadershipTransferToServer(raft.ServerID(id), raft.ServerAddress(id))
			}
		default:
			done <- fmt.Errorf("%w: membership change %d", ErrInvalid, op)
			return
		}
		err := s.errorOf(f)
		if op == remove && err == nil {
			s.raftSide.SetRemoved(raft.ServerID(id), true)
		}
		done <- err
	})
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	case <-s.ctx.Done():
		return ErrClosed
	}
}

// changeThere asks the leader to do it.
func (s *Store) changeThere(ctx context.Context, leader string, op memberOp, id string, changed <-chan struct{}) error {
	done := make(chan error, 1)
	call := s.peers.Call(leader, peer.KindMember, append([]byte{byte(op)}, id...), func(f peer.Frame, _ bool, err error) {
		switch {
		case err != nil:
			// It may have happened; repeating it is harmless.
			err = ErrNoLeader
		case len(f.Body) > 0 && verdict(f.Body[0]) == refused:
			err = raft.ErrNotLeader
		case len(f.Body) > 0:
			err = errors.New(string(f.Body[1:]))
		}
		done <- err
	})
	defer s.peers.Forget(leader, call)
	select {
	case err := <-done:
		return err
	case <-changed:
		if op == transfer {
			return nil
		}
		return ErrNoLeader
	case <-ctx.Done():
		return ctx.Err()
	case <-s.ctx.Done():
		return ErrClosed
	}
}

// serveMember answers KindMember.
func (s *Store) serveMember(ctx context.Context, body []byte) []byte {
	if len(body) < 1 {
		return append([]byte{byte(notDecoded)}, "empty request"...)
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.LeaderWait)
	defer cancel()
	err := s.changeHere(ctx, memberOp(body[0]), string(body[1:]))
	switch {
	case err == nil:
		return nil
	case elsewhere(err):
		return []byte{byte(refused)}
	default:
		return append([]byte{byte(uncertain)}, err.Error()...)
	}
}
