package raftstore_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// voters are the IDs of the voters a member knows of.
func voters(t *testing.T, s *raftstore.Store) []string {
	t.Helper()
	ms, err := s.Members()
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, m := range ms {
		if m.Voter {
			ids = append(ids, m.ID)
		}
	}
	return ids
}

func TestMultiOnlyVoterStays(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 1, nil)
	s := c.Store("n0")
	n1 := c.Start("n1")
	if err := s.AddNonvoter(testContext(t), "n1"); err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func() error{
		"remove": func() error { return s.RemoveMember(testContext(t), "n0") },
		"demote": func() error { return s.DemoteVoter(testContext(t), "n0") },
		"check":  func() error { return n1.CheckRemoval(testContext(t), "n0") },
	} {
		c.Wait("n1 knows the members", func() bool { ms, err := n1.Members(); return err == nil && len(ms) == 2 })
		if err := change(); !errors.Is(err, raftstore.ErrLastVoter) {
			t.Errorf("%s the only voter: %v", what, err)
		}
	}
	mustPut(t, s, "/after", "x")
}

// TestMultiQuorumIsKept: with one of three voters down, taking away one that
// lives is refused; taking the dead one away is not.
func TestMultiQuorumIsKept(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, raftstoretest.Steady)
	ctx := testContext(t)
	leader := c.LeaderID()
	var dead, living string
	for _, id := range c.IDs() {
		switch {
		case id == leader:
		case dead == "":
			dead = id
		default:
			living = id
		}
	}
	if err := c.Store(living).CheckRemoval(ctx, leader); err != nil {
		t.Errorf("all are there: %v", err)
	}
	c.Kill(dead)
	var q *raftstore.QuorumError
	for what, err := range map[string]error{
		"remove":         c.Store(leader).RemoveMember(ctx, living),
		"demote":         c.Store(leader).DemoteVoter(ctx, living),
		"remove leader":  c.Store(leader).RemoveMember(ctx, leader),
		"a fourth, gone": c.Store(leader).AddVoter(ctx, "absent"),
	} {
		if !errors.As(err, &q) || !slices.Contains(q.Silent, dead) || !strings.Contains(err.Error(), "must answer") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := c.Store(living).DemoteVoter(ctx, living); err == nil || !strings.Contains(err.Error(), "must answer") {
		t.Errorf("asked through a follower: %v", err)
	}
	mustPut(t, c.Store(living), "/after", "x")
	if err := c.Store(living).RemoveMember(ctx, dead); err != nil {
		t.Fatal(err)
	}
	if got := voters(t, c.Store(leader)); len(got) != 2 || slices.Contains(got, dead) {
		t.Errorf("voters %v", got)
	}
}

// TestMultiQuorumOfTwoChanges: of two changes that each would leave a majority, and
// together none, one is refused.
func TestMultiQuorumOfTwoChanges(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 4, raftstoretest.Steady)
	ctx := testContext(t)
	leader := c.LeaderID()
	others := slices.DeleteFunc(c.IDs(), func(id string) bool { return id == leader })
	c.Kill(others[0])
	made := make(chan error, 2)
	for _, id := range others[1:] {
		go func() { made <- c.Store(leader).DemoteVoter(ctx, id) }()
	}
	var q *raftstore.QuorumError
	if one, two := <-made, <-made; (one == nil) == (two == nil) || !errors.As(errors.Join(one, two), &q) {
		t.Fatalf("both together leave no majority: %v; %v", one, two)
	}
	mustPut(t, c.Store(leader), "/after", "x")
}

// TestMultiLeaderIsDemoted: it hands over, and follows without a vote.
func TestMultiLeaderIsDemoted(t *testing.T) {
	t.Parallel()
	c := raftstoretest.New(t, 3, nil)
	old := c.LeaderID()
	if err := c.Store(old).DemoteVoter(testContext(t), old); err != nil {
		t.Fatal(err)
	}
	if now := c.LeaderID(); now == old {
		t.Errorf("%s still leads", old)
	}
	if got := voters(t, c.Leader()); len(got) != 2 || slices.Contains(got, old) {
		t.Errorf("voters %v", got)
	}
	mustPut(t, c.Store(old), "/through-it", "x")
}
