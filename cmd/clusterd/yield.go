package main

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/clusterd/clusterd/member/clock"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/slack"
)

// leaderYield hands leadership over while this server's clock is wrong: to a voter whose clock is
// right, as far as that is known, since another one would hand it back.
type leaderYield struct {
	verdict  func() clock.Verdict
	leads    func() bool
	members  func() ([]raftstore.Member, error)
	transfer func(ctx context.Context, id string) error
	log      *slog.Logger

	tries int // since the clock was right
}

const (
	yieldTimeout = 10 * time.Second
	yieldMost    = 30 * time.Second
)

// look hands over if that is needed, and returns after how long it is to be called again.
func (y *leaderYield) look(ctx context.Context) time.Duration {
	v := y.verdict()
	if !v.Wrong() || !v.Agreed {
		y.tries = 0
		return clockWrongPeriod
	}
	if !y.leads() {
		return clockWrongPeriod
	}
	err := y.handOver(ctx, v.By)
	y.tries++
	y.log.Warn("this server hands leadership over, as its clock is wrong", "tries", y.tries, "err", err)
	if err == nil && y.tries == 1 {
		return clockWrongPeriod
	}
	// It failed, or leadership came back: others are given the time to work meanwhile.
	return yieldMost + rand.N(yieldMost)
}

// handOver tries those whose clocks are right in turn.
func (y *leaderYield) handOver(ctx context.Context, right []string) error {
	ctx, cancel := context.WithTimeout(ctx, yieldTimeout)
	defer cancel()
	members, err := y.members()
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
	return y.transfer(ctx, to[y.tries%len(to)])
}

// holdLoops waits while this machine's clock is wrong or was set and is not judged again yet: loops
// decide by it what has ended.
func (m *Main) holdLoops(ctx context.Context) {
	for ctx.Err() == nil && (m.clock.Doubtful() || m.clock.Verdict().Wrong()) {
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// whileClockIsRight runs work until ctx or the work ends, or the clock is wrong.
func (m *Main) whileClockIsRight(ctx context.Context, work func(context.Context) error) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var watching sync.WaitGroup
	watching.Go(func() {
		for ctx.Err() == nil && !m.clock.Verdict().Wrong() {
			select {
			case <-ctx.Done():
			case <-slack.After(clockLook):
			}
		}
		stop()
	})
	err := work(ctx)
	stop()
	watching.Wait()
	return err
}
