package raftstore

import (
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/disk"
	"github.com/clusterd/clusterd/raftstore/divergence"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/wait"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// fsm is what raft drives: it decodes, lets the keyspace apply, and tells
// those who wait. raft calls it from one goroutine.
type fsm struct {
	s        *Store
	captures wait.Next[*mvcc.Snapshot]
	keyspace atomic.Pointer[mvcc.Keyspace]
	hashes   divergence.Hashes
	restored atomic.Bool  // the keyspace was replaced by a snapshot's, not seen by housekeep yet
	logBytes atomic.Int64 // applied since the last snapshot was begun
	applied  atomic.Int64 // … since the start
	// snapBytes is how large the state was then.
	snapBytes atomic.Int64
	// noRoom is when a snapshot last met a lack of room, in unix nanoseconds.
	noRoom atomic.Int64
}

var _ raft.BatchingFSM = (*fsm)(nil)

// Apply implements raft.FSM.
func (f *fsm) Apply(l *raft.Log) any { return f.ApplyBatch([]*raft.Log{l})[0] }

// ApplyBatch implements raft.BatchingFSM. The results are nil: the outcome
// of a command reaches its waiter by the command's identity.
func (f *fsm) ApplyBatch(logs []*raft.Log) []any {
	for _, l := range logs {
		f.applyOne(l)
	}
	last := logs[len(logs)-1]
	f.s.applied.Broadcast()
	f.s.hub.Notify()
	f.s.raftSide.Committed(last.Index, last.Term)
	return make([]any, len(logs))
}

func (f *fsm) applyOne(l *raft.Log) {
	ks := f.keyspace.Load()
	if l.Type != raft.LogCommand {
		ks.Advance(l.Index)
		return
	}
	start := time.Now()
	batch, err := wire.DecodeBatch(l.Data)
	if err != nil {
		// Going on without this entry would make this node differ from the
		// others permanently. Stopping is the lesser evil.
		panic(fmt.Sprintf("raftstore: log entry %d of term %d in %s: %v", l.Index, l.Term, f.s.cfg.Dir, err))
	}
	if f.s.cfg.mangle != nil {
		f.s.cfg.mangle(&batch)
	}
	outcomes := ks.Apply(l.Index, batch)
	f.hashes.Note(l.Index, ks.Digest().Hash)
	f.logBytes.Add(int64(len(l.Data)))
	f.applied.Add(int64(len(l.Data)))
	f.s.clock.Observe(batch.Time, f.s.isCurrentTerm(l.Term))
	for i := range outcomes {
		c := &batch.Commands[i]
		if (c.Type == mvcc.CmdTxn || c.Type == mvcc.CmdDelete) && outcomes[i].Err == nil && !outcomes[i].Duplicate {
			f.s.usage.Note(batch.Time, c)
			if fn := f.s.cfg.Events.Written; fn != nil {
				fn(c.Writer(), batch.Time, c.HistoryBytes())
			}
		}
		if id := batch.Commands[i].ID; id.Session == f.s.commands.session {
			f.s.commands.waiting.Resolve(id.Seq, outcomes[i])
		}
	}
	if fn := f.s.cfg.Events.Applied; fn != nil {
		fn(l.Index, len(outcomes), time.Since(start))
	}
}

// snapped notes how large the state of the newest snapshot is.
func (f *fsm) snapped(d mvcc.Digest) { f.snapBytes.Store(d.Bytes + d.HistoryBytes) }

// Snapshot implements raft.FSM.
func (f *fsm) Snapshot() (raft.FSMSnapshot, error) {
	snap := f.keyspace.Load().Snapshot()
	f.captures.Give(snap)
	f.snapped(f.keyspace.Load().Digest())
	return &fsmSnapshot{s: f.s, snap: snap, logBytes: f.logBytes.Swap(0)}, nil
}

// Restore implements raft.FSM. The present keyspace stays in place until the
// new one has proved whole.
func (f *fsm) Restore(rc io.ReadCloser) error {
	begins := func(h mvcc.Header) {
		if f.keyspace.Load().Index() == 0 { // the heap is empty, and is to be filled at once
			makeRoom(roomFor(h.Digest))
		}
	}
	ks, err := wire.ReadSnapshotOf(rc, begins)
	if err != nil {
		return err
	}
	if f.s.raft() != nil { // otherwise raft begins, and this is our own
		if err := f.s.logs.Replaced(); err != nil {
			return err
		}
	}
	f.keyspace.Store(ks)
	f.restored.Store(true)
	f.logBytes.Store(0)
	d := ks.Digest()
	f.snapped(d)
	f.hashes.Note(d.Index, d.Hash)
	f.s.clock.Observe(d.Time, false)
	f.s.applied.Broadcast()
	f.s.hub.Notify()
	// Commands that were in the entries we skipped will not be seen here.
	f.s.commands.waiting.AskAgain()
	if fn := f.s.cfg.Events.Restored; fn != nil {
		fn(d)
	}
	return nil
}

type fsmSnapshot struct {
	s        *Store
	snap     *mvcc.Snapshot
	logBytes int64 // the log that it makes needless; 0 once it has
}

func (f *fsmSnapshot) Persist(sink raft.SnapshotSink) error {
	start := time.Now()
	if err := wire.WriteSnapshot(sink, f.snap); err != nil {
		if cerr := sink.Cancel(); cerr != nil {
			f.s.cfg.Logger.Warn("a snapshot that could not be written", "err", cerr)
		}
		f.lacksRoom(err)
		if errors.Is(err, mvcc.ErrCorrupt) {
			// The memory of this machine, or a fault of ours.
			f.s.fail(fmt.Errorf("the keyspace in memory is not what was applied: %w", err), false)
		}
		return fmt.Errorf("write snapshot: %w", err)
	}
	if err := sink.Close(); err != nil {
		f.lacksRoom(err)
		return fmt.Errorf("finish snapshot: %w", err)
	}
	f.logBytes = 0
	if fn := f.s.cfg.Events.Snapshotted; fn != nil {
		fn(f.snap.Header().Digest.Index, time.Since(start))
	}
	return nil
}

func (f *fsmSnapshot) lacksRoom(err error) {
	if errors.Is(err, ErrNoSpace) || disk.Full(err) {
		f.s.fsm.noRoom.Store(time.Now().UnixNano())
	}
}

// Release implements raft.FSMSnapshot. It is called in any case.
func (f *fsmSnapshot) Release() {
	f.s.fsm.logBytes.Add(f.logBytes)
	f.snap = nil
}

// maySnapshot says why no snapshot may be begun or go on, its own or a leader's; nil:
// it may. A snapshot takes none of the room that has to stay free (MinFreeBytes): with
// the disk full the log could not grow. And raft does not end before it, however
// long that takes: the log has all of it, so Close need not wait.
func (s *Store) maySnapshot() error {
	if s.ctx.Err() != nil {
		return ErrClosed
	}
	if free, tight := s.disk.Tight(); tight || s.disk.Short() {
		return fmt.Errorf("%w: no snapshot is written to %s: %d bytes are free there, %d have to stay free (%d before the disk counts as having room again)",
			ErrNoSpace, s.cfg.Dir, free, s.cfg.MinFreeBytes, s.cfg.MinFreeBytes+disk.BallastBytes)
	}
	return nil
}
