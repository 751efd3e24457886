package join

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/clusterd/clusterd/gossip"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// Raft is what this package needs of the store's membership. Changes fail on
// all but the leader.
type Raft interface {
	Members() ([]raftstore.Member, error)
	AddVoter(ctx context.Context, id string) error
	AddNonvoter(ctx context.Context, id string) error
	DemoteVoter(ctx context.Context, id string) error
	RemoveMember(ctx context.Context, id string) error
	// Progress asks a member how far it has applied the log.
	Progress(ctx context.Context, id string) (uint64, error)
}

// View is what gossip says.
type View interface {
	All() []gossip.Member
	Changed() <-chan struct{}
	Forget(id string)
}

// Reconciler gives raft the members that the records admit and gossip sees,
// and the votes to those who are fit for one. It runs on the leader only; what
// it remembers of its members' health starts empty with each leader.
type Reconciler struct {
	ID     string // this member's
	Store  Store
	Raft   Raft
	Gossip View
	Log    *slog.Logger
	// Warn is called with what the cluster would not survive, once for each time it
	// becomes so. May be nil.
	Warn func(warning string)

	health   map[string]health
	warnings map[string]time.Time // when each came up; zero: it was logged
}

// health is what this leader has seen of a member.
type health struct {
	silentSince time.Time // zero: it is there
	aliveSince  time.Time // when it came back; zero: it was never away
}

const (
	// reconcilePeriod is how often all is looked at when gossip is quiet: a
	// removal does not show in gossip.
	reconcilePeriod = 15 * time.Second
	// Sooner, while a newcomer catches up and while a member is away.
	newcomerPeriod = 50 * time.Millisecond
	awayPeriod     = time.Second

	// lostAfter is how long a voter must be away before its vote goes to
	// another: longer than an upgrade of clusterd takes.
	lostAfter = 10 * time.Second
	// steadyAfter is how long one that was away must be back before it is
	// given a vote: one that comes and goes gets none.
	steadyAfter = 30 * time.Second
	// maxLag is how many log entries behind the leader one may be that is
	// given a vote: the store would have to wait for it otherwise.
	maxLag = 250
	// warnAfter is how long a cluster must be in danger before it is warned.
	warnAfter = 30 * time.Second
	// askTimeout is what a member may take to say how far it is.
	askTimeout = time.Second
)

// Run reconciles until ctx ends, which it does when leadership is lost.
func (r *Reconciler) Run(ctx context.Context) error {
	r.health, r.warnings = map[string]health{}, map[string]time.Time{}
	for {
		changed := r.Gossip.Changed()
		wait, err := r.pass(ctx)
		if err != nil && ctx.Err() == nil {
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

// pass looks at everything once and does what is planned. It returns when it
// wants to look again.
func (r *Reconciler) pass(ctx context.Context) (time.Duration, error) {
	records, err := Records(ctx, r.Store, false)
	if err != nil {
		return 0, err
	}
	records = Servers(records)
	wanted, err := WantedVoters(ctx, r.Store, false)
	if err != nil {
		return 0, err
	}
	current, err := r.Raft.Members()
	if err != nil {
		return 0, err
	}
	members, strangers := r.look(ctx, records, current, time.Now())
	for _, m := range members {
		if !m.Confirmed && m.alive {
			if err := confirm(ctx, r.Store, m.ID); err != nil {
				return 0, fmt.Errorf("confirm member %s: %w", m.Name, err)
			}
		}
	}
	changes := plan(members, strangers, r.ID, wanted)
	// A machine without a record that cannot be taken out now, since a majority would
	// be missing, must not keep others from coming in, who may be what is missing.
	var stay []error
	for _, c := range changes {
		r.Log.Info("membership of the store changes", "change", c.verb, "member", c.id)
		err := r.do(ctx, c)
		if err == nil {
			continue
		}
		err = fmt.Errorf("%s %s: %w", c.verb, c.id, err)
		if c.verb != remove || ctx.Err() != nil {
			return 0, errors.Join(append(stay, err)...)
		}
		stay = append(stay, err)
	}
	if len(stay) > 0 {
		return 0, errors.Join(stay...)
	}
	if len(changes) > 0 {
		return newcomerPeriod, nil
	}
	r.warn(records, current, time.Now())
	wait := reconcilePeriod
	for _, m := range members {
		switch {
		case m.in && m.alive && !m.voter && !m.fit && r.health[m.ID].aliveSince.IsZero():
			wait = min(wait, newcomerPeriod)
		case m.in && (!m.alive || !m.voter && !m.fit):
			wait = min(wait, awayPeriod)
		}
	}
	return wait, nil
}

func (r *Reconciler) do(ctx context.Context, c change) error {
	switch c.verb {
	case addVoter:
		return r.Raft.AddVoter(ctx, c.id)
	case addNonvoter:
		return r.Raft.AddNonvoter(ctx, c.id)
	case demote:
		return r.Raft.DemoteVoter(ctx, c.id)
	default:
		err := r.Raft.RemoveMember(ctx, c.id)
		if err == nil {
			r.Gossip.Forget(c.id)
		}
		return err
	}
}

// look finds out how each member is, and which are in raft without a record.
func (r *Reconciler) look(ctx context.Context, records []Record, current []raftstore.Member, now time.Time) (members []memberState, strangers []string) {
	seen := map[string]bool{}
	for _, m := range r.Gossip.All() {
		seen[m.ID] = m.State == gossip.Alive
	}
	known := make(map[string]health, len(r.health)) // without those who were removed
	progress := r.ask(ctx, current)
	ours := progress[r.ID]
	for _, rec := range records {
		i := slices.IndexFunc(current, func(m raftstore.Member) bool { return m.ID == rec.ID })
		at, answered := progress[rec.ID]
		s := memberState{Record: rec, in: i >= 0, voter: i >= 0 && current[i].Voter, alive: answered || seen[rec.ID]}
		h := r.health[rec.ID].next(s.alive, now)
		if s.in {
			known[rec.ID] = h
		}
		s.lost = h.lost(now)
		s.fit = answered && h.steady(now) && at+maxLag >= ours
		members = append(members, s)
	}
	r.health = known
	for _, m := range current {
		if !slices.ContainsFunc(records, func(rec Record) bool { return rec.ID == m.ID }) {
			strangers = append(strangers, m.ID)
		}
	}
	return members, strangers
}

func (h health) next(alive bool, now time.Time) health {
	switch {
	case !alive && h.silentSince.IsZero():
		return health{silentSince: now}
	case alive && !h.silentSince.IsZero():
		return health{aliveSince: now}
	}
	return h
}

func (h health) lost(now time.Time) bool {
	return !h.silentSince.IsZero() && now.Sub(h.silentSince) >= lostAfter
}

func (h health) steady(now time.Time) bool {
	return h.silentSince.IsZero() && (h.aliveSince.IsZero() || now.Sub(h.aliveSince) >= steadyAfter)
}

// ask asks all members at once how far they are. Those who do not answer in
// time are missing.
func (r *Reconciler) ask(ctx context.Context, current []raftstore.Member) map[string]uint64 {
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	var mu sync.Mutex
	progress := map[string]uint64{}
	var asking sync.WaitGroup
	for _, m := range current {
		asking.Go(func() {
			if at, err := r.Raft.Progress(ctx, m.ID); err == nil {
				mu.Lock()
				defer mu.Unlock()
				progress[m.ID] = at
			}
		})
	}
	asking.Wait()
	return progress
}

// warn tells of what has been so for warnAfter: a cluster that grows passes
// through two members.
func (r *Reconciler) warn(records []Record, current []raftstore.Member, now time.Time) {
	warnings := Warnings(records, func(id string) bool {
		return slices.Contains(current, raftstore.Member{ID: id, Voter: true})
	})
	maps.DeleteFunc(r.warnings, func(w string, _ time.Time) bool { return !slices.Contains(warnings, w) })
	for _, w := range warnings {
		since, known := r.warnings[w]
		switch {
		case !known:
			r.warnings[w] = now
		case !since.IsZero() && now.Sub(since) >= warnAfter:
			r.warnings[w] = time.Time{}
			r.Log.Warn(w)
			if r.Warn != nil {
				r.Warn(w)
			}
		}
	}
}

// votersRecord is the cluster's word on how many voters there should be.
type votersRecord struct {
	Voters int `json:"voters"` // 0: DefaultVoters, as far as there are members
}

// ErrVoters is returned for a number of voters that cannot be had.
var ErrVoters = errors.New("give 1, 3, 5 or 7, or 0 (auto) to let the cluster choose")

// SetWantedVoters records how many voters the cluster is to have; 0 lets it
// choose by the number of members. The leader acts on it within seconds.
func SetWantedVoters(ctx context.Context, s Store, n int) error {
	if n != 0 && (n < 1 || n > MaxVoters || n%2 == 0) {
		return fmt.Errorf("%d voters: %w", n, ErrVoters)
	}
	if _, err := s.Txn(ctx, mvcc.Txn{Origin: origin, Ops: []mvcc.Op{put(votersKey, votersRecord{n})}}); err != nil {
		return fmt.Errorf("record the number of voters: %w", err)
	}
	return nil
}

// WantedVoters is what SetWantedVoters recorded last.
// A stale answer needs no leader.
func WantedVoters(ctx context.Context, s Store, stale bool) (int, error) {
	kv, _, err := s.Get(ctx, votersKey, raftstore.ReadOptions{Stale: stale})
	if err != nil {
		return 0, fmt.Errorf("read the number of voters: %w", err)
	}
	var v votersRecord
	if kv == nil {
		return 0, nil
	}
	if err := json.Unmarshal(kv.Value, &v); err != nil {
		return 0, fmt.Errorf("the number of voters: %w", err)
	}
	return v.Voters, nil
}
