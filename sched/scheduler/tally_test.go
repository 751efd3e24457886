package scheduler

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/sched/replicaset"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// Whatever comes and goes, what the snapshot keeps is what counting again gives.
func TestTalliesAreWhatCountingGives(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 1))
		s := newSnapshot()
		sets := []*schedtest.PodBuilder{
			schedtest.Pod("a").Label("app", "a").Apart("zone", "app", "b"),
			schedtest.Pod("b").Label("app", "b").OwnedBy(schedtest.ReplicaSet("web", 1), replicaset.Kind),
			schedtest.Pod("c").Label("app", "b").Label("tier", "x"),
		}
		questions := func(s *snapshot) (living, meeting *tally) {
			p := newPodInfo(schedtest.Pod("q").Apart("zone", "app", "a").Together("zone", "app", "b").Obj())
			everywhere := p.repel[0]
			everywhere.nsSelector = labels.SelectorFromSet(labels.Set{"team": "red"})
			return s.living("default", labels.SelectorFromSet(labels.Set{"app": "b"})), s.meeting(p.attract[0], everywhere)
		}
		for step := range 400 {
			node := fmt.Sprint("n", r.IntN(6))
			uid := types.UID(fmt.Sprint("uid-p", r.IntN(30)))
			switch r.IntN(10) {
			case 0:
				n := schedtest.Node(node).Label("everywhere", "yes")
				if zone := r.IntN(4); zone > 0 {
					n.Label("zone", fmt.Sprint(zone))
				}
				s.setNode(n.Obj())
			case 1:
				s.removeNode(node)
			case 2, 3:
				s.removePod(uid)
			case 4:
				s.setNamespace("default", labels.Set{"team": []string{"red", "blue"}[r.IntN(2)]})
			default:
				pod := sets[r.IntN(len(sets))].Obj().DeepCopy()
				pod.UID, pod.Name = uid, string(uid)
				if r.IntN(4) == 0 {
					pod.DeletionTimestamp = schedtest.Pod("x").Deleting(time.Unix(1, 0)).Obj().DeletionTimestamp
				}
				if r.IntN(2) == 0 {
					s.assume(newPodInfo(pod), node)
				} else {
					pod.Spec.NodeName = node
					s.setPod(pod)
				}
			}
			living, meeting := questions(s)
			anew := newSnapshot()
			anew.list, anew.nodes, anew.namespaces = s.list, s.nodes, s.namespaces
			wantLiving, wantMeeting := questions(anew)
			same := func(what string, kept, counted *tally) {
				t.Helper()
				if !maps.Equal(kept.nodes, counted.nodes) || !maps.Equal(kept.in("zone"), counted.in("zone")) {
					t.Fatalf("seed %d, step %d: %s: kept %v, counted %v", seed, step, what, kept, counted)
				}
			}
			same("living", living, wantLiving)
			same("meeting", meeting, wantMeeting)
			all := newTally()
			for _, n := range s.list {
				if n.node != nil {
					all.add(n, 1)
				}
			}
			same("all", s.all, all)
			owned, owner := newTally(), schedtest.ReplicaSet("web", 1).UID
			for _, n := range s.list {
				for _, p := range n.pods {
					if p.owner == owner && p.pod.DeletionTimestamp == nil {
						owned.add(n, 1)
					}
				}
			}
			same("owned", s.owned(owner), owned)
			// What is counted at once is what asking each node gives: here they all
			// have the label that the second pod asks for.
			free := schedtest.Pod("free").Label("app", "b").Spread("zone", 1, corev1.DoNotSchedule, "app", "b")
			fixed := schedtest.Pod("fixed").Label("app", "b").Spread("zone", 1, corev1.DoNotSchedule, "app", "b").Select("everywhere", "yes")
			fast, slow := spreads(s, newPodInfo(free.Obj()), corev1.DoNotSchedule)[0], spreads(s, newPodInfo(fixed.Obj()), corev1.DoNotSchedule)[0]
			if fast.least != slow.least {
				t.Fatalf("seed %d, step %d: the emptiest domain has %d, asked node by node %d", seed, step, fast.least, slow.least)
			}
			for zone, n := range slow.counts {
				if fast.counts[zone] != n {
					t.Fatalf("seed %d, step %d: zone %s has %d, asked node by node %d", seed, step, zone, fast.counts[zone], n)
				}
			}
			repel := newTally()
			for i, n := range s.list {
				for _, p := range n.pods {
					if len(p.repel) > 0 {
						repel.add(n, 1)
					}
				}
				if n.index != i || s.nodes[n.name] != n {
					t.Fatalf("seed %d, step %d: node %s is listed at %d and says %d", seed, step, n.name, i, n.index)
				}
			}
			kept := newTally()
			for _, r := range s.repelling.byID {
				kept = r.tally
			}
			same("repelling", kept, repel)
			if len(s.list) != len(s.nodes) || len(s.repelling.byID) > 1 {
				t.Fatalf("seed %d, step %d: %d nodes listed of %d, %d terms", seed, step, len(s.list), len(s.nodes), len(s.repelling.byID))
			}
		}
	}
}

// A sample of the nodes is enough to choose from, and still every node gets its
// share of a ReplicaSet's pods; a node that alone fits is found wherever it is.
func TestASampleOfNodes(t *testing.T) {
	const nodes, pods = 1000, 3000
	s := newSnapshot()
	for i := range nodes {
		n := schedtest.Node(fmt.Sprint("n", i)).Has("pods", "110")
		if i == 777 {
			n.Label("disk", "ssd")
		}
		s.setNode(n.Obj())
	}
	rs := schedtest.ReplicaSet("web", pods)
	looked := 0
	for i := range pods {
		p := newPodInfo(schedtest.Pod(fmt.Sprint("p", i)).OwnedBy(rs, replicaset.Kind).Obj())
		v := runFilters(s, p)
		looked += v.nodes
		s.assume(p, best(s, p, v.fit).name)
	}
	if looked > 2*sample*pods {
		t.Errorf("%d pods looked at %d nodes", pods, looked)
	}
	for _, n := range s.list {
		if got := n.owners[rs.UID]; got != pods/nodes {
			t.Errorf("%s has %d of %d pods on %d nodes", n.name, got, pods, nodes)
		}
	}
	only := newPodInfo(schedtest.Pod("only").Select("disk", "ssd").Obj())
	for range 3 {
		if v := runFilters(s, only); len(v.fit) != 1 || v.fit[0].name != "n777" {
			t.Fatalf("found %d nodes", len(v.fit))
		}
	}
	impossible := newPodInfo(schedtest.Pod("no").Select("disk", "tape").Obj())
	if got, want := runFilters(s, impossible).explain(), "0/1000 nodes are available: 1000 node(s) didn't match Pod's node affinity/selector."; got != want {
		t.Errorf("explains %q, want %q", got, want)
	}
	wishes := schedtest.Pod("wishes").Spread(corev1.LabelHostname, 1, corev1.ScheduleAnyway, "app", "x").Obj()
	if v := runFilters(s, newPodInfo(wishes)); len(v.fit) != nodes {
		t.Errorf("a pod with preferences chooses among %d nodes", len(v.fit))
	}
}

// Constraints for all controllers had a tally of each controller push out those that
// pods asked for, and each other's: with more than maxMatching of them all pods were
// counted again for each decision.
func TestControllersOfListedConstraintsKeepTheirTallies(t *testing.T) {
	s := world([]*schedtest.NodeBuilder{schedtest.Node("a").Label("rack", "1"), schedtest.Node("b").Label("rack", "2")})
	s.profiles = profilesOf(oneProfile(t, "{name: PodTopologySpread, args: {defaultingType: List, defaultConstraints: [{maxSkew: 1, topologyKey: rack, whenUnsatisfiable: DoNotSchedule}]}}"))
	asked := s.living("default", labels.SelectorFromSet(labels.Set{"app": "x"}))
	const many = 3 * maxMatching
	pod := func(i int, name string) *podInfo {
		return newPodInfo(schedtest.Pod(fmt.Sprint(name, i)).OwnedBy(schedtest.ReplicaSet(fmt.Sprint("rs", i), 2), replicaset.Kind).Obj())
	}
	first := make([]*tally, many)
	for i := range many {
		s.assume(pod(i, "first"), "a")
		hard := spreads(s, pod(i, "second"), corev1.DoNotSchedule)
		first[i] = hard[0].living
		if hard[0].counts["1"] != 1 || hard[0].counts["2"] != 0 {
			t.Fatalf("controller %d is counted %v", i, hard[0].counts)
		}
	}
	for i := range many {
		if spreads(s, pod(i, "second"), corev1.DoNotSchedule)[0].living != first[i] {
			t.Fatalf("the pods of controller %d were counted anew", i)
		}
	}
	if s.living("default", labels.SelectorFromSet(labels.Set{"app": "x"})) != asked {
		t.Error("what another pod asked for was counted anew")
	}
	for i := range many {
		s.removePod(pod(i, "first").pod.UID)
	}
	s.owned("another")
	if n := len(s.byOwner); n > 1 {
		t.Errorf("%d controllers are kept that have no pods", n-1)
	}
}
