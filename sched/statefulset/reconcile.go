package statefulset

import (
	"cmp"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/history"
	"github.com/clusterd/clusterd/sched/internal/pods"
)

// burst is the most pods one pass makes for one set.
const burst = 500

// Input is all that Decide looks at. Decide changes none of it.
type Input struct {
	Set *appsv1.StatefulSet
	// Pods are those that the set controls, in any order.
	Pods []*corev1.Pod
	// Current and Update name the revision that the pods were last known to
	// have all reached, and the one that holds the set's template.
	Current, Update string
	Now             time.Time
}

// Create is one pod to make.
type Create struct {
	Ordinal  int
	Revision string
}

// Plan is what one pass does.
type Plan struct {
	Create []Create
	// Delete holds pods to delete: of ordinals beyond the set's, of older
	// revisions, and finished ones, which are replaced by a later pass.
	Delete []*corev1.Pod
	// Fix holds pods that lack a label of their identity.
	Fix []*corev1.Pod
	// Claims are the ordinals of pods without a node: a claim of theirs that is missing
	// is made again, as no node fits them without it.
	Claims []int
	// Status is the new status; Recheck the time after which time alone may
	// change it (minReadySeconds), 0 for never.
	Status  appsv1.StatefulSetStatus
	Recheck time.Duration
}

// member is a pod with what Decide asks of it again and again.
type member struct {
	*corev1.Pod
	ordinal     int
	ready       bool
	available   bool
	terminating bool
	revision    string
}

// healthy reports whether a member serves and is to stay.
func (m *member) healthy() bool { return m.available && !m.terminating }

// state is the working state of one Decide call.
type state struct {
	in         Input
	start, end int
	// wanted holds the members within the set's ordinals, lowest first.
	wanted []*member
	// surplus holds members beyond the set's ordinals, highest first.
	surplus []*member
	ordered bool
	plan    Plan
}

// Decide computes the next step of a StatefulSet.
//
// In order (OrderedReady) a pass changes one pod at most, and only if all
// before it are available:
//
//	0 … n-1: missing ─► make     finished ─► delete     not ready ─► wait
//	n …    : highest first, and only while none below is unhealthy ─► delete
//	n-1 … partition: of another revision ─► delete, maxUnavailable at a time
//
// In parallel the first two act on all pods at once.
func Decide(in Input) Plan {
	s := newState(in)
	s.status()
	if in.Set.DeletionTimestamp != nil {
		return s.plan
	}
	s.claims()
	if s.fill() && s.shrink() {
		s.roll()
	}
	return s.plan
}

func newState(in Input) *state {
	s := &state{in: in, ordered: in.Set.Spec.PodManagementPolicy != appsv1.ParallelPodManagement}
	s.start, s.end = span(in.Set)
	minReady := time.Duration(in.Set.Spec.MinReadySeconds) * time.Second
	for _, pod := range in.Pods {
		ordinal := ordinalOf(in.Set, pod.Name)
		if ordinal < 0 {
			continue // claimed by its labels, but none of this set's names
		}
		m := &member{Pod: pod, ordinal: ordinal, terminating: pod.DeletionTimestamp != nil, revision: pod.Labels[history.HashLabel]}
		m.ready = pod.Status.Phase == corev1.PodRunning && pods.Ready(pod)
		if m.ready {
			var wait time.Duration
			m.available, wait = pods.Available(pod, minReady, in.Now)
			if wait > 0 && (s.plan.Recheck == 0 || wait < s.plan.Recheck) {
				s.plan.Recheck = wait
			}
		}
		if ordinal >= s.start && ordinal < s.end {
			s.wanted = append(s.wanted, m)
			continue
		}
		s.surplus = append(s.surplus, m)
	}
	slices.SortFunc(s.wanted, func(a, b *member) int { return cmp.Compare(a.ordinal, b.ordinal) })
	slices.SortFunc(s.surplus, func(a, b *member) int { return -cmp.Compare(a.ordinal, b.ordinal) })
	return s
}

// rolling reports whether the controller replaces pods by itself.
func (s *state) rolling() bool {
	return s.in.Set.Spec.UpdateStrategy.Type != appsv1.OnDeleteStatefulSetStrategyType
}

// partition is the first ordinal that the new revision is meant for.
func (s *state) partition() int {
	if r := s.in.Set.Spec.UpdateStrategy.RollingUpdate; s.rolling() && r != nil {
		return s.start + int(ptr.Deref(r.Partition, 0))
	}
	return s.start
}

// revisionFor is the revision a new pod of the ordinal is made of.
func (s *state) revisionFor(ordinal int) string {
	if ordinal < s.partition() {
		return s.in.Current
	}
	return s.in.Update
}

// stale reports whether rolling has to replace the member.
func (s *state) stale(m *member) bool {
	return s.rolling() && m.ordinal >= s.partition() && m.revision != s.in.Update
}

// claims names the pods that may lack a claim: it can have been deleted, since no
// pod that runs keeps it.
func (s *state) claims() {
	if len(s.in.Set.Spec.VolumeClaimTemplates) == 0 {
		return
	}
	for _, m := range s.wanted {
		if m.Spec.NodeName == "" && !m.terminating && !pods.Finished(m.Pod) {
			s.plan.Claims = append(s.plan.Claims, m.ordinal)
		}
	}
}

// fill makes the missing pods. It reports whether the pass may go on: in order
// only when every pod is available.
func (s *state) fill() bool {
	rest := s.wanted
	for ordinal := s.start; ordinal < s.end && len(s.plan.Create) < burst; ordinal++ {
		var m *member
		if len(rest) > 0 && rest[0].ordinal == ordinal {
			m, rest = rest[0], rest[1:]
		}
		switch {
		case m == nil:
			s.plan.Create = append(s.plan.Create, Create{Ordinal: ordinal, Revision: s.revisionFor(ordinal)})
		case m.terminating:
		case pods.Finished(m.Pod):
			s.plan.Delete = append(s.plan.Delete, m.Pod)
		case strange(s.in.Set, m.Pod, m.ordinal):
			s.plan.Fix = append(s.plan.Fix, m.Pod)
			if m.available {
				continue
			}
		case m.available:
			continue
		case s.ordered && !m.ready && s.stale(m) && !s.otherDown(m):
			// It is not ready, and waiting for it would keep its successor
			// from ever being tried.
			s.plan.Delete = append(s.plan.Delete, m.Pod)
		}
		if s.ordered {
			return false
		}
	}
	return len(s.plan.Create) < burst
}

// otherDown reports whether another member is on its way out, or is of the new
// revision and does not serve yet: m may be not ready because of that.
func (s *state) otherDown(m *member) bool {
	return slices.ContainsFunc(s.wanted, func(other *member) bool {
		return other != m && (other.terminating || !other.available && other.revision == s.in.Update)
	})
}

// shrink deletes the pods beyond the set's ordinals. It reports whether the
// pass may go on.
func (s *state) shrink() bool {
	lowestUnhealthy := -1
	for _, m := range slices.Backward(s.surplus) {
		if !m.healthy() {
			lowestUnhealthy = m.ordinal
			break
		}
	}
	for _, m := range s.surplus {
		if m.terminating {
			if s.ordered {
				return false
			}
			continue
		}
		if s.ordered && !m.available && m.ordinal != lowestUnhealthy && !pods.Finished(m.Pod) {
			return false // those below it may need it
		}
		s.plan.Delete = append(s.plan.Delete, m.Pod)
		if s.ordered {
			return false
		}
	}
	return true
}

// roll replaces pods of other revisions, highest ordinal first, as far as
// maxUnavailable allows.
func (s *state) roll() {
	if !s.rolling() {
		return
	}
	budget := maxUnavailable(s.in.Set) - len(s.plan.Create)
	for _, m := range s.wanted {
		if !m.healthy() {
			budget--
		}
	}
	gone := map[*corev1.Pod]bool{}
	for _, pod := range s.plan.Delete {
		gone[pod] = true
	}
	for _, m := range slices.Backward(s.wanted) {
		if m.terminating || gone[m.Pod] || !s.stale(m) {
			continue
		}
		if m.available { // else it counts as unavailable already
			if budget <= 0 {
				continue
			}
			budget--
		}
		s.plan.Delete = append(s.plan.Delete, m.Pod)
	}
}

// maxUnavailable resolves the strategy's bound to pods, at least one.
func maxUnavailable(set *appsv1.StatefulSet) int {
	r := set.Spec.UpdateStrategy.RollingUpdate
	if r == nil || r.MaxUnavailable == nil {
		return 1
	}
	n, err := intstr.GetScaledValueFromIntOrPercent(r.MaxUnavailable, int(ptr.Deref(set.Spec.Replicas, 1)), true)
	if err != nil {
		return 1
	}
	return max(1, n)
}

// status counts the pods as they are.
func (s *state) status() {
	set := s.in.Set
	status := *set.Status.DeepCopy()
	status.ObservedGeneration = set.Generation
	status.CurrentRevision, status.UpdateRevision = s.in.Current, s.in.Update
	status.Replicas, status.ReadyReplicas, status.AvailableReplicas = 0, 0, 0
	status.CurrentReplicas, status.UpdatedReplicas = 0, 0
	count := func(m *member) {
		status.Replicas++
		if m.ready {
			status.ReadyReplicas++
		}
		if m.available {
			status.AvailableReplicas++
		}
		if m.terminating || pods.Finished(m.Pod) {
			return
		}
		if m.revision == s.in.Current {
			status.CurrentReplicas++
		}
		if m.revision == s.in.Update {
			status.UpdatedReplicas++
		}
	}
	for _, m := range s.wanted {
		count(m)
	}
	for _, m := range s.surplus {
		count(m)
	}
	want := ptr.Deref(set.Spec.Replicas, 1)
	if status.UpdatedReplicas == want && status.Replicas == want && status.ReadyReplicas == want {
		status.CurrentRevision, status.CurrentReplicas = status.UpdateRevision, status.UpdatedReplicas
	}
	s.plan.Status = status
}
