package raftstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/peer"
	"github.com/clusterd/clusterd/raftstore/watch"
)

// ReadOptions say what a read may return.
type ReadOptions struct {
	// Revision: the state as of it, which must still be in history. 0: the
	// latest.
	Revision int64
	// Stale: what this member knows, without asking the leader. It may be old,
	// and works without a leader.
	Stale bool
}

// ListOptions say what a List returns.
type ListOptions struct {
	ReadOptions
	From      string // first key included; "" or anything before the prefix: from its beginning
	Limit     int    // 0: all
	CountOnly bool
	NoCount   bool // Count is not wanted: only what is returned is looked at
}

// ListResult is a List's result. KVs is shared and must not be changed.
type ListResult struct {
	KVs      []mvcc.KeyValue
	More     bool  // keys follow after the last of KVs
	Count    int64 // all keys of the prefix from From on
	Revision int64 // as of which it holds
}

// Get returns the key, nil if it does not exist, and the revision as of which
// that holds. Linearizable unless o.Stale: it sees every write that was
// acknowledged, by any member, before the call.
func (s *Store) Get(ctx context.Context, key string, o ReadOptions) (*mvcc.KeyValue, int64, error) {
	if err := s.catchUp(ctx, o); err != nil {
		return nil, 0, err
	}
	return s.keyspace().Get(key, o.Revision)
}

// List returns the keys beginning with prefix, in order, all as of one
// revision. Linearizable unless o.Stale.
func (s *Store) List(ctx context.Context, prefix string, o ListOptions) (ListResult, error) {
	if err := s.catchUp(ctx, o.ReadOptions); err != nil {
		return ListResult{}, err
	}
	l, err := s.keyspace().List(mvcc.Range{
		Prefix: prefix, From: o.From, Limit: o.Limit, CountOnly: o.CountOnly, NoCount: o.NoCount, Revision: o.Revision,
	})
	return ListResult(l), err
}

// catchUp returns when this member's state is recent enough for the read. What
// was at a past revision does not change any more, so no other member has to be asked.
func (s *Store) catchUp(ctx context.Context, o ReadOptions) error {
	switch {
	case s.ctx.Err() != nil:
		return ErrClosed
	case o.Stale, o.Revision != 0 && o.Revision <= s.Revision():
		return ctx.Err()
	default:
		return s.linearize(ctx)
	}
}

// linearize returns when this member has applied everything that was committed
// when it was called.
func (s *Store) linearize(ctx context.Context) error {
	deadline := time.Now().Add(s.leaderWait())
	for {
		leader, changed := s.leader.Current()
		if leader != "" {
			index, err := s.readRounds.Join(ctx)
			if err == nil {
				return s.reach(ctx, index)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
		}
		if s.ctx.Err() != nil {
			return ErrClosed
		}
		left := time.Until(deadline)
		if left <= 0 {
			return s.noLeader()
		}
		if leader != "" {
			left = min(left, retryAfter)
		}
		pause := time.NewTimer(left)
		select {
		case <-changed:
		case <-pause.C:
		case <-ctx.Done():
		case <-s.ctx.Done():
		}
		pause.Stop()
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// boundRound ends a round with the store, or when it takes longer than any
// leader would keep its lease.
func (s *Store) boundRound(do func(context.Context) (uint64, error)) func(context.Context) (uint64, error) {
	return func(context.Context) (uint64, error) {
		ctx, cancel := context.WithTimeout(s.ctx, 2*max(s.cfg.LeaderLease, s.cfg.ElectionTimeout))
		defer cancel()
		return do(ctx)
	}
}

// askReadIndex is one round: an index such that everything committed before
// the round began is at or below it.
func (s *Store) askReadIndex(ctx context.Context) (uint64, error) {
	leader, changed := s.leader.Current()
	switch leader {
	case "":
		return 0, ErrNoLeader
	case s.cfg.ID:
		return s.leaderReadIndex(ctx)
	}
	type answer struct {
		index uint64
		err   error
	}
	got := make(chan answer, 1)
	call := s.peers.Call(leader, peer.KindReadIndex, nil, func(f peer.Frame, _ bool, err error) {
		if err == nil && f.Kind != peer.KindNumber {
			err = ErrNoLeader
		}
		var a answer
		if a.err = err; err == nil {
			a.index, a.err = peer.BodyNumber(f.Body)
		}
		got <- a
	})
	defer s.peers.Forget(leader, call)
	select {
	case a := <-got:
		return a.index, a.err
	case <-changed:
		return 0, ErrNoLeader
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// leaderReadIndex shares one confirmation among all who ask meanwhile.
func (s *Store) leaderReadIndex(ctx context.Context) (uint64, error) {
	return s.confirmRounds.Join(ctx)
}

var errNotConfirmed = errors.New("leadership was not confirmed by a majority")

// confirmReadIndex returns the commit index after a majority of voters has
// said, after it was read, that it knows of no later term: so no other member
// had been elected, and nothing else committed, by then.
//
// raft.VerifyLeader is not used: it counts non-voters, and heartbeats that
// were under way before it was asked.
func (s *Store) confirmReadIndex(ctx context.Context) (uint64, error) {
	r := s.raft()
	term := s.readyTerm.Load()
	if term == 0 {
		return 0, raft.ErrNotLeader
	}
	index := r.CommitIndex()
	cf := r.GetConfiguration()
	if err := cf.Error(); err != nil {
		return 0, fmt.Errorf("read the members: %w", err)
	}
	var others []string
	voters, agreed := 0, 0
	for _, m := range cf.Configuration().Servers {
		if m.Suffrage != raft.Voter {
			continue
		}
		voters++
		if string(m.ID) == s.cfg.ID {
			agreed++
		} else {
			others = append(others, string(m.ID))
		}
	}
	need := voters/2 + 1
	if agreed < need {
		var err error
		if agreed, err = s.askTerms(ctx, others, term, agreed, need); err != nil {
			return 0, err
		}
	}
	// Our own vote, and proof that index was not raised by a later leader.
	if agreed < need || r.CurrentTerm() != term {
		return 0, errNotConfirmed
	}
	return index, nil
}

func (s *Store) askTerms(ctx context.Context, others []string, term uint64, agreed, need int) (int, error) {
	answers, forget := s.peers.Ask(others, peer.KindTerm, nil)
	defer forget()
	for range others {
		select {
		case a := <-answers:
			if theirs, ok := a.Number(); ok && theirs <= term {
				agreed++
			}
		case <-ctx.Done():
			return agreed, ctx.Err()
		}
		if agreed >= need {
			return agreed, nil
		}
	}
	return agreed, errNotConfirmed
}

// reach is waitIndex for a read: a member that makes no progress for LeaderWait
// tells the reader to ask another one, rather than wait for as long as the
// reader would.
func (s *Store) reach(ctx context.Context, index uint64) error {
	for {
		at := s.keyspace().Index()
		wait, cancel := context.WithTimeout(ctx, s.cfg.LeaderWait)
		err := s.waitIndex(wait, index)
		cancel()
		switch {
		case err == nil || ctx.Err() != nil || s.ctx.Err() != nil:
			return err
		case s.keyspace().Index() == at:
			return fmt.Errorf("%w: this member has applied log entry %d of %d, and gets no further", ErrNoLeader, at, index)
		}
	}
}

// waitIndex returns when the keyspace has applied the log up to index.
func (s *Store) waitIndex(ctx context.Context, index uint64) error {
	return s.waitFor(ctx, func() bool { return s.keyspace().Index() >= index })
}

// WaitRevision returns when this member has applied revision rev.
func (s *Store) WaitRevision(ctx context.Context, rev int64) error {
	return s.waitFor(ctx, func() bool { return s.Revision() >= rev })
}

func (s *Store) waitFor(ctx context.Context, ok func() bool) error {
	for {
		if ok() {
			return nil
		}
		changed := s.applied.Next()
		if ok() {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-s.ctx.Done():
			return ErrClosed
		}
	}
}

// Revision is the latest revision that this member has applied.
func (s *Store) Revision() int64 { return s.keyspace().Revision() }

// OldestRevision is the oldest revision that can be read here; a watch can
// begin with the one after it.
func (s *Store) OldestRevision() int64 { return s.keyspace().Oldest() }

type (
	// Watcher receives the changes of one prefix.
	Watcher = watch.Watcher
	// Batch is what a Watcher delivers.
	Batch = watch.Batch
)

// WatchOptions say where a watch begins.
type WatchOptions struct {
	// Revision is the first one wanted, which may lie in the future. 0: the
	// next one this member applies.
	Revision int64
}

// Watch delivers every change of the keys beginning with prefix, once and in
// order, until ctx ends or the watcher is stopped. A revision that has left the
// history gives a *mvcc.CompactedError.
func (s *Store) Watch(ctx context.Context, prefix string, o WatchOptions) (*Watcher, error) {
	w, err := s.hub.Watch(ctx, prefix, o.Revision)
	if errors.Is(err, watch.ErrClosed) {
		err = ErrClosed
	}
	return w, err
}

// History tells the latest changes of key that are still in the history, at
// most limit of them (0: all), deletions included. Of o only Stale is used.
func (s *Store) History(ctx context.Context, key string, limit int, o ReadOptions) (mvcc.KeyHistory, error) {
	if err := s.catchUp(ctx, ReadOptions{Stale: o.Stale}); err != nil {
		return mvcc.KeyHistory{}, err
	}
	return s.keyspace().History(key, limit), nil
}

// RevisionAt is the revision that was the present one at t, by store time. A
// time before the history gives a *mvcc.TimeCompactedError. It asks no other member:
// what this member has not applied yet counts as not happened.
func (s *Store) RevisionAt(t time.Time) (int64, error) {
	return s.keyspace().RevisionAt(t.UnixMilli())
}

// Extent tells which revisions can be read here, and their times.
func (s *Store) Extent() mvcc.Extent { return s.keyspace().Extent() }

// Time is the store time now, as far as this member can tell.
func (s *Store) Time() time.Time { return time.UnixMilli(s.clock.Millis()) }

// Top answers from what this member has applied, without a leader. A member
// that has restarted counts from the log entry after its newest snapshot on.
func (s *Store) Top() Top { return s.usage.Top(s.keyspace(), &s.quotas, s.clock.Millis()) }
