package authority

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/slack"
)

// Leader takes a rotation from step to step while this node leads. Nothing is
// remembered between two looks: another leader continues where this one ended.
type Leader struct {
	Store join.Store
	// Make makes other successors for these purposes, writes their keys to this node's disk, and begins
	// again with it.
	Make func(ctx context.Context, of []pki.Purpose) error
	// Refresh has an agent, by name, ask for changes; it must not block. May be nil:
	// agents ask by themselves.
	Refresh func(name string)
	Log     *slog.Logger
	// Now is the cluster's time, by which grace ends; nil: this machine's.
	Now func() time.Time

	logged string    // the last log line about the members that are waited for
	poked  time.Time // when agents were last asked to look
}

const (
	// lookPeriod is how often the leader looks whether it is time for a step.
	lookPeriod = time.Second
	// pokePeriod is how often agents that are waited for are asked to look.
	pokePeriod = 5 * time.Second
)

// Run works until ctx ends.
func (l *Leader) Run(ctx context.Context) error {
	now := l.Now
	if now == nil {
		now = time.Now
	}
	for {
		if err := l.look(ctx, now()); err != nil && ctx.Err() == nil {
			l.Log.Warn("the CA rotation waits", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-slack.After(lookPeriod):
		}
	}
}

func (l *Leader) look(ctx context.Context, now time.Time) error {
	// A stale look costs nothing; what is written compares what was read.
	state, revision, err := get(ctx, l.Store, true)
	if err != nil || state.Phase == Stable {
		return err
	}
	members, err := Members(ctx, l.Store, false)
	if err != nil {
		return err
	}
	if state.Lost(members) {
		l.Log.Warn("no member holds the key of the new authority: another one is made")
		return l.Make(ctx, state.of())
	}
	next, due := state.Next(members, now)
	if !due {
		l.logWaiting(state, members, now)
		return nil
	}
	var more []mvcc.Op
	if next.Phase == Stable {
		trust, err := next.Trust()
		if err == nil {
			more, err = join.DropTokens(ctx, l.Store, trust.Signer().ID())
		}
		if err != nil {
			return err
		}
		if state.rotates(pki.ForPeers) {
			more = append(more, join.GossipKeyRotation("the CA was rotated"))
		}
	}
	done, err := put(ctx, l.Store, revision, next, more...)
	if done {
		l.Log.Info("the CA rotation continues", "phase", next.Phase, "number", next.Number)
	}
	return err
}

// logWaiting says who is waited for, when that has changed.
func (l *Leader) logWaiting(state State, members []Member, now time.Time) {
	var names []string
	poke := l.Refresh != nil && now.Sub(l.poked) > pokePeriod
	for _, m := range state.Waiting(members, now) {
		names = append(names, m.Name)
		if poke && !m.Server {
			l.Refresh(m.Name)
		}
	}
	if poke {
		l.poked = now
	}
	slices.Sort(names)
	names = names[:min(len(names), 10)]
	if line := string(state.Phase) + " " + strings.Join(names, " "); line != l.logged {
		l.logged = line
		l.Log.Info("the CA rotation waits for members", "phase", state.Phase, "for", names)
	}
}
