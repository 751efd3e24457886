package raftstore

import (
	"context"
	"errors"
	"fmt"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// Capture returns the keyspace as it is now: with every write that was
// acknowledged, by any member, before the call. It takes a snapshot of raft on
// the way, since only the applying goroutine may look at all of a keyspace.
// The result does not change, and holds what it shows in memory.
func (s *Store) Capture(ctx context.Context) (*mvcc.Snapshot, error) {
	if s.ctx.Err() != nil {
		return nil, ErrClosed
	}
	if err := s.linearize(ctx); err != nil {
		return nil, err
	}
	got := s.fsm.captures.Ask()
	defer s.fsm.captures.Forget(got)
	err := s.Snapshot(ctx)
	select {
	case snap := <-got: // whatever became of the file
		return snap, nil
	default:
	}
	if err == nil {
		err = errors.New("nothing was applied yet")
	}
	return nil, fmt.Errorf("take a snapshot: %w", err)
}
