package scheduler

import (
	"fmt"
	"math/rand/v2"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/sched/schedtest"
)

// Victims found by sums are those that the rules themselves find, on any cluster: with
// budgets, places that were promised, ports and terms of other pods.
func TestVictimsBySumsAreThoseByRules(t *testing.T) {
	bySums, found, spared := 0, 0, 0
	for seed := range uint64(600) {
		r := rand.New(rand.NewPCG(seed, 11))
		some := func(what ...string) string { return what[r.IntN(len(what))] }
		make := func(name string) *schedtest.PodBuilder {
			p := schedtest.Pod(name).CPU(some("1", "2", "3")).Priority(int32(r.IntN(4))).Label("app", some("x", "y"))
			if r.IntN(2) == 0 {
				gpus(p, some("0", "1", "2"))
			}
			if r.IntN(6) == 0 {
				p.HostPort(80)
			}
			if r.IntN(20) == 0 {
				p.Apart(corev1.LabelHostname, "app", some("x", "z"))
			}
			return p
		}
		s := newSnapshot()
		for i := range 4 {
			name := fmt.Sprint("n", i)
			n := schedtest.Node(name).Label(corev1.LabelHostname, name).Has("pods", some("3", "5", "9")).Has("example.com/gpu", some("0", "2", "4"))
			s.setNode(n.Obj())
		}
		for i := range 16 {
			s.setPod(make(fmt.Sprint("p", i)).On(fmt.Sprint("n", r.IntN(4))).Obj())
		}
		if r.IntN(3) == 0 {
			s.nominate(nomination{p: newPodInfo(make("promised").Priority(3).Obj()), node: "n1"})
		}
		var budgets []*policyv1.PodDisruptionBudget
		if r.IntN(2) == 0 {
			budgets = append(budgets, &policyv1.PodDisruptionBudget{
				ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "x"},
				Spec:       policyv1.PodDisruptionBudgetSpec{Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "x"}}},
				Status:     policyv1.PodDisruptionBudgetStatus{DisruptionsAllowed: int32(r.IntN(2))},
			})
		}
		p := newPodInfo(make("q").Priority(int32(1 + r.IntN(3))).Obj())
		if onlyRoom(s, p) {
			bySums++
		}
		search := searchFor(s, p, budgets)
		for _, n := range s.list {
			got, want := text(search(n)), text(s.without(p, n, budgets))
			if got != want {
				t.Fatalf("seed %d: on %s the victims are %s by sums, %s by rules, for %+v", seed, n.name, got, want, p.pod.Spec)
			}
			switch want {
			case "none":
				spared++
			default:
				found++
			}
		}
	}
	if bySums < 100 || found < 500 || spared < 100 {
		t.Errorf("by sums alone %d times, victims on %d nodes, none on %d: the test shows little", bySums, found, spared)
	}
}

func text(c *candidate) string {
	if c == nil {
		return "none"
	}
	var victims []types.UID
	for _, v := range c.victims {
		victims = append(victims, v.pod.UID)
	}
	return fmt.Sprint(victims, c.violations)
}

// Refusals that follow each other are counted together, and as many as there are.
func TestRefusalsInARow(t *testing.T) {
	a, b := []string{"a"}, []string{"a", "b"}
	into, r := map[string]int{}, run{}
	for _, reasons := range [][]string{a, a, b, b[:1], {"a"}, a, a} {
		r.add(into, reasons)
	}
	r.end(into)
	r.end(into)
	if into["a"] != 7 || into["b"] != 1 || len(into) != 2 {
		t.Errorf("counted %v", into)
	}
}
