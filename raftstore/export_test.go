package raftstore

import (
	"testing"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// HasState reports whether the data directory held a member's state when it was
// opened: then Bootstrap is not for this member.
func (s *Store) HasState() bool { return s.state.Had }

// Absences is how often replication had to wait for a member.
func (s *Store) Absences() int { return s.raftSide.Absences() }

// DemoteOp is the first byte of a frame that takes a vote.
const DemoteOp = byte(demote)

// Refused is how many of raft's calls a member that lost its state has
// refused.
func (s *Store) Refused() int { return s.raftSide.Gate.Refused() }

// LostState reports whether the member has lost its state and takes part in nothing.
func (s *Store) LostState() bool { return s.raftSide.Gate.Shut() }

// Faults are put below a member before it is opened.
type Faults struct {
	Log    func(raft.LogStore) raft.LogStore
	Free   func(dir string) (int64, error)
	Mangle func(*mvcc.Batch)
	// Silence is how long a leader may be silent; 0: as in production.
	Silence time.Duration
	// Older: the member does not know format 2.
	Older bool
	// Knows is the highest format that the member knows; 0: the newest.
	Knows int
	// LookAt is how often the others' formats are asked for; 0: as in production.
	LookAt time.Duration
	// Wall is the clock as it is set by hand; what elapses is not touched.
	Wall func() time.Time
}

// Leaders in these tests send entries ahead however fast the disk is: all faults
// happen to that, too.
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
	c.wrapLog, c.freeBytes, c.mangle, c.silence, c.older, c.knows, c.lookAt = f.Log, f.Free, f.Mangle, f.Silence, f.Older, f.Knows, f.LookAt
	if f.Wall != nil {
		start := time.Now()
		c.Now, c.elapsed = f.Wall, func() time.Duration { return time.Since(start) }
	}
}

// ShouldStand asks the others whether lost is gone for them, too.
func ShouldStand(s *Store, lost string) bool { return s.election.ShouldStand(s.ctx, lost) }

// PendingCalls is how many calls of this member wait for a reply of another one.
func (s *Store) PendingCalls() int { return s.peers.Pending() }

// BreakVote makes every further write of term and vote fail.
func BreakVote(s *Store) { _ = s.state.Stable.Close() }

// GiveUpElection is what a candidate in that term does when it gets no votes.
func GiveUpElection(s *Store, term uint64) error { return s.raftSide.GiveUpElection(term) }

// StandForElection makes the member a candidate.
func StandForElection(s *Store) { s.election.Stand() }
