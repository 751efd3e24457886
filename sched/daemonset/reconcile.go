package daemonset

import (
	"cmp"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/clusterd/clusterd/sched/internal/history"
	"github.com/clusterd/clusterd/sched/internal/pods"
)

// burst is the most pods one pass makes for one set.
const burst = 500

// Input is all that Decide looks at. Decide changes none of it.
type Input struct {
	Set *appsv1.DaemonSet
	// Pods are those that the set controls, in any order.
	Pods  []*corev1.Pod
	Nodes []*corev1.Node
	// Hash is the label of pods made of the set's present template.
	Hash string
	Now  time.Time
}

// Plan is what one pass does.
type Plan struct {
	// Create holds the names of nodes that get a pod.
	Create []string
	Delete []*corev1.Pod
	// Ended holds pods that ended though daemons do not: they are deleted, at
	// growing intervals, and replaced.
	Ended []*corev1.Pod
	// Status is the new status; Recheck the time after which time alone may
	// change it (minReadySeconds), 0 for never.
	Status  appsv1.DaemonSetStatus
	Recheck time.Duration
}

// spot is one node with the set's pods on it.
type spot struct {
	node string
	// old and fresh are the pods of former templates and of the present one
	// that are neither deleted nor ended; at most one each after tidying.
	old, fresh []*corev1.Pod
	// leaving: a pod of the set is still on its way out.
	leaving bool
}

type state struct {
	in    Input
	plan  Plan
	avail map[*corev1.Pod]bool
}

// Decide computes the next step of a DaemonSet: a pod on each node that should
// have one and none elsewhere, then a step of the roll to the present template.
func Decide(in Input) Plan {
	s := &state{in: in, avail: map[*corev1.Pod]bool{}}
	byNode := map[string][]*corev1.Pod{}
	for _, pod := range in.Pods {
		byNode[nodeOf(pod)] = append(byNode[nodeOf(pod)], pod)
		available, wait := pods.Available(pod, time.Duration(in.Set.Spec.MinReadySeconds)*time.Second, in.Now)
		s.avail[pod] = available && pod.DeletionTimestamp == nil
		if wait > 0 && (s.plan.Recheck == 0 || wait < s.plan.Recheck) {
			s.plan.Recheck = wait
		}
	}
	status := *in.Set.Status.DeepCopy()
	status = appsv1.DaemonSetStatus{ObservedGeneration: in.Set.Generation, CollisionCount: status.CollisionCount, Conditions: status.Conditions}
	fit := newFitter(in.Set)
	nodes := slices.Clone(in.Nodes)
	slices.SortFunc(nodes, func(a, b *corev1.Node) int { return cmp.Compare(a.Name, b.Name) })
	var spots []*spot
	for _, node := range nodes {
		mine := byNode[node.Name]
		delete(byNode, node.Name)
		where := fit.on(node)
		s.count(&status, where, mine)
		if where == keepOff {
			s.remove(mine...)
			continue
		}
		sp := s.tidy(node.Name, mine)
		if where == wanted {
			spots = append(spots, sp)
		}
	}
	for _, lost := range byNode {
		for _, pod := range lost {
			if pod.Spec.NodeName == "" { // can never be placed; the bound ones are podgc's
				s.remove(pod)
			}
		}
	}
	status.NumberUnavailable = max(0, status.DesiredNumberScheduled-status.NumberAvailable)
	s.plan.Status = status
	if in.Set.DeletionTimestamp != nil {
		return Plan{Status: status}
	}
	s.fill(spots)
	s.roll(spots)
	return s.plan
}

func (s *state) remove(list ...*corev1.Pod) {
	for _, pod := range list {
		if pod.DeletionTimestamp == nil {
			s.plan.Delete = append(s.plan.Delete, pod)
		}
	}
}

func (s *state) updated(pod *corev1.Pod) bool { return pod.Labels[history.HashLabel] == s.in.Hash }

// count adds one node to the status.
func (s *state) count(status *appsv1.DaemonSetStatus, where place, mine []*corev1.Pod) {
	if where != wanted {
		if slices.ContainsFunc(mine, func(p *corev1.Pod) bool { return p.Spec.NodeName != "" && !pods.Finished(p) }) {
			status.NumberMisscheduled++
		}
		return
	}
	status.DesiredNumberScheduled++
	has := func(f func(*corev1.Pod) bool) int32 {
		if slices.ContainsFunc(mine, f) {
			return 1
		}
		return 0
	}
	status.CurrentNumberScheduled += has(func(*corev1.Pod) bool { return true })
	status.NumberReady += has(func(p *corev1.Pod) bool { return pods.Ready(p) && p.DeletionTimestamp == nil })
	status.NumberAvailable += has(func(p *corev1.Pod) bool { return s.avail[p] })
	status.UpdatedNumberScheduled += has(func(p *corev1.Pod) bool { return s.updated(p) && p.DeletionTimestamp == nil })
}

// tidy sorts the pods of one node and removes those that are too many: of former
// templates and of the present one the oldest that serves stays (the oldest, if none
// does), and of these two only one unless surging.
func (s *state) tidy(node string, mine []*corev1.Pod) *spot {
	sp := &spot{node: node}
	slices.SortFunc(mine, func(a, b *corev1.Pod) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	for _, pod := range mine {
		switch {
		case pod.DeletionTimestamp != nil:
			sp.leaving = true
		case pods.Finished(pod):
			sp.leaving = true
			s.plan.Ended = append(s.plan.Ended, pod)
		case s.updated(pod):
			sp.fresh = append(sp.fresh, pod)
		default:
			sp.old = append(sp.old, pod)
		}
	}
	keep := func(list []*corev1.Pod) []*corev1.Pod {
		if len(list) < 2 {
			return list
		}
		stays := max(0, slices.IndexFunc(list, func(p *corev1.Pod) bool { return s.avail[p] }))
		for i, pod := range list {
			if i != stays {
				s.remove(pod)
			}
		}
		return []*corev1.Pod{list[stays]}
	}
	sp.old, sp.fresh = keep(sp.old), keep(sp.fresh)
	if _, surge := s.bounds(1); surge == 0 && len(sp.old) > 0 && len(sp.fresh) > 0 {
		// Both are left of an aborted surge: the one that is available stays.
		if s.avail[sp.old[0]] && !s.avail[sp.fresh[0]] {
			s.remove(sp.fresh...)
			sp.fresh = nil
		} else {
			s.remove(sp.old...)
			sp.old = nil
		}
	}
	return sp
}

// fill makes a pod where none is. A pod on its way out has its place until it
// is gone: two of them would fight for ports and files of their node.
func (s *state) fill(spots []*spot) {
	for _, sp := range spots {
		if len(sp.old)+len(sp.fresh) == 0 && !sp.leaving && len(s.plan.Create) < burst {
			s.plan.Create = append(s.plan.Create, sp.node)
		}
	}
}

// bounds resolves the strategy's bounds for n nodes; both are 0 when pods are
// replaced by hand.
func (s *state) bounds(n int) (unavailable, surge int) {
	strategy := &s.in.Set.Spec.UpdateStrategy
	if strategy.Type != appsv1.RollingUpdateDaemonSetStrategyType || strategy.RollingUpdate == nil {
		return 0, 0
	}
	scaled := func(share *intstr.IntOrString, otherwise int) int {
		if share == nil {
			return otherwise
		}
		v, err := intstr.GetScaledValueFromIntOrPercent(share, n, true)
		if err != nil {
			return otherwise
		}
		return max(0, v)
	}
	return scaled(strategy.RollingUpdate.MaxUnavailable, 1), scaled(strategy.RollingUpdate.MaxSurge, 0)
}

// roll takes a step from former templates to the present one.
func (s *state) roll(spots []*spot) {
	if s.in.Set.Spec.UpdateStrategy.Type != appsv1.RollingUpdateDaemonSetStrategyType {
		return
	}
	unavailable, surge := s.bounds(len(spots))
	if surge > 0 {
		s.surge(spots, surge)
		return
	}
	for _, sp := range spots {
		if !s.serves(sp) {
			unavailable--
		}
	}
	for _, sp := range spots {
		for _, pod := range sp.old {
			switch {
			case !s.avail[pod]: // counted as unavailable already
			case unavailable > 0:
				unavailable--
			default:
				continue
			}
			s.remove(pod)
		}
	}
}

func (s *state) serves(sp *spot) bool {
	available := func(p *corev1.Pod) bool { return s.avail[p] }
	return slices.ContainsFunc(sp.old, available) || slices.ContainsFunc(sp.fresh, available)
}

// surge starts successors beside the pods they replace, which go once the
// successor is available.
func (s *state) surge(spots []*spot, room int) {
	for _, sp := range spots {
		if len(sp.old) > 0 && len(sp.fresh) > 0 && !s.avail[sp.fresh[0]] {
			room--
		}
	}
	for _, sp := range spots {
		switch {
		case len(sp.old) == 0:
		case len(sp.fresh) > 0:
			if s.avail[sp.fresh[0]] {
				s.remove(sp.old...)
			}
		case sp.leaving || len(s.plan.Create) >= burst:
		case !s.avail[sp.old[0]]:
			s.plan.Create = append(s.plan.Create, sp.node) // costs no availability
		case room > 0:
			room--
			s.plan.Create = append(s.plan.Create, sp.node)
		}
	}
}
