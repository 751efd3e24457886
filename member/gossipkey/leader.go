package gossipkey

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/slack"
)

// Leader takes rotations of the key from step to step while this node leads. Nothing
// is remembered between two looks: another leader continues where this one ended.
type Leader struct {
	Store join.Store
	// Every is how long a key is used at most; 0: until another is asked for.
	Every time.Duration
	// Make makes a key that this server holds from then on, and returns its id, and
	// that of the key that this server encrypts with now.
	Make func() (first, id string)
	Log  *slog.Logger
	// Now is the cluster's time, by which a key is old; nil: this machine's.
	Now func() time.Time

	logged string // the last log line about the servers that are waited for
}

// lookPeriod is how often the leader looks whether it is time for a step.
const lookPeriod = time.Second

// Run works until ctx ends.
func (l *Leader) Run(ctx context.Context) error {
	now := l.Now
	if now == nil {
		now = time.Now
	}
	for {
		if err := l.look(ctx, now()); err != nil && ctx.Err() == nil {
			l.Log.Warn("the rotation of the gossip key waits", "err", err)
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
	if err != nil {
		return err
	}
	wished, err := LastRequest(ctx, l.Store)
	if err != nil {
		return err
	}
	var due string
	if state.Phase == Stable {
		if due, err = l.due(ctx, state, wished, now); err != nil || due == "" {
			return err
		}
	}
	servers, err := Servers(ctx, l.Store, true)
	if err != nil {
		return err
	}
	switch next, step := state.Next(servers, now); {
	case due != "":
		var old []string
		for _, m := range servers {
			if m.Arrived && !m.Knows {
				old = append(old, m.Name)
			}
		}
		if len(old) > 0 {
			l.logWaiting("another gossip key is due and waits for servers that have not reported yet that they can rotate it: start them, with this version of clusterd", old)
			return nil
		}
		return l.begin(ctx, state, revision, wished, due, now)
	case state.Lost(servers, now):
		return l.begin(ctx, state, revision, wished, "no server holds the next one", now)
	case step:
		done, err := put(ctx, l.Store, revision, next)
		if done {
			l.logged = ""
			l.Log.Info("the rotation of the gossip key continues", "phase", next.Phase, "generation", next.Generation)
		}
		return err
	default:
		var names []string
		for _, m := range state.Lagging(servers) {
			names = append(names, m.Name)
		}
		l.logWaiting("the rotation of the gossip key waits for servers", names)
		return nil
	}
}

func (l *Leader) due(ctx context.Context, state State, wished int64, now time.Time) (string, error) {
	began := now
	if state.Used.IsZero() && l.Every > 0 {
		cluster, err := join.GetCluster(ctx, l.Store)
		if err != nil {
			return "", err
		}
		if !cluster.Created.IsZero() {
			began = cluster.Created
		}
	}
	return state.Due(wished, l.Every, began, now), nil
}

func (l *Leader) begin(ctx context.Context, state State, revision, wished int64, why string, now time.Time) error {
	first, id := l.Make()
	done, err := put(ctx, l.Store, revision, state.Begin(first, id, wished, now))
	if done {
		l.Log.Info("the gossip key is being rotated", "why", why)
	}
	return err
}

// logWaiting logs who is waited for, when that has changed.
func (l *Leader) logWaiting(what string, names []string) {
	slices.Sort(names)
	if line := what + strings.Join(names, " "); line != l.logged {
		l.logged = line
		l.Log.Info(what, "for", names)
	}
}
