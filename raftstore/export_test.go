package raftstore

import (
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// Absences is how often replication had to wait for a member.
func (s *Store) Absences() int {
	s.raftSide.mu.Lock()
	defer s.raftSide.mu.Unlock()
	return s.raftSide.absences
}

// DemoteOp is the first byte of a frame that takes a vote.
const DemoteOp = byte(demote)

// Refused is how many of raft's calls a member that lost its state has
// refused.
func (s *Store) Refused() int {
	s.gate.mu.Lock()
	defer s.gate.mu.Unlock()
	return s.gate.refused
}

// Amnesiac reports whether the member takes part in nothing.
func (s *Store) Amnesiac() bool { return s.gate.shut.Load() }

// Faults are put below a member before it is opened.
type Faults struct {
	Log    func(raft.LogStore) raft.LogStore
	Free   func(dir string) (int64, error)
	Mangle func(*mvcc.Batch)
	// Silence is how long a leader may be silent; 0: as in earnest.
	Silence time.Duration
	// Wall is the clock as it is set by hand; what elapses is not touched.
	Wall func() time.Time
}

// Leaders in these tests send entries ahead however fast the disk is: all faults
// befall that, too.
func init() { slowSync = 0 }

// SendAhead sets whether leaders of a benchmark send ahead.
func SendAhead(b *testing.B, on bool) {
	if !on {
		slowSync = time.Hour
		b.Cleanup(func() { slowSync = 0 })
	}
}

// Inject puts them there.
func (c *Config) Inject(f Faults) {
	c.wrapLog, c.freeBytes, c.mangle, c.silence = f.Log, f.Free, f.Mangle, f.Silence
	if f.Wall != nil {
		start := time.Now()
		c.Now, c.elapsed = f.Wall, func() time.Duration { return time.Since(start) }
	}
}

// ShouldStand asks the others whether lost is gone for them, too.
func ShouldStand(s *Store, lost string) bool { return s.shouldStand(s.ctx, lost) }

// BreakVote makes every further write of term and vote fail.
func BreakVote(s *Store) { _ = s.stable.Close() }

// Endless are the kinds of raft's futures that errorOf could not end, asked of
// a follower, which refuses all that only a leader does.
func (s *Store) Endless() (kinds []string) {
	r := s.raft()
	for kind, ask := range map[string]func() raft.Future{
		"apply":    func() raft.Future { return r.Apply(nil, 0) },
		"add":      func() raft.Future { return r.AddNonvoter("x", "x", 0, 0) },
		"remove":   func() raft.Future { return r.RemoveServer("x", 0, 0) },
		"demote":   func() raft.Future { return r.DemoteVoter("x", 0, 0) },
		"transfer": func() raft.Future { return r.LeadershipTransfer() },
		"to":       func() raft.Future { return r.LeadershipTransferToServer("x", "x") },
		"snapshot": func() raft.Future { return r.Snapshot() },
	} {
		f := ask()
		if _, ok := shutdownField(f); !ok {
			kinds = append(kinds, kind)
		}
		_ = f.Error() // raft takes one transfer at a time
	}
	return kinds
}
