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
)

// housekeep ticks once a second: as leader it lets keys expire and history age
// when something is due, and on every member it marks the end of the log and
// takes a snapshot when much log has come. An idle store is not written to.
//
// What a start or a snapshot from elsewhere leaves behind in memory is about as
// much as the state itself. It is given back once, when it is over: Go would
// keep it until the state has grown by as much.
func (s *Store) housekeep() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	behind, settled := s.raft().LastIndex(), 0
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
		if ms, err := s.Members(); err == nil {
			if err := s.state.NoteMembers(ms); err != nil {
				s.cfg.Logger.Warn("the members could not be written down", "err", err)
			}
		}
		s.lookAtDisk(&yielded)
		if s.IsLeader() && s.keyspace().Due(s.clock.Millis()) {
			s.tick()
		}
		if s.snapshotDue() && !s.disk.Short() {
			if err := s.Snapshot(s.ctx); err != nil && s.ctx.Err() == nil {
				s.cfg.Logger.Warn("snapshot", "err", err)
			}
		}
	}
}

// settledAfter is how many ticks of housekeep after the last of a start or a
// restore was applied its memory is given back.
const settledAfter = 3

// snapshotDue says whether there is enough log for a snapshot: SnapshotBytes,
// and as much as there was state at the last one, so that at most half of what
// goes to disk is snapshots. (As much as there is state now would never come
// together while all that is written is new.) Members differ by up to a half in
// what they call enough: all of them at once would be felt by every write.
func (s *Store) snapshotDue() bool {
	return s.fsm.logBytes.Load() >= enoughLog(s.cfg.SnapshotBytes, s.fsm.snapBytes.Load(), s.cfg.ID)
}

func enoughLog(least, state int64, id string) int64 {
	enough := max(least, state)
	return enough + enough/16*int64(datadir.Checksum([]byte(id))%8)
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
	s.tellRoom(changed, err)
	if s.disk.Short() && s.IsLeader() && time.Since(*yielded) > yieldPeriod {
		*yielded = time.Now()
		s.yield()
	}
}

// tellRoom logs what a look at the disk has shown.
func (s *Store) tellRoom(changed bool, err error) {
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

// errDiskFull is what a client is told.
func (s *Store) errDiskFull(leader string) error {
	if leader == s.cfg.ID {
		return fmt.Errorf("%w: the disk that holds %s is nearly full (%d bytes are free, %d are needed): deletes and small updates pass, the rest when there is room again",
			ErrNoSpace, s.cfg.Dir, s.disk.Room(), s.cfg.MinFreeBytes+disk.BallastBytes)
	}
	return fmt.Errorf("%w: the disk of the leader, member %s, is nearly full: deletes and small updates pass, the rest when there is room again", ErrNoSpace, leader)
}
