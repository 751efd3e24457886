package daemonset

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/history"
	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// Any sequence of changes of the spec and of nodes that come, go and are tainted, of
// pods that fail and of pods that never serve keeps the promises of the strategy on
// the way, and ends with one pod of the last template on each node that should have
// one.
func TestRandomWorkloads(t *testing.T) {
	for seed := range uint64(150) {
		r := rand.New(rand.NewPCG(seed, 9))
		set := newSet()
		hash, made := "h0", 0
		all := map[string]*corev1.Node{}
		have := map[*corev1.Pod]bool{}
		place := func(name string) place {
			f := newFitter(set)
			return f.on(all[name])
		}
		serve := func(gone []*corev1.Pod) map[string]bool {
			out := map[string]bool{}
			for p := range have {
				if p.DeletionTimestamp == nil && pods.Ready(p) && !slices.Contains(gone, p) {
					out[nodeOf(p)] = true
				}
			}
			return out
		}
		pass := func(what string) (changed bool) {
			var list []*corev1.Pod
			for p := range have {
				list = append(list, p)
			}
			var nodes []*corev1.Node
			for _, n := range all {
				nodes = append(nodes, n)
			}
			plan := Decide(Input{Set: set, Pods: list, Nodes: nodes, Hash: hash, Now: now})
			s := &state{in: Input{Set: set, Nodes: nodes}}
			wanting := 0
			for name := range all {
				if place(name) == wanted {
					wanting++
				}
			}
			unavailable, surge := s.bounds(wanting)
			// No more nodes stop to serve than may. With room for successors none does.
			before, after := serve(nil), serve(plan.Delete)
			down, lost := 0, 0
			for name := range all {
				if place(name) != wanted {
					continue
				}
				if !after[name] {
					down++
				}
				if before[name] && !after[name] {
					lost++
				}
			}
			if surge > 0 {
				unavailable = 0
			}
			if set.Spec.UpdateStrategy.Type == appsv1.OnDeleteDaemonSetStrategyType {
				unavailable = 0
			}
			if lost > 0 && down > unavailable {
				t.Fatalf("seed %d, %s: %d nodes stop to serve, %d do not then, %d may; %s", seed, what, lost, down, unavailable, describe(plan))
			}
			for _, name := range plan.Create {
				if all[name] == nil || place(name) != wanted {
					t.Fatalf("seed %d, %s: a pod for node %s", seed, what, name)
				}
				for p := range have {
					if nodeOf(p) == name && (surge == 0 || p.Labels[history.HashLabel] == hash) {
						t.Fatalf("seed %d, %s: another pod for node %s, which has %s (%v); surge %d", seed, what, name, p.Name, p.DeletionTimestamp, surge)
					}
				}
			}
			for _, p := range append(plan.Delete, plan.Ended...) {
				p.DeletionTimestamp = ptr.To(metav1.NewTime(now))
			}
			for _, name := range plan.Create {
				made++
				p := newPod(set, name, hash)
				p.Name = fmt.Sprintf("p%d", made)
				(&schedtest.PodBuilder{P: p}).Phase(corev1.PodPending).On(name).Created(now.Add(time.Duration(made) * time.Second))
				have[p] = true
			}
			set.Status = plan.Status
			return len(plan.Create)+len(plan.Delete)+len(plan.Ended) > 0
		}
		live := func(faults bool) (changed bool) {
			for p := range have {
				switch {
				case faults && r.IntN(3) == 0:
				case p.DeletionTimestamp != nil || all[nodeOf(p)] == nil: // podgc's
					delete(have, p)
					changed = true
				case p.Labels[history.HashLabel] == "broken" || pods.Finished(p):
				case !pods.Ready(p):
					(&schedtest.PodBuilder{P: p}).Ready(now)
					changed = true
				case faults && r.IntN(15) == 0:
					p.Status = corev1.PodStatus{Phase: []corev1.PodPhase{corev1.PodFailed, corev1.PodRunning}[r.IntN(2)]}
				}
			}
			return changed
		}
		for step := range 80 {
			name := fmt.Sprint("n", r.IntN(7))
			switch r.IntN(12) {
			case 0, 1:
				hash = []string{"h0", "h1", "h2", "broken"}[r.IntN(4)]
			case 2:
				bounds([]string{"1", "2", "50%"}[r.IntN(3)], "0")(set)
			case 3:
				bounds("0", []string{"1", "2", "50%"}[r.IntN(3)])(set)
			case 4:
				onDelete(set)
			case 5, 6:
				all[name] = schedtest.Node(name).Obj()
			case 7:
				all[name] = schedtest.Node(name).Taint("gpu", "", []corev1.TaintEffect{corev1.TaintEffectNoSchedule, corev1.TaintEffectNoExecute}[r.IntN(2)]).Obj()
			case 8:
				delete(all, name)
			}
			if set.Spec.UpdateStrategy.RollingUpdate == nil && r.IntN(2) == 0 {
				set.Spec.UpdateStrategy.Type = appsv1.OnDeleteDaemonSetStrategyType
			} else if set.Spec.UpdateStrategy.RollingUpdate != nil {
				set.Spec.UpdateStrategy.Type = appsv1.RollingUpdateDaemonSetStrategyType
			}
			pass(fmt.Sprint("step ", step))
			live(true)
		}
		hash = "last"
		set.Spec.UpdateStrategy.Type = appsv1.RollingUpdateDaemonSetStrategyType
		bounds("1", "0")(set)
		for step := 0; ; step++ {
			decided := pass(fmt.Sprint("settling ", step))
			if moved := live(false); !decided && !moved {
				break
			}
			if step > 200 {
				t.Fatalf("seed %d does not settle", seed)
			}
		}
		on := map[string]int{}
		for p := range have {
			on[nodeOf(p)]++
			if all[nodeOf(p)] == nil || place(nodeOf(p)) == keepOff {
				t.Errorf("seed %d: a pod on node %s, which should have none", seed, nodeOf(p))
			} else if place(nodeOf(p)) == wanted && (p.Labels[history.HashLabel] != "last" || !pods.Ready(p)) {
				t.Errorf("seed %d: the pod of node %s is of %s", seed, nodeOf(p), p.Labels[history.HashLabel])
			}
		}
		for name := range all {
			if on[name] != 1 && (place(name) == wanted || on[name] > 1) {
				t.Errorf("seed %d: %d pods on node %s", seed, on[name], name)
			}
		}
	}
}
