package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/member/releases"
)

// upgradeNode is what is known of a node before a roll-out.
type upgradeNode struct {
	member  v1.Member
	ready   bool            // its Node is
	release *v1.NodeRelease // nil: problem says why it is not known
	problem string
}

func (n upgradeNode) name() string { return n.member.Name }

// role is agent, follower or leader.
func (n upgradeNode) role() string {
	switch {
	case n.member.Role == v1.RoleAgent:
		return v1.RoleAgent
	case n.member.Leader:
		return "leader"
	}
	return "follower"
}

// upgradePlan is which nodes get the release, in which order, and which have it.
type upgradePlan struct {
	release releases.Manifest
	steps   []upgradeNode
	done    []string
	left    []string // that were to be left out
}

// planOptions is what the user wants.
type planOptions struct {
	release releases.Manifest
	key     string // id of the key that has signed it
	canary  string // the node that goes first; "": the plan's choice
	except  []string
}

// planUpgrade orders the nodes: those that an earlier command has left on trial, before
// their time is over; one canary (an agent if there is one, which holds no
// state of the cluster; else a follower), the followers, the other agents, the leader.
// What stands against a roll-out is found before anything is done: all of it is in the
// error.
func planUpgrade(nodes []upgradeNode, wish planOptions) (upgradePlan, error) {
	plan := upgradePlan{release: wish.release}
	var against []string
	passing := true // all that stands against it may be over in a moment
	object := func(n upgradeNode, format string, args ...any) {
		against = append(against, n.name()+": "+fmt.Sprintf(format, args...))
	}
	objectForGood := func(n upgradeNode, format string, args ...any) {
		passing = false
		object(n, format, args...)
	}
	for _, named := range append(slices.Clone(wish.except), wish.canary) {
		if named != "" && !slices.ContainsFunc(nodes, func(n upgradeNode) bool { return n.name() == named }) {
			passing = false
			against = append(against, fmt.Sprintf("%s: no member is called so; `clusterctl members` lists them", named))
		}
	}
	for _, n := range nodes {
		r := n.release
		switch {
		case slices.Contains(wish.except, n.name()):
			plan.left = append(plan.left, n.name())
		case r == nil:
			object(n, "%s", n.problem)
		case r.Version == wish.release.Version && r.Trial == nil:
			plan.done = append(plan.done, n.name())
		case r.Trial != nil && r.Trial.Version != wish.release.Version:
			objectForGood(n, "version %s is on trial there until %s: wait until it has ended", r.Trial.Version, r.Trial.Deadline.Local().Format("15:04:05"))
		case r.Obstacle != "":
			objectForGood(n, "%s", r.Obstacle)
		case r.Arch != wish.release.Arch:
			objectForGood(n, "it is linux/%s, and the file is for %s: leave it out with --except, and give it the file for its architecture in a second run", r.Arch, wish.release.Platform())
		case !slices.Contains(r.Keys, wish.key):
			objectForGood(n, "it does not trust key %s, which has signed the file (%s); add the key with clusterctl upgrade trust KEY%s", wish.key, trustedBy(r), ownKeys(r))
		case !n.ready || n.member.Gossip != "alive" && n.member.Gossip != "answers":
			object(n, "it is not Ready (%s): start clusterd there, or leave it out with --except", orNone(n.member.Gossip))
		default:
			plan.steps = append(plan.steps, n)
		}
	}
	if len(against) > 0 {
		return plan, &planError{"the release cannot be rolled out:\n  " + strings.Join(against, "\n  "), passing}
	}
	onTrial := 0
	rank := func(n upgradeNode) int {
		if n.release.Trial != nil {
			return -1
		}
		return slices.Index([]string{"follower", v1.RoleAgent, "leader"}, n.role())
	}
	for _, n := range plan.steps {
		if n.release.Trial != nil {
			onTrial++
		}
	}
	slices.SortFunc(plan.steps, func(a, b upgradeNode) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.name(), b.name()))
	})
	canary := slices.IndexFunc(plan.steps, func(n upgradeNode) bool {
		return n.name() == wish.canary || wish.canary == "" && n.role() == v1.RoleAgent
	})
	if canary > onTrial {
		first := plan.steps[canary]
		plan.steps = slices.Insert(slices.Delete(plan.steps, canary, canary+1), onTrial, first)
	}
	return plan, nil
}

// planError is all that stands against a roll-out. What is passing may be over in a
// moment: a node that has just begun again is found to be away and back.
type planError struct {
	words   string
	passing bool
}

func (e *planError) Error() string { return e.words }

// quorumWithout refuses to stop a server for a moment when the others are too few to
// go on. A cluster of one voter cannot do better.
func quorumWithout(list v1.MemberList, name string) error {
	voters, others, stops := 0, 0, false
	var silent []string
	for _, m := range list.Members {
		if m.Role != v1.RoleVoter {
			continue
		}
		voters++
		switch {
		case m.Name == name:
			stops = true
		case m.Gossip == "alive":
			others++
		default:
			silent = append(silent, m.Name)
		}
	}
	if stops && voters == 2 && others == 1 {
		return &permanentError{fmt.Errorf("without %s the store would have 1 of 2 voters, and both are needed: join a third server, or remove one with clusterctl members rm", name)}
	}
	if need := voters/2 + 1; stops && voters > 1 && others < need {
		return &permanentError{fmt.Errorf("without %s the store would have %d of %d voters, and %d are needed: start clusterd on %s, or remove it with clusterctl members rm", name, others, voters, need, strings.Join(silent, ", "))}
	}
	return nil
}

func trustedBy(r *v1.NodeRelease) string {
	if len(r.Keys) == 0 {
		return "it trusts none"
	}
	return "it trusts " + strings.Join(r.Keys, ", ")
}

func ownKeys(r *v1.NodeRelease) string {
	if r.KeysFrom == v1.KeysFromNode {
		return ", or rather to the flag --release-keys of that node, which holds there"
	}
	return ""
}

// table prints the plan.
func (p upgradePlan) table(w io.Writer) error {
	var rows [][]string
	for i, n := range p.steps {
		note := ""
		switch {
		case n.release.Trial != nil:
			note = "is on trial already"
		case i == 0 && len(p.steps) > 1:
			note = "canary"
		case n.role() == "leader":
			note = "hands over first"
		}
		rows = append(rows, []string{n.name(), n.role(), n.release.Version, p.release.Version, note})
	}
	for _, name := range p.done {
		rows = append(rows, []string{name, "", p.release.Version, p.release.Version, "has it already"})
	}
	for _, name := range p.left {
		rows = append(rows, []string{name, "", "", "", "left out"})
	}
	return printTable(w, []string{"NODE", "ROLE", "FROM", "TO", "NOTE"}, rows)
}
