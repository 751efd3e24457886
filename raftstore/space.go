package raftstore

import (
	"context"
	"fmt"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/disk"
	"github.com/clusterd/clusterd/raftstore/peer"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// lookAtDisk is housekeep's look at the room that is left.
func (s *Store) lookAtDisk() {
	changed, err := s.disk.Look()
	s.tellRoom(changed, err)
	if s.disk.Short() && s.IsLeader() && time.Since(s.yielded) > yieldPeriod {
		s.yielded = time.Now()
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
