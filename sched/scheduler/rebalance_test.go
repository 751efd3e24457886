package scheduler

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/sched/schedtest"
)

func everyPod(*corev1.Pod) bool { return true }

// placement0 is where every pod is.
func placement0(s *snapshot) map[types.UID]string { return maps.Clone(s.placed) }

// carryOut plays what follows from moves: the pod goes, and the scheduler places
// another one like it. It returns what has left which node.
func carryOut(t *testing.T, s *snapshot, moves []Move) {
	t.Helper()
	for _, m := range moves {
		if s.placed[m.Pod.UID] != m.From {
			t.Fatalf("%s is moved from %s, and is on %s", m.Pod.Name, m.From, s.placed[m.Pod.UID])
		}
		s.removePod(m.Pod.UID)
		pod := m.Pod.DeepCopy()
		pod.Spec.NodeName = ""
		p := newPodInfo(pod)
		p.choosy = true // as few nodes as there are here are all searched anyway
		v := runFilters(s, p)
		if len(v.fit) == 0 {
			t.Fatalf("%s fits nowhere after it was moved: %s", pod.Name, v.explain())
		}
		pod.Spec.NodeName = best(s, newPodInfo(pod), v.fit).name
		if pod.Spec.NodeName == m.From {
			t.Fatalf("%s comes back to %s after it was moved for %s", pod.Name, m.From, m.Why)
		}
		s.setPod(pod)
	}
}

// TestMoves: who is moved, and why.
func TestMoves(t *testing.T) {
	node, pod := schedtest.Node, schedtest.Pod
	type (
		nodes = []*schedtest.NodeBuilder
		pods  = []*schedtest.PodBuilder
	)
	big := func(name string) *schedtest.NodeBuilder { return node(name).Has("cpu", "10").Has("memory", "10Gi") }
	four := func(on string, more ...*schedtest.PodBuilder) (out pods) {
		for i := range 4 {
			out = append(out, pod(fmt.Sprintf("%s-%d", on, i)).On(on).CPU("2").Memory("2Gi"))
		}
		return append(out, more...)
	}
	prefers := func(p *schedtest.PodBuilder, value string) *schedtest.PodBuilder {
		p.P.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{{
			Weight: 50, Preference: corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "disk", Operator: corev1.NodeSelectorOpIn, Values: []string{value}}}},
		}}}}
		return p
	}
	for name, c := range map[string]struct {
		nodes nodes
		pods  pods
		want  []string // kind and ways of the moves, in their order
	}{
		"balanced":                 {nodes{big("a"), big("b")}, pods{pod("p").On("a").CPU("2"), pod("q").On("b").CPU("2")}, nil},
		"a little more":            {nodes{big("a"), big("b")}, pods{pod("p").On("a").CPU("2"), pod("q").On("a").CPU("1"), pod("r").On("b").CPU("1")}, nil},
		"all on one of two":        {nodes{big("a"), big("b")}, four("a"), []string{"load a>b"}},
		"all on one of three":      {nodes{big("a"), big("b"), big("c")}, four("a"), []string{"load a>b", "load a>c"}},
		"one pod that is too big":  {nodes{big("a"), big("b")}, pods{pod("p").On("a").CPU("9")}, nil},
		"the other is full of RAM": {nodes{big("a"), big("b").Has("memory", "1Gi")}, four("a"), nil},
		"the other is cordoned":    {nodes{big("a"), big("b").Cordon()}, four("a"), nil},
		"its own is cordoned":      {nodes{big("a").Cordon(), big("b")}, four("a"), nil},
		"tainted since":            {nodes{big("a").Taint("k", "v", corev1.TaintEffectNoSchedule), big("b")}, pods{pod("p").On("a").CPU("1")}, []string{"rule a>b"}},
		"tainted, tolerated":       {nodes{big("a").Taint("k", "v", corev1.TaintEffectNoSchedule), big("b")}, pods{pod("p").On("a").CPU("1").Tolerate(corev1.Toleration{Operator: corev1.TolerationOpExists})}, nil},
		"a node in trouble":        {nodes{big("a").Taint("node.kubernetes.io/not-ready", "", corev1.TaintEffectNoSchedule), big("b")}, pods{pod("p").On("a").CPU("1")}, nil},
		"tainted, nowhere to go":   {nodes{big("a").Taint("k", "v", corev1.TaintEffectNoSchedule), big("b")}, pods{pod("p").On("a").CPU("8"), pod("q").On("b").CPU("8")}, nil},
		"its label has gone":       {nodes{big("a"), big("b").Label("disk", "ssd")}, pods{pod("p").On("a").CPU("1").Select("disk", "ssd")}, []string{"rule a>b"}},
		"nowhere well":             {nodes{big("a"), big("b")}, pods{pod("p").On("a").CPU("1").Select("disk", "ssd")}, nil},
		"apart no more":            {nodes{big("a"), big("b")}, pods{pod("p").On("a").Label("app", "x").Apart("kubernetes.io/hostname", "app", "x"), pod("q").On("a").Label("app", "x")}, []string{"rule a>b"}},
		"a skew":                   {nodes{big("a").Label("zone", "1"), big("b").Label("zone", "2")}, pods{pod("p").On("a").Label("app", "x").Spread("zone", 1, corev1.DoNotSchedule, "app", "x"), pod("q").On("a").Label("app", "x").Spread("zone", 1, corev1.DoNotSchedule, "app", "x")}, []string{"rule a>b"}},
		"a wish for a skew":        {nodes{big("a").Label("zone", "1"), big("b").Label("zone", "2")}, pods{pod("p").On("a").Label("app", "x").Spread("zone", 1, corev1.ScheduleAnyway, "app", "x"), pod("q").On("a").Label("app", "x").Spread("zone", 1, corev1.ScheduleAnyway, "app", "x")}, []string{"spread a>b"}},
		"a better disk":            {nodes{big("a").Label("disk", "hdd"), big("b").Label("disk", "ssd")}, pods{prefers(pod("p").On("a").CPU("1"), "ssd")}, []string{"affinity a>b"}},
		"the best disk":            {nodes{big("a").Label("disk", "hdd"), big("b").Label("disk", "ssd")}, pods{prefers(pod("p").On("b").CPU("1"), "ssd")}, nil},
		"load does not undo it":    {nodes{big("a").Label("disk", "hdd"), big("b").Label("disk", "ssd")}, pods{prefers(pod("p").On("b").CPU("4"), "ssd"), prefers(pod("q").On("b").CPU("4"), "ssd")}, nil},
	} {
		s := world(c.nodes, c.pods...)
		before := placement0(s)
		moves, _ := rebalance(s, everyPod, 10, "")
		var got []string
		for _, m := range moves {
			got = append(got, fmt.Sprintf("%s %s>%s", m.Kind, m.From, m.To))
			if m.Why == "" {
				t.Errorf("%s: no reason for %+v", name, m)
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
		if !maps.Equal(before, s.placed) {
			t.Errorf("%s: the plan has changed the snapshot: %v", name, s.placed)
		}
		if none, _ := rebalance(s, func(*corev1.Pod) bool { return false }, 10, ""); len(none) > 0 {
			t.Errorf("%s: pods are moved that may not be: %+v", name, none)
		}
	}
}

// TestEveryPodIsLookedAt: passes go on where the last one ended.
func TestEveryPodIsLookedAt(t *testing.T) {
	s := world([]*schedtest.NodeBuilder{schedtest.Node("a").Has("pods", "1000")})
	for i := range looks*2 + 1 {
		s.setPod(schedtest.Pod(fmt.Sprintf("p%04d", i)).On("a").Obj())
	}
	seen, last := map[types.UID]bool{}, types.UID("")
	for range 3 {
		_, last = rebalance(s, everyPod, 1, last)
		seen[last] = true
	}
	if len(seen) != 3 {
		t.Errorf("passes ended with %v", seen)
	}
}

// TestBalancingEnds: whatever the cluster, there is a pass after which none finds
// anything to move. Where load is all that counts, no pod moves twice, and no node
// that is left is far above the mean for a pod that could have gone.
func TestBalancingEnds(t *testing.T) {
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 7)) //nolint:gosec // a test's chance
		plain := seed%2 == 0
		var nodes []*schedtest.NodeBuilder
		for i := range 2 + r.IntN(6) {
			n := schedtest.Node(fmt.Sprintf("n%d", i)).Has("cpu", fmt.Sprint(4+r.IntN(8))).Has("memory", "64Gi").Label("zone", fmt.Sprint(i%2)).Label("disk", fmt.Sprint(r.IntN(2)))
			if !plain && i > 0 && r.IntN(4) == 0 {
				n.Taint("k", "v", corev1.TaintEffectNoSchedule)
			}
			nodes = append(nodes, n)
		}
		s := world(nodes)
		count := r.IntN(40)
		for i := range count {
			n := s.list[r.IntN(1+r.IntN(len(s.list)))]
			p := schedtest.Pod(fmt.Sprintf("p%02d", i)).CPU(fmt.Sprintf("%dm", 100+100*r.IntN(12))).Memory("128Mi").Label("app", fmt.Sprint(r.IntN(3))).On(n.name)
			if !plain {
				p.OwnedBy(schedtest.ReplicaSet(fmt.Sprintf("rs%d", r.IntN(4)), 1), schema.GroupVersionKind{Group: "apps", Version: "v1", Kind: "ReplicaSet"})
				switch r.IntN(6) {
				case 0:
					p.Spread("zone", 1, corev1.ScheduleAnyway, "app", "1")
				case 1:
					p.Spread("zone", 1, corev1.DoNotSchedule, "app", "1")
				case 2:
					p.P.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{{
						Weight: 10, Preference: corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "disk", Operator: corev1.NodeSelectorOpIn, Values: []string{"1"}}}},
					}}}}
				}
			}
			if q := newPodInfo(p.Obj()); len(short(n, q)) > 0 {
				continue
			}
			s.setPod(p.Obj())
		}
		moved, last := map[types.UID]int{}, types.UID("")
		for pass := 0; ; pass++ {
			if pass > 3*count+3 {
				t.Fatalf("seed %d: after %d passes pods are still moved: %v", seed, pass, moved)
			}
			var moves []Move
			if moves, last = rebalance(s, everyPod, 1, last); len(moves) == 0 {
				break
			}
			for _, m := range moves {
				if moved[m.Pod.UID]++; plain && moved[m.Pod.UID] > 1 {
					t.Fatalf("seed %d: %s moves again: %+v", seed, m.Pod.Name, m)
				}
			}
			carryOut(t, s, moves)
		}
	}
}
