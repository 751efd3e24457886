package join

import (
	"slices"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore"
)

// Judgement is what a node does by the answers to its question for its membership status. At most
// one of Removed, Demoted and StartOver is set; none: it continues.
type Judgement struct {
	// Removed: it is not a member any more, and ends.
	Removed *Removal
	// Demoted: it is an agent by now. It was down, or cut off from the store, when that was written.
	Demoted bool
	// StartOver is the epoch in which it starts over with an empty store.
	StartOver *raftstore.Epoch
	// Elsewhere are newer epochs in which another part of the cluster runs without it.
	Elsewhere []raftstore.Epoch
	// Contradicted are removals that some answers name, and that a member which follows a leader
	// does not know.
	Contradicted []Removal
}

// JudgeMembership decides what follows from the answers for a server of the epoch ours, which leads
// or follows a leader, or does not. It continues while it hears a leader of its own epoch, or while a
// member of that epoch hears one and has this node for a server: the cluster was recovered
// elsewhere although that majority lived, and ending this node would lose what it has
// written; or the server that says otherwise was removed and still shows a good certificate.
func JudgeMembership(ours raftstore.Epoch, leads bool, answers []MembershipStatus) (j Judgement) {
	follows := slices.ContainsFunc(answers, func(a MembershipStatus) bool { return a.Follows(ours) })
	for _, a := range answers {
		newer := a.Epoch.Number > ours.Number
		switch {
		case newer && (leads || follows):
			j.Elsewhere = append(j.Elsewhere, a.Epoch)
		case follows:
			if a.Removed != nil && a.Epoch == ours {
				j.Contradicted = append(j.Contradicted, *a.Removed)
			}
		case a.Removed != nil && (newer || a.Epoch == ours):
			j.Removed = a.Removed
			return j
		case a.Member && a.Role == pki.Agent && (newer || a.Epoch == ours) && !leads:
			j.Demoted = true
			return j
		case newer && a.Member:
			j.StartOver = &a.Epoch
			return j
		}
	}
	return j
}
