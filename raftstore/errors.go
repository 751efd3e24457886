package raftstore

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/divergence"
	"github.com/clusterd/clusterd/raftstore/quota"
)

// Errors of the Store. Match with errors.Is. Reads and watches of old
// revisions return mvcc.ErrCompacted and mvcc.ErrFutureRevision.
var (
	// ErrNoLeader is returned when no leader answered in time; a write was
	// certainly not applied and never will be.
	ErrNoLeader = errors.New("no leader")
	// ErrUnknownOutcome is returned when a write was handed over and its
	// outcome was not known in time: it may have been applied, or be
	// applied later. When the caller's context ended, it matches that error
	// as well.
	ErrUnknownOutcome = errors.New("outcome of the write is unknown")
	// ErrTooLarge is returned, before anything is written, for a key, a value
	// or a transaction beyond the configured size.
	ErrTooLarge = errors.New("too large")
	// ErrNoSpace is returned for a write that stores something when a quota is
	// used up (then it is a *QuotaError) or the leader's disk is full. Deletes
	// pass the quotas.
	ErrNoSpace = quota.ErrNoSpace
	// ErrDiverged is why a store stops whose keyspace differs from what most
	// members made of the same log.
	ErrDiverged = divergence.Err
	// ErrClosed is returned by every call after Close.
	ErrClosed = errors.New("store is closed")
	// ErrStateExists is returned by Bootstrap when the data directory already
	// holds a member's state.
	ErrStateExists = errors.New("data folder already holds state")
	// ErrInvalid is returned for a request that makes no sense.
	ErrInvalid = errors.New("invalid request")
)

// NoLeaderError is the ErrNoLeader of a cluster that has had no leader for
// longer than elections take: a person has to start servers, or recover the
// cluster.
type NoLeaderError struct {
	For    time.Duration // how long there has been none
	Voters int           // in the configuration as this member knows it
}

func (e *NoLeaderError) Error() string {
	return fmt.Sprintf("no leader for %s: %d of %d voters are needed", e.For.Round(time.Second), e.Needed(), e.Voters)
}

// Needed is how many voters make a majority.
func (e *NoLeaderError) Needed() int { return e.Voters/2 + 1 }

// Is makes it an ErrNoLeader.
func (e *NoLeaderError) Is(target error) bool { return target == ErrNoLeader }

// minLeaderWait is what a call waits at least for a leader to appear.
const minLeaderWait = time.Second

// leaderWait is how long a call waits for a leader to appear. LeaderWait counts
// from the loss of the last one: in a cluster that stays without, calls are
// answered soon, and not each after as long as an election may take.
func (s *Store) leaderWait() time.Duration {
	return max(s.cfg.LeaderWait-s.leader.Without(), min(minLeaderWait, s.cfg.LeaderWait))
}

// noLeader is the error of a call that has waited for a leader in vain.
func (s *Store) noLeader() error {
	without := s.leader.Without()
	if without < s.cfg.LeaderWait {
		return ErrNoLeader
	}
	e := &NoLeaderError{For: without}
	cf := s.raft().GetConfiguration()
	if cf.Error() != nil {
		return ErrNoLeader
	}
	for _, member := range cf.Configuration().Servers {
		if member.Suffrage == raft.Voter {
			e.Voters++
		}
	}
	if e.Voters == 0 { // the cluster is being made, or this member was not added yet
		return ErrNoLeader
	}
	return e
}

// verdict is what the one who was given a command says when it did not get
// through. Numbers are part of the call protocol.
type verdict uint8

const (
	refused     verdict = 1 // certainly not in the log
	uncertain   verdict = 2 // may be in the log
	outOfSpace  verdict = 3 // disk full; may be in the log
	notDecoded  verdict = 4 // the command is malformed
	unavailable verdict = 5 // the peer was not reached: certainly not in the log
	diskFull    verdict = 6 // the leader's disk is short of space: certainly not in the log
)

// judge says what a failed raft future means for the command in it.
func judge(err error) verdict {
	switch {
	case errors.Is(err, raft.ErrNotLeader), errors.Is(err, raft.ErrLeadershipTransferInProgress), errors.Is(err, raft.ErrEnqueueTimeout):
		return refused
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return outOfSpace
	default:
		return uncertain
	}
}

func tooLarge(what string, size, limit int) error {
	return fmt.Errorf("%w: %s of %d bytes, at most %d are allowed", ErrTooLarge, what, size, limit)
}
