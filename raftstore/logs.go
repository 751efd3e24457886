package raftstore

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/boltlog"
	"github.com/clusterd/clusterd/raftstore/datadir"
	"github.com/clusterd/clusterd/raftstore/disk"
	"github.com/clusterd/clusterd/raftstore/seglog"
)

// logs is raft's log as raft sees it: it measures every write, survives a full
// disk, and keeps what a damaged snapshot would be replaced with.
type logs struct {
	raft.LogStore
	disk *disk.Disk
	// latest are the indexes of the two newest snapshots; 0: there is none.
	latest func() (newest, older uint64, err error)
	log    *slog.Logger
	ctx    context.Context // ends with the store
	// replaced is set when a snapshot from elsewhere has taken the log's place:
	// what it holds may be of another history.
	replaced atomic.Bool
	// corrupt is told of an entry that is damaged; it stops the store.
	corrupt func(error)
	synced  func(entries int, took time.Duration) // EventListener's; may be nil
	ahead   *ahead
}

var _ raft.MonotonicLogStore = (*logs)(nil)

// IsMonotonic implements raft.MonotonicLogStore.
func (l *logs) IsMonotonic() bool {
	m, ok := l.LogStore.(raft.MonotonicLogStore)
	return ok && m.IsMonotonic()
}

// GetLog implements raft.LogStore. An entry that has become damaged since the
// log was opened stops the store: the next start heals it.
func (l *logs) GetLog(index uint64, e *raft.Log) error {
	err := l.LogStore.GetLog(index, e)
	if c := new(seglog.CorruptError); errors.As(err, &c) {
		damage := datadir.LogDamage(c)
		l.corrupt(damage)
		return damage
	}
	return err
}

// StoreLog implements raft.LogStore.
func (l *logs) StoreLog(e *raft.Log) error { return l.StoreLogs([]*raft.Log{e}) }

// spaceRetry is how often a write is tried again on a full disk.
const spaceRetry = 200 * time.Millisecond

// StoreLogs implements raft.LogStore. With the disk full it waits: raft would
// take an error for the end of a leadership and begin another one, over and
// over, while reads have nobody to ask. A leader that waits too long loses its
// leadership for another reason, see disk.Stuck.
func (l *logs) StoreLogs(es []*raft.Log) error {
	l.ahead.send(es)
	done := l.disk.Write()
	defer done()
	for said := false; ; said = true {
		start := time.Now()
		err := l.LogStore.StoreLogs(es)
		if err == nil {
			l.ahead.wrote(es)
			if l.synced != nil {
				l.synced(len(es), time.Since(start))
			}
		}
		if c := new(seglog.CorruptError); errors.Is(err, boltlog.ErrBroken) || errors.As(err, &c) {
			err = datadir.AsDamage(err)
			l.corrupt(err)
		}
		if !isNoSpace(err) {
			return err
		}
		if !said {
			l.log.Error("the disk is full: the log cannot grow", "err", err)
		}
		l.disk.FoundFull()
		select {
		case <-time.After(spaceRetry):
		case <-l.ctx.Done():
			return err
		}
	}
}

// DeleteRange implements raft.LogStore. When raft trims the log after a
// snapshot, the entries since the snapshot before it stay: should the newest
// one turn out damaged, nothing is lost. They are as many bytes as lie between
// two snapshots, which is also what a follower may be late by before it is sent
// a snapshot.
func (l *logs) DeleteRange(lo, hi uint64) error {
	last, err := l.LastIndex()
	if err != nil {
		return err
	}
	newest, older, err := l.latest()
	if err != nil {
		return err
	}
	switch {
	case hi > newest: // a conflict with a new leader, or all of it
	case hi >= last && l.replaced.CompareAndSwap(true, false):
	default:
		hi = min(hi, older)
	}
	if lo > hi {
		return nil
	}
	return l.LogStore.DeleteRange(lo, hi)
}

func isNoSpace(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}
