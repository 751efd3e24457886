package raftstore_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// patientRaft would not elect anybody before the test has given up waiting.
func patientRaft(c *raftstore.Config) {
	const t = raftstoretest.Patience + time.Second
	c.HeartbeatTimeout, c.ElectionTimeout, c.LeaderLease = t, t, t
	c.LeaderWait = t
}

// TestMultiLeaderKilled: followers whose leader's process is gone agree on
// another one without waiting for raft's timeout.
func TestMultiLeaderKilled(t *testing.T) {
	for _, n := range []int{3, 5} {
		t.Run(fmt.Sprintf("%d members", n), func(t *testing.T) {
			t.Parallel()
			c := raftstoretest.New(t, n, patientRaft)
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
	c := raftstoretest.New(t, 3, patientRaft)
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
	c := raftstoretest.New(t, 3, patientRaft)
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
