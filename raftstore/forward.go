package raftstore

import (
	"context"
	crand "crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"

	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/peer"
	"github.com/clusterd/clusterd/raftstore/wait"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// Txn applies t atomically and returns once this member has applied it, so a
// read here sees it. Any member takes it; the leader puts it into the log.
//
// A command keeps its identity however often it is handed over, and takes
// effect once: when a leader dies in the middle, it is handed to the next one.
// Only when the context ends (or no leader appears for LeaderWait) before
// its outcome was reported is the outcome unknown.
//
// Errors: ErrNoLeader (a *NoLeaderError once it lasts), ErrUnknownOutcome, ErrTooLarge, ErrNoSpace, ErrClosed,
// mvcc.ErrInvalid, and the context's error when nothing was handed over yet. A
// comparison that failed is no error: see TxnResult.Succeeded.
func (s *Store) Txn(ctx context.Context, t mvcc.Txn) (mvcc.TxnResult, error) {
	if err := s.admit(&t); err != nil {
		return mvcc.TxnResult{}, err
	}
	return s.decide(ctx, mvcc.Command{Type: mvcc.CmdTxn, Txn: t})
}

// decide carries a command through that was admitted.
func (s *Store) decide(ctx context.Context, cmd mvcc.Command) (mvcc.TxnResult, error) {
	whole := cmd.Txn.Ops
	cmd.Txn.Ops = s.withPatches(&cmd.Txn)
	for {
		out, err := s.send(ctx, cmd)
		switch {
		case err != nil:
			return mvcc.TxnResult{}, err
		case errors.Is(out.Err, mvcc.ErrPatch):
			// No occurrence of it changes anything, see mvcc.ErrPatch. The fault is in this
			// member's memory, or in its program.
			s.cfg.Logger.Error("the store could not make a value of its patch; it is written as a whole", "err", out.Err)
			cmd.Txn.Ops = whole
			continue
		case !errors.Is(out.Err, mvcc.ErrExpired):
			return out.Result, outcomeError(out.Err)
		case out.attempts > 1:
			return mvcc.TxnResult{}, fmt.Errorf("%w: %w", ErrUnknownOutcome, out.Err)
		}
		// Handed over once, came too late, and will never be applied: ask again
		// under a new identity.
	}
}

func outcomeError(err error) error {
	if errors.Is(err, mvcc.ErrForgotten) {
		return fmt.Errorf("%w: %w", ErrUnknownOutcome, err)
	}
	return err
}

// admit refuses what must not reach the log.
func (s *Store) admit(t *mvcc.Txn) error {
	if s.ctx.Err() != nil {
		return ErrClosed
	}
	if err := t.Validate(); err != nil {
		return err
	}
	if n := len(t.Origin); n > maxOrigin {
		return tooLarge("origin", n, maxOrigin)
	}
	total := len(t.Origin)
	for i := range t.Compares {
		if n := len(t.Compares[i].Key); n > s.cfg.MaxKeyBytes {
			return tooLarge("key", n, s.cfg.MaxKeyBytes)
		}
		total += len(t.Compares[i].Key) + 16
	}
	for i := range t.Ops {
		key, value := len(t.Ops[i].Key), len(t.Ops[i].Value)
		if key > s.cfg.MaxKeyBytes {
			return tooLarge("key", key, s.cfg.MaxKeyBytes)
		}
		if value > s.cfg.MaxValueBytes {
			return tooLarge("value of "+t.Ops[i].Key, value, s.cfg.MaxValueBytes)
		}
		total += key + value + 16
	}
	if total > s.cfg.MaxTxnBytes {
		return tooLarge("transaction", total, s.cfg.MaxTxnBytes)
	}
	return s.quotas.Check(s.keyspace(), t)
}

// maxOrigin bounds the name of a change's author.
const maxOrigin = 256

// commands are this member's own on their way, and as leader those of all.
type commands struct {
	session   uint64 // random: this process's
	seq       atomic.Uint64
	pending   *semaphore.Weighted // bytes of this member's that are under way
	waiting   *wait.Outcomes[mvcc.Outcome]
	proposals *proposals
	patches   patches
}

func newCommands(maxPending int64, gatherFor time.Duration) (*commands, error) {
	var random [8]byte
	if _, err := crand.Read(random[:]); err != nil {
		return nil, err
	}
	return &commands{
		session:   binary.LittleEndian.Uint64(random[:]),
		pending:   semaphore.NewWeighted(maxPending),
		waiting:   wait.NewOutcomes[mvcc.Outcome](),
		proposals: newProposals(gatherFor),
	}, nil
}

// id is that of a new command.
func (c *commands) id() mvcc.CommandID {
	return mvcc.CommandID{Session: c.session, Seq: c.seq.Add(1)}
}

type sent struct {
	mvcc.Outcome
	attempts int
}

// send carries one command through: hand it to the leader, wait until it comes
// back in the log, hand it over again when its leader is lost.
func (s *Store) send(ctx context.Context, cmd mvcc.Command) (sent, error) {
	// Which member took the request is the leader's to say.
	cmd.Txn.Origin, cmd.Delete.Origin = mvcc.OriginFrom(cmd.Txn.Origin, ""), mvcc.OriginFrom(cmd.Delete.Origin, "")
	cmd.ID = s.commands.id()
	cmd.Basis = s.keyspace().Index()
	raw := wire.AppendCommand(nil, &cmd)
	if err := s.commands.pending.Acquire(ctx, int64(len(raw))); err != nil {
		return sent{}, err
	}
	defer s.commands.pending.Release(int64(len(raw)))
	outcome := s.commands.waiting.Add(cmd.ID.Seq)
	defer s.commands.waiting.Remove(cmd.ID.Seq)

	deadline := time.NewTimer(s.leaderWait())
	defer deadline.Stop()
	var (
		attempts int  // handed over so often, without being refused for certain
		noSpace  bool // the last one failed for that
		pause    time.Duration
		cancel   func() // ends the handing over that is under way; nil: none is
	)
	defer func() {
		if cancel != nil {
			cancel()
		}
	}()
	giveUp := func(cause error) (sent, error) {
		if noSpace {
			cause = fmt.Errorf("%w: %w", ErrNoSpace, cause)
		}
		if attempts > 0 {
			return sent{}, fmt.Errorf("%w: %w", ErrUnknownOutcome, cause)
		}
		return sent{}, cause
	}
	for {
		leader, changed := s.leader.Current()
		failed := make(chan verdict, 1)
		if leader != "" && pause == 0 {
			attempts++
			cancel = s.handOver(leader, raw, func(v verdict) { failed <- v })
		}
		var backoff <-chan time.Time
		if pause > 0 {
			backoff = time.After(pause)
		}
		var deadlineC <-chan time.Time
		if leader == "" || pause > 0 {
			deadlineC = deadline.C
		}
		select {
		case out, ok := <-outcome:
			if ok {
				return sent{out, max(attempts, 1)}, nil
			}
			// A snapshot was installed over the entries that may have held it.
			outcome = s.commands.waiting.Add(cmd.ID.Seq)
			pause = 0
		case v := <-failed:
			switch v {
			case notDecoded:
				return sent{}, fmt.Errorf("%w: the leader cannot decode it", mvcc.ErrInvalid)
			case refused, unavailable:
				attempts--
			case diskFull:
				if attempts--; attempts == 0 {
					return sent{}, s.errDiskFull(leader)
				}
			default:
				deadline.Reset(s.leaderWait())
			}
			noSpace = v == outOfSpace || v == diskFull
			pause = retryAfter
		case <-changed:
			pause = 0
			if cancel != nil {
				deadline.Reset(s.leaderWait())
			}
		case <-backoff:
			pause = 0
			select {
			case <-deadline.C:
				return giveUp(s.noLeader())
			default:
			}
		case <-deadlineC:
			return giveUp(s.noLeader())
		case <-ctx.Done():
			return giveUp(ctx.Err())
		case <-s.ctx.Done():
			return giveUp(ErrClosed)
		}
		if cancel != nil {
			cancel()
			cancel = nil
		}
	}
}

// retryAfter is the pause before a command that was refused is handed over
// again; a change of the leader cuts it short.
const retryAfter = 20 * time.Millisecond

// handOver gives the command to the leader. failed is called if it did not get
// through; cancel says that no goroutine waits any more.
func (s *Store) handOver(leader string, raw []byte, failed func(verdict)) (cancel func()) {
	if leader == s.cfg.ID {
		if s.disk.Short() && !s.essential(raw) {
			failed(diskFull)
			return func() {}
		}
		s.enqueue(proposal{raw: raw, failed: failed})
		return func() {}
	}
	call := s.peers.Call(leader, peer.KindSubmit, raw, func(f peer.Frame, sent bool, err error) {
		switch {
		case err != nil && sent:
			failed(uncertain)
		case err != nil:
			failed(unavailable)
		case f.Kind == peer.KindVerdict && len(f.Body) == 1:
			failed(verdict(f.Body[0]))
		default:
			failed(uncertain)
		}
	})
	return func() { s.peers.Forget(leader, call) }
}
