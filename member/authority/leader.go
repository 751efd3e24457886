package authority

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// Leader takes an exchange from step to step while this node leads. Nothing is
// remembered between two looks: another leader goes on where this one ended.
type Leader struct {
	Store join.Store
	// Make makes another successor, writes its key to this node's disk, and begins
	// again with it.
	Make func(context.Context) error
	// Poke tells an agent, by name, to ask for news; it must not wait. May be nil:
	// agents ask by themselves.
	Poke func(name string)
	Log  *slog.Logger

	told  string    // what the log said last of who is waited for
	poked time.Time // when agents were last asked to look
}

const (
	// lookPeriod is how often the leader looks whether it is time for a step.
	lookPeriod = time.Second
	// pokePeriod is how often agents that are waited for are asked to look.
	pokePeriod = 5 * time.Second
)

// Run works until ctx ends.
func (l *Leader) Run(ctx context.Context) error {
	for {
		if err := l.look(ctx, time.Now()); err != nil && ctx.Err() == nil {
			l.Log.Warn("the exchange of the authority waits", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(lookPeriod):
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
		l.Log.Warn("nobody holds the key of the authority that is to follow: another is made")
		return l.Make(ctx)
	}
	next, due := state.Next(members, now)
	if !due {
		l.tellWaiting(state, members, now)
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
		more = append(more, join.GossipKeyWish("the authority was exchanged"))
	}
	done, err := put(ctx, l.Store, revision, next, more...)
	if done {
		l.Log.Info("the exchange of the authority goes on", "phase", next.Phase, "number", next.Number)
	}
	return err
}

// tellWaiting says who is waited for, when that has changed.
func (l *Leader) tellWaiting(state State, members []Member, now time.Time) {
	var names []string
	poke := l.Poke != nil && now.Sub(l.poked) > pokePeriod
	for _, m := range state.Waiting(members, now) {
		names = append(names, m.Name)
		if poke && !m.Server {
			l.Poke(m.Name)
		}
	}
	if poke {
		l.poked = now
	}
	slices.Sort(names)
	names = names[:min(len(names), 10)]
	if told := string(state.Phase) + " " + strings.Join(names, " "); told != l.told {
		l.told = told
		l.Log.Info("the exchange of the authority waits for members", "phase", state.Phase, "for", names)
	}
}
