package raftstore

import (
	"context"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/datadir"
	"github.com/clusterd/clusterd/raftstore/disk"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/peer"
	"github.com/clusterd/clusterd/raftstore/wire"
	"github.com/clusterd/clusterd/slack"
)

// housekeep ticks once a second: as leader it lets keys expire and history age
// when something is due, and on every member it marks the end of the log and
// takes a snapshot when much log has come. An idle store is not written to.
//
// What a start, a snapshot from elsewhere or many writes leave behind in memory
// is about as much as the state itself. It is given back once, when that is
// over: Go would keep it until the state has grown by as much.
func (s *Store) housekeep() {
	tick := slack.NewTicker(time.Second)
	defer tick.Stop()
	behind, settled := s.raft().LastIndex(), 0
	var burst burst
	var yielded time.Time // when a leader without room last looked for one with
	for {
		select {
		case <-tick.C:
		case <-s.ctx.Done():
			return
		}
		if err := s.state.Log.Mark(); err != nil && !disk.Full(err) {
			s.cfg.Logger.Warn("mark the end of the log", "err", err)
		}
		if s.fsm.restored.Swap(false) {
			behind, settled = s.raft().LastIndex(), 0
		}
		if s.keyspace().Index() >= behind {
			if settled++; settled == settledAfter {
				debug.FreeOSMemory()
			}
		}
		if burst.over(s.fsm.applied.Load()) {
			debug.FreeOSMemory()
		}
		if ms, err := s.Members(); err == nil {
			if err := s.state.NoteMembers(ms); err != nil {
				s.cfg.Logger.Warn("the members could not be written down", "err", err)
			}
		}
		s.lookAtDisk(&yielded)
		if s.IsLeader() && s.keyspace().Due(s.clock.Millis()) {
			s.tick()
		}
		if s.snapshotDue() && !s.disk.Short() && time.Since(time.Unix(0, s.fsm.noRoom.Load())) > snapshotRetry {
			if err := s.Snapshot(s.ctx); err != nil && s.ctx.Err() == nil {
				s.cfg.Logger.Warn("snapshot", "err", err)
			}
		}
	}
}

// snapshotRetry is how long after one that met a lack of room the next snapshot is
// tried: each takes all of the room that may be taken for a moment.
const snapshotRetry = time.Minute

// settledAfter is how many ticks of housekeep after the last of a start, a
// restore or a burst of writes was applied its memory is given back.
const settledAfter = 3

const (
	burstBytes = 64 << 20  // so much of log in all is a burst
	quietBytes = 256 << 10 // in one tick: nothing but heartbeats
)

// burst tells when many writes are over, from how much log was applied in all.
type burst struct {
	seen, last int64
	quiet      int
}

// over is asked once a tick.
func (b *burst) over(applied int64) bool {
	if b.quiet++; applied-b.last > quietBytes {
		b.quiet = 0
	}
	b.last = applied
	if b.quiet < settledAfter || applied-b.seen < burstBytes {
		return false
	}
	b.seen = applied
	return true
}

// snapshotDue says whether there is enough log for a snapshot, see enoughLog.
func (s *Store) snapshotDue() bool {
	log := s.fsm.logBytes.Load()
	return log >= s.cfg.SnapshotBytes && log >= enoughLog(s.cfg.SnapshotBytes, s.fsm.snapBytes.Load(), s.state.Snapshots.Size(), s.cfg.ID)
}

// enoughLog is how much log has to come before another snapshot: as much as the
// last one takes of the disk, so that at most half of what is written there is
// snapshots; and a third of the state that is in it, for the processor's sake.
// (Of the state now it would never come together while all that is written is
// new.) What a start has to read of the log is bounded by that, too. Members
// differ by up to a fifth in what they call enough: all of them at once would be
// felt by every write.
func enoughLog(least, state, onDisk int64, id string) int64 {
	enough := max(least, state/3, onDisk)
	return enough + enough/32*int64(datadir.Checksum([]byte(id))%8)
}

// tick puts a CmdTick into the log. One that is lost is made up for by the
// next one.
func (s *Store) tick() {
	cmd := mvcc.Command{Type: mvcc.CmdTick, ID: s.commands.id()}
	done := make(chan struct{})
	entry := wire.AppendBatch(nil, s.clock.Millis(), [][]byte{wire.AppendCommand(nil, &cmd)})
	s.start(func() {
		defer close(done)
		if err := s.errorOf(s.raft().Apply(entry, 0)); err != nil {
			s.cfg.Logger.Debug("tick", "err", err)
		}
	})
	select {
	case <-done:
	case <-s.ctx.Done():
	}
}

// lookAtDisk is housekeep's look at the room that is left.
func (s *Store) lookAtDisk(yielded *time.Time) {
	changed, err := s.disk.Look()
	s.logDiskSpace(changed, err)
	if s.disk.Short() && s.IsLeader() && time.Since(*yielded) > yieldPeriod {
		*yielded = time.Now()
		s.yield()
	}
}

// logDiskSpace logs what a look at the disk has shown.
func (s *Store) logDiskSpace(changed bool, err error) {
	switch {
	case err != nil:
		s.cfg.Logger.Warn("look for free space", "err", err)
	case changed && s.disk.Short():
		s.cfg.Logger.Error("the disk is nearly full: only deletes and small updates are taken until there is room",
			"dir", s.cfg.Dir, "free", s.disk.Room(), "needed", s.cfg.MinFreeBytes+disk.BallastBytes)
	case changed:
		s.cfg.Logger.Info("there is room on the disk again: writes are taken", "dir", s.cfg.Dir, "free", s.disk.Room())
	}
}

// yieldPeriod is how often a leader without room looks for one that has some.
const yieldPeriod = 5 * time.Second

// yield hands leadership to the voter with the most room, if one has enough.
func (s *Store) yield() {
	ms, err := s.Members()
	if err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(s.ctx, 2*time.Second)
	defer cancel()
	var others []string
	for _, m := range ms {
		if m.Voter && m.ID != s.cfg.ID {
			others = append(others, m.ID)
		}
	}
	answers, forget := s.peers.Ask(others, peer.KindRoom, nil)
	defer forget()
	id, most := "", uint64(0)
	for range others {
		select {
		case a := <-answers:
			if bytes, ok := a.Number(); ok && bytes > most {
				id, most = a.ID, bytes
			}
		case <-ctx.Done():
		}
	}
	if most < uint64(s.cfg.MinFreeBytes+disk.BallastBytes) {
		return
	}
	s.cfg.Logger.Info("handing over to a member that has room on its disk", "member", id, "free", most)
	s.start(func() {
		if err := s.errorOf(s.raft().LeadershipTransferToServer(raft.ServerID(id), raft.ServerAddress(id))); err != nil {
			s.cfg.Logger.Info("leadership was not handed over", "err", err)
		}
	})
}

// essential reports whether a command is let through when the disk is short:
// deletes, and what the quota's reserve is for.
func (s *Store) essential(raw []byte) bool {
	cmd, err := wire.DecodeCommand(raw)
	if err != nil {
		return false
	}
	return s.quotas.Essential(s.keyspace(), &cmd.Txn)
}

// errDiskFull is the error that clients get.
func (s *Store) errDiskFull(leader string) error {
	if leader == s.cfg.ID {
		return fmt.Errorf("%w: the disk that holds %s is nearly full (%d bytes are free, %d are needed): deletes and small updates pass, the rest when there is room again",
			ErrNoSpace, s.cfg.Dir, s.disk.Room(), s.cfg.MinFreeBytes+disk.BallastBytes)
	}
	return fmt.Errorf("%w: the disk of the leader, member %s, is nearly full: deletes and small updates pass, the rest when there is room again", ErrNoSpace, leader)
}
