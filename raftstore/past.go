package raftstore

import (
	"context"
	"time"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// History tells the latest changes of key that are still in the history, at
// most limit of them (0: all), deletions included. Of o only Stale is used.
func (s *Store) History(ctx context.Context, key string, limit int, o ReadOptions) (mvcc.KeyHistory, error) {
	if err := s.catchUp(ctx, ReadOptions{Stale: o.Stale}); err != nil {
		return mvcc.KeyHistory{}, err
	}
	return s.keyspace().History(key, limit), nil
}

// RevisionAt is the revision that was the present one at t, by store time. A
// time before the history gives a *mvcc.TimeCompactedError. It asks nobody:
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
