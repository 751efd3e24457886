package main

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/clock"
	"github.com/clusterd/clusterd/raftstore"
)

// TestLeaderYield: of two servers whose clocks are wrong none gets leadership from the other, and who
// cannot hand over, or gets it back, does not go on each moment.
func TestLeaderYield(t *testing.T) {
	var got []string
	var fails error
	v := clock.Verdict{Why: "wrong", Agreed: true, Ahead: time.Hour, By: []string{"n3", "n4", "n5"}}
	leads := true
	y := leaderYield{
		verdict: func() clock.Verdict { return v }, leads: func() bool { return leads }, log: slog.New(slog.DiscardHandler),
		members: func() ([]raftstore.Member, error) {
			return []raftstore.Member{{ID: "n1", Voter: true}, {ID: "n2", Voter: true}, {ID: "n3", Voter: true}, {ID: "n4", Voter: true}, {ID: "n5"}}, nil
		},
		transfer: func(_ context.Context, id string) error {
			got = append(got, id)
			return fails
		},
	}
	if wait := y.look(t.Context()); wait != clockWrongPeriod {
		t.Errorf("after the first: %s", wait)
	}
	leads = false
	if wait := y.look(t.Context()); wait != clockWrongPeriod {
		t.Errorf("another leads: %s", wait)
	}
	leads = true
	if wait := y.look(t.Context()); wait < yieldMost || wait > 2*yieldMost {
		t.Errorf("it came back: %s", wait)
	}
	if !slices.Equal(got, []string{"n3", "n4"}) {
		t.Errorf("handed over to %v", got)
	}
	v = clock.Verdict{}
	y.look(t.Context())
	v = clock.Verdict{Why: "wrong", Agreed: true, By: []string{"n5"}}
	if wait := y.look(t.Context()); wait < yieldMost {
		t.Errorf("no voter is right: %s", wait)
	}
	v.By, fails = []string{"n3"}, errors.New("no answer")
	y.tries = 0
	if wait := y.look(t.Context()); wait < yieldMost {
		t.Errorf("it failed: %s", wait)
	}
	v.Agreed = false // and Ahead is the store's last time
	y.look(t.Context())
	if !slices.Equal(got, []string{"n3", "n4", "n3"}) {
		t.Errorf("handed over to %v", got)
	}
}
