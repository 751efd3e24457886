package election

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/peer"
)

// fakeRaft is a follower among voters.
type fakeRaft struct {
	voters                    []string
	term, lastTerm, lastIndex uint64
	heard                     atomic.Pointer[time.Time]
	state                     atomic.Uint32 // a raft.RaftState, and a follower at first
}

func (r *fakeRaft) State() raft.RaftState  { return raft.RaftState(r.state.Load()) }
func (r *fakeRaft) CurrentTerm() uint64    { return atomic.LoadUint64(&r.term) }
func (r *fakeRaft) rise() uint64           { return atomic.AddUint64(&r.term, 1) }
func (r *fakeRaft) LastContact() time.Time { return *r.heard.Load() }
func (r *fakeRaft) hear()                  { now := time.Now(); r.heard.Store(&now) }
func (r *fakeRaft) Stats() map[string]string {
	return map[string]string{"last_log_term": fmt.Sprint(r.lastTerm), "last_log_index": fmt.Sprint(r.lastIndex)}
}
func (r *fakeRaft) GetConfiguration() raft.ConfigurationFuture { return configuration{r.voters} }

type configuration struct{ voters []string }

func (c configuration) Error() error  { return nil }
func (c configuration) Index() uint64 { return 1 }
func (c configuration) Configuration() (conf raft.Configuration) {
	for _, id := range c.voters {
		conf.Servers = append(conf.Servers, raft.Server{ID: raft.ServerID(id), Suffrage: raft.Voter})
	}
	return conf
}

// fakeVoters answer what they were given; those without an answer are silent,
// those with nil are not there.
type fakeVoters map[string]*voterState

func (v fakeVoters) Ask(ids []string, kind byte, _ []byte) (<-chan peer.Answer, func()) {
	ch := make(chan peer.Answer, len(ids))
	for _, id := range ids {
		switch st, ok := v[id]; {
		case !ok:
		case st == nil:
			ch <- peer.Answer{ID: id, Err: peer.ErrStreamLost}
		case kind == peer.KindLeaderless:
			ch <- peer.Answer{ID: id, Frame: peer.Frame{Kind: peer.KindVoterState, Body: st.append(nil)}}
		}
	}
	return ch, func() {}
}

func newElection(r *fakeRaft, v fakeVoters, stand func()) *Election {
	return New(Config{
		ID: "b", Raft: r, Voters: v, Leader: NewLeader(), Logger: slog.New(slog.DiscardHandler),
		Dial:             func(context.Context, string) (net.Conn, error) { return nil, os.ErrDeadlineExceeded },
		Stand:            func() error { stand(); return nil },
		GiveUp:           func(uint64) error { return nil },
		Gap:              func() time.Duration { return 0 },
		Lost:             func() bool { return false },
		HeartbeatTimeout: time.Second, ElectionTimeout: time.Second,
	})
}

// TestShouldStand: member b, whose log ends with entry 10 of term 4 in term 5,
// has lost l.
func TestShouldStand(t *testing.T) {
	free := func(term, lastTerm, lastIndex uint64) *voterState {
		return &voterState{leaderless: true, term: term, lastTerm: lastTerm, lastIndex: lastIndex}
	}
	for _, tc := range []struct {
		name   string
		voters []string
		others fakeVoters
		want   bool
	}{
		{"the other one agrees", []string{"a", "b", "l"}, fakeVoters{"a": free(5, 4, 10)}, true},
		{"the other one is behind", []string{"b", "c", "l"}, fakeVoters{"c": free(5, 4, 9)}, true},
		{"the other one has as much and the higher ID", []string{"b", "c", "l"}, fakeVoters{"c": free(5, 4, 10)}, false},
		{"but is asking for votes in vain", []string{"b", "c", "l"}, fakeVoters{"c": {leaderless: true, candidate: true, term: 5, lastTerm: 4, lastIndex: 10}}, true},
		{"the other one has a later entry", []string{"a", "b", "l"}, fakeVoters{"a": free(5, 4, 11)}, false},
		{"the other one has an entry of a later term", []string{"a", "b", "l"}, fakeVoters{"a": free(5, 5, 3)}, false},
		{"the other one is in a later term", []string{"a", "b", "l"}, fakeVoters{"a": free(6, 4, 9)}, false},
		{"the other one has a leader", []string{"a", "b", "l"}, fakeVoters{"a": {term: 5, lastTerm: 4, lastIndex: 9}}, false},
		{"no answers", []string{"a", "b", "l"}, fakeVoters{}, false},
		{"the other one refuses connections", []string{"a", "b", "l"}, fakeVoters{"a": nil}, false},
		{"a majority of five", []string{"a", "b", "c", "d", "l"}, fakeVoters{"a": free(5, 4, 9), "c": free(5, 4, 9), "d": nil}, true},
		{"two of five", []string{"a", "b", "c", "d", "l"}, fakeVoters{"a": free(5, 4, 9), "d": nil}, false},
		{"alone", []string{"b"}, fakeVoters{}, true},
		{"no voter", []string{"a", "l"}, fakeVoters{"a": free(5, 4, 9)}, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := &fakeRaft{voters: tc.voters, term: 5, lastTerm: 4, lastIndex: 10}
			r.hear()
			e := newElection(r, tc.others, func() {})
			if got := e.ShouldStand(t.Context(), "l"); got != tc.want {
				t.Errorf("%s: %v", tc.name, got)
			}
			e.cfg.Lost = func() bool { return true }
			if e.ShouldStand(t.Context(), "l") {
				t.Errorf("%s: stands although its state is lost", tc.name)
			}
		})
	}
}

// TestSilentLeader: no member stands while heartbeats come, late ones too; when they
// end a member stands before raft would.
func TestSilentLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRaft{voters: []string{"a", "b", "l"}, term: 5, lastTerm: 4, lastIndex: 10}
		r.hear()
		var stood atomic.Int32
		e := newElection(r, fakeVoters{"a": {leaderless: true, term: 5, lastTerm: 4, lastIndex: 10}}, func() { stood.Add(1); r.hear() })
		e.cfg.Leader.Set("l", 5)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); e.MonitorSilence(ctx) }()
		for range 100 {
			time.Sleep(800 * time.Millisecond) // a machine that is busy
			r.hear()
		}
		if n := stood.Load(); n != 0 {
			t.Errorf("stood %d times under a leader that is only slow", n)
		}
		time.Sleep(time.Second)
		if n := stood.Load(); n != 1 {
			t.Errorf("stood %d times under a leader that was silent for a second", n)
		}
		cancel()
		<-ended
	})
}

// TestSlowLeader: under a leader whose heartbeats are known to come late no member
// stands before twice that time, and then one does.
func TestSlowLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRaft{voters: []string{"a", "b", "l"}, term: 5, lastTerm: 4, lastIndex: 10}
		r.hear()
		var stood atomic.Int32
		e := newElection(r, fakeVoters{"a": {leaderless: true, term: 5, lastTerm: 4, lastIndex: 10}}, func() { stood.Add(1); r.hear() })
		const gap = 2 * time.Second
		e.cfg.Gap = func() time.Duration { return gap }
		e.timeouts.gap = e.cfg.Gap
		e.cfg.Leader.Set("l", 5)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); e.MonitorSilence(ctx) }()
		for range 100 {
			time.Sleep(gap + gap/2)
			r.hear()
		}
		if n := stood.Load(); n != 0 {
			t.Errorf("stood %d times under a leader that is as slow as ever", n)
		}
		time.Sleep(gapFactor*gap + time.Second)
		if n := stood.Load(); n != 1 {
			t.Errorf("stood %d times under a leader that has ended", n)
		}
		cancel()
		<-ended
	})
}

// TestElectionsInVain: a candidate that gets no votes gives up and stands again, after
// longer and longer, and no wait is longer than the longest.
func TestElectionsInVain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRaft{voters: []string{"a", "b", "l"}, term: 5, lastTerm: 4, lastIndex: 10}
		r.hear()
		var stood []time.Time
		var e *Election
		e = newElection(r, fakeVoters{"a": {leaderless: true, term: 5, lastTerm: 4, lastIndex: 9}}, func() {
			stood = append(stood, time.Now())
			r.state.Store(uint32(raft.Candidate))
			e.cfg.Leader.Set("", r.rise())
		})
		e.cfg.GiveUp = func(term uint64) error {
			if got := r.CurrentTerm(); got != term {
				t.Errorf("gives up in term %d, is in %d", term, got)
			}
			r.state.Store(uint32(raft.Follower))
			e.cfg.Leader.Set("", r.rise())
			return nil
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); e.MonitorSilence(ctx) }()
		time.Sleep(5 * time.Minute)
		cancel()
		<-ended
		if len(stood) < 5 {
			t.Fatalf("stood %d times in five minutes", len(stood))
		}
		longest := 2*(e.cfg.Silence<<maxFailed) + time.Second
		for i := 1; i < len(stood); i++ {
			took := stood[i].Sub(stood[i-1])
			if i <= maxFailed && took < e.cfg.Silence<<(i-1) {
				t.Errorf("election %d was given %v", i, took)
			}
			if took > longest+e.askFor(0) { // member l does not answer
				t.Errorf("election %d was given %v, more than %v", i, took, longest)
			}
		}
	})
}

// TestCandidateOfRafts: a member that is cut off, and a candidate in raft's own time, does
// not raise its term.
func TestCandidateOfRafts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRaft{voters: []string{"a", "b", "l"}, term: 5, lastTerm: 4, lastIndex: 10}
		r.hear()
		r.state.Store(uint32(raft.Candidate))
		e := newElection(r, fakeVoters{}, func() { t.Error("it stands") })
		e.cfg.GiveUp = func(uint64) error { t.Error("it gives raft's election up"); return nil }
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		e.MonitorSilence(ctx)
	})
}

// TestTimeouts: what is not a leader's silence, and how waits grow and shrink.
func TestTimeouts(t *testing.T) {
	began := time.Now()
	at := func(millis int) time.Time { return began.Add(time.Duration(millis) * time.Millisecond) }
	p := timeouts{silence: 900 * time.Millisecond, gap: func() time.Duration { return 0 }}
	check := func(what string, got, want time.Duration) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	check("silence", p.silentFor(at(0), at(500)), 500*time.Millisecond)
	p.sleeps(at(900))
	check("a timer that has not fired yet", p.silentFor(at(0), at(3000)), 900*time.Millisecond)
	p.woke(at(3000))
	check("a timer that fired late", p.silentFor(at(0), at(3100)), time.Second)
	p.sleeps(at(3200))
	p.woke(at(3150))
	check("a timer that was not needed", p.silentFor(at(0), at(3200)), 1100*time.Millisecond)
	check("after it was heard again", p.silentFor(at(3200), at(3600)), 400*time.Millisecond)

	check("the usual wait", p.wait(), 900*time.Millisecond)
	p.failedElection()
	check("after an election in vain", p.wait(), 1800*time.Millisecond)
	for range 10 {
		p.failedElection()
	}
	check("the longest wait", p.wait(), 14400*time.Millisecond)
	p.gap = func() time.Duration { return time.Minute }
	check("the longest wait under a slow leader", p.wait(), 14400*time.Millisecond)
	p.gap = func() time.Duration { return 0 }
	for i := range maxFailed {
		p.leads(at(i*20_000 + 1))
		p.leads(at(i*20_000 + 10_000))
		check("a leader that is there for a moment", p.wait(), 900*time.Millisecond<<(maxFailed-i))
		p.leads(at(i*20_000 + 16_000))
		p.until = time.Time{}
		check("a leader that stays", p.wait(), 900*time.Millisecond<<(maxFailed-i-1))
	}
}

// TestGoneLeader: a host that refuses is asked about at once; one that says
// nothing is not taken for gone.
func TestGoneLeader(t *testing.T) {
	for _, tc := range []struct {
		dial error
		want int32
	}{{&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}, 1}, {errors.New("i/o timeout"), 0}} {
		synctest.Test(t, func(t *testing.T) {
			r := &fakeRaft{voters: []string{"a", "b", "l"}, term: 5, lastTerm: 4, lastIndex: 10}
			r.hear()
			var stood atomic.Int32
			e := newElection(r, fakeVoters{"a": {leaderless: true, term: 5, lastTerm: 4, lastIndex: 10}}, func() { stood.Add(1) })
			e.cfg.Dial = func(context.Context, string) (net.Conn, error) { return nil, tc.dial }
			e.cfg.Leader.Set("l", 5)
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			go func() { defer close(ended); e.MonitorLeader(ctx) }()
			time.Sleep(100 * time.Millisecond)
			if n := stood.Load(); n != tc.want {
				t.Errorf("dial says %v: stood %d times", tc.dial, n)
			}
			cancel()
			<-ended
		})
	}
}

func TestVoterState(t *testing.T) {
	for _, st := range []voterState{{}, {leaderless: true}, {leaderless: true, candidate: true}, {term: 1 << 63, lastTerm: 7, lastIndex: 9}} {
		if got := parseVoterState("", st.append(nil)); got == nil || *got != st {
			t.Errorf("%+v became %+v", st, got)
		}
	}
	for _, bad := range [][]byte{nil, make([]byte, 24), make([]byte, 26)} {
		if parseVoterState("", bad) != nil {
			t.Errorf("%d bytes are taken for a state", len(bad))
		}
	}
}

// TestLaterTerm: an election of which this member has not heard is waited for, and not
// for ever.
func TestLaterTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRaft{voters: []string{"a", "b", "l"}, term: 5, lastTerm: 4, lastIndex: 10}
		r.hear()
		began := time.Now()
		stood := make(chan time.Time, 1)
		e := newElection(r, fakeVoters{"a": {leaderless: true, term: 7, lastTerm: 4, lastIndex: 9}}, func() { stood <- time.Now(); r.hear() })
		e.cfg.Leader.Set("l", 5)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); e.MonitorSilence(ctx) }()
		if took := (<-stood).Sub(began); took <= 2*e.cfg.Silence || took > 4*e.cfg.Silence {
			t.Errorf("stood after %v, with a silence of %v", took, e.cfg.Silence)
		}
		cancel()
		<-ended
	})
}
