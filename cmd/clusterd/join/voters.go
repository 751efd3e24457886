package join

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/clusterd/clusterd/gossip"
	"github.com/clusterd/clusterd/raftstore"
)

// Raft is what this package needs of the store's membership. Changes fail on
// all but the leader.
type Raft interface {
	Members() ([]raftstore.Member, error)
	AddVoter(ctx context.Context, id string) error
	AddNonvoter(ctx context.Context, id string) error
	RemoveMember(ctx context.Context, id string) error
}

// View is what gossip says.
type View interface {
	All() []gossip.Member
	Changed() <-chan struct{}
	Forget(id string)
}

// Reconciler gives raft the members that the records admit and gossip sees.
// It runs on the leader only.
type Reconciler struct {
	Store  Store
	Raft   Raft
	Gossip View
	Log    *slog.Logger
}

// reconcilePeriod is how often the records are read when gossip is quiet: a
// removal does not show in gossip.
const reconcilePeriod = 15 * time.Second

// MaxVoters bounds what each write has to wait for.
const MaxVoters = 5

// Run reconciles until ctx ends, which it does when leadership is lost.
func (r *Reconciler) Run(ctx context.Context) error {
	for {
		changed := r.Gossip.Changed()
		wait := reconcilePeriod
		if err := r.pass(ctx); err != nil && ctx.Err() == nil {
			r.Log.Warn("the store's membership could not be brought up to date, trying again", "err", err)
			wait = time.Second
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		case <-time.After(wait):
		}
	}
}

func (r *Reconciler) pass(ctx context.Context) error {
	records, err := Records(ctx, r.Store, false)
	if err != nil {
		return err
	}
	current, err := r.Raft.Members()
	if err != nil {
		return err
	}
	seen := map[string]gossip.State{}
	for _, m := range r.Gossip.All() {
		seen[m.ID] = m.State
	}
	for _, rec := range records {
		if !rec.Confirmed && seen[rec.ID] == gossip.Alive {
			if err := confirm(ctx, r.Store, rec.ID); err != nil {
				return fmt.Errorf("confirm member %s: %w", rec.Name, err)
			}
		}
	}
	for _, c := range plan(records, seen, current) {
		r.Log.Info("membership of the store changes", "change", c.verb, "member", c.id)
		var err error
		switch c.verb {
		case addVoter:
			err = r.Raft.AddVoter(ctx, c.id)
		case addNonvoter:
			err = r.Raft.AddNonvoter(ctx, c.id)
		case remove:
			if err = r.Raft.RemoveMember(ctx, c.id); err == nil {
				r.Gossip.Forget(c.id)
			}
		}
		if err != nil {
			return fmt.Errorf("%s %s: %w", c.verb, c.id, err)
		}
	}
	return nil
}

type verb string

const (
	addVoter    verb = "add voter"
	addNonvoter verb = "add non-voter"
	remove      verb = "remove"
)

type change struct {
	verb verb
	id   string
}

// plan decides what to change, as a function of values: members without a
// record go, alive ones with a record come in, and voters are kept at an odd
// number. It never demotes a living voter, and never adds a machine that
// gossip does not see, whose vote would only be missing.
func plan(records []Record, seen map[string]gossip.State, current []raftstore.Member) []change {
	admitted := map[string]bool{}
	for _, rec := range records {
		admitted[rec.ID] = true
	}
	var changes []change
	in, voter := map[string]bool{}, map[string]bool{}
	for _, m := range current {
		if !admitted[m.ID] {
			changes = append(changes, change{remove, m.ID})
			continue
		}
		in[m.ID] = true
		if m.Voter {
			voter[m.ID] = true
		}
	}
	// Alive members that do not vote yet, those who joined first first.
	var spare []string
	slices.SortFunc(records, func(a, b Record) int {
		return cmp.Or(a.Joined.Compare(b.Joined), cmp.Compare(a.ID, b.ID))
	})
	for _, rec := range records {
		if seen[rec.ID] == gossip.Alive && !voter[rec.ID] {
			spare = append(spare, rec.ID)
			in[rec.ID] = true
		}
	}
	for _, id := range spare {
		switch {
		case len(voter) < voters(len(in)):
			changes = append(changes, change{addVoter, id})
			voter[id] = true
		case !slices.ContainsFunc(current, func(m raftstore.Member) bool { return m.ID == id }):
			changes = append(changes, change{addNonvoter, id})
		}
	}
	return changes
}

// voters is how many of n members should vote. Two voters would be worse than
// one: either's loss would stop the store. From the third member on, one may
// be lost.
func voters(n int) int {
	return min(MaxVoters, (n-1)/2*2+1)
}
