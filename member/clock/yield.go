package clock

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/slack"
)

// Yield hands leadership over while this server's clock is wrong, since what the leader does goes by
// its clock: to a voter whose clock is right, as far as that is known, since another one would hand it back.
type Yield struct {
	Verdict  func() Verdict
	Leads    func() bool
	Members  func() ([]raftstore.Member, error)
	Transfer func(ctx context.Context, id string) error
	Log      *slog.Logger

	tries int // since the clock was right
}

const (
	yieldTimeout = 10 * time.Second
	yieldMost    = 30 * time.Second
)

// Run works until ctx ends.
func (y *Yield) Run(ctx context.Context) {
	for ctx.Err() == nil {
		wait := y.look(ctx)
		select {
		case <-ctx.Done():
		case <-slack.After(wait):
		}
	}
}

// look hands over if that is needed, and returns after how long it is to be called again.
func (y *Yield) look(ctx context.Context) time.Duration {
	v := y.Verdict()
	if !v.Wrong() || !v.Agreed {
		y.tries = 0
		return wrongPeriod
	}
	if !y.Leads() {
		return wrongPeriod
	}
	err := y.handOver(ctx, v.By)
	y.tries++
	y.Log.Warn("this server hands leadership over, as its clock is wrong", "tries", y.tries, "err", err)
	if err == nil && y.tries == 1 {
		return wrongPeriod
	}
	// It failed, or leadership came back: others are given the time to work meanwhile.
	return yieldMost + rand.N(yieldMost)
}

// handOver tries those whose clocks are right in turn.
func (y *Yield) handOver(ctx context.Context, right []string) error {
	ctx, cancel := context.WithTimeout(ctx, yieldTimeout)
	defer cancel()
	members, err := y.Members()
	if err != nil {
		return err
	}
	var to []string
	for _, m := range members {
		if m.Voter && slices.Contains(right, m.ID) {
			to = append(to, m.ID)
		}
	}
	if len(to) == 0 {
		return errors.New("no other voter is known to have a right clock")
	}
	return y.Transfer(ctx, to[y.tries%len(to)])
}

// WaitUntilRight waits while this machine's clock is wrong or was set and is not judged again yet, or
// until ctx ends: for loops, which decide by it what has ended.
func (c *Clock) WaitUntilRight(ctx context.Context) {
	for ctx.Err() == nil && (c.Doubtful() || c.Verdict().Wrong()) {
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// RunWhileRight runs work until ctx or the work ends, or the clock is wrong.
func (c *Clock) RunWhileRight(ctx context.Context, work func(context.Context) error) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var watching sync.WaitGroup
	watching.Go(func() {
		for ctx.Err() == nil && !c.Verdict().Wrong() {
			select {
			case <-ctx.Done():
			case <-slack.After(lookPeriod):
			}
		}
		stop()
	})
	err := work(ctx)
	stop()
	watching.Wait()
	return err
}
