package raftstore

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/hashicorp/raft"
)

// Errors of the Store. Match with errors.Is. Reads and watches of old
// revisions return mvcc.ErrCompacted and mvcc.ErrFutureRevision.
var (
	// ErrNoLeader is returned when no leader answered in time; a write was
	// certainly not applied and never will be.
	ErrNoLeader = errors.New("no leader")
	// ErrUnknownOutcome is returned when a write was handed over and nobody
	// could say in time what became of it: it may have been applied, or be
	// applied later. When the caller's context ended, it matches that error
	// as well.
	ErrUnknownOutcome = errors.New("outcome of the write is unknown")
	// ErrTooLarge is returned, before anything is written, for a key, a value
	// or a transaction beyond the configured size.
	ErrTooLarge = errors.New("too large")
	// ErrNoSpace is returned for a write that stores something when a quota is
	// used up (then it is a *QuotaError) or the leader's disk is full. Deletes
	// pass the quotas.
	ErrNoSpace = errors.New("no space left in the store")
	// ErrClosed is returned by every call after Close.
	ErrClosed = errors.New("store is closed")
	// ErrStateExists is returned by Bootstrap when the data folder already
	// holds a member's state.
	ErrStateExists = errors.New("data folder already holds state")
	// ErrInvalid is returned for a request that makes no sense.
	ErrInvalid = errors.New("invalid request")
)

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
