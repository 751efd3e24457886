package raftstore_test

import (
	"flag"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// longTimeouts has raft elect no leader before the test fails for its own timeout.
func longTimeouts(c *raftstore.Config) {
	const t = raftstoretest.Timeout + time.Second
	c.HeartbeatTimeout, c.ElectionTimeout, c.LeaderLease = t, t, t
	c.LeaderWait = t
}

// TestMultiLeaderKilled: followers whose leader's process is gone agree on
// another one without waiting for raft's timeout.
func TestMultiLeaderKilled(t *testing.T) {
	for _, n := range []int{3, 5} {
		t.Run(fmt.Sprintf("%d members", n), func(t *testing.T) {
			t.Parallel()
			c := raftstoretest.New(t, n, longTimeouts)
			mustPut(t, c.Leader(), "/a", "1")
			for _, id := range c.IDs() {
				c.Wait(id+" has the first write", func() bool { return c.Store(id).Status().Keyspace.Keys == 1 })
			}
			c.Kill(c.LeaderID())
			mustPut(t, c.Leader(), "/b", "2")
		})
	}
}

// TestMultiRestartAll: members that start together agree on a leader without
// waiting for raft's timeout.
func TestMultiRestartAll(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, longTimeouts)
	mustPut(t, c.Leader(), "/a", "1")
	for _, id := range c.IDs() {
		c.Kill(id)
	}
	for _, id := range c.IDs() {
		c.Start(id)
	}
	if got := get(t, c.Leader(), "/a"); got != "1" {
		t.Errorf("after a restart of all: %q", got)
	}
}

// TestMultiLeaderOutOfReach: one member that cannot reach the leader does not
// depose it, refused or not.
func TestMultiLeaderOutOfReach(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, longTimeouts)
	leader, follower := c.LeaderID(), c.Follower().Status().ID
	mustPut(t, c.Leader(), "/a", "1")
	term := c.Leader().Status().Term
	if raftstore.ShouldStand(c.Store(follower), leader) {
		t.Error("a follower would stand although the leader serves the others")
	}
	if got := c.Leader().Status(); got.ID != leader || got.Term != term {
		t.Errorf("%s leads in term %d, was %s in %d", got.ID, got.Term, leader, term)
	}
}

// TestMultiSilentLeader: followers whose leader has vanished, its streams still
// open and its host saying nothing, agree on another one before raft would.
func TestMultiSilentLeader(t *testing.T) {
	for _, n := range []int{3, 5} {
		t.Run(fmt.Sprintf("%d members", n), func(t *testing.T) {
			t.Parallel()
			// raft would not elect a leader in less than this.
			const timeout = 40 * time.Second
			c := raftstoretest.New(t, n, func(cfg *raftstore.Config) {
				cfg.HeartbeatTimeout, cfg.ElectionTimeout, cfg.LeaderLease = timeout, timeout, timeout
				cfg.LeaderWait = raftstoretest.Timeout
				cfg.Inject(raftstore.Faults{Silence: timeout / 4}) // a heartbeat comes every four to eight seconds
			})
			mustPut(t, c.Leader(), "/a", "1")
			for _, id := range c.IDs() {
				c.Wait(id+" has the first write", func() bool { return c.Store(id).Status().Keyspace.Keys == 1 })
			}
			leader := c.LeaderID()
			c.Mute(leader, true)
			c.Deafen(leader, true)
			began := time.Now()
			var next *raftstore.Store
			c.Wait("another leader", func() bool {
				for id, s := range c.Running() {
					if id != leader && s.IsLeader() {
						next = s
						return true
					}
				}
				return false
			})
			if took := time.Since(began); took > timeout*9/10 {
				t.Errorf("it took %v: that was raft's own timeout", took)
			}
			mustPut(t, next, "/b", "2")
			c.Mute(leader, false)
			c.Deafen(leader, false)
		})
	}
}

// TestMultiSilentForOne: a member that alone does not hear the leader does
// not depose it, however long that lasts.
func TestMultiSilentForOne(t *testing.T) {
	t.Parallel()
	// A busy machine keeps the others from hearing the leader too, for a while.
	const silence = 4 * time.Second
	c := raftstoretest.New(t, 3, func(cfg *raftstore.Config) {
		raftstoretest.Steady(cfg)
		cfg.Inject(raftstore.Faults{Silence: silence})
	})
	leader, deaf := c.LeaderID(), c.Follower().Status().ID
	term := c.Leader().Status().Term
	c.Sever(leader, deaf, true)
	for i, began := 0, time.Now(); time.Since(began) < 2*silence; i++ {
		mustPut(t, c.Store(leader), "/a", fmt.Sprint(i))
		if raftstore.ShouldStand(c.Store(deaf), leader) {
			t.Fatal("it would stand although the leader serves the others")
		}
		time.Sleep(100 * time.Millisecond) // the leader is heard more often than a heartbeat comes
	}
	if got := c.Store(leader).Status(); got.State != "Leader" || got.Term != term {
		t.Errorf("%s is %s in term %d, led in %d", leader, got.State, got.Term, term)
	}
	c.Sever(leader, deaf, false)
}

var silentRounds = flag.Int("silent-rounds", 1, "how many rounds TestMultiSilentLeaderTakes measures")

// TestMultiSilentLeaderTakes measures how long writes wait for another leader,
// at default timeouts, when the leader vanishes without a word.
func TestMultiSilentLeaderTakes(t *testing.T) {
	c := raftstoretest.New(t, 3, nil)
	var took []time.Duration
	for i := range *silentRounds {
		leader := c.LeaderID()
		writer := c.Follower()
		mustPut(t, writer, "/before", fmt.Sprint(i))
		c.Mute(leader, true)
		c.Deafen(leader, true)
		start := time.Now()
		mustPut(t, writer, "/after", fmt.Sprint(i))
		took = append(took, time.Since(start).Round(time.Millisecond))
		c.Mute(leader, false)
		c.Deafen(leader, false)
		c.Wait("all to follow one leader", func() bool {
			now := c.LeaderID()
			for _, s := range c.Running() {
				if s.Leader() != now {
					return false
				}
			}
			return true
		})
	}
	slices.Sort(took)
	t.Logf("p50 %v, max %v of %d", took[len(took)/2], took[len(took)-1], len(took))
}
