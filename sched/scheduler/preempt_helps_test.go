package scheduler

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/sched/schedtest"
)

func gpus(b *schedtest.PodBuilder, n string) *schedtest.PodBuilder {
	b.CPU("1m").P.Spec.Containers[0].Resources.Requests["example.com/gpu"] = resource.MustParse(n)
	return b
}

// On nodes where no pod's loss helps the search for victims is not begun: it is the
// dear part, and such pods are tried again and again.
func TestNodesThatLossCannotHelp(t *testing.T) {
	node, pod := schedtest.Node, schedtest.Pod
	type (
		nodes []*schedtest.NodeBuilder
		pods  []*schedtest.PodBuilder
	)
	low := func(name, on string) *schedtest.PodBuilder { return pod(name).On(on).Priority(1) }
	equal := func(name, on string) *schedtest.PodBuilder { return pod(name).On(on).Priority(9) }
	for _, tt := range []struct {
		name   string
		nodes  nodes
		placed pods
		pod    *schedtest.PodBuilder
		users  []types.UID
		want   string
	}{
		{"no resource of the kind", nodes{node("a"), node("b").Has("example.com/gpu", "1")},
			pods{low("a0", "a"), gpus(low("b0", "b"), "1")}, gpus(pod("p"), "1"), nil, "b"},
		{"the resource is held by equals", nodes{node("a").Has("example.com/gpu", "2"), node("b").Has("example.com/gpu", "2")},
			pods{low("a0", "a"), gpus(equal("a1", "a"), "1"), low("b0", "b"), gpus(low("b1", "b"), "1"), gpus(low("b2", "b"), "1")}, gpus(pod("p"), "2"), nil, "b"},
		{"as many pods as it may have", nodes{node("a").Has("pods", "1"), node("b").Has("pods", "1"), node("c").Has("pods", "0")},
			pods{low("a0", "a"), equal("b0", "b"), low("b1", "b"), low("c0", "c")}, pod("p"), nil, "a"},
		{"a claim's user is elsewhere", nodes{node("a"), node("b"), node("c")},
			pods{low("a0", "a"), low("b0", "b"), low("c0", "c")}, pod("p"), []types.UID{"uid-b0"}, "b"},
		{"a claim's user is an equal", nodes{node("a"), node("b")},
			pods{low("a0", "a"), low("b0", "b"), equal("b1", "b")}, pod("p"), []types.UID{"uid-b1"}, ""},
		{"claims' users are on two nodes", nodes{node("a"), node("b")},
			pods{low("a0", "a"), low("b0", "b")}, pod("p"), []types.UID{"uid-a0", "uid-b0"}, ""},
		{"a claim's user has gone", nodes{node("a")}, pods{low("a0", "a")}, pod("p"), []types.UID{"uid-gone"}, "a"},
		{"a domain that is too full", nodes{node("a").Label("zone", "1"), node("b").Label("zone", "1"), node("c").Label("zone", "2"), node("d")},
			pods{low("a0", "a").Label("app", "x"), low("a1", "a").Label("app", "x"), low("b0", "b"), low("c0", "c"), low("d0", "d")},
			pod("p").Label("app", "x").Spread("zone", 1, corev1.DoNotSchedule, "app", "x"), nil, "a c"},
		{"the same, of the nodes of a selector", nodes{node("a").Label("zone", "1").Label("disk", "ssd"), node("b").Label("zone", "1").Label("disk", "ssd"), node("c").Label("zone", "2").Label("disk", "ssd"), node("d").Label("zone", "3")},
			pods{low("a0", "a").Label("app", "x"), low("b0", "b"), low("c0", "c")},
			pod("p").Label("app", "x").Select("disk", "ssd").Spread("zone", 1, corev1.DoNotSchedule, "app", "x"), nil, "a c"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := world(tt.nodes, tt.placed...)
			p := newPodInfo(tt.pod.Priority(9).Obj())
			if tt.users != nil {
				p.storage = &demand{users: tt.users}
			}
			var got []string
			mayHelp := lossMayHelp(s, p)
			for _, n := range s.list {
				if mayHelp(n) {
					got = append(got, n.name)
				}
			}
			slices.Sort(got)
			if names := strings.Join(got, " "); names != tt.want {
				t.Errorf("it may help on %q, want %q", names, tt.want)
			}
		})
	}
}

// Wherever the search for victims would find some, it is made.
func TestLossMayHelpRefusesNoNodeThatItHelps(t *testing.T) {
	helped := 0
	for seed := range uint64(400) {
		r := rand.New(rand.NewPCG(seed, 7))
		some := func(what ...string) string { return what[r.IntN(len(what))] }
		make := func(name string) *schedtest.PodBuilder {
			p := schedtest.Pod(name).CPU(some("1", "2", "3")).Priority(int32(r.IntN(3))).Label("app", some("x", "y"))
			if r.IntN(2) == 0 {
				gpus(p, some("0", "1", "2"))
			}
			if r.IntN(3) == 0 {
				p.HostPort(80)
			}
			return p
		}
		s := newSnapshot()
		for i := range 6 {
			n := schedtest.Node(fmt.Sprint("n", i)).Has("pods", some("2", "4")).Has("example.com/gpu", some("0", "2", "3"))
			if zone := r.IntN(4); zone > 0 {
				n.Label("zone", fmt.Sprint(zone))
			}
			if r.IntN(4) > 0 {
				n.Label("disk", "ssd")
			}
			s.setNode(n.Obj())
		}
		for i := range 14 {
			s.setPod(make(fmt.Sprint("p", i)).On(fmt.Sprint("n", r.IntN(6))).Obj())
		}
		ask := make("q").Priority(int32(1 + r.IntN(2)))
		if r.IntN(2) == 0 {
			ask.Spread("zone", 1, corev1.DoNotSchedule, "app", "x")
		}
		if r.IntN(2) == 0 {
			ask.Select("disk", "ssd")
		}
		p := newPodInfo(ask.Obj())
		if r.IntN(2) == 0 {
			p.storage = &demand{users: []types.UID{types.UID(fmt.Sprint("uid-p", r.IntN(14)))}}
		}
		if r.IntN(2) == 0 {
			s.nominate(nomination{p: newPodInfo(make("promised").Priority(2).Obj()), node: "n1"})
		}
		mayHelp := lossMayHelp(s, p)
		for _, n := range s.list {
			if fits(s, p, n) || s.without(p, n, nil) == nil {
				continue
			}
			helped++
			if !mayHelp(n) {
				t.Fatalf("seed %d: pods of %s can make room for %+v, and are not tried", seed, n.name, ask.P.Spec)
			}
		}
	}
	if helped < 100 {
		t.Errorf("it helped on %d nodes alone: the test shows little", helped)
	}
}

// Tries that are in vain are bounded, and the pod comes again soon: then others are
// tried.
func TestPreemptionInVainIsBounded(t *testing.T) {
	x := newTable(t)
	x.stop()
	tries := 0
	standard := defaultProfile()
	standard.filters = append(slices.Clone(standard.filters), Filter{Name: "refuses", wokenBy: podGone, prepare: func(*snapshot, *podInfo) func(*nodeInfo) []string {
		tries++
		return func(n *nodeInfo) []string {
			if n.name == "good" && len(n.pods) == 0 {
				return nil
			}
			return []string{"refused"}
		}
	}})
	x.s.snapshot.profiles = profilesOf(standard)
	for i := range 2 * maxFailures {
		name := fmt.Sprint("n", i)
		x.node(schedtest.Node(name).Obj())
		x.pods(schedtest.Pod("low" + name).On(name).Priority(1))
	}
	urgent := schedtest.Pod("urgent").Priority(9)
	x.pods(urgent)
	x.decide()
	if tries > maxFailures+10 {
		t.Errorf("%d nodes were tried in vain", tries)
	}
	if got := x.s.queue.pods[urgent.P.UID].place; got != inBackoff {
		t.Errorf("the pod is %s, though nodes are left that were not tried", got)
	}
	x.pods(schedtest.Pod("lowgood").On("good").Priority(1))
	x.s.snapshot.setNode(schedtest.Node("good").Obj()) // no change of it wakes the pod
	for range 200 {
		x.later()
		x.decide()
		if x.s.snapshot.nominated[urgent.P.UID].node == "good" {
			return
		}
	}
	t.Error("the node where it helps was not found in 200 attempts")
}

// The bug: a pod that no pod's loss helps was tried again for ever, each time from any
// node on, where more nodes than one preemption tries looked as if it could help.
func TestPreemptionInVainEnds(t *testing.T) {
	x := newTable(t)
	x.stop()
	tried := map[string]int{}
	standard := defaultProfile()
	standard.filters = append(slices.Clone(standard.filters), Filter{Name: "refuses", wokenBy: podGone, prepare: func(*snapshot, *podInfo) func(*nodeInfo) []string {
		return func(n *nodeInfo) []string {
			if len(n.pods) == 0 {
				tried[n.name]++
			}
			return []string{"refused"}
		}
	}})
	x.s.snapshot.profiles = profilesOf(standard)
	const nodes = 2*maxFailures + 100
	for i := range nodes {
		name := fmt.Sprint("n", i)
		x.node(schedtest.Node(name).Obj())
		x.pods(schedtest.Pod("low" + name).On(name).Priority(1))
	}
	urgent := schedtest.Pod("urgent").Priority(9)
	x.pods(urgent)
	place := func() place { return x.s.queue.pods[urgent.P.UID].place }
	for attempt := range 2 {
		x.decide()
		if got := place(); got != inBackoff {
			t.Fatalf("after attempt %d the pod is %s", attempt+1, got)
		}
		x.later()
	}
	x.decide()
	if got := place(); got != parked {
		t.Errorf("the pod is %s though all nodes were tried", got)
	}
	for i := range nodes {
		if n := tried[fmt.Sprint("n", i)]; n != 1 {
			t.Errorf("node n%d was tried %d times, want once", i, n)
		}
	}
	// Something changes: a search of its own.
	x.s.queue.changed(podGone)
	x.later()
	x.decide()
	if got := place(); got != inBackoff {
		t.Errorf("woken, the pod is %s", got)
	}
}
