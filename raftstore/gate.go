package raftstore

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/datadir"
)

// gate stands before raft in a member that has lost its state. raft's promises
// rest on what a voter has written down: one that forgets entries it had
// acknowledged, or whom it voted for, can let acknowledged writes be lost. So
// nothing reaches raft, and nothing is answered in its name, until the leader
// has taken this member out of the membership, by a majority of the others.
// After that it comes back like a new machine.
//
//	state lost ──▶ shut ──(removed, by a leader's word)──▶ open
//
// The gate learns who leads from the calls that it refuses.
type gate struct {
	shut atomic.Bool
	in   chan raft.RPC // what raft consumes; nil: the gate was never shut

	mu      sync.Mutex
	callers []string // members that have called as leaders, the last one first
	refused int      // calls
	called  chan struct{}
}

var errAmnesia = errors.New("this member has lost its state and must be taken out of the membership first")

func newGate(shut bool) *gate {
	g := &gate{called: make(chan struct{}, 1)}
	g.shut.Store(shut)
	if shut {
		g.in = make(chan raft.RPC)
	}
	return g
}

// run hands the transport's calls on, or refuses them. It ends with ctx.
func (g *gate) run(ctx context.Context, from <-chan raft.RPC) {
	for {
		select {
		case rpc := <-from:
			if g.refuse(rpc) {
				continue
			}
			select {
			case g.in <- rpc:
			case <-ctx.Done():
				return
			}
		case <-ctx.Done():
			return
		}
	}
}

// refuse answers a call if the gate is shut.
func (g *gate) refuse(rpc raft.RPC) bool {
	if !g.shut.Load() {
		return false
	}
	g.mu.Lock()
	g.refused++
	g.mu.Unlock()
	switch c := rpc.Command.(type) {
	case *raft.AppendEntriesRequest:
		g.note(c.RPCHeader)
		rpc.Respond(&raft.AppendEntriesResponse{}, errAmnesia)
	case *raft.InstallSnapshotRequest:
		g.note(c.RPCHeader)
		// The stream cannot be used again after an unread snapshot; the caller
		// opens another one.
		rpc.Respond(&raft.InstallSnapshotResponse{}, errAmnesia)
	case *raft.RequestVoteRequest:
		rpc.Respond(&raft.RequestVoteResponse{}, errAmnesia)
	case *raft.RequestPreVoteRequest:
		rpc.Respond(&raft.RequestPreVoteResponse{}, errAmnesia)
	case *raft.TimeoutNowRequest:
		rpc.Respond(&raft.TimeoutNowResponse{}, errAmnesia)
	default:
		rpc.Respond(nil, errAmnesia)
	}
	return true
}

func (g *gate) note(h raft.RPCHeader) {
	id := string(h.ID)
	g.mu.Lock()
	g.callers = append([]string{id}, slices.DeleteFunc(g.callers, func(c string) bool { return c == id })...)
	g.mu.Unlock()
	select {
	case g.called <- struct{}{}:
	default:
	}
}

func (g *gate) leaders() []string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Clone(g.callers)
}

// rejoin leads a member that has lost its state back into the membership.
func (s *Store) rejoin() {
	s.untilDone("be taken out of the membership", func(ctx context.Context, leader string) error {
		return s.changeThere(ctx, leader, remove, s.cfg.ID, nil)
	})
	if s.ctx.Err() != nil {
		return
	}
	// From here on it is a machine like one that never was a member.
	if err := errors.Join(os.Remove(s.path(lostStateFile)), datadir.SyncDir(s.cfg.Dir)); err != nil {
		s.cfg.Logger.Error("a member that was replaced stays out of the store until it is started again", "err", err)
		return
	}
	s.gate.shut.Store(false)
	s.cfg.Logger.Info("taken out of the membership, coming back as a new member")
	s.untilDone("be added to the membership", func(ctx context.Context, leader string) error {
		if ms, err := s.Members(); err == nil && slices.ContainsFunc(ms, func(m Member) bool { return m.ID == s.cfg.ID }) {
			return nil // somebody else saw to it
		}
		return s.changeThere(ctx, leader, addNonvoter, s.cfg.ID, nil)
	})
}

// untilDone asks those who have called as leaders, the latest first, until one
// of them has done it or the store closes.
func (s *Store) untilDone(what string, ask func(ctx context.Context, leader string) error) {
	said := ""
	for {
		for _, leader := range s.gate.leaders() {
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
		case <-s.gate.called:
		case <-time.After(time.Second):
		case <-s.ctx.Done():
			return
		}
	}
}

// votes reports whether this member may be counted as a voter by whoever asks:
// it knows itself to be one.
func (s *Store) votes() bool {
	if s.gate.shut.Load() {
		return false
	}
	ms, err := s.Members()
	return err == nil && slices.Contains(ms, Member{ID: s.cfg.ID, Voter: true})
}
