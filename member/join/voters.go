package join

import (
	"cmp"
	"slices"
	"strings"
)

// Numbers of voters that can be asked for. Each write waits for a majority of
// them, so more than seven only cost.
const (
	// DefaultVoters is how many are wanted by default: two may be lost.
	DefaultVoters = 5
	MaxVoters     = 7
)

// memberState is what is known of one member when the membership is planned.
type memberState struct {
	Record
	in    bool // it is in raft's configuration
	voter bool
	// alive: gossip sees it, or it answered just now.
	alive bool
	// lost: it has been neither for longer than lostAfter.
	lost bool
	// fit to be given a vote: alive for a while, and caught up with the log.
	fit bool
}

type verb string

const (
	addVoter    verb = "add voter"
	addNonvoter verb = "add non-voter"
	demote      verb = "demote voter"
	remove      verb = "remove"
)

type change struct {
	verb verb
	id   string
}

// plan decides what to change, as a function of values: machines without a
// record go, living ones with a record come in without a vote, and votes are
// kept at an odd number: given to those who are fit, taken from those who are
// lost once there is another for it. wanted is how many voters the cluster was
// set to have (0: it is not set). The leader keeps its vote.
//
// A lost voter is demoted before another is promoted: should that one fail in
// between, the others are a majority of fewer.
func plan(members []memberState, strangers []string, leader string, wanted int) []change {
	var changes []change
	for _, id := range strangers {
		changes = append(changes, change{remove, id})
	}
	members = slices.Clone(members)
	slices.SortFunc(members, func(a, b memberState) int { // who joined first comes first
		return cmp.Or(a.Joined.Compare(b.Joined), cmp.Compare(a.ID, b.ID))
	})
	var lost, living, spare []string // voters; voters; to be voters
	all, usable := 0, 0
	for _, m := range members {
		if !m.in && !m.alive {
			continue // admitted, and not here yet
		}
		all++
		if !m.lost {
			usable++
		}
		switch {
		case m.voter && m.lost:
			lost = append(lost, m.ID)
		case m.voter:
			living = append(living, m.ID)
		case !m.in:
			changes = append(changes, change{addNonvoter, m.ID})
		case m.fit:
			spare = append(spare, m.ID)
		}
	}
	target := targetVoters(all, usable, wanted)
	// Votes change hands, or are taken where there are too many.
	for len(lost) > 0 && (len(spare) > 0 || len(lost)+len(living) > target) {
		last := len(lost) - 1
		changes = append(changes, change{demote, lost[last]})
		lost = lost[:last]
		if len(spare) > 0 && len(lost)+len(living) < target {
			changes = append(changes, change{addVoter, spare[0]})
			living, spare = append(living, spare[0]), spare[1:]
		}
	}
	// All members that are missing come in one go: an even number of voters
	// tolerates no more losses than one fewer.
	have := len(lost) + len(living)
	if n := min(target-have, len(spare)); n > 0 {
		if (have+n)%2 == 0 {
			n--
		}
		for _, id := range spare[:n] {
			changes = append(changes, change{addVoter, id})
		}
	}
	// The youngest go first.
	for _, id := range slices.Backward(living) {
		if have <= target {
			break
		}
		if id != leader {
			changes = append(changes, change{demote, id})
			have--
		}
	}
	return changes
}

// targetVoters is how many of all members should vote: an odd number, since
// two voters would be worse than one (either's loss would stop the store), and
// from the third member on one may be lost. It takes two lost members for
// which there is no other to lower it, by two, and never below three: with one
// voter left, the loss of that one would lose writes.
func targetVoters(all, usable, wanted int) int {
	if wanted == 0 {
		wanted = DefaultVoters
	}
	full := max(1, min(wanted, (all-1)/2*2+1))
	return max(min(full, 3), full-max(0, full-usable)/2*2)
}

// Warnings says, for people, what the cluster would not survive that one might
// think it does. members need only their records and votes.
func Warnings(members []Record, isVoter func(id string) bool) []string {
	var voters, others []string
	for _, m := range Servers(members) {
		if isVoter(m.ID) {
			voters = append(voters, m.Name)
		} else {
			others = append(others, m.Name)
		}
	}
	switch {
	case len(voters) == 2:
		return []string{"There are two voters, " + strings.Join(voters, " and ") + ": the loss of either stops all changes. Join a third machine."}
	case len(voters) == 1 && len(others) == 1:
		return []string{voters[0] + " is the only voter of two members: its loss stops all changes until it is back or the cluster is recovered on " + others[0] + " (clusterctl recover). Join a third machine, and either of them may fail."}
	}
	return nil
}
