package gossipkey

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/join/jointest"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

var now = time.Date(2026, 11, 24, 12, 0, 0, 0, time.UTC)

func has(name string, number uint64) Server {
	return Server{ID: name, Name: name, Arrived: true, Knows: true, Has: number}
}

func TestNext(t *testing.T) {
	state := func(phase Phase, ago time.Duration) State {
		return State{Number: 5, Generation: 1, Phase: phase, Keys: []string{"a", "b"}, Since: now.Add(-ago), Answers: 7}
	}
	older := Server{ID: "n3", Name: "n3", Arrived: true}
	for _, test := range []struct {
		name    string
		state   State
		servers []Server
		lagging string
		want    Phase // empty: it stays
	}{
		{"nothing to do", State{Phase: Stable, Number: 5, Keys: []string{"a"}}, []Server{has("n1", 5)}, "", ""},
		{"all have it", state(Distribute, 0), []Server{has("n1", 5), has("n2", 5)}, "", Use},
		{"one lacks it", state(Distribute, time.Second), []Server{has("n1", 5), has("n2", 5), has("n3", 4)}, "n3", ""},
		{"one is away", state(Distribute, stepTimeout), []Server{has("n1", 5), has("n2", 5), has("n3", 4)}, "n3", Use},
		{"one is too old to say", state(Distribute, time.Second), []Server{has("n1", 5), has("n2", 5), older}, "n3", ""},
		{"no majority has it", state(Distribute, time.Hour), []Server{has("n1", 5), has("n2", 4)}, "n2", ""},
		{"one joins now", state(Distribute, 0), []Server{has("n1", 5), {ID: "n2", Name: "n2"}}, "", Use},
		{"no server", state(Distribute, time.Hour), nil, "", ""},
		{"all use it", state(Use, 0), []Server{has("n1", 5), has("n2", 6)}, "", Stable},
		{"one does not use it yet", state(Use, 0), []Server{has("n1", 5), has("n2", 5), has("n3", 4)}, "n3", ""},
		{"one that was to use it is away", state(Use, stepTimeout), []Server{has("n1", 5), has("n2", 5), has("n3", 4)}, "n3", Stable},
	} {
		var lagging []string
		for _, m := range test.state.Lagging(test.servers) {
			lagging = append(lagging, m.Name)
		}
		if got := strings.Join(lagging, " "); got != test.lagging {
			t.Errorf("%s: %q lag, want %q", test.name, got, test.lagging)
		}
		next, due := test.state.Next(test.servers, now)
		if due != (test.want != "") || due && (next.Phase != test.want || next.Number != 6 || !next.Since.Equal(now) || next.Answers != 7) {
			t.Errorf("%s: %t %+v, want %q", test.name, due, next, test.want)
			continue
		}
		switch test.want {
		case Use:
			if !slices.Equal(next.Keys, []string{"b", "a"}) || next.Generation != 2 || !next.Used.Equal(now) {
				t.Errorf("%s: %+v", test.name, next)
			}
		case Stable:
			if !slices.Equal(next.Keys, []string{"a"}) || next.Generation != 1 {
				t.Errorf("%s: %+v", test.name, next)
			}
		}
	}
}

func TestDueAndLost(t *testing.T) {
	began := now.Add(-48 * time.Hour)
	stable := State{Phase: Stable, Answers: 5, Used: now.Add(-time.Hour)}
	for _, test := range []struct {
		name   string
		state  State
		wished int64
		every  time.Duration
		want   bool
	}{
		{"it is young", stable, 5, 24 * time.Hour, false},
		{"it is old", stable, 5, time.Hour, true},
		{"it may be as old as it likes", stable, 5, 0, false},
		{"another is wanted", stable, 6, 0, true},
		{"the first one is as old as the cluster", State{Phase: Stable}, 0, 24 * time.Hour, true},
		{"the first one is young", State{Phase: Stable}, 0, 72 * time.Hour, false},
		{"a change is under way", State{Phase: Use}, 6, time.Hour, false},
	} {
		if got := test.state.Due(test.wished, test.every, began, now); (got != "") != test.want {
			t.Errorf("%s: due %q", test.name, got)
		}
	}
	state := State{Number: 5, Phase: Distribute, Since: now.Add(-stepTimeout)}
	young := state
	young.Since = now
	for _, test := range []struct {
		name    string
		state   State
		servers []Server
		want    bool
	}{
		{"no server has it", state, []Server{has("n1", 4), has("n2", 3)}, true},
		{"no server has it yet", young, []Server{has("n1", 4)}, false},
		{"one has it", state, []Server{has("n1", 5), has("n2", 3)}, false},
		{"it is in use", State{Number: 5, Phase: Use, Since: now.Add(-stepTimeout)}, []Server{has("n1", 4)}, false},
	} {
		if got := test.state.Lost(test.servers, now); got != test.want {
			t.Errorf("%s: %t", test.name, got)
		}
	}
}

func TestRingOnDisk(t *testing.T) {
	a, b := New(), New()
	for _, ring := range []Ring{{Keys: [][]byte{a}}, {Number: 3, Keys: [][]byte{a}}, {Number: 2, Keys: [][]byte{b, a}}} {
		first, rest, err := ring.Encode()
		if err != nil || !bytes.Equal(first, ring.Keys[0]) || (rest == nil) != (ring.Number == 0) {
			t.Fatalf("%x %s %v", first, rest, err)
		}
		got, err := Parse(first, rest)
		if err != nil || got.Number != ring.Number || !slices.EqualFunc(got.Keys, ring.Keys, bytes.Equal) {
			t.Errorf("%+v became %+v, %v", ring, got, err)
		}
	}
	for name, test := range map[string]struct{ first, rest string }{
		"short":     {"abc", ""},
		"no JSON":   {string(a), "{"},
		"short too": {string(a), `{"number":1,"keys":["YWJj"]}`},
		"many":      {string(a), `{"keys":["` + strings.Repeat("A", 43) + `=","` + strings.Repeat("A", 43) + `="]}`},
	} {
		var rest []byte
		if test.rest != "" {
			rest = []byte(test.rest)
		}
		if _, err := Parse([]byte(test.first), rest); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// server is one that follows the state as cmd/clusterd's does.
type server struct {
	id   string
	ring Ring
	made []byte
}

func (m *server) lead(s join.Store, at time.Time) error {
	leader := Leader{Store: s, Log: slog.New(slog.DiscardHandler), Make: func() (string, string) {
		m.made = New()
		return ID(m.ring.Keys[0]), ID(m.made)
	}}
	return leader.look(context.Background(), at)
}

func (m *server) follow(s join.Store, all []*server) error {
	state, err := Get(context.Background(), s, true)
	if err != nil {
		return err
	}
	if state.Number > m.ring.Number {
		next := Ring{Number: state.Number}
		for _, id := range state.Keys {
			key := m.ring.Find(id)
			if m.made != nil && ID(m.made) == id {
				key = m.made
			}
			for _, other := range all {
				if key == nil {
					key = other.ring.Find(id)
				}
			}
			if key == nil {
				return nil // it tries again
			}
			next.Keys = append(next.Keys, key)
		}
		m.ring = next
	}
	return RecordState(context.Background(), s, m.id, m.ring.Number)
}

func (m *server) hears(other *server) bool { return m.ring.Find(ID(other.ring.Keys[0])) != nil }

func cluster(t *testing.T, ids ...string) (*jointest.Store, []*server) {
	t.Helper()
	s := jointest.New()
	first := New()
	var all []*server
	for _, id := range ids {
		all = append(all, &server{id: id, ring: Ring{Keys: [][]byte{first}}})
		record(t, s, join.Record{ID: id, Name: id, Role: pki.Server, Confirmed: true})
	}
	return s, all
}

// TestKilledAtEveryWrite: whichever write of a change a killed server made or did
// not make, and whichever server leads then, it comes to its end, and at all times each
// server hears all others.
func TestKilledAtEveryWrite(t *testing.T) {
	for kill := int64(1); kill <= 16; kill++ {
		for _, after := range []bool{false, true} {
			t.Run(fmt.Sprintf("write %d, done %t", kill, after), func(t *testing.T) { changeWithKill(t, kill, after) })
		}
	}
}

func changeWithKill(t *testing.T, kill int64, after bool) {
	s, all := cluster(t, "n1", "n2", "n3")
	first := all[0].ring.Keys[0]
	if err := RequestRotation(t.Context(), s, "a test"); err != nil {
		t.Fatal(err)
	}
	s.KillAt(kill, after)
	at := now
	for round := 0; ; round++ {
		state, _ := Get(t.Context(), s, true)
		if round == 40 {
			t.Fatalf("it does not end: %+v", state)
		}
		if state.Generation > 0 && state.Phase == Stable && !slices.ContainsFunc(all, func(m *server) bool { return m.ring.Number < state.Number }) {
			break
		}
		at = at.Add(stepTimeout / 3)
		// Another leads in each round; a leader that is killed forgets the key it made.
		leader := all[round%3]
		if err := leader.lead(s, at); err != nil && !errors.Is(err, jointest.ErrKilled) {
			t.Fatal(err)
		} else if err != nil {
			leader.made = nil
		}
		for i := range all {
			if err := all[(i+round)%3].follow(s, all); err != nil && !errors.Is(err, jointest.ErrKilled) {
				t.Fatal(err)
			}
			for _, x := range all {
				for _, y := range all {
					if !x.hears(y) {
						t.Fatalf("round %d: %s (state %d) does not hear %s (state %d)", round, x.id, x.ring.Number, y.id, y.ring.Number)
					}
				}
			}
		}
	}
	for _, m := range all {
		if len(m.ring.Keys) != 1 || !bytes.Equal(m.ring.Keys[0], all[0].ring.Keys[0]) || bytes.Equal(m.ring.Keys[0], first) {
			t.Errorf("%s holds %+v", m.id, m.ring)
		}
	}
}

// TestAway: a server that is away delays the others only for a while, and gets the keys when it
// comes back; one that does not know of changes is not left behind.
func TestAway(t *testing.T) {
	s, all := cluster(t, "n1", "n2", "n3")
	away := all[2]
	step := func(at time.Time) State {
		t.Helper()
		if err := all[0].lead(s, at); err != nil {
			t.Fatal(err)
		}
		for _, m := range all[:2] {
			if err := m.follow(s, all); err != nil {
				t.Fatal(err)
			}
		}
		state, _ := Get(t.Context(), s, true)
		return state
	}
	if err := RequestRotation(t.Context(), s, "a test"); err != nil {
		t.Fatal(err)
	}
	if state := step(now); state.Number != 0 {
		t.Fatalf("it begins without one that never said that it supports this: %+v", state)
	}
	if err := away.follow(s, all); err != nil {
		t.Fatal(err)
	}
	if state := step(now); state.Phase != Distribute {
		t.Fatalf("%+v", state)
	}
	if state := step(now.Add(stepTimeout - 1)); state.Phase != Distribute {
		t.Errorf("it is not waited for: %+v", state)
	}
	at := now
	for range 3 {
		at = at.Add(stepTimeout)
		step(at)
	}
	if state, _ := Get(t.Context(), s, true); state.Phase != Stable || state.Generation != 1 || away.hears(all[0]) {
		t.Fatalf("%+v", state)
	}
	if err := away.follow(s, all); err != nil {
		t.Fatal(err)
	}
	if !away.hears(all[0]) || !all[0].hears(away) || len(away.ring.Keys) != 1 {
		t.Errorf("it has %+v", away.ring)
	}
}

// TestWishes: whatever ends a server's part asks for another key, an agent's does not,
// and a wish during a change is not lost.
func TestWishes(t *testing.T) {
	s, all := cluster(t, "n1", "n2", "n3", "n4")
	wished := func() int64 {
		rev, err := LastRequest(t.Context(), s)
		if err != nil {
			t.Fatal(err)
		}
		return rev
	}
	for _, m := range all {
		if err := m.follow(s, all); err != nil {
			t.Fatal(err)
		}
		if _, err := s.Txn(t.Context(), mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/clusterd/names/" + m.id, Value: []byte(m.id)}}}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := join.SetRole(t.Context(), s, "n4", pki.Agent); err != nil {
		t.Fatal(err)
	}
	demoted := wished()
	if demoted == 0 {
		t.Error("a demotion asks for nothing")
	}
	if _, err := join.RemoveMember(t.Context(), s, "n4", now); err != nil {
		t.Fatal(err)
	}
	if wished() != demoted {
		t.Error("the removal of an agent asks for another key")
	}
	all = all[:3]
	round := func() State {
		t.Helper()
		if err := all[0].lead(s, now); err != nil {
			t.Fatal(err)
		}
		for _, m := range all {
			if err := m.follow(s, all); err != nil {
				t.Fatal(err)
			}
		}
		state, _ := Get(t.Context(), s, true)
		return state
	}
	if state := round(); state.Phase != Distribute {
		t.Fatalf("%+v", state)
	}
	removed := all[2] // which has received the next key
	if _, err := join.RemoveMember(t.Context(), s, "n3", now); err != nil {
		t.Fatal(err)
	}
	if wished() == demoted {
		t.Error("the removal of a server asks for nothing")
	}
	all = all[:2]
	for range 5 {
		round()
	}
	state, _ := Get(t.Context(), s, true)
	if state.Phase != Stable || state.Generation != 2 || state.Answers != wished() || all[0].hears(removed) || removed.hears(all[0]) {
		t.Errorf("%+v", state)
	}
}

func record(t *testing.T, s *jointest.Store, r join.Record) {
	t.Helper()
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Txn(t.Context(), mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/clusterd/members/" + r.ID, Value: b}}}); err != nil {
		t.Fatal(err)
	}
}

// TestAgeByTheClustersTime: a leader whose machine's clock is two days ahead finds no key old.
func TestAgeByTheClustersTime(t *testing.T) {
	cluster := time.Now().Add(-48 * time.Hour)
	s := jointest.New()
	if _, err := put(t.Context(), s, 0, State{Phase: Stable, Used: cluster}); err != nil {
		t.Fatal(err)
	}
	for _, age := range []time.Duration{time.Hour, 25 * time.Hour} {
		ctx, stop := context.WithCancel(t.Context())
		looks, made := 0, false
		leader := Leader{
			Store: s, Every: 24 * time.Hour, Log: slog.New(slog.DiscardHandler),
			Make: func() (string, string) {
				made = true
				return "first", "next"
			},
			Now: func() time.Time {
				if looks++; looks > 1 {
					stop()
				}
				return cluster.Add(age)
			},
		}
		if err := leader.Run(ctx); err != nil {
			t.Fatal(err)
		}
		stop()
		if want := age > 24*time.Hour; made != want {
			t.Errorf("a key of %s: another one was made: %v, want %v", age, made, want)
		}
	}
}
