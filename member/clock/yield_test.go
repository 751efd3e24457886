package clock

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/clusterd/clusterd/raftstore"
)

// TestYield: of two servers whose clocks are wrong none gets leadership from the other, and who
// cannot hand over, or gets it back, does not go on each moment.
func TestYield(t *testing.T) {
	var got []string
	var fails error
	v := Verdict{Why: "wrong", Agreed: true, Ahead: time.Hour, By: []string{"n3", "n4", "n5"}}
	leads := true
	y := Yield{
		Verdict: func() Verdict { return v }, Leads: func() bool { return leads }, Log: slog.New(slog.DiscardHandler),
		Members: func() ([]raftstore.Member, error) {
			return []raftstore.Member{{ID: "n1", Voter: true}, {ID: "n2", Voter: true}, {ID: "n3", Voter: true}, {ID: "n4", Voter: true}, {ID: "n5"}}, nil
		},
		Transfer: func(_ context.Context, id string) error {
			got = append(got, id)
			return fails
		},
	}
	if wait := y.look(t.Context()); wait != wrongPeriod {
		t.Errorf("after the first: %s", wait)
	}
	leads = false
	if wait := y.look(t.Context()); wait != wrongPeriod {
		t.Errorf("another leads: %s", wait)
	}
	leads = true
	if wait := y.look(t.Context()); wait < yieldMost || wait > 2*yieldMost {
		t.Errorf("it came back: %s", wait)
	}
	if !slices.Equal(got, []string{"n3", "n4"}) {
		t.Errorf("handed over to %v", got)
	}
	v = Verdict{}
	y.look(t.Context())
	v = Verdict{Why: "wrong", Agreed: true, By: []string{"n5"}}
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
