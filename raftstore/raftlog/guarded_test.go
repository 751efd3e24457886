package raftlog

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/disk"
	"github.com/clusterd/clusterd/raftstore/logtest"
)

type notAhead struct{}

func (notAhead) Send([]*raft.Log)  {}
func (notAhead) Wrote([]*raft.Log) {}

// TestLogAfterSnapshots: after each snapshot the log since the one before it is
// there, if both are of this member's own history; what was there when a leader's
// snapshot came is not used again.
func TestLogAfterSnapshots(t *testing.T) {
	type step func(l *Guarded, latest *[2]uint64) error
	entries := func(from, to uint64) step {
		return func(l *Guarded, _ *[2]uint64) error { return l.StoreLogs(logtest.Entries(from, to, 1, 3000)) }
	}
	// trim is what raft does after a snapshot of its own.
	trim := func(l *Guarded, upTo uint64) error {
		first, err := l.FirstIndex()
		if err != nil {
			return err
		}
		last, err := l.LastIndex()
		if err != nil || last == 0 || first > min(upTo, last) {
			return err
		}
		return l.DeleteRange(first, min(upTo, last))
	}
	own := func(index uint64) step {
		return func(l *Guarded, latest *[2]uint64) error {
			*latest = [2]uint64{index, latest[0]}
			return trim(l, index)
		}
	}
	// A leader's takes the place of the whole log.
	foreign := func(index uint64) step {
		return func(l *Guarded, latest *[2]uint64) error {
			*latest = [2]uint64{index, latest[0]}
			if err := l.Replaced(); err != nil {
				return err
			}
			last, err := l.LastIndex()
			if err != nil {
				return err
			}
			return trim(l, last)
		}
	}
	for _, tc := range []struct {
		name        string
		steps       []step
		first, last uint64 // what the log holds then; 0: nothing
	}{
		{"own ones", []step{entries(1, 100), own(100), entries(101, 200), own(200)}, 101, 200},
		{"a leader's, into an empty log", []step{foreign(100), entries(101, 200), own(200)}, 101, 200},
		{"a leader's, beyond the log", []step{entries(1, 80), own(50), foreign(100)}, 0, 0},
		{"a leader's, beyond the log, and one of its own", []step{entries(1, 80), own(50), foreign(100), entries(101, 200), own(200)}, 101, 200},
		{"a leader's, within the log", []step{entries(1, 120), own(50), foreign(100)}, 0, 0},
		{"a leader's, within the log, and one of its own", []step{entries(1, 120), own(50), foreign(100), entries(101, 200), own(200)}, 101, 200},
		{"a leader's, and two of its own", []step{entries(1, 120), foreign(100), entries(101, 200), own(150), own(200)}, 151, 200},
	} {
		for _, engine := range Engines {
			t.Run(fmt.Sprint(tc.name, ", ", engine), func(t *testing.T) {
				log, err := Record{Engine: engine, Folder: logDir}.Open(logtest.MemDir(t), 0, slog.New(slog.DiscardHandler))
				if err != nil {
					t.Fatal(err)
				}
				defer func() { _ = log.Close() }()
				var latest [2]uint64
				l := NewGuarded(log, Guard{
					Disk: disk.New(t.TempDir(), 1, time.Minute, nil), Logger: slog.New(slog.DiscardHandler), Ahead: notAhead{},
					Latest: func() (uint64, uint64, error) { return latest[0], latest[1], nil },
				})
				for i, step := range tc.steps {
					if err := step(l, &latest); err != nil {
						t.Fatalf("step %d: %v", i, err)
					}
				}
				first, err := l.FirstIndex()
				if err != nil {
					t.Fatal(err)
				}
				last, err := l.LastIndex()
				if err != nil {
					t.Fatal(err)
				}
				// Segments go as a whole: more than is needed may be there.
				if first > tc.first || last != tc.last || (first == 0) != (tc.first == 0) {
					t.Errorf("the log holds %d to %d, want %d to %d", first, last, tc.first, tc.last)
				}
			})
		}
	}
}
