package raftside

import (
	"testing"
	"time"

	"github.com/hashicorp/raft"
)

// TestGaps: only what a leader was late for twice, and lately, is what it is late for.
func TestGaps(t *testing.T) {
	type beat struct {
		at   time.Duration
		term uint64
	}
	s := time.Second
	for _, tc := range []struct {
		name  string
		beats []beat
		at    time.Duration
		want  time.Duration
	}{
		{"nothing was heard", nil, s, 0},
		{"one", []beat{{0, 1}}, s, 0},
		{"one pause", []beat{{0, 1}, {3 * s, 1}}, 3 * s, 0},
		{"two pauses", []beat{{0, 1}, {3 * s, 1}, {5 * s, 1}}, 5 * s, 2 * s},
		{"many", []beat{{0, 1}, {s, 1}, {4 * s, 1}, {6 * s, 1}, {7 * s, 1}}, 7 * s, 2 * s},
		{"the pause between two leaders", []beat{{0, 1}, {2 * s, 1}, {5 * s, 2}, {6 * s, 2}, {6 * s, 2}}, 6 * s, s},
		{"a leader of the past", []beat{{0, 2}, {2 * s, 2}, {3 * s, 1}, {5 * s, 2}}, 5 * s, 2 * s},
		{"remembered", []beat{{0, 1}, {3 * s, 1}, {5 * s, 1}}, 5*s + gapKept, 2 * s},
		{"forgotten", []beat{{0, 1}, {3 * s, 1}, {5 * s, 1}}, 6*s + 2*gapKept, 0},
	} {
		var g gaps
		began := time.Now()
		for _, b := range tc.beats {
			g.note(raft.RPC{Command: &raft.AppendEntriesRequest{Term: b.term}}, began.Add(b.at))
		}
		if got := g.typical(began.Add(tc.at)); got != tc.want {
			t.Errorf("%s: %v, want %v", tc.name, got, tc.want)
		}
	}
}

// TestHeartbeatTerm: heartbeats are of the latest term in which raft has led here.
func TestHeartbeatTerm(t *testing.T) {
	var b heartbeats
	for _, step := range []struct{ noted, want uint64 }{{3, 3}, {5, 5}, {4, 5}, {5, 5}} {
		if b.leads(step.noted); b.term.Load() != step.want {
			t.Errorf("after a message of term %d: %d, want %d", step.noted, b.term.Load(), step.want)
		}
	}
}
