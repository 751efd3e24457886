package scheduler

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/schedtest"
)

func TestPreempt(t *testing.T) {
	pod := func(name, node, cpu string, priority int32) *schedtest.PodBuilder {
		return schedtest.Pod(name).On(node).CPU(cpu).Priority(priority).Label("app", name)
	}
	urgent := func(cpu string) *schedtest.PodBuilder { return schedtest.Pod("urgent").CPU(cpu).Priority(100) }
	at := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	budget := func(app string, allowed int32) *policyv1.PodDisruptionBudget {
		return &policyv1.PodDisruptionBudget{
			ObjectMeta: metav1.ObjectMeta{Name: app, Namespace: schedtest.Namespace},
			Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": app}}},
			Status:     policyv1.PodDisruptionBudgetStatus{DisruptionsAllowed: allowed},
		}
	}
	two := []*schedtest.NodeBuilder{schedtest.Node("n1"), schedtest.Node("n2")}
	tests := []struct {
		name    string
		nodes   []*schedtest.NodeBuilder // of 4 CPUs
		placed  []*schedtest.PodBuilder
		pod     *schedtest.PodBuilder
		budgets []*policyv1.PodDisruptionBudget
		node    string
		victims []types.UID
	}{
		{"the lowest goes", two, []*schedtest.PodBuilder{pod("a", "n1", "3", 10), pod("b", "n2", "3", 5)}, urgent("2"), nil, "n2", []types.UID{"uid-b"}},
		{"no more than needed", two[:1], []*schedtest.PodBuilder{pod("a", "n1", "2", 10), pod("b", "n1", "1", 5), pod("c", "n1", "1", 1)}, urgent("2"), nil, "n1", []types.UID{"uid-b", "uid-c"}},
		{"equals stay", two[:1], []*schedtest.PodBuilder{pod("a", "n1", "3", 100)}, urgent("2"), nil, "", nil},
		{"it would not fit anyway", two[:1], []*schedtest.PodBuilder{pod("a", "n1", "3", 1)}, urgent("5"), nil, "", nil},
		{"a cordoned node is no help", []*schedtest.NodeBuilder{schedtest.Node("n1").Cordon()}, []*schedtest.PodBuilder{pod("a", "n1", "3", 1)}, urgent("2"), nil, "", nil},
		{"never by policy", two[:1], []*schedtest.PodBuilder{pod("a", "n1", "3", 1)}, never(urgent("2")), nil, "", nil},
		{"a budget is kept if it can be", two, []*schedtest.PodBuilder{pod("a", "n1", "3", 10), pod("b", "n2", "3", 5)}, urgent("2"),
			[]*policyv1.PodDisruptionBudget{budget("b", 0)}, "n1", []types.UID{"uid-a"}},
		{"a budget that allows it", two, []*schedtest.PodBuilder{pod("a", "n1", "3", 10), pod("b", "n2", "3", 5)}, urgent("2"),
			[]*policyv1.PodDisruptionBudget{budget("b", 1)}, "n2", []types.UID{"uid-b"}},
		{"a budget is no wall", two[:1], []*schedtest.PodBuilder{pod("a", "n1", "3", 10)}, urgent("2"),
			[]*policyv1.PodDisruptionBudget{budget("a", 0)}, "n1", []types.UID{"uid-a"}},
		{"fewer", two, []*schedtest.PodBuilder{pod("a", "n1", "2", 5), pod("b", "n1", "2", 5), pod("c", "n2", "4", 5)}, urgent("4"), nil, "n2", []types.UID{"uid-c"}},
		{"the younger", two, []*schedtest.PodBuilder{pod("a", "n1", "4", 5).Created(at), pod("b", "n2", "4", 5).Created(at.Add(time.Hour))}, urgent("4"), nil, "n2", []types.UID{"uid-b"}},
		{"a host port", two[:1], []*schedtest.PodBuilder{pod("a", "n1", "1", 5).HostPort(80), pod("b", "n1", "1", 1)}, urgent("1").HostPort(80), nil, "n1", []types.UID{"uid-a"}},
		{"anti-affinity", two[:1], []*schedtest.PodBuilder{pod("a", "n1", "1", 5), pod("b", "n1", "1", 1)}, urgent("1").Apart(corev1.LabelHostname, "app", "a"), nil, "n1", []types.UID{"uid-a"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			s := newSnapshot()
			for _, n := range test.nodes {
				s.setNode(n.Obj())
			}
			for _, p := range test.placed {
				s.setPod(p.Obj())
			}
			before := len(s.placed)
			p := newPodInfo(test.pod.Obj())
			var c *candidate
			if mayPreempt(s, p) {
				c = preempt(s, p, test.budgets)
			}
			var node string
			var victims []types.UID
			if c != nil {
				node = c.node.name
				for _, v := range c.victims {
					victims = append(victims, v.pod.UID)
				}
			}
			slices.Sort(victims)
			if node != test.node || !slices.Equal(victims, test.victims) {
				t.Errorf("on %q %v, want %q %v", node, victims, test.node, test.victims)
			}
			if len(s.placed) != before {
				t.Errorf("%d pods are counted, were %d", len(s.placed), before)
			}
		})
	}
}

func never(b *schedtest.PodBuilder) *schedtest.PodBuilder {
	policy := corev1.PreemptNever
	b.P.Spec.PreemptionPolicy = &policy
	return b
}

// Room made for one pod is not taken by another that comes meanwhile, and no
// more pods go while the first ones are on their way.
func TestNominated(t *testing.T) {
	s := newSnapshot()
	s.setNode(schedtest.Node("n1").Obj())
	s.setPod(schedtest.Pod("low").On("n1").CPU("3").Priority(1).Obj())
	urgent := newPodInfo(schedtest.Pod("urgent").CPU("3").Priority(100).Obj())
	s.nominate(nomination{p: urgent, node: "n1", victims: []types.UID{"uid-low"}})
	if mayPreempt(s, urgent) {
		t.Error("preempts again while its victim has not gone")
	}
	s.removePod("uid-low")
	if !mayPreempt(s, urgent) {
		t.Error("may not preempt though its victim has gone")
	}
	other := newPodInfo(schedtest.Pod("other").CPU("2").Priority(50).Obj())
	if v := runFilters(s, other); len(v.fit) != 0 {
		t.Error("the room that was made is given away")
	}
	higher := newPodInfo(schedtest.Pod("higher").CPU("2").Priority(200).Obj())
	if v := runFilters(s, higher); len(v.fit) != 1 {
		t.Error("a promise binds pods of higher priority too")
	}
	if v := runFilters(s, urgent); len(v.fit) != 1 {
		t.Error("the pod's own promise is in its way")
	}
	if got := s.nodes["n1"].requested.cpu; got != 0 {
		t.Errorf("%d of CPU are counted on an empty node", got)
	}
}

// The reason that names the victims may be replaced by that of another attempt
// before anything was deleted: that one has to name them, too.
func TestVictimsOfEachAttempt(t *testing.T) {
	for _, test := range []struct {
		name  string
		ready func(x *table)
		pod   string
	}{
		{"a pod", func(x *table) { x.pods(schedtest.Pod("urgent").CPU("3").Priority(100)) }, "urgent"},
		{"a group", func(x *table) {
			x.group(schedtest.Gang("g", 1))
			x.pods(schedtest.Pod("g0").Group("g").CPU("3").Priority(100))
		}, "g0"},
	} {
		t.Run(test.name, func(t *testing.T) {
			x := newTable(t)
			x.stop() // nothing is written between the attempts
			x.node(schedtest.Node("n1").Obj())
			x.pods(schedtest.Pod("low").On("n1").CPU("3").Priority(1))
			test.ready(x)
			for attempt := 1; attempt <= 2; attempt++ {
				x.decide()
				v, ok := x.s.why.LoadAndDelete(loop.Key{Namespace: schedtest.Namespace, Name: test.pod})
				if !ok {
					t.Fatalf("attempt %d: no reason", attempt)
				}
				var victims []string
				for _, pod := range v.(*reason).victims {
					victims = append(victims, pod.Name)
				}
				if !slices.Equal(victims, []string{"low"}) || v.(*reason).node != "n1" {
					t.Errorf("attempt %d: %v go on %q, want low on n1", attempt, victims, v.(*reason).node)
				}
				x.s.queue.changed(podGone)
				x.later()
			}
		})
	}
}

// A pod that is deleted before it has a node, and waits for a finalizer, keeps no room.
func TestPromiseToOneThatGoes(t *testing.T) {
	x := newTable(t)
	x.stop()
	x.node(schedtest.Node("n1").Obj())
	x.pods(schedtest.Pod("low").On("n1").CPU("3").Priority(1), schedtest.Pod("urgent").CPU("3").Priority(100))
	x.decide()
	if len(x.s.snapshot.nominated) != 1 {
		t.Fatalf("%d promises", len(x.s.snapshot.nominated))
	}
	x.pod(schedtest.Pod("low").On("n1").CPU("3").Priority(1).Obj(), nil)
	x.pods(schedtest.Pod("other").CPU("3").Priority(50))
	x.decide()
	x.want("the room is promised", "")
	x.pod(schedtest.Pod("urgent").CPU("3").Priority(100).Obj(), schedtest.Pod("urgent").CPU("3").Priority(100).Deleting(x.clock.Now()).Obj())
	x.later()
	x.decide()
	x.want("the promise ended", "other")
}

// Nodes on which no pod's loss helps used up the search: a pod waited for ever
// beside nodes full of pods of lower priority, if they came after 100 others.
func TestPreemptionSeesAllNodes(t *testing.T) {
	build := func(first func(i int) []*schedtest.PodBuilder) *snapshot {
		s := newSnapshot()
		for i := range 150 {
			name := fmt.Sprintf("n%03d", i)
			s.setNode(schedtest.Node(name).Obj())
			placed := []*schedtest.PodBuilder{schedtest.Pod("low" + name).CPU("4").Priority(1)}
			if i < 149 {
				placed = first(i)
			}
			for _, p := range placed {
				s.setPod(p.On(name).Obj())
			}
		}
		return s
	}
	pod := schedtest.Pod
	for _, tt := range []struct {
		name  string
		first func(i int) []*schedtest.PodBuilder
	}{
		{"full of equals, with a daemon", func(i int) []*schedtest.PodBuilder {
			return []*schedtest.PodBuilder{pod(fmt.Sprint("equal", i)).CPU("3900m").Priority(100), pod(fmt.Sprint("daemon", i)).CPU("100m").Priority(0)}
		}},
		{"with a port taken by an equal", func(i int) []*schedtest.PodBuilder {
			return []*schedtest.PodBuilder{pod(fmt.Sprint("equal", i)).HostPort(80).Priority(100), pod(fmt.Sprint("lower", i)).CPU("4").Priority(0)}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := build(tt.first)
			for range 20 { // it begins anywhere
				p := newPodInfo(pod("urgent").CPU("2").HostPort(80).Priority(100).Obj())
				c := preempt(s, p, nil)
				if c == nil || c.node.name != "n149" || len(c.victims) != 1 {
					t.Fatalf("candidate %+v, want the pod of n149", c)
				}
			}
		})
	}
	// Where it helps everywhere, the choice is among a hundred, and not always the same.
	s := build(func(i int) []*schedtest.PodBuilder {
		return []*schedtest.PodBuilder{pod(fmt.Sprint("low", i)).CPU("4").Priority(1)}
	})
	chosen := map[string]bool{}
	for range 30 {
		chosen[preempt(s, newPodInfo(pod("urgent").CPU("2").Priority(100).Obj()), nil).node.name] = true
	}
	if len(chosen) < 2 {
		t.Errorf("30 preemptions of 150 equal nodes chose %v", chosen)
	}
}

// The victims on a node that died stay, on their way out, until someone sees to it:
// a pod that had been promised the node waited as long, beside nodes with pods that
// could have gone for it. The same for a node that is cordoned or removed, and for
// what the leader before promised.
func TestPromiseOfANodeThatIsLost(t *testing.T) {
	dead := func() *schedtest.NodeBuilder {
		return schedtest.Node("n1").Taint(corev1.TaintNodeUnreachable, "", corev1.TaintEffectNoSchedule).Taint(corev1.TaintNodeUnreachable, "", corev1.TaintEffectNoExecute)
	}
	pod := func(name, node string, priority int32) *schedtest.PodBuilder {
		return schedtest.Pod(name).On(node).CPU("3").Priority(priority)
	}
	for _, tt := range []struct {
		name string
		lost *corev1.Node // n1 from then on; nil: removed
		stay bool         // the promise is kept
	}{
		{"dead", dead().Obj(), false},
		{"cordoned", schedtest.Node("n1").Cordon().Obj(), false},
		{"removed", nil, false},
		{"labelled", schedtest.Node("n1").Label("a", "b").Obj(), true},
	} {
		for _, again := range []bool{false, true} {
			t.Run(fmt.Sprint(tt.name, ", by the leader before: ", again), func(t *testing.T) {
				x := newTable(t)
				x.stop()
				n1, n2 := schedtest.Node("n1").Obj(), schedtest.Node("n2").Obj()
				x.node(n1)
				x.node(n2)
				x.pods(pod("low1", "n1", 1), pod("low2", "n2", 2))
				urgent := schedtest.Pod("urgent").CPU("3").Priority(100).Obj()
				x.pod(nil, urgent)
				promised := func() string { return x.s.snapshot.nominated[urgent.UID].node }
				x.decide()
				if got := promised(); got != "n1" {
					t.Fatalf("promised is %q, want n1", got)
				}
				going := pod("low1", "n1", 1).Deleting(x.clock.Now()).Obj()
				x.pod(pod("low1", "n1", 1).Obj(), going)
				if again {
					urgent = urgent.DeepCopy()
					urgent.Status.NominatedNodeName = "n1"
					x.lead([]*corev1.Node{n1, n2}, nil, []*corev1.Pod{going, pod("low2", "n2", 2).Obj(), urgent})
				}
				x.decide()
				x.later()
				if got := promised(); got != "n1" {
					t.Fatalf("while low1 goes, promised is %q, want n1", got)
				}
				x.s.onNode(n1, tt.lost)
				x.later()
				x.decide()
				want, victims := "n2", []string{"low2"}
				if tt.stay {
					want, victims = "n1", []string{"low1"}
				}
				if got := promised(); got != want {
					t.Errorf("promised is %q, want %q", got, want)
				}
				v, _ := x.s.why.Load(loop.Key{Namespace: schedtest.Namespace, Name: "urgent"})
				var names []string
				for _, victim := range v.(*reason).victims {
					names = append(names, victim.Name)
				}
				if !slices.Equal(names, victims) || v.(*reason).node != want {
					t.Errorf("%v go on %q, want %v on %q", names, v.(*reason).node, victims, want)
				}
			})
		}
	}
}
