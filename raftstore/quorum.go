package raftstore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/clusterd/clusterd/raftstore/peer"
)

// ErrLastVoter is returned when the only voter is to be demoted or removed:
// nothing would be left of the store.
var ErrLastVoter = errors.New("it is the only voter: the store would be lost with it")

// QuorumError refuses a change of membership after which no majority of the
// voters would answer: nothing could be written any more, the way back
// included.
type QuorumError struct {
	Voters int      // after the change
	Silent []string // IDs of those among them that did not answer
}

// Error says what would be left, and what is needed.
func (e *QuorumError) Error() string {
	return fmt.Sprintf("it would leave %d voters of which %d do not answer (%s); %d must answer",
		e.Voters, len(e.Silent), strings.Join(e.Silent, ", "), e.Voters/2+1)
}

// quorumTimeout is how long a voter may take to show that it is there.
const quorumTimeout = 5 * time.Second

// CheckRemoval says whether the member could be removed now: nil,
// ErrLastVoter, or a *QuorumError. Any member can be asked; the leader asks
// again before it does it.
func (s *Store) CheckRemoval(ctx context.Context, id string) error {
	return s.checkChange(ctx, remove, id)
}

// checkChange refuses what would leave no majority of voters that answer. It
// asks them now: what gossip or the last heartbeat said may be out of date.
func (s *Store) checkChange(ctx context.Context, op memberOp, id string) error {
	ms, err := s.Members()
	if err != nil {
		return err
	}
	after, changes := votersAfter(ms, op, id)
	switch {
	case !changes:
		return nil
	case len(after) == 0:
		return ErrLastVoter
	}
	silent := s.silent(ctx, after, len(after)/2+1)
	if len(after)-len(silent) < len(after)/2+1 {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return &QuorumError{Voters: len(after), Silent: silent}
	}
	return nil
}

// votersAfter are the IDs of the voters after a change; false: it does not
// touch them.
func votersAfter(ms []Member, op memberOp, id string) (after []string, changes bool) {
	was := false
	for _, m := range ms {
		if !m.Voter {
			continue
		}
		if m.ID == id {
			was = true
			if op == remove || op == demote {
				continue
			}
		}
		after = append(after, m.ID)
	}
	switch op {
	case addVoter:
		if !was {
			after = append(after, id)
		}
		return after, !was
	case remove, demote:
		return after, was
	default:
		return after, false
	}
}

// silent asks members whether they are there and returns those who did not
// answer, as soon as enough others have.
func (s *Store) silent(ctx context.Context, ids []string, enough int) []string {
	ctx, cancel := context.WithTimeout(ctx, quorumTimeout)
	defer cancel()
	left := map[string]bool{}
	for _, id := range ids {
		left[id] = id != s.cfg.ID
	}
	others := slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return !left[id] })
	there := len(ids) - len(others)
	answers, forget := s.peers.Ask(others, peer.KindProgress, nil)
	defer forget()
	for asked := 0; asked < len(others) && there < enough; asked++ {
		select {
		case a := <-answers:
			if _, ok := a.Number(); ok { // else it is not there, or has lost its state
				left[a.ID] = false
				there++
			}
		case <-ctx.Done():
			asked = len(others)
		case <-s.ctx.Done():
			asked = len(others)
		}
	}
	var silent []string
	for _, id := range ids {
		if left[id] {
			silent = append(silent, id)
		}
	}
	return silent
}

// Progress asks a member for the log index that it has applied. The error says
// that it did not answer while ctx lasted.
func (s *Store) Progress(ctx context.Context, id string) (uint64, error) {
	if id == s.cfg.ID {
		return s.keyspace().Index(), nil
	}
	answers, forget := s.peers.Ask([]string{id}, peer.KindProgress, nil)
	defer forget()
	select {
	case a := <-answers:
		if a.Err != nil {
			return 0, a.Err
		}
		return peer.BodyNumber(a.Frame.Body)
	case <-ctx.Done():
		return 0, fmt.Errorf("ask member %s: %w", id, ctx.Err())
	case <-s.ctx.Done():
		return 0, ErrClosed
	}
}
