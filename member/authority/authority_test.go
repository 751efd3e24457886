package authority

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
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

func TestNext(t *testing.T) {
	server := func(name string, has uint64) Member {
		return Member{ID: name, Name: name, Server: true, Arrived: true, Joined: now.Add(-time.Hour), Has: has}
	}
	agent := func(name string, has uint64) Member {
		m := server(name, has)
		m.Server = false
		return m
	}
	joining := func(name string, ago time.Duration) Member {
		return Member{ID: name, Name: name, Joined: now.Add(-ago)}
	}
	two := [][]byte{[]byte("a"), []byte("b")}
	state := func(phase Phase, ago time.Duration, finish bool) State {
		return State{Number: 5, Phase: phase, Authorities: two, Since: now.Add(-ago), Began: now.Add(-time.Hour), Grace: time.Hour, Finish: finish}
	}
	fresh := state(Reissue, time.Second, true)
	fresh.Began = now.Add(-settle / 2)
	for _, test := range []struct {
		name    string
		state   State
		members []Member
		waiting string
		want    Phase // empty: it stays
	}{
		{"nothing to do", State{Phase: Stable, Number: 4}, []Member{server("n1", 4)}, "", ""},
		{"all have the new one", state(Distribute, 0, false), []Member{server("n1", 5), agent("a1", 5)}, "", Reissue},
		{"a server has not", state(Distribute, time.Hour, true), []Member{server("n1", 5), server("n2", 4)}, "n2", ""},
		{"an agent has not, and never mind how long", state(Distribute, 1000*time.Hour, true), []Member{server("n1", 5), agent("a1", 0)}, "a1", ""},
		{"one joins now", state(Distribute, 0, false), []Member{server("n1", 5), joining("n4", time.Second)}, "n4", ""},
		{"one broke off while it joined", state(Distribute, 0, false), []Member{server("n1", 5), joining("n4", time.Hour)}, "", Reissue},
		{"grace", state(Reissue, time.Minute, false), []Member{server("n1", 5)}, "", ""},
		{"the grace is over", state(Reissue, 2*time.Hour, false), []Member{server("n1", 5)}, "", Stable},
		{"the grace is over, and one is not ready", state(Reissue, 2*time.Hour, false), []Member{server("n1", 5), agent("a1", 4)}, "a1", ""},
		{"finish is set", state(Reissue, time.Second, true), []Member{server("n1", 5), agent("a1", 5)}, "", Stable},
		{"finish is set, and it has only begun", fresh, []Member{server("n1", 5)}, "", ""},
		{"finish is set, and an agent is on its way", state(Reissue, time.Second, true), []Member{server("n1", 5), agent("a1", 4)}, "a1", ""},
		{"finish is set, and an agent is away", state(Reissue, time.Hour, true), []Member{server("n1", 5), agent("a1", 4)}, "", Stable},
		{"finish is set, and a server is away", state(Reissue, time.Hour, true), []Member{server("n1", 5), server("n2", 4)}, "n2", ""},
	} {
		var waiting []string
		for _, m := range test.state.Waiting(test.members, now) {
			waiting = append(waiting, m.Name)
		}
		if got := strings.Join(waiting, " "); got != test.waiting {
			t.Errorf("%s: waits for %q, want %q", test.name, got, test.waiting)
		}
		next, due := test.state.Next(test.members, now)
		if due != (test.want != "") || due && (next.Phase != test.want || next.Number != 6 || !next.Since.Equal(now)) {
			t.Errorf("%s: %t %+v, want %q", test.name, due, next, test.want)
			continue
		}
		switch test.want {
		case Reissue:
			if string(next.Authorities[0]) != "b" || string(next.Authorities[1]) != "a" || next.Grace != time.Hour || !next.Began.Equal(test.state.Began) {
				t.Errorf("%s: %+v", test.name, next)
			}
		case Stable:
			if len(next.Authorities) != 1 || string(next.Authorities[0]) != "a" || next.Finish != test.state.Finish {
				t.Errorf("%s: %+v", test.name, next)
			}
		}
	}
}

func TestLost(t *testing.T) {
	state := State{Number: 5, Phase: Distribute, Maker: "n1"}
	for _, test := range []struct {
		name    string
		members []Member
		want    bool
	}{
		{"its maker is there", []Member{{ID: "n1", Server: true}, {ID: "n2", Server: true}}, false},
		{"its maker went, and another has it", []Member{{ID: "n2", Server: true, Has: 5}}, false},
		{"its maker went", []Member{{ID: "n2", Server: true, Has: 4}, {ID: "a1", Has: 5}}, true},
		{"its maker is an agent now", []Member{{ID: "n1"}, {ID: "n2", Server: true}}, true},
	} {
		if got := state.Lost(test.members); got != test.want {
			t.Errorf("%s: %t", test.name, got)
		}
	}
	state.Phase = Reissue
	if state.Lost(nil) {
		t.Error("an authority that signs was given up")
	}
}

// TestKilledAtEveryWrite: whichever write of a rotation a killed member made or
// did not make, and whichever member leads then, it comes to its end, and at all times any two
// members trust each other, in each purpose. The same for a rotation that gives purposes
// authorities of their own.
func TestKilledAtEveryWrite(t *testing.T) {
	for _, test := range []struct {
		name     string
		separate bool // before it
		of       []pki.Purpose
	}{
		{"the only authority", false, []pki.Purpose{pki.ForPeers}},
		{"own ones are introduced", false, pki.OwnPurposes},
		{"one is introduced", false, []pki.Purpose{pki.ForClients}},
		{"one of many", true, []pki.Purpose{pki.ForNodes}},
		{"all of them", true, pki.Purposes},
	} {
		before, made := newTrust(t, test.separate), map[string]*pki.CA{}
		wishes := []Request{successors(t, before, made, test.of...), successors(t, before, made, test.of...)}
		for kill := int64(1); kill <= 16; kill++ {
			for _, after := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, write %d, done %t", test.name, kill, after), func(t *testing.T) {
					rotationWithKill(t, before, made, wishes, kill, after, 0)
				})
			}
		}
		for step := 1; step <= 12; step++ {
			t.Run(fmt.Sprintf("%s, step %d of a server fails", test.name, step), func(t *testing.T) {
				rotationWithKill(t, before, made, wishes, 0, false, step)
			})
		}
	}
}

func newTrust(t *testing.T, separate bool) *pki.Trust {
	t.Helper()
	ca, err := pki.NewCA("test", now)
	trust := pki.NewTrust(0, ca)
	if err == nil && separate {
		trust, err = trust.Separate(now)
	}
	if err != nil {
		t.Fatal(err)
	}
	return trust
}

// successors are authorities to follow those of a trust, and the wish for them.
func successors(t *testing.T, trust *pki.Trust, made map[string]*pki.CA, of ...pki.Purpose) Request {
	t.Helper()
	w := Request{Now: trust, Successors: map[pki.Purpose][]byte{}, Maker: "n1"}
	for _, p := range of {
		next, err := trust.Signer().NewFor(p, now)
		if trust.Owns(p) {
			next, err = trust.For(p).Signer().NewSuccessor(now)
		}
		if err != nil {
			t.Fatal(err)
		}
		if made != nil {
			made[next.ID()] = next
		}
		w.Successors[p] = pki.EncodeCert(next.Cert)
	}
	return w
}

func rotationWithKill(t *testing.T, before *pki.Trust, made map[string]*pki.CA, wishes []Request, kill int64, after bool, failing int) {
	ctx := t.Context()
	steps := 0
	fail := func() error {
		if steps++; steps == failing {
			return errStep
		}
		return nil
	}
	s := jointest.New()
	var all []*member
	for _, id := range []string{"n1", "n2", "n3", "a1"} {
		m := &member{id: id, server: id != "a1", trust: before}
		role := pki.Server
		if !m.server {
			m.trust, role = before.Public(), pki.Agent
		}
		all = append(all, m)
		record(t, s, join.Record{ID: id, Name: id, Role: role, Joined: now.Add(-time.Hour), Confirmed: true})
		if err := m.follow(ctx, s, nil, nil, func() error { return nil }); err != nil {
			t.Fatal(err)
		}
	}
	if kill > 0 {
		s.KillAt(kill, after)
	}
	if err := Begin(ctx, s, wishes[0], now); err != nil {
		if !errors.Is(err, jointest.ErrKilled) {
			t.Fatal(err)
		}
		// Who asked for it tries again, and may learn that it has begun.
		if err := Begin(ctx, s, wishes[1], now); err != nil && !errors.Is(err, ErrUnderWay) {
			t.Fatal(err)
		}
	}
	at := now
	for round := 0; ; round++ {
		if round == 30 {
			state, _ := Get(ctx, s, true)
			t.Fatalf("it does not end: %+v", state)
		}
		at = at.Add(settle)
		// Another leads in each round, and remembers nothing.
		leader := Leader{Store: s, Log: slog.New(slog.DiscardHandler), Make: func(context.Context, []pki.Purpose) error { t.Error("the key was thought lost"); return nil }}
		if err := leader.look(ctx, at); err != nil && !errors.Is(err, jointest.ErrKilled) {
			t.Fatal(err)
		}
		for i := range all {
			m := all[(i+round)%len(all)]
			if err := m.follow(ctx, s, made, all, fail); err != nil && !errors.Is(err, jointest.ErrKilled) && !errors.Is(err, errStep) && (failing == 0 || !errors.Is(err, errNoKey)) {
				t.Fatal(err)
			}
			for _, p := range pki.Purposes {
				for _, x := range all {
					for _, y := range all {
						if x.trust.For(p).Find(y.trust.For(p).Signer().ID()) == nil {
							t.Fatalf("round %d: %s (state %d) does not trust %s (state %d) as %s", round, x.id, x.trust.Number, y.id, y.trust.Number, p)
						}
					}
				}
			}
		}
		if state, _ := Get(ctx, s, true); state.Phase == Stable && state.Number > 0 && !slices.ContainsFunc(all, func(m *member) bool { return m.trust.Number < state.Number }) {
			break
		}
	}
	separate, of := before.Separated(), slices.Collect(maps.Keys(wishes[0].Successors))
	for _, m := range all {
		for _, p := range pki.Purposes {
			own, was := m.trust.For(p), before.For(p).Signer().ID()
			rotated := slices.Contains(of, p) || !separate && slices.Contains(of, pki.ForPeers)
			if len(own.All()) != 1 || (own.Find(was) != nil) == rotated || m.server != own.Signer().HasKey() {
				t.Errorf("%s trusts as %s %+v", m.id, p, own)
			}
		}
		if want := separate || !slices.Contains(of, pki.ForPeers); m.trust.Separated() != want {
			t.Errorf("%s has separate authorities: %t", m.id, !want)
		}
	}
}

// TestBehind: no purpose gets an authority of its own while a member's version would take the
// servers' for it. The members are named.
func TestBehind(t *testing.T) {
	ctx, s, trust := t.Context(), jointest.New(), newTrust(t, false)
	for _, name := range []string{"n1", "a1", "a2"} {
		record(t, s, join.Record{ID: "id-" + name, Name: name, Joined: now.Add(-time.Hour), Confirmed: true})
	}
	record(t, s, join.Record{ID: "id-x", Name: "broke-off", Joined: now.Add(-time.Hour)})
	if err := RecordSeparateSupport(ctx, s, "id-n1", nil); err != nil {
		t.Fatal(err)
	}
	err := Begin(ctx, s, successors(t, trust, nil, pki.ForClients), now)
	if !errors.Is(err, ErrBehind) || !strings.Contains(err.Error(), "on a1, a2, or") {
		t.Errorf("%v", err)
	}
	if state, err := Get(ctx, s, false); err != nil || state.Number != 0 {
		t.Errorf("it has begun: %+v, %v", state, err)
	}
	for _, id := range []string{"id-a1", "id-a2"} {
		if err := RecordSeparateSupport(ctx, s, id, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := Begin(ctx, s, successors(t, trust, nil, pki.ForClients), now); err != nil {
		t.Error(err)
	}
}

// TestStateOfVersions: a state that has one authority is read by versions that know no other,
// and theirs here; one with more is an error to them, so that they do not follow it halfway.
func TestStateOfVersions(t *testing.T) {
	type before struct {
		Number      uint64   `json:"number"`
		Phase       Phase    `json:"phase"`
		Authorities [][]byte `json:"authorities"`
	}
	var old before
	for _, separate := range []bool{false, true} {
		trust := newTrust(t, separate)
		state := State{Number: 7, Phase: Stable, Since: now}
		state.Authorities, state.Own = lists(trust)
		b, err := json.Marshal(state)
		if err != nil {
			t.Fatal(err)
		}
		var got State
		if err := json.Unmarshal(b, &got); err != nil || got.Number != 7 || len(got.Authorities) != 1 || len(got.Own) != len(state.Own) {
			t.Fatalf("%s: %+v, %v", b, got, err)
		}
		back, err := got.Trust()
		if err != nil || back.Separated() != separate || back.For(pki.ForClients).Signer().ID() != trust.For(pki.ForClients).Signer().ID() {
			t.Errorf("%+v, %v", back, err)
		}
		err = json.Unmarshal(b, &old)
		if (err != nil) != separate || !separate && (old.Number != 7 || len(old.Authorities) != 1) {
			t.Errorf("the version before reads %s as %+v, %v", b, old, err)
		}
	}
	var got State
	if err := json.Unmarshal([]byte(`{"number":4,"phase":"stable","authorities":["YQ=="],"since":"2026-01-01T00:00:00Z","finish":true}`), &got); err != nil || string(got.Authorities[0]) != "a" {
		t.Errorf("%+v, %v", got, err)
	}
	if number, alone := got.TokenKeys(); number != 4 || !alone {
		t.Errorf("token keys follow %d, %t", number, alone)
	}
}

// TestTokenKeysFollow: the keys of tokens are changed with what seals them, and a rotation
// of another purpose does not make anybody forget that.
func TestTokenKeysFollow(t *testing.T) {
	trust := newTrust(t, true)
	state := State{Phase: Stable}
	run := func(finish bool, of ...pki.Purpose) {
		t.Helper()
		next, err := state.begin(successors(t, trust, nil, of...), now)
		if err != nil {
			t.Fatal(err)
		}
		next.Finish = finish
		for next.Phase != Stable {
			after, due := next.Next(nil, now.Add(time.Hour))
			if !due {
				t.Fatalf("%+v does not go on", next)
			}
			next = after
		}
		state = next
	}
	for _, test := range []struct {
		of     []pki.Purpose
		finish bool
		number uint64
		alone  bool
	}{
		{[]pki.Purpose{pki.ForClients}, true, 0, false},
		{[]pki.Purpose{pki.ForSecrets}, false, 6, false},
		{[]pki.Purpose{pki.ForPeers}, true, 6, false},
		{pki.Purposes, true, 12, true},
		{[]pki.Purpose{pki.ForNodes}, false, 12, true},
	} {
		run(test.finish, test.of...)
		if number, alone := state.TokenKeys(); number != test.number || alone != test.alone {
			t.Errorf("after %v: %d, %t; want %d, %t", test.of, number, alone, test.number, test.alone)
		}
	}
}

// TestLostKeyIsMadeAnew: the server that made the new authority is removed before
// another one has its key.
func TestLostKeyIsMadeAnew(t *testing.T) {
	for _, of := range [][]pki.Purpose{{pki.ForPeers}, {pki.ForClients, pki.ForNodes}} {
		ctx, s, old := t.Context(), jointest.New(), newTrust(t, false)
		record(t, s, join.Record{ID: "n2", Name: "n2", Confirmed: true})
		if err := RecordSeparateSupport(ctx, s, "n2", nil); err != nil {
			t.Fatal(err)
		}
		wish := successors(t, old, nil, of...)
		wish.Grace = time.Hour
		if err := Begin(ctx, s, wish, now); err != nil {
			t.Fatal(err)
		}
		if err := Begin(ctx, s, successors(t, old, nil, of...), now); !errors.Is(err, ErrUnderWay) {
			t.Errorf("a second rotation: %v", err)
		}
		again := Request{Maker: "n2"}
		leader := Leader{Store: s, Log: slog.New(slog.DiscardHandler), Make: func(ctx context.Context, lost []pki.Purpose) error {
			again.Successors = successors(t, old, nil, lost...).Successors
			return RetryWithNewKeys(ctx, s, again, now)
		}}
		if err := leader.look(ctx, now); err != nil {
			t.Fatal(err)
		}
		state, err := Get(ctx, s, false)
		if err != nil || state.Maker != "n2" || state.Number != 2 || state.Grace != time.Hour || !slices.Equal(state.Of, of) || state.Split != (len(of) > 1) {
			t.Errorf("state %+v, %v", state, err)
		}
		for _, p := range of {
			list := state.For(p)
			if len(list) != 2 || string(list[0]) != string(pki.EncodeCert(old.Signer().Cert)) || string(list[1]) != string(again.Successors[p]) {
				t.Errorf("authorities for %s: %s", p, list)
			}
		}
	}
}

// TestOldTokensGo: a machine that joins by them would trust the authority that is given up.
func TestOldTokensGo(t *testing.T) {
	ctx := t.Context()
	s := jointest.New()
	old, err := pki.NewCA("test", now)
	if err != nil {
		t.Fatal(err)
	}
	next, err := old.NewSuccessor(now)
	if err != nil {
		t.Fatal(err)
	}
	wish := join.TokenOptions{Role: pki.Agent, TTL: time.Hour}
	var kept string
	for _, ca := range []*pki.CA{old, next} {
		token, _, err := join.CreateToken(ctx, s, ca.Cert, wish, now)
		if err != nil {
			t.Fatal(err)
		}
		kept = token.ID
	}
	rotation := Request{Now: pki.NewTrust(0, old), Successors: map[pki.Purpose][]byte{pki.ForPeers: pki.EncodeCert(next.Cert)}, Maker: "n1"}
	if err := Begin(ctx, s, rotation, now); err != nil {
		t.Fatal(err)
	}
	record(t, s, join.Record{ID: "n1", Name: "n1", Confirmed: true})
	leader := Leader{Store: s, Log: slog.New(slog.DiscardHandler)}
	for range 2 {
		state, err := Get(ctx, s, false)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(RecordState(ctx, s, "n1", state.Number, nil), leader.look(ctx, now.Add(time.Hour))); err != nil {
			t.Fatal(err)
		}
	}
	tokens, err := join.Tokens(ctx, s)
	if err != nil || len(tokens) != 1 || tokens[0].ID != kept {
		t.Errorf("tokens %+v, %v; want %s", tokens, err, kept)
	}
	if err := Finish(ctx, s, nil); !errors.Is(err, ErrNone) {
		t.Errorf("finish without a rotation: %v", err)
	}
}

// TestFinishNamesTheRotation: whoever finishes another rotation than the one under way
// ends nothing.
func TestFinishNamesTheRotation(t *testing.T) {
	ctx, s, now := t.Context(), jointest.New(), time.Unix(1e9, 0)
	trust := newTrust(t, true)
	successor, err := trust.Signer().NewSuccessor(now)
	if err != nil {
		t.Fatal(err)
	}
	if err := Begin(ctx, s, Request{Now: trust, Successors: map[pki.Purpose][]byte{pki.ForPeers: pki.EncodeCert(successor.Cert)}, Maker: "n1"}, now); err != nil {
		t.Fatal(err)
	}
	if err := Finish(ctx, s, []pki.Purpose{pki.ForClients}); !errors.Is(err, ErrOther) || !strings.Contains(err.Error(), "of peer") {
		t.Errorf("finish of client's: %v", err)
	}
	if state, err := Get(ctx, s, false); err != nil || state.Finish {
		t.Errorf("%+v, %v: it was finished", state, err)
	}
	if err := Finish(ctx, s, []pki.Purpose{pki.ForPeers}); err != nil {
		t.Fatal(err)
	}
	if state, err := Get(ctx, s, false); err != nil || !state.Finish {
		t.Errorf("%+v, %v: it was not finished", state, err)
	}
}

// record puts a member's record where package join has it.
func record(t *testing.T, s *jointest.Store, r join.Record) {
	t.Helper()
	b, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Txn(t.Context(), mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/clusterd/members/" + r.ID, Value: b}}}); err != nil {
		t.Fatal(err)
	}
	if records, err := join.Records(t.Context(), s, true); err != nil || !slices.ContainsFunc(records, func(have join.Record) bool { return have.ID == r.ID }) {
		t.Fatalf("records %+v, %v", records, err)
	}
}

// TestRestored: a cluster that begins from a copy has one authority, and its next
// rotation has numbers that agents of the cluster that was, however far that had
// come, take up.
func TestRestored(t *testing.T) {
	for _, separate := range []bool{false, true} {
		restoredFrom(t, newTrust(t, separate))
	}
}

func restoredFrom(t *testing.T, trust *pki.Trust) {
	ca := string(pki.EncodeCert(trust.Signer().Cert))
	for _, was := range []*State{nil, {Number: 1, Phase: Distribute}, {Number: 8, Phase: Reissue, Finish: true}, {Number: 9, Phase: Stable, Finish: true}} {
		k := mvcc.New()
		var ops []mvcc.Op
		var number uint64
		if was != nil {
			number = was.Number
			b, err := json.Marshal(was)
			if err != nil {
				t.Fatal(err)
			}
			ops = []mvcc.Op{{Type: mvcc.OpPut, Key: stateKey, Value: b}, {Type: mvcc.OpPut, Key: progress.Prefix + "n1", Value: []byte(`{"number":1}`)}}
			out := k.Apply(1, mvcc.Batch{Time: 1, Commands: []mvcc.Command{{Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: 1, Seq: 1}, Txn: mvcc.Txn{Ops: ops}}}})
			if out[0].Err != nil {
				t.Fatal(out[0].Err)
			}
		}
		state, changes, err := Restored(k, trust, now)
		if err != nil {
			t.Fatal(err)
		}
		s := jointest.New()
		for _, all := range [][]mvcc.Op{ops, changes} {
			if _, err := s.Txn(t.Context(), mvcc.Txn{Ops: all}); err != nil {
				t.Fatal(err)
			}
		}
		got, err := Get(t.Context(), s, false)
		if err != nil || got.Number != state.Number || got.Phase != Stable || got.Finish || len(got.Authorities) != 1 || string(got.Authorities[0]) != ca || (len(got.Own) > 0) != trust.Separated() {
			t.Errorf("from %+v: %+v, %v", was, got, err)
		}
		if has, err := progress.All(t.Context(), s, false); err != nil || len(has) != 0 {
			t.Errorf("from %+v: members' progress is kept: %v, %v", was, has, err)
		}
		if err := Begin(t.Context(), s, successors(t, trust, nil, pki.ForPeers), now); !errors.Is(err, ErrUnderWay) {
			t.Errorf("from %+v, by one who does not know of the state: %v", was, err)
		}
		trust.Number = state.Number
		if err := Begin(t.Context(), s, successors(t, trust, nil, pki.ForPeers), now); err != nil {
			t.Fatal(err)
		}
		trust.Number = 0
		// The cluster that was may have rotated its CA since, and often.
		if got, err = Get(t.Context(), s, false); err != nil || got.Number <= number+1000 || got.Phase != Distribute || string(got.Authorities[0]) != ca || (len(got.Own) > 0) != trust.Separated() {
			t.Errorf("from %+v, the next rotation: %+v, %v", was, got, err)
		}
	}
}

// TestGraceByTheClustersTime: a leader whose machine's clock is two days ahead does not end the grace
// of a rotation.
func TestGraceByTheClustersTime(t *testing.T) {
	cluster := time.Now().Add(-48 * time.Hour)
	s, old := jointest.New(), newTrust(t, false)
	record(t, s, join.Record{ID: "n1", Name: "n1", Confirmed: true})
	wish := successors(t, old, nil, pki.ForPeers)
	wish.Grace = time.Hour
	if err := Begin(t.Context(), s, wish, cluster); err != nil {
		t.Fatal(err)
	}
	for i, now := range []time.Time{cluster.Add(settle), cluster.Add(settle + time.Minute), cluster.Add(settle + 2*time.Hour)} {
		state, err := Get(t.Context(), s, false)
		if err == nil {
			err = RecordState(t.Context(), s, "n1", state.Number, nil)
		}
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		looks := 0
		leader := Leader{Store: s, Log: slog.New(slog.DiscardHandler), Now: func() time.Time {
			if looks++; looks > 1 {
				stop()
			}
			return now
		}}
		if i == 0 { // before the clock was set
			err = leader.look(ctx, now)
		} else {
			err = leader.Run(ctx)
		}
		if err != nil {
			t.Fatal(err)
		}
		stop()
		want := []Phase{Reissue, Reissue, Stable}[i]
		if state, err = Get(t.Context(), s, false); err != nil || state.Phase != want {
			t.Errorf("at %s after it began: %s, %v; want %s", now.Sub(cluster), state.Phase, err, want)
		}
	}
}
