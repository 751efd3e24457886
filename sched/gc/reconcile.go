package gc

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// ownerState is what an owner reference of an object leads to.
type ownerState int

const (
	solid   ownerState = iota // the owner exists
	absent                    // it does not
	waiting                   // it is being deleted and waits for its dependents
)

// action is what is to be done with an object because of its owners.
type action int

const (
	keep action = iota
	// prune: it stays, for it has an owner left, but loses references.
	prune
	// remove: it goes.
	remove
)

// Verdict is the outcome of judging an object by its owners.
type Verdict struct {
	Do action
	// Prune lists the owners whose references are to be taken off.
	Prune []types.UID
	// Policy is how to remove it.
	Policy metav1.DeletionPropagation
}

// judge decides about an object from the states of its owners.
// hasDependents tells whether others depend on it in turn.
func judge(owners []metav1.OwnerReference, states []ownerState, finalizers []string, hasDependents bool) Verdict {
	counts := map[ownerState]int{}
	var unsound []types.UID
	for i, s := range states {
		counts[s]++
		if s != solid {
			unsound = append(unsound, owners[i].UID)
		}
	}
	switch {
	case len(owners) == 0 || len(unsound) == 0:
		return Verdict{Do: keep}
	case counts[solid] > 0:
		return Verdict{Do: prune, Prune: unsound}
	case counts[waiting] > 0 && hasDependents:
		// The owner waits for all below it, so everything below goes first.
		return Verdict{Do: remove, Policy: metav1.DeletePropagationForeground}
	}
	// What was asked of the object itself comes first.
	for _, f := range finalizers {
		switch f {
		case metav1.FinalizerOrphanDependents:
			return Verdict{Do: remove, Policy: metav1.DeletePropagationOrphan}
		case metav1.FinalizerDeleteDependents:
			return Verdict{Do: remove, Policy: metav1.DeletePropagationForeground}
		}
	}
	return Verdict{Do: remove, Policy: metav1.DeletePropagationBackground}
}

// followUps says which objects must be looked at because one object changed
// from old to now; either may be nil. known reports whether an owner is in the
// graph.
func followUps(old, now *object, dependents []*object, known func(types.UID) bool) (out []types.UID) {
	if now == nil {
		for _, d := range dependents {
			out = append(out, d.uid) // perhaps orphans now
		}
		for _, ref := range old.owners {
			out = append(out, ref.UID) // perhaps waited for it
		}
		return out
	}
	if now.deleting {
		out = append(out, now.uid) // its finalizers may be ours
	}
	had := map[types.UID]bool{}
	if old != nil {
		for _, ref := range old.owners {
			had[ref.UID] = true
			if old.blocks(ref.UID) && !now.blocks(ref.UID) {
				out = append(out, ref.UID) // waited for it, perhaps
			}
		}
	}
	for _, ref := range now.owners {
		if !had[ref.UID] && !known(ref.UID) {
			out = append(out, now.uid)
		}
		delete(had, ref.UID)
	}
	for uid := range had { // owners it had and does not have any more
		if !old.blocks(uid) {
			out = append(out, uid)
		}
	}
	if now.foreground() && (old == nil || !old.foreground()) {
		for _, d := range dependents {
			out = append(out, d.uid)
		}
	}
	return out
}
