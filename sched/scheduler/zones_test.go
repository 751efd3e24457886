package scheduler

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/sched/replicaset"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// zoned are nodes as they are registered where machines are set up zone by zone.
func zoned(sizes ...int) (nodes []*schedtest.NodeBuilder) {
	for z, size := range sizes {
		for i := range size {
			name := fmt.Sprintf("z%d-%d", z, i)
			nodes = append(nodes, schedtest.Node(name).Label(corev1.LabelTopologyZone, fmt.Sprint("z", z)).Label(corev1.LabelHostname, name))
		}
	}
	return nodes
}

// TestReplicasAreSpreadOverZones: without a word about it in the pods, as with
// kube-scheduler's default constraints. Two of three replicas were often in one
// zone, and of more than 100 nodes a search saw one zone alone.
func TestReplicasAreSpreadOverZones(t *testing.T) {
	rs := schedtest.ReplicaSet("web", 3)
	for _, tt := range []struct {
		name     string
		sizes    []int
		replicas int
		zones    map[string]int
		nodes    int // on how many they are
	}{
		{"as many as zones", []int{2, 2, 2}, 3, map[string]int{"z0": 1, "z1": 1, "z2": 1}, 3},
		{"as many as nodes", []int{2, 2, 2}, 6, map[string]int{"z0": 2, "z1": 2, "z2": 2}, 6},
		{"twice as many as zones, of many nodes", []int{4, 4, 4}, 6, map[string]int{"z0": 2, "z1": 2, "z2": 2}, 6},
		{"zones of more nodes than a search looks for", []int{120, 120, 120}, 3, map[string]int{"z0": 1, "z1": 1, "z2": 1}, 3},
		{"zones of few nodes beside a large one", []int{200, 20, 20}, 3, map[string]int{"z0": 1, "z1": 1, "z2": 1}, 3},
		{"no zones", []int{6}, 6, map[string]int{"z0": 6}, 6},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for seed := range uint64(200) {
				r := rand.New(rand.NewPCG(seed, 1))
				s := world(zoned(tt.sizes...))
				for i, n := range s.list { // others are there
					if r.IntN(2) == 0 {
						s.setPod(schedtest.Pod(fmt.Sprint("other", i)).On(n.name).CPU(fmt.Sprint(r.IntN(1500), "m")).Memory("1Gi").Obj())
					}
				}
				s.next = r.IntN(len(s.list))
				got, nodes := map[string]int{}, map[string]bool{}
				for i := range tt.replicas {
					p := newPodInfo(schedtest.Pod(fmt.Sprint("web", i)).CPU("100m").Memory("100Mi").OwnedBy(rs, replicaset.Kind).Obj())
					n := best(s, p, runFilters(s, p).fit)
					s.assume(p, n.name)
					got[n.zone]++
					nodes[n.name] = true
				}
				if !maps.Equal(got, tt.zones) || len(nodes) != tt.nodes {
					t.Fatalf("seed %d: %v on %d nodes, want %v on %d", seed, got, len(nodes), tt.zones, tt.nodes)
				}
			}
		})
	}
}

// A pod that says how to be spread, and one of no controller, is not spread by it;
// neither is one of a profile that has the rule off.
func TestWhoIsNotSpreadByOwner(t *testing.T) {
	rs := schedtest.ReplicaSet("web", 3)
	s := world(zoned(1, 1), schedtest.Pod("there").On("z0-0").OwnedBy(rs, replicaset.Kind))
	for _, tt := range []struct {
		name string
		pod  *schedtest.PodBuilder
		want bool
	}{
		{"a replica", schedtest.Pod("p").OwnedBy(rs, replicaset.Kind), true},
		{"one with a constraint", schedtest.Pod("p").OwnedBy(rs, replicaset.Kind).Spread("zone", 1, corev1.DoNotSchedule, "a", "b"), false},
		{"one of no controller", schedtest.Pod("p"), false},
	} {
		p := newPodInfo(tt.pod.Obj())
		for what, prepare := range map[string]prepareScore{"nodes": scoreOwnerSpread, "zones": scoreOwnerZones} {
			if got := prepare(s, p) != nil; got != tt.want {
				t.Errorf("%s: spread over %s: %t", tt.name, what, got)
			}
		}
	}
	cfg, err := ReadConfig([]byte(configHead + "profiles: [{plugins: {score: {disabled: [{name: OwnerSpread}]}}}]"))
	if err != nil {
		t.Fatal(err)
	}
	for _, score := range cfg.profiles[0].scores {
		if score.Name == ownerSpread {
			t.Error("the rule is on though it was turned off")
		}
	}
}

// What is counted for zones is what pods and labels say, whatever comes and goes.
func TestZonesAreCounted(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	s := newSnapshot()
	label := map[string]string{}
	for step := range 3000 {
		name := fmt.Sprint("n", r.IntN(6))
		switch r.IntN(5) {
		case 0:
			n := schedtest.Node(name)
			if delete(label, name); r.IntN(4) > 0 {
				label[name] = fmt.Sprint("z", r.IntN(3))
				n.Label(corev1.LabelTopologyZone, label[name])
			}
			s.setNode(n.Obj())
		case 1:
			s.removeNode(name)
			delete(label, name)
		case 2:
			s.removePod(types.UID(fmt.Sprint("uid-p", r.IntN(20))))
		default:
			s.setPod(schedtest.Pod(fmt.Sprint("p", r.IntN(20))).On(name).OwnedBy(schedtest.ReplicaSet(fmt.Sprint("rs", r.IntN(3)), 1), replicaset.Kind).Obj())
		}
		want := map[types.UID]map[string]int{}
		for _, n := range s.list {
			for _, p := range n.pods {
				if want[p.owner] == nil {
					want[p.owner] = map[string]int{}
				}
				want[p.owner][label[n.name]]++
			}
		}
		got := map[types.UID]map[string]int{}
		for owner, in := range s.zones.owners {
			got[owner] = map[string]int{}
			for zone, id := range s.zones.ids {
				if id < len(in) && in[id] != 0 {
					got[owner][zone] = in[id]
				}
			}
		}
		if !maps.EqualFunc(want, got, maps.Equal) {
			t.Fatalf("step %d: %v, want %v", step, got, want)
		}
		s.mix()
		for i, n := range s.list {
			if n.index != i {
				t.Fatalf("step %d: node %s is at %d and says %d", step, n.name, i, n.index)
			}
		}
	}
}
