package raftstore

import (
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/settle"
)

// Status describes a member. It needs no leader.
type Status struct {
	ID        string `json:"id"`
	State     string `json:"state"` // Follower, Candidate, Leader, Shutdown
	Ready     bool   `json:"ready"` // leads, and has applied all that was committed before
	Epoch     Epoch  `json:"epoch"`
	Term      uint64 `json:"term"`
	Leader    string `json:"leader,omitempty"`
	LastIndex uint64 `json:"lastIndex"` // in this member's log
	LastTerm  uint64 `json:"lastTerm"`  // of that entry
	Commit    uint64 `json:"commitIndex"`
	// LastContact is how long ago the leader was heard; 0 on the leader.
	LastContact time.Duration `json:"lastContactNanoseconds"`
	Keyspace    mvcc.Digest   `json:"keyspace"`
	History     mvcc.Extent   `json:"history"`
	QuotaBytes  int64         `json:"quotaBytes"`
	// ReserveBytes is the part of QuotaBytes that is kept from most writes.
	ReserveBytes int64 `json:"reserveBytes"`
	Watchers     int   `json:"watchers"`
	LogBytes     int64 `json:"logFileBytes"`
	SnapBytes    int64 `json:"snapshotBytes"`
	// DiskFree is the room on the data directory's disk, -1 if it is not known;
	// with DiskShort this member as leader takes little more than deletes.
	DiskFree  int64 `json:"diskFreeBytes"`
	DiskShort bool  `json:"diskShort,omitempty"`
	// Format is what this member writes.
	Format settle.Status `json:"format"`
	// LostState: it takes part in nothing until the leader has taken it
	// out of the membership, see DESIGN.md.
	LostState bool     `json:"lostState,omitempty"`
	Members   []Member `json:"members"`
}

// Status returns this member's view.
func (s *Store) Status() Status {
	r := s.raft()
	st := Status{
		ID: s.cfg.ID, State: r.State().String(), Ready: s.IsLeader(), Term: r.CurrentTerm(), Leader: s.Leader(),
		Epoch: s.epoch, LastIndex: r.LastIndex(), LastTerm: lastTerm(r), Commit: r.CommitIndex(),
		Keyspace: s.keyspace().Digest(), History: s.Extent(), QuotaBytes: s.cfg.QuotaBytes, ReserveBytes: s.cfg.ReserveBytes, Watchers: s.hub.Len(),
		LogBytes: s.state.Log.Size(), SnapBytes: sizeOf(filepath.Join(s.cfg.Dir, "snapshots")),
		DiskFree: s.disk.Room(), DiskShort: s.disk.Short(), LostState: s.raftSide.Gate.Shut(),
		Format: s.settling.Status(),
	}
	if at := r.LastContact(); !st.Ready && !at.IsZero() {
		st.LastContact = time.Since(at)
	}
	st.Members, _ = s.Members()
	return st
}

// lastTerm is the term of the last entry in the log. raft tells it in its
// statistics only.
func lastTerm(r *raft.Raft) uint64 {
	stats := r.Stats()
	log, _ := strconv.ParseUint(stats["last_log_term"], 10, 64)
	snapshot, _ := strconv.ParseUint(stats["last_snapshot_term"], 10, 64)
	return max(log, snapshot)
}

// sizeOf adds up the files at and below path. What vanishes meanwhile counts
// as nothing.
func sizeOf(path string) (n int64) {
	_ = filepath.WalkDir(path, func(_ string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil
		}
		if info, err := d.Info(); err == nil {
			n += info.Size()
		}
		return nil
	})
	return n
}

// Epoch is the life of the store that this member takes part in.
func (s *Store) Epoch() Epoch { return s.epoch }
