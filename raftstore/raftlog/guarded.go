package raftlog

import (
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/boltlog"
	"github.com/clusterd/clusterd/raftstore/datadir"
	"github.com/clusterd/clusterd/raftstore/disk"
	"github.com/clusterd/clusterd/raftstore/seglog"
)

// Guarded is raft's log as raft sees it: it measures every write, survives a full
// disk, and keeps what a damaged snapshot would be replaced with.
type Guarded struct {
	raft.LogStore
	Guard
	// replaced is the index of the snapshot from elsewhere that has taken the log's
	// place last; 0: none has.
	replaced atomic.Uint64
}

// Guard is what is to happen around a log.
type Guard struct {
	Disk *disk.Disk
	// Latest are the indexes of the two newest snapshots; 0: there is none.
	Latest func() (newest, older uint64, err error)
	Logger *slog.Logger
	Done   <-chan struct{} // closed when the store stops writing
	// Corrupt is called for an entry that is damaged.
	Corrupt func(error)
	Synced  func(entries int, took time.Duration) // after each write; may be nil
	Ahead   Ahead
}

// Ahead is called with entries before they are written, and after. It must not wait.
type Ahead interface {
	Send(es []*raft.Log)
	Wrote(es []*raft.Log)
}

// NewGuarded guards a log.
func NewGuarded(l raft.LogStore, g Guard) *Guarded { return &Guarded{LogStore: l, Guard: g} }

var _ raft.MonotonicLogStore = (*Guarded)(nil)

// IsMonotonic implements raft.MonotonicLogStore.
func (l *Guarded) IsMonotonic() bool {
	m, ok := l.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}

// GetLog implements raft.LogStore. An entry that has become damaged since the
// log was opened stops the store: the next start repairs it.
func (l *Guarded) GetLog(index uint64, e *raft.Log) error {
	err := l.LogStore.GetLog(index, e)
	if c := new(seglog.CorruptError); errors.As(err, &c) {
		damage := datadir.LogDamage(c)
		l.Corrupt(damage)
		return damage
	}
	return err
}

// StoreLog implements raft.LogStore.
func (l *Guarded) StoreLog(e *raft.Log) error { return l.StoreLogs([]*raft.Log{e}) }

// spaceRetry is how often a write is tried again on a full disk.
const spaceRetry = 200 * time.Millisecond

// StoreLogs implements raft.LogStore. With the disk full it waits: raft would
// take an error for the end of a leadership and begin another one, over and
// over, while reads find no leader. A leader that waits too long loses its
// leadership for another reason, see disk.Disk.Stuck.
func (l *Guarded) StoreLogs(es []*raft.Log) error {
	l.Ahead.Send(es)
	done := l.Disk.Write()
	defer done()
	for said := false; ; said = true {
		start := time.Now()
		err := l.LogStore.StoreLogs(es)
		if err == nil {
			l.Ahead.Wrote(es)
			if l.Synced != nil {
				l.Synced(len(es), time.Since(start))
			}
		}
		if c := new(seglog.CorruptError); errors.Is(err, boltlog.ErrBroken) || errors.As(err, &c) {
			err = datadir.AsDamage(err)
			l.Corrupt(err)
		}
		if !disk.Full(err) {
			return err
		}
		if !said {
			l.Logger.Error("the disk is full: the log cannot grow", "err", err)
		}
		l.Disk.FoundFull()
		select {
		case <-time.After(spaceRetry):
		case <-l.Done:
			return err
		}
	}
}

// Replaced notes that the newest snapshot came from elsewhere and has taken the
// log's place: what the log holds up to there may be of another history.
func (l *Guarded) Replaced() error {
	newest, _, err := l.Latest()
	if err != nil {
		return err
	}
	l.replaced.Store(newest)
	return nil
}

// DeleteRange implements raft.LogStore. When raft trims the log after a
// snapshot, the entries since the snapshot before it stay: should the newest
// one turn out damaged, nothing is lost. They are as many bytes as lie between
// two snapshots, which is also what a follower may be late by before it is sent
// a snapshot.
func (l *Guarded) DeleteRange(lo, hi uint64) error {
	newest, older, err := l.Latest()
	if err != nil {
		return err
	}
	switch {
	case hi > newest: // a conflict with a new leader, or all of it
	case newest == l.replaced.Load(): // nothing before it may be used again
	default:
		hi = min(hi, older)
	}
	if lo > hi {
		return nil
	}
	return l.LogStore.DeleteRange(lo, hi)
}
