package authority

import (
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

// member is one that follows the state as cmd/clusterd's do.
type member struct {
	id     string
	server bool
	trust  *pki.Trust // with keys, of a server
	cert   *pki.CA    // that signed its certificate
}

// follow takes up the state, asking others for keys.
func (m *member) follow(ctx context.Context, s join.Store, made map[string]*pki.CA, all []*member) error {
	state, err := Get(ctx, s, true)
	if err != nil || state.Number == 0 {
		return err
	}
	if state.Number > m.trust.Number {
		public, err := state.Trust()
		if err != nil {
			return err
		}
		var cas []*pki.CA
		for _, ca := range public.All() {
			have := m.trust.Find(ca.ID())
			if have == nil && state.Maker == m.id {
				have = made[ca.ID()]
			}
			for _, other := range all {
				if have == nil && m.server && other.server {
					have = other.trust.Find(ca.ID())
				}
			}
			if !m.server {
				have = ca
			}
			if have == nil {
				return fmt.Errorf("%s lacks the key of %s", m.id, ca.ID())
			}
			cas = append(cas, have)
		}
		m.trust = pki.NewTrust(state.Number, cas[0], cas[1:]...)
		m.cert = m.trust.Signer()
	}
	return Has(ctx, s, m.id, m.trust.Number, nil)
}

// TestKilledAtEveryWrite: whichever write of an exchange a killed member made or
// did not make, and whichever member leads then, it comes to its end, and at all times any two
// members trust each other.
func TestKilledAtEveryWrite(t *testing.T) {
	for kill := int64(1); kill <= 12; kill++ {
		for _, after := range []bool{false, true} {
			t.Run(fmt.Sprintf("write %d, done %t", kill, after), func(t *testing.T) { exchangeWithKill(t, kill, after) })
		}
	}
}

func exchangeWithKill(t *testing.T, kill int64, after bool) {
	ctx := t.Context()
	s := jointest.New()
	old, err := pki.NewCA("test", now)
	if err != nil {
		t.Fatal(err)
	}
	var all []*member
	for _, id := range []string{"n1", "n2", "n3", "a1"} {
		m := &member{id: id, server: id != "a1", trust: pki.NewTrust(0, old), cert: old}
		role := pki.Server
		if !m.server {
			m.trust, role = pki.NewTrust(0, old.Public()), pki.Agent
		}
		all = append(all, m)
		record(t, s, join.Record{ID: id, Name: id, Role: role, Joined: now.Add(-time.Hour), Confirmed: true})
	}
	made := map[string]*pki.CA{}
	make := func(begin func([]byte) error) error {
		next, err := old.NewSuccessor(now)
		if err != nil {
			return err
		}
		made[next.ID()] = next
		return begin(pki.EncodeCert(next.Cert))
	}
	s.KillAt(kill, after)
	begin := func() error {
		return make(func(next []byte) error {
			return Begin(ctx, s, pki.EncodeCert(old.Cert), next, "n1", 0, now)
		})
	}
	if err := begin(); err != nil {
		if !errors.Is(err, jointest.ErrKilled) {
			t.Fatal(err)
		}
		// Who asked for it tries again, and may learn that it has begun.
		if err := begin(); err != nil && !errors.Is(err, ErrUnderWay) {
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
		leader := Leader{Store: s, Log: slog.New(slog.DiscardHandler), Make: func(context.Context) error { t.Error("the key was thought lost"); return nil }}
		if err := leader.look(ctx, at); err != nil && !errors.Is(err, jointest.ErrKilled) {
			t.Fatal(err)
		}
		for i := range all {
			m := all[(i+round)%len(all)]
			if err := m.follow(ctx, s, made, all); err != nil && !errors.Is(err, jointest.ErrKilled) {
				t.Fatal(err)
			}
			for _, x := range all {
				for _, y := range all {
					if x.trust.Find(y.cert.ID()) == nil {
						t.Fatalf("round %d: %s (state %d) does not trust %s (state %d)", round, x.id, x.trust.Number, y.id, y.trust.Number)
					}
				}
			}
		}
		if state, _ := Get(ctx, s, true); state.Phase == Stable && state.Number > 0 && !slices.ContainsFunc(all, func(m *member) bool { return m.trust.Number < state.Number }) {
			break
		}
	}
	for _, m := range all {
		if len(m.trust.All()) != 1 || m.trust.Find(old.ID()) != nil || m.server && !m.trust.Signer().HasKey() {
			t.Errorf("%s trusts %+v", m.id, m.trust)
		}
	}
}

// TestLostKeyIsMadeAnew: the server that made the new authority is removed before
// another one has its key.
func TestLostKeyIsMadeAnew(t *testing.T) {
	ctx := t.Context()
	s := jointest.New()
	old, err := pki.NewCA("test", now)
	if err != nil {
		t.Fatal(err)
	}
	successor := func() []byte {
		next, err := old.NewSuccessor(now)
		if err != nil {
			t.Fatal(err)
		}
		return pki.EncodeCert(next.Cert)
	}
	record(t, s, join.Record{ID: "n2", Name: "n2", Confirmed: true})
	if err := Begin(ctx, s, pki.EncodeCert(old.Cert), successor(), "n1", time.Hour, now); err != nil {
		t.Fatal(err)
	}
	if err := Begin(ctx, s, pki.EncodeCert(old.Cert), successor(), "n2", time.Hour, now); !errors.Is(err, ErrUnderWay) {
		t.Errorf("a second exchange: %v", err)
	}
	again := successor()
	leader := Leader{Store: s, Log: slog.New(slog.DiscardHandler), Make: func(ctx context.Context) error { return BeginAgain(ctx, s, again, "n2", now) }}
	if err := leader.look(ctx, now); err != nil {
		t.Fatal(err)
	}
	state, err := Get(ctx, s, false)
	if err != nil || state.Maker != "n2" || state.Number != 2 || state.Grace != time.Hour || string(state.Authorities[0]) != string(pki.EncodeCert(old.Cert)) || string(state.Authorities[1]) != string(again) {
		t.Errorf("state %+v, %v", state, err)
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
	wish := join.TokenWish{Role: pki.Agent, TTL: time.Hour}
	var kept string
	for _, ca := range []*pki.CA{old, next} {
		token, _, err := join.CreateToken(ctx, s, ca.Cert, wish, now)
		if err != nil {
			t.Fatal(err)
		}
		kept = token.ID
	}
	if err := Begin(ctx, s, pki.EncodeCert(old.Cert), pki.EncodeCert(next.Cert), "n1", 0, now); err != nil {
		t.Fatal(err)
	}
	record(t, s, join.Record{ID: "n1", Name: "n1", Confirmed: true})
	leader := Leader{Store: s, Log: slog.New(slog.DiscardHandler)}
	for range 2 {
		state, err := Get(ctx, s, false)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(Has(ctx, s, "n1", state.Number, nil), leader.look(ctx, now.Add(time.Hour))); err != nil {
			t.Fatal(err)
		}
	}
	tokens, err := join.Tokens(ctx, s)
	if err != nil || len(tokens) != 1 || tokens[0].ID != kept {
		t.Errorf("tokens %+v, %v; want %s", tokens, err, kept)
	}
	if err := Finish(ctx, s); !errors.Is(err, ErrNone) {
		t.Errorf("finish without an exchange: %v", err)
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
// exchange has numbers that agents of the cluster that was, however far that had
// come, take up.
func TestRestored(t *testing.T) {
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
		state, changes, err := Restored(k, []byte("ca"), now)
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
		if err != nil || got.Number != state.Number || got.Phase != Stable || got.Finish || len(got.Authorities) != 1 || string(got.Authorities[0]) != "ca" {
			t.Errorf("from %+v: %+v, %v", was, got, err)
		}
		if has, err := progress.All(t.Context(), s, false); err != nil || len(has) != 0 {
			t.Errorf("from %+v: members' progress is kept: %v, %v", was, has, err)
		}
		if err := Begin(t.Context(), s, nil, []byte("next"), "n1", 0, now); err != nil {
			t.Fatal(err)
		}
		// The cluster that was may have exchanged its authority since, and often.
		if got, err = Get(t.Context(), s, false); err != nil || got.Number <= number+1000 || got.Phase != Distribute || string(got.Authorities[0]) != "ca" {
			t.Errorf("from %+v, the next exchange: %+v, %v", was, got, err)
		}
	}
}
