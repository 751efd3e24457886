package gc

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

func refs(uids ...string) (out []metav1.OwnerReference) {
	for _, uid := range uids {
		out = append(out, metav1.OwnerReference{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: uid, UID: types.UID(uid), BlockOwnerDeletion: ptr.To(true)})
	}
	return out
}

func TestJudge(t *testing.T) {
	const (
		background = metav1.DeletePropagationBackground
		foreground = metav1.DeletePropagationForeground
		orphan     = metav1.DeletePropagationOrphan
	)
	tests := []struct {
		name       string
		owners     []metav1.OwnerReference
		states     []ownerState
		finalizers []string
		dependents bool
		want       Verdict
	}{
		{"no owners", nil, nil, nil, false, Verdict{Do: keep}},
		{"owner exists", refs("a"), []ownerState{solid}, nil, false, Verdict{Do: keep}},
		{"owner is gone", refs("a"), []ownerState{absent}, nil, false, Verdict{Do: remove, Policy: background}},
		{"all owners are gone", refs("a", "b"), []ownerState{absent, absent}, nil, true, Verdict{Do: remove, Policy: background}},
		{"one of two is gone", refs("a", "b"), []ownerState{absent, solid}, nil, false, Verdict{Do: prune, Prune: []types.UID{"a"}}},
		{"one of two waits", refs("a", "b"), []ownerState{solid, waiting}, nil, false, Verdict{Do: prune, Prune: []types.UID{"b"}}},
		{"owner waits", refs("a"), []ownerState{waiting}, nil, false, Verdict{Do: remove, Policy: background}},
		{"owner waits for all below", refs("a"), []ownerState{waiting}, nil, true, Verdict{Do: remove, Policy: foreground}},
		{"own wish: orphan", refs("a"), []ownerState{absent}, []string{metav1.FinalizerOrphanDependents}, true, Verdict{Do: remove, Policy: orphan}},
		{"own wish: foreground", refs("a"), []ownerState{absent}, []string{"x", metav1.FinalizerDeleteDependents}, false, Verdict{Do: remove, Policy: foreground}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			got := judge(test.owners, test.states, test.finalizers, test.dependents)
			got.Prune = slices.Clone(got.Prune)
			if test.want.Do != prune {
				got.Prune = nil
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestFollowUps(t *testing.T) {
	obj := func(uid string, owners ...string) *object {
		return &object{uid: types.UID(uid), owners: refs(owners...)}
	}
	waits := obj("x")
	waits.deleting, waits.finalizers = true, []string{metav1.FinalizerDeleteDependents}
	free := obj("x", "a")
	free.owners[0].BlockOwnerDeletion = nil
	below := []*object{obj("d1", "x"), obj("d2", "x")}
	tests := []struct {
		name       string
		old, now   *object
		dependents []*object
		known      string
		want       string
	}{
		{"new, owner known", nil, obj("x", "a"), nil, "a", ""},
		{"new, owner unknown", nil, obj("x", "a"), nil, "", "x"},
		{"unchanged", obj("x", "a"), obj("x", "a"), nil, "a", ""},
		{"gone", obj("x", "a"), nil, below, "", "d1 d2 a"},
		{"begins to wait", obj("x"), waits, below, "", "x d1 d2"},
		{"lost an owner", obj("x", "a"), obj("x"), nil, "a", "a"},
		{"does not block its owner any more", obj("x", "a"), free, nil, "a", "a"},
		{"new owner that is unknown", obj("x"), obj("x", "a"), nil, "", "x"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			var words []string
			for _, uid := range followUps(test.old, test.now, test.dependents, func(uid types.UID) bool { return string(uid) == test.known }) {
				words = append(words, string(uid))
			}
			if got := strings.Join(words, " "); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestGraph(t *testing.T) {
	g := newGraph()
	g.put(&object{uid: "pod", owners: refs("rs")})
	g.put(&object{uid: "rs"})
	if got := g.of("rs"); len(got) != 1 || got[0].uid != "pod" {
		t.Fatalf("dependents %v", got)
	}
	g.put(&object{uid: "pod", owners: refs("other")})
	if got := len(g.of("rs")) + 10*len(g.of("other")); got != 10 {
		t.Errorf("a changed owner is not followed: %d", got)
	}
	g.drop("pod")
	if len(g.dependents) != 0 || g.drop("pod") != nil {
		t.Errorf("something is left: %v", g.dependents)
	}
}
