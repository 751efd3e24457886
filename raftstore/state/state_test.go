package state

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/datadir"
	"github.com/clusterd/clusterd/raftstore/logtest"
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
	if why, err := s.MarkCorrupt(errors.New("it differs")); why != nil || err != nil {
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

// snapshot writes one of a keyspace with that many changes. It is not finished.
func snapshot(t *testing.T, s *State, index uint64) raft.SnapshotSink {
	t.Helper()
	_, trans := raft.NewInmemTransport("a")
	k := mvcc.New()
	for i := uint64(1); i <= index; i++ {
		k.Apply(i, mvcc.Batch{Time: int64(i), Commands: []mvcc.Command{{Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: 1, Seq: i}, Txn: mvcc.Txn{
			Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/a", Value: []byte("some value")}},
		}}}})
	}
	sink, err := s.Snapshots.Create(1, index, 3, raft.Configuration{}, 1, trans)
	if err == nil {
		err = wire.WriteSnapshot(sink, k.Snapshot())
	}
	if err != nil {
		t.Fatal(err)
	}
	return sink
}

// TestDamagedSnapshots: a damaged snapshot is made up for by the one before it and
// the log, if they reach as far; otherwise acknowledged writes are gone, and the
// member knows that, at every start until it is healed.
func TestDamagedSnapshots(t *testing.T) {
	for _, tc := range []struct {
		name        string
		snapshots   []uint64
		first, last uint64 // of the log; 0: it is empty
		damaged     []uint64
		lost        bool
	}{
		{"the log is there since the older one", []uint64{10, 20}, 11, 25, []uint64{20}, false},
		{"the log ends where the damaged one did", []uint64{10, 20}, 11, 20, []uint64{20}, false},
		{"the log ends before", []uint64{10, 20}, 11, 19, []uint64{20}, true},
		{"the log is empty: the newest came from a leader", []uint64{10, 20}, 0, 0, []uint64{20}, true},
		{"the log begins behind the newest", []uint64{10, 20}, 21, 25, []uint64{20}, true},
		{"both, and the log is there from the beginning", []uint64{10, 20}, 1, 20, []uint64{10, 20}, false},
		{"both", []uint64{10, 20}, 11, 25, []uint64{10, 20}, true},
		{"the only one", []uint64{20}, 0, 0, []uint64{20}, true},
		{"the older one", []uint64{10, 20}, 0, 0, []uint64{10}, false},
	} {
		for _, others := range []bool{true, false} {
			t.Run(tc.name, func(t *testing.T) {
				dir := t.TempDir()
				s, _, err := open(t, dir)
				if err != nil {
					t.Fatal(err)
				}
				members := []Member{{ID: "a", Voter: true}}
				if others {
					members = append(members, Member{ID: "b", Voter: true})
				}
				if err := errors.Join(s.NoteMembers(members), s.Stable.SetUint64([]byte(datadir.KeyTerm), 3)); err != nil {
					t.Fatal(err)
				}
				for _, index := range tc.snapshots {
					if err := snapshot(t, s, index).Close(); err != nil {
						t.Fatal(err)
					}
				}
				if tc.last > 0 {
					if err := s.Log.StoreLogs(logtest.Entries(tc.first, tc.last, 3, 10)); err != nil {
						t.Fatal(err)
					}
				}
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				for _, index := range tc.damaged {
					files, err := filepath.Glob(filepath.Join(dir, datadir.SnapshotsDir, fmt.Sprintf("*-%d-*", index), "state.bin"))
					if err != nil || len(files) != 1 {
						t.Fatal(files, err)
					}
					b, err := os.ReadFile(files[0])
					if err != nil {
						t.Fatal(err)
					}
					b[len(b)/2] ^= 1
					if err := os.WriteFile(files[0], b, 0o600); err != nil {
						t.Fatal(err)
					}
				}
				for range 2 { // the second start comes to the same
					s, _, err := open(t, dir)
					if tc.lost && !others {
						if !errors.As(err, new(*datadir.DamageError)) {
							t.Fatalf("no other member has it: %v", err)
						}
						continue
					}
					if err != nil {
						t.Fatal(err)
					}
					if s.Lost != tc.lost {
						t.Errorf("lost: %v", s.Lost)
					}
					newest, _, err := s.Snapshots.Latest()
					if want := slices.Max(append([]uint64{0}, slices.DeleteFunc(slices.Clone(tc.snapshots), func(i uint64) bool { return tc.lost || slices.Contains(tc.damaged, i) })...)); newest != want || err != nil {
						t.Errorf("the newest snapshot is of %d, %v; want %d", newest, err, want)
					}
					if err := s.Close(); err != nil {
						t.Fatal(err)
					}
				}
			})
		}
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
	if err := errors.Join(snapshot(t, s, 1).Close(), snapshot(t, s, 2).Close()); err != nil {
		t.Fatal(err)
	}
	sink := snapshot(t, s, 3)
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
