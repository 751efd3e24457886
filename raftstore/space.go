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
	type room struct {
		id    string
		bytes uint64
	}
	answers := make(chan room, len(ms))
	asked := 0
	for _, m := range ms {
		if !m.Voter || m.ID == s.cfg.ID {
			continue
		}
		asked++
		call := s.peers.Call(m.ID, peer.KindRoom, nil, func(f peer.Frame, _ bool, err error) {
			r := room{id: m.ID}
			if err == nil && f.Kind == peer.KindNumber {
				r.bytes, _ = peer.BodyNumber(f.Body)
			}
			answers <- r
		})
		defer s.peers.Forget(m.ID, call)
	}
	var best room
	for range asked {
		select {
		case r := <-answers:
			if r.bytes > best.bytes {
				best = r
			}
		case <-ctx.Done():
		}
	}
	if best.bytes < uint64(s.cfg.MinFreeBytes+disk.BallastBytes) {
		return
	}
	s.cfg.Logger.Info("handing over to a member that has room on its disk", "member", best.id, "free", best.bytes)
	id := best.id
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
