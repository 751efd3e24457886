package raftstore_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// A starved process runs for a moment, and then is kept from running for longer than a
// follower waits for its leader on a machine that is not overloaded. (SIGSTOP does what
// a kernel with too much to run does, without load on this machine.)
const (
	starvedRuns   = 80 * time.Millisecond
	starvedPauses = 900 * time.Millisecond // and up to half of it more
)

// starve keeps the members from running most of the time until feed is called.
func (p *processes) starve() (feed func()) {
	over := make(chan struct{})
	var wg sync.WaitGroup
	for _, id := range p.ids {
		process := p.cmds[id].Process // another one is not starved
		wg.Go(func() {
			defer func() { _ = process.Signal(syscall.SIGCONT) }()
			for {
				for _, turn := range []struct {
					signal syscall.Signal
					wait   time.Duration
				}{{syscall.SIGSTOP, starvedPauses + rand.N(starvedPauses/2)}, {syscall.SIGCONT, starvedRuns}} {
					if process.Signal(turn.signal) != nil {
						return // it was killed
					}
					select {
					case <-time.After(turn.wait):
					case <-over:
						return
					}
				}
			}
		})
	}
	var once sync.Once
	feed = func() { once.Do(func() { close(over); wg.Wait() }) }
	p.t.Cleanup(feed)
	return feed
}

// acknowledged tries writes through any member until the time is over, and returns how
// many were acknowledged. Until it is zero: one is enough.
func (p *processes) acknowledged(r *rand.Rand, enough int, until time.Time) (n int) {
	for i := 0; n < enough && time.Now().Before(until); i++ {
		in := registerInput{key: "/starved", op: "put", value: fmt.Sprint(i)}
		if out, happened := p.try(r, in); happened && !out.unknown && out.ok {
			n++
		}
	}
	return n
}

// TestProcessStarved: members that run for a twentieth of the time, and each at another,
// keep their leader; and when it is killed they elect another one, which they keep. With
// fixed timeouts there was no leader for minutes.
func TestProcessStarved(t *testing.T) {
	t.Parallel()
	p := startProcesses(t)
	r := rand.New(rand.NewPCG(1, 2))
	const window, tries = 8 * time.Second, 4
	// The machine that the test runs on may itself be overloaded: one quiet time of some
	// is enough.
	kept := func(when string) {
		t.Helper()
		least := uint64(1 << 63)
		for range tries {
			before := p.latestTerm()
			acks := p.acknowledged(r, 1<<30, time.Now().Add(window))
			elections := p.latestTerm() - before
			t.Logf("%s: %d writes acknowledged in %v, %d elections", when, acks, window, elections)
			if acks == 0 {
				elections++
			}
			if least = min(least, elections); least == 0 {
				return
			}
		}
		t.Fatalf("%s: at least %d elections in each of %d times %v", when, least, tries, window)
	}
	feed := p.starve()
	kept("starved")
	feed()
	victim := p.leader("")
	feed = p.starve()
	p.kill(victim)
	began := time.Now()
	if p.acknowledged(r, 1, began.Add(time.Minute)) == 0 {
		t.Fatal("no write was acknowledged within a minute of the leader's end")
	}
	t.Logf("a write was acknowledged %v after the leader was killed", time.Since(began).Round(time.Millisecond))
	kept("starved, without the one that was killed")
	feed()
	p.start(victim)
	p.agree()
}

// latestTerm is the latest that any member knows; members that do not answer now are
// asked again.
func (p *processes) latestTerm() (term uint64) {
	p.t.Helper()
	for _, id := range p.ids {
		if p.cmds[id].ProcessState != nil {
			continue // it was killed
		}
		for end := time.Now().Add(time.Minute); ; {
			st, err := p.status(id)
			if err == nil {
				term = max(term, st.Term)
				break
			}
			if time.Now().After(end) {
				p.t.Fatalf("%s does not answer: %v", id, err)
			}
		}
	}
	return term
}

// TestMultiHeartbeats: a leader sends heartbeats at the pace that its followers' timeouts
// needs, however long raft's own timeouts are.
func TestMultiHeartbeats(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) {
		cfg.LeaderLease = 5 * time.Minute // raft's own come every 30 to 60 s
	})
	leader := c.Leader()
	began := time.Now()
	for _, id := range c.IDs() {
		if id == c.LeaderID() {
			continue
		}
		for i := range 5 {
			before := leader.Answered()[id]
			c.Wait(fmt.Sprintf("heartbeat %d to be answered by %s", i+1, id), func() bool { return leader.Answered()[id].After(before) })
		}
	}
	if took := time.Since(began); took > time.Minute {
		t.Errorf("ten heartbeats took %v", took)
	}
}

// TestMultiElectionGivenUp: a candidate without a majority becomes a follower again, and
// nothing happens to a leader and its followers.
func TestMultiElectionGivenUp(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, longTimeouts)
	leader := c.Leader()
	term := leader.Status().Term
	for _, s := range c.Running() {
		_ = raftstore.GiveUpElection(s, term) // what becomes of it is looked at below
		if st := s.Status(); st.Term != term {
			t.Errorf("%s is in term %d, was in %d", st.ID, st.Term, term)
		}
	}
	mustPut(t, leader, "/a", "1")
	if st := leader.Status(); st.State != "Leader" || st.Term != term {
		t.Errorf("%s is %s in term %d, led in %d", st.ID, st.State, st.Term, term)
	}
	follower := c.Follower()
	for _, id := range c.IDs() {
		if id != follower.Status().ID {
			c.Kill(id)
		}
	}
	raftstore.StandForElection(follower)
	term++
	c.Wait("it is a candidate", func() bool {
		st := follower.Status()
		return st.State == "Candidate" && st.Term == term
	})
	if err := raftstore.GiveUpElection(follower, term); err != nil {
		t.Fatal(err)
	}
	c.Wait("it is a follower again", func() bool {
		st := follower.Status()
		return st.State == "Follower" && st.Term == term+1
	})
	for _, id := range c.IDs() {
		if id != follower.Status().ID {
			c.Start(id)
		}
	}
	raftstore.StandForElection(follower)
	mustPut(t, c.Leader(), "/b", "2")
}
