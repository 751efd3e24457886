package state

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/datadir"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftlog"
	"github.com/clusterd/clusterd/raftstore/wire"
)

func open(t *testing.T, dir string) (s *State, damaged []error, err error) {
	t.Helper()
	s, err = Open(Options{
		Dir: dir, ID: "a", Engine: raftlog.Segments, Logger: slog.New(slog.DiscardHandler), Now: time.Now,
		Damaged: func(err error) { damaged = append(damaged, err) },
	})
	return s, damaged, err
}

// TestLostState takes a member's votes away: without other voters nothing is
// opened or changed; with them its state is set aside, and it takes part in
// nothing until it was taken out of the membership.
func TestLostState(t *testing.T) {
	dir := t.TempDir()
	s, damaged, err := open(t, dir)
	if err != nil || s.Had || s.Lost || damaged != nil {
		t.Fatalf("an empty folder: %+v, %v, %v", s, damaged, err)
	}
	err = errors.Join(s.Stable.SetUint64([]byte(datadir.KeyTerm), 3), s.Log.StoreLogs([]*raft.Log{{Index: 1, Term: 3}}),
		s.NoteMembers([]Member{{ID: "a", Voter: true}}), s.Close())
	if err != nil {
		t.Fatal(err)
	}
	votes := map[string][]byte{}
	for _, name := range datadir.VoteFiles {
		if votes[name], err = os.ReadFile(filepath.Join(dir, name)); err == nil {
			err = os.Remove(filepath.Join(dir, name))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for range 2 { // the second time is as the first
		if _, damaged, err := open(t, dir); !errors.As(err, new(*datadir.DamageError)) || len(damaged) != 1 {
			t.Fatalf("no votes, and no other member: %v, %v", damaged, err)
		}
	}
	for name, b := range votes { // a person has found them
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if s, damaged, err = open(t, dir); err != nil || !s.Had || s.Lost || damaged != nil {
		t.Fatalf("with its votes again: %+v, %v, %v", s, damaged, err)
	}
	if err := errors.Join(s.NoteMembers([]Member{{ID: "a", Voter: true}, {ID: "b", Voter: true}}), s.Close()); err != nil {
		t.Fatal(err)
	}
	for name := range votes {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if s, _, err = open(t, dir); err != nil || !s.Lost || !s.Had {
			t.Fatalf("no votes, and another member: %+v, %v", s, err)
		}
		if last, err := s.Log.LastIndex(); last != 0 || err != nil {
			t.Errorf("the log of a member that has lost its state ends at %d, %v", last, err)
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if kept, _ := filepath.Glob(filepath.Join(dir, datadir.DamagedDir, "*")); len(kept) == 0 {
		t.Error("nothing of the old state is kept")
	}
	if s, _, err = open(t, dir); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(s.Rejoined(), s.Close()); err != nil {
		t.Fatal(err)
	}
	if s, _, err = open(t, dir); err != nil || s.Lost || s.Had {
		t.Fatalf("after it was taken out: %+v, %v", s, err)
	}
	if why, err := s.Disbelieve(errors.New("it differs")); why != nil || err != nil {
		t.Errorf("disbelieve: %v, %v", why, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s, _, err = open(t, dir); err != nil || !s.Lost {
		t.Fatalf("after it was found to differ: %+v, %v", s, err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestUnfinishedSnapshots: what a crash left of a snapshot is gone when the state is
// open, and a whole one stays.
func TestUnfinishedSnapshots(t *testing.T) {
	dir := t.TempDir()
	s, _, err := open(t, dir)
	if err != nil {
		t.Fatal(err)
	}
	_, trans := raft.NewInmemTransport("a")
	k := mvcc.New()
	var sink raft.SnapshotSink
	for i := uint64(1); i <= 3; i++ { // the last one is not finished
		k.Apply(i, mvcc.Batch{Time: int64(i), Commands: []mvcc.Command{{Type: mvcc.CmdTick, ID: mvcc.CommandID{Session: 1, Seq: i}}}})
		if sink, err = s.Snapshots.Create(1, i, 3, raft.Configuration{}, 1, trans); err == nil {
			err = wire.WriteSnapshot(sink, k.Snapshot())
		}
		if err == nil && i < 3 {
			err = sink.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	crashed := filepath.Join(dir, datadir.SnapshotsDir, sink.ID()+".tmp")
	if _, err := os.Stat(crashed); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s, _, err = open(t, dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(crashed); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the unfinished one: %v", err)
	}
	if newest, older, err := s.Snapshots.Latest(); newest != 2 || older != 1 || err != nil {
		t.Errorf("the others: %d, %d, %v", newest, older, err)
	}
	if err := errors.Join(s.Close(), sink.Cancel()); err != nil {
		t.Fatal(err)
	}
}
