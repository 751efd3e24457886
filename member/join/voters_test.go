package join

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/clusterd/clusterd/gossip"
	"github.com/clusterd/clusterd/member/join/jointest"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

func TestPlan(t *testing.T) {
	start := time.Date(2026, 11, 20, 0, 0, 0, 0, time.UTC)
	// A member is written as its id and letters: a alive, l lost, v it votes,
	// n it is in without a vote, f it is fit for one, x it has no record.
	for _, tc := range []struct {
		name    string
		wanted  int
		members []string
		want    []string
	}{
		{"first alone", 0, []string{"a avf"}, nil},
		{"second does not vote: two voters are worse than one", 0, []string{"a avf", "b a"}, []string{"add non-voter b"}},
		{"second stays as it is", 0, []string{"a avf", "b anf"}, nil},
		{"newcomers come in without a vote", 0, []string{"a avf", "b a", "c a"}, []string{"add non-voter b", "add non-voter c"}},
		{"not two voters, not even for a while", 0, []string{"a avf", "b anf", "c an"}, nil},
		{"third makes three voters", 0, []string{"a avf", "b anf", "c anf"}, []string{"add voter b", "add voter c"}},
		{"fourth does not vote", 0, []string{"a avf", "b avf", "c avf", "d a"}, []string{"add non-voter d"}},
		{"fifth makes five", 0, []string{"a avf", "b avf", "c avf", "d anf", "e anf"}, []string{"add voter d", "add voter e"}},
		{"five are enough of seven", 0, []string{"a avf", "b avf", "c avf", "d avf", "e avf", "f anf", "g anf"}, nil},
		{"seven were asked for", 7, []string{"a avf", "b avf", "c avf", "d avf", "e avf", "f anf", "g anf"}, []string{"add voter f", "add voter g"}},
		{"three were asked for: the youngest go, the leader stays", 3, []string{"b avf", "c avf", "d avf", "e avf", "a avf"}, []string{"demote voter e", "demote voter d"}},
		{"admitted but not here", 0, []string{"a avf", "b -", "c -"}, nil},
		{"here but not admitted", 0, []string{"a avf", "x xavf"}, []string{"remove x"}},
		{"one away for a moment keeps its vote", 0, []string{"a avf", "b v", "c avf", "d anf"}, nil},
		{"a lost voter keeps its vote while there is no other", 0, []string{"a avf", "b lv", "c avf"}, nil},
		{"nor is one that has come back just now", 0, []string{"a avf", "b lv", "c avf", "d an"}, nil},
		{"a lost voter's vote goes to another", 0, []string{"a avf", "b lv", "c avf", "d anf"}, []string{"demote voter b", "add voter d"}},
		{"to the one who joined first", 0, []string{"a avf", "b lv", "c avf", "d anf", "e anf"}, []string{"demote voter b", "add voter d"}},
		{"of five, one lost", 0, []string{"a avf", "b avf", "c avf", "d avf", "e lv"}, nil},
		{"of five, two lost: three may lose one more", 0, []string{"a avf", "b avf", "c avf", "d lv", "e lv"}, []string{"demote voter e", "demote voter d"}},
		{"of six, two lost", 0, []string{"a avf", "b avf", "c avf", "d lv", "e lv", "f anf"}, []string{"demote voter e", "add voter f"}},
		{"of three, two lost: never one voter of three", 0, []string{"a avf", "b lv", "c lv"}, nil},
		{"they are back: five again", 0, []string{"a avf", "b avf", "c avf", "d anf", "e anf"}, []string{"add voter d", "add voter e"}},
		{"record gone: out, and one voter of two", 0, []string{"a avf", "b xv", "c avf"}, []string{"remove b", "demote voter c"}},
		{"one was demoted, the rest failed: it goes on", 0, []string{"a avf", "b ln", "c avf", "d anf"}, []string{"add voter d"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var members []memberState
			var strangers []string
			for i, m := range tc.members {
				var id, flags string
				fmt.Sscan(m, &id, &flags)
				has := func(f string) bool { return strings.Contains(flags, f) }
				if has("x") {
					strangers = append(strangers, id)
					continue
				}
				members = append(members, memberState{
					Record: Record{ID: id, Name: id, Joined: start.Add(time.Duration(i) * time.Minute)},
					in:     has("v") || has("n"), voter: has("v"), alive: has("a"), lost: has("l"), fit: has("f"),
				})
			}
			slices.Reverse(members) // their order means nothing
			var got []string
			for _, c := range plan(members, strangers, "a", tc.wanted) {
				got = append(got, string(c.verb)+" "+c.id)
			}
			if d := cmp.Diff(tc.want, got); d != "" {
				t.Error(d)
			}
		})
	}
}

// TestHealth: one that comes and goes is neither lost nor given a vote.
func TestHealth(t *testing.T) {
	now := time.Date(2026, 11, 20, 0, 0, 0, 0, time.UTC)
	var h health
	for i, s := range []struct {
		after        time.Duration
		alive        bool
		lost, steady bool
	}{
		{0, true, false, true}, // never away: no need to wait
		{time.Hour, false, false, false},
		{lostAfter - time.Second, false, false, false},
		{time.Second, false, true, false},
		{time.Second, true, false, false}, // back
		{steadyAfter - time.Second, true, false, false},
		{0, false, false, false}, // gone again: both start over
		{time.Second, true, false, false},
		{steadyAfter, true, false, true},
	} {
		now = now.Add(s.after)
		h = h.next(s.alive, now)
		if h.lost(now) != s.lost || h.steady(now) != s.steady {
			t.Errorf("step %d: lost %v, steady %v; want %v, %v", i, h.lost(now), h.steady(now), s.lost, s.steady)
		}
	}
}

// fakeRaft answers for the members it lists as answering.
type fakeRaft struct {
	members   []raftstore.Member
	answering map[string]uint64
}

func (f *fakeRaft) Members() ([]raftstore.Member, error) { return slices.Clone(f.members), nil }
func (f *fakeRaft) set(id string, voter bool) error {
	f.members = slices.DeleteFunc(f.members, func(m raftstore.Member) bool { return m.ID == id })
	f.members = append(f.members, raftstore.Member{ID: id, Voter: voter})
	return nil
}
func (f *fakeRaft) AddVoter(_ context.Context, id string) error    { return f.set(id, true) }
func (f *fakeRaft) AddNonvoter(_ context.Context, id string) error { return f.set(id, false) }
func (f *fakeRaft) DemoteVoter(_ context.Context, id string) error { return f.set(id, false) }
func (f *fakeRaft) RemoveMember(_ context.Context, id string) error {
	f.members = slices.DeleteFunc(f.members, func(m raftstore.Member) bool { return m.ID == id })
	return nil
}
func (f *fakeRaft) Progress(_ context.Context, id string) (uint64, error) {
	at, ok := f.answering[id]
	if !ok {
		return 0, errors.New("silent")
	}
	return at, nil
}

type fakeView []gossip.Member

func (v fakeView) All() []gossip.Member   { return v }
func (fakeView) Changed() <-chan struct{} { return nil }
func (fakeView) Forget(string)            {}

// TestLook: gossip's hint alone makes no member lost, and only a member that has
// caught up is fit.
func TestLook(t *testing.T) {
	raft := &fakeRaft{answering: map[string]uint64{"a": 1000, "b": 1000 - maxLag, "c": 1000 - maxLag - 1, "d": 1000}}
	var records []Record
	view := fakeView{}
	for _, id := range []string{"a", "b", "c", "d", "e", "f"} {
		records = append(records, Record{ID: id, Name: id})
		if err := raft.set(id, id == "a"); err != nil {
			t.Fatal(err)
		}
		state := gossip.Alive
		if id == "d" || id == "e" {
			state = gossip.Dead
		}
		view = append(view, gossip.Member{Meta: gossip.Meta{ID: id, Name: id}, State: state})
	}
	r := Reconciler{ID: "a", Raft: raft, Gossip: view, Log: slog.New(slog.DiscardHandler), health: map[string]health{}}
	now := time.Now()
	for _, at := range []time.Time{now, now.Add(lostAfter)} {
		members, _ := r.look(t.Context(), records, raft.members, at)
		var fit, lost []string
		for _, m := range members {
			if m.fit {
				fit = append(fit, m.ID)
			}
			if m.lost {
				lost = append(lost, m.ID)
			}
		}
		if d := cmp.Diff([]string{"a", "b", "d"}, fit); d != "" {
			t.Errorf("fit: %s", d)
		}
		var want []string
		if at.After(now) {
			want = []string{"e"}
		}
		if d := cmp.Diff(want, lost); d != "" {
			t.Errorf("lost: %s", d)
		}
	}
}

// TestLookForgetsRemoved: one bug of issue 9 was that a leader kept what it had seen of
// members that were removed since.
func TestLookForgetsRemoved(t *testing.T) {
	raft := &fakeRaft{answering: map[string]uint64{"a": 1, "b": 1}}
	records := []Record{{ID: "a", Name: "a"}, {ID: "b", Name: "b"}}
	for _, rec := range records {
		if err := raft.set(rec.ID, true); err != nil {
			t.Fatal(err)
		}
	}
	r := Reconciler{ID: "a", Raft: raft, Gossip: fakeView{}, Log: slog.New(slog.DiscardHandler), health: map[string]health{}}
	r.look(t.Context(), records, raft.members, time.Now())
	if len(r.health) != 2 {
		t.Fatalf("health of two members: %v", r.health)
	}
	if err := raft.RemoveMember(t.Context(), "b"); err != nil {
		t.Fatal(err)
	}
	r.look(t.Context(), records[:1], raft.members, time.Now())
	if _, kept := r.health["b"]; kept || len(r.health) != 1 {
		t.Errorf("health after b was removed: %v", r.health)
	}
}

func TestWarnings(t *testing.T) {
	for _, tc := range []struct {
		members string // capitals vote
		want    string
	}{
		{"A", ""}, {"Ab", "A is the only voter of two members"}, {"AB", "two voters, A and B"}, {"ABc", "two voters"}, {"ABC", ""}, {"ABCd", ""},
	} {
		var records []Record
		for _, c := range tc.members {
			records = append(records, Record{ID: string(c), Name: string(c)})
		}
		got := strings.Join(Warnings(records, func(id string) bool { return id == strings.ToUpper(id) }), "\n")
		if (tc.want == "") != (got == "") || !strings.Contains(got, tc.want) {
			t.Errorf("%s: %q", tc.members, got)
		}
	}
}

// TestWarnOnce: a cluster that grows through two members is not warned, one
// that stays there is, once.
func TestWarnOnce(t *testing.T) {
	var warned []string
	r := Reconciler{
		Log: slog.New(slog.DiscardHandler), Warn: func(w string) { warned = append(warned, w) },
		health: map[string]health{}, warnings: map[string]time.Time{},
	}
	two := []Record{{ID: "a", Name: "a"}, {ID: "b", Name: "b"}}
	three := append(slices.Clone(two), Record{ID: "c", Name: "c"})
	voters := []raftstore.Member{{ID: "a", Voter: true}}
	now := time.Now()
	for _, s := range []struct {
		after   time.Duration
		records []Record
		want    int
	}{
		{0, two, 0}, {warnAfter - 1, two, 0}, {1, three, 0}, {time.Second, two, 0},
		{warnAfter, two, 1}, {warnAfter, two, 1}, {0, three, 1}, {0, two, 1}, {warnAfter, two, 2},
	} {
		now = now.Add(s.after)
		r.warn(s.records, voters, now)
		if len(warned) != s.want {
			t.Errorf("warned %q, want %d", warned, s.want)
		}
	}
}

// stuckRaft cannot take one member out.
type stuckRaft struct {
	*fakeRaft
	stays string
}

func (r stuckRaft) RemoveMember(ctx context.Context, id string) error {
	if id == r.stays {
		return &raftstore.QuorumError{Voters: 2, Silent: []string{id}}
	}
	return r.fakeRaft.RemoveMember(ctx, id)
}

// TestStrangerKeepsNobodyOut: a member of the store without a record that cannot be
// taken out does not keep a new server from coming in.
func TestStrangerKeepsNobodyOut(t *testing.T) {
	store := jointest.New()
	if err := PutCluster(t.Context(), store, Cluster{Name: "c"}, Record{ID: "a", Name: "a", Confirmed: true}); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Txn(t.Context(), mvcc.Txn{Ops: recordOps(Record{ID: "b", Name: "b", Confirmed: true})}); err != nil {
		t.Fatal(err)
	}
	raft := stuckRaft{&fakeRaft{answering: map[string]uint64{"a": 1, "b": 1}}, "stranger"}
	for _, id := range []string{"a", "stranger"} {
		if err := raft.set(id, true); err != nil {
			t.Fatal(err)
		}
	}
	var view fakeView
	for _, id := range []string{"a", "b"} {
		view = append(view, gossip.Member{Meta: gossip.Meta{ID: id, Name: id}, State: gossip.Alive})
	}
	r := Reconciler{ID: "a", Store: store, Raft: raft, Gossip: view, Log: slog.New(slog.DiscardHandler), health: map[string]health{}, warnings: map[string]time.Time{}}
	var few *raftstore.QuorumError
	if _, err := r.pass(t.Context()); !errors.As(err, &few) {
		t.Errorf("the stranger cannot be taken out: %v", err)
	}
	members, err := raft.Members()
	if err != nil || !slices.ContainsFunc(members, func(m raftstore.Member) bool { return m.ID == "b" }) {
		t.Errorf("the new server is not among %+v, %v", members, err)
	}
}
