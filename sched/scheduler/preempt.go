package scheduler

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	corev1helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/disrupt"
)

// maxCandidates is how many nodes on which it would help one preemption chooses
// among, unless a profile says another number.
const maxCandidates = 100

// maxFailures is on how many nodes one preemption tries in vain: other pods wait
// meanwhile. The pod is tried again soon, and the next one goes on from there.
const maxFailures = 500

// search is where in the list of nodes the next preemption for a pod begins, and how many
// nodes are left to look at: 0, none is under way, and the next one begins anywhere.
type search struct{ next, left int }

// nomination is the place that a waiting pod has been promised: pods went, or
// go, for its sake.
type nomination struct {
	p       *podInfo
	node    string
	victims []types.UID
}

// candidate is a node on which the pod would fit without the victims.
type candidate struct {
	node    *nodeInfo
	victims []*podInfo
	// violations counts victims whose budget does not allow their loss.
	violations int
}

// nominate promises the pod a node.
func (s *snapshot) nominate(n nomination) { s.nominated[n.p.pod.UID] = n }

// pledged returns the pods that a node is promised to and that go before p.
func (s *snapshot) pledged(n *nodeInfo, p *podInfo) (out []*podInfo) {
	for uid, other := range s.nominated {
		if other.node == n.name && uid != p.pod.UID && priority(other.p) >= priority(p) {
			out = append(out, other.p)
		}
	}
	return out
}

// promisedOn are the pods that were promised the node.
func (s *snapshot) promisedOn(node string) (out []types.UID) {
	for uid, n := range s.nominated {
		if n.node == node {
			out = append(out, uid)
		}
	}
	return out
}

func priority(p *podInfo) int32 { return corev1helpers.PodPriority(p.pod) }

// mayPreempt reports whether pods may go for this one's sake now. While those
// that were asked to go before have not gone, no others are.
func mayPreempt(s *snapshot, p *podInfo) bool {
	if !s.profile(p).preempts || ptr.Deref(p.pod.Spec.PreemptionPolicy, corev1.PreemptLowerPriority) == corev1.PreemptNever {
		return false
	}
	return len(s.leaving(p)) == 0
}

// leaving are the pods that go for p's sake and are still on its node. A node that
// p cannot have any more, whoever goes, is not waited for: the pods of a dead node
// stay until someone sees to it.
func (s *snapshot) leaving(p *podInfo) (out []*corev1.Pod) {
	n, ok := s.nominated[p.pod.UID]
	if !ok {
		return nil
	}
	on := s.nodes[n.node]
	if on == nil || on.out || hopelessFor(s, p)(on) {
		return nil
	}
	for _, uid := range n.victims {
		if victim := on.pods[uid]; victim != nil {
			out = append(out, victim.pod)
		}
	}
	return out
}

// preempt looks for the node where the loss of pods of lower priority that
// makes room for p hurts least; nil if there is none. It begins where p.search says, and
// ends when it has enough nodes to choose from, has tried maxFailures in vain (then
// p.search says what is left), or has seen all: nodes where clearly nothing helps are not
// tried.
func preempt(s *snapshot, p *podInfo, budgets []*policyv1.PodDisruptionBudget) *candidate {
	if len(s.list) == 0 {
		return nil
	}
	var best *candidate
	from := p.search
	if from.left == 0 {
		from = search{next: rand.IntN(len(s.list)), left: len(s.list)}
	}
	p.search = search{}
	start, left := from.next, min(from.left, len(s.list))
	found, failed, enough := 0, 0, s.profile(p).args.candidates(len(s.list))
	hopeless, mayHelp, victims := hopelessFor(s, p), lossMayHelp(s, p), victimsFor(s, p, budgets)
	for i := range left {
		n := s.list[(start+i)%len(s.list)]
		if n.out || !mayHelp(n) || hopeless(n) {
			continue
		}
		c := victims(n)
		if c == nil {
			if failed++; failed == maxFailures {
				if best == nil {
					p.search = search{next: (start + i + 1) % len(s.list), left: left - i - 1}
				}
				break
			}
			continue
		}
		if best == nil || c.better(best) {
			best = c
		}
		if found++; found == enough {
			break
		}
	}
	return best
}

// hopelessFor returns what reports whether a rule refuses a node that no pod's
// loss changes.
func hopelessFor(s *snapshot, p *podInfo) func(*nodeInfo) bool {
	var checks []func(*nodeInfo) []string
	for _, f := range s.profile(p).filters {
		if f.wokenBy&podGone != 0 {
			continue
		}
		if check := f.prepare(s, p); check != nil {
			checks = append(checks, check)
		}
	}
	return func(n *nodeInfo) bool {
		return slices.ContainsFunc(checks, func(check func(*nodeInfo) []string) bool { return len(check(n)) > 0 })
	}
}

// fits reports whether p passes every rule on the node as it is.
func fits(s *snapshot, p *podInfo, n *nodeInfo) bool {
	for _, f := range s.profile(p).filters {
		if check := f.prepare(s, p); check != nil && len(check(n)) > 0 {
			return false
		}
	}
	return true
}

// without finds the fewest and least important pods whose loss lets p onto the
// node. It tries on the snapshot itself and leaves it as it was.
func (s *snapshot) without(p *podInfo, n *nodeInfo, budgets []*policyv1.PodDisruptionBudget) *candidate {
	pledged := s.pledged(n, p)
	for _, other := range pledged {
		s.put(other, n.name)
	}
	defer func() {
		for _, other := range pledged {
			s.removePod(other.pod.UID)
		}
	}()
	var lower []*podInfo
	for _, other := range n.pods {
		if priority(other) < priority(p) {
			lower = append(lower, other)
		}
	}
	assumed := map[types.UID]bool{}
	take := func(other *podInfo) {
		assumed[other.pod.UID] = s.assumed[other.pod.UID]
		s.removePod(other.pod.UID)
	}
	give := func(other *podInfo) {
		s.put(other, n.name)
		if assumed[other.pod.UID] {
			s.assumed[other.pod.UID] = true
		}
	}
	for _, other := range lower {
		take(other)
	}
	c := &candidate{node: n}
	if !fits(s, p, n) {
		for _, other := range lower {
			give(other)
		}
		return nil
	}
	// Those whose loss would hurt most are the first to stay after all.
	violates := overdrawn(lower, budgets)
	dearestFirst(lower, violates)
	for _, other := range lower {
		give(other)
		if fits(s, p, n) {
			continue
		}
		take(other)
		c.victims = append(c.victims, other)
		if violates[other] {
			c.violations++
		}
	}
	for _, victim := range c.victims {
		give(victim)
	}
	return c
}

// dearestFirst sorts pods by how much their loss hurts; violates are those that a budget
// guards.
func dearestFirst(list []*podInfo, violates map[*podInfo]bool) {
	slices.SortFunc(list, func(a, b *podInfo) int {
		return cmp.Or(first(violates[a], violates[b]), -cmp.Compare(priority(a), priority(b)), started(a).Compare(started(b)), cmp.Compare(a.pod.UID, b.pod.UID))
	})
}

func first(a, b bool) int {
	switch {
	case a && !b:
		return -1
	case b && !a:
		return 1
	}
	return 0
}

func started(p *podInfo) time.Time {
	if t := p.pod.Status.StartTime; t != nil {
		return t.Time
	}
	return p.pod.CreationTimestamp.Time
}

// overdrawn returns those of the pods whose loss, after that of the more
// important ones before them, a budget does not allow.
func overdrawn(list []*podInfo, budgets []*policyv1.PodDisruptionBudget) map[*podInfo]bool {
	if len(budgets) == 0 {
		return nil
	}
	out := map[*podInfo]bool{}
	sorted := slices.Clone(list)
	slices.SortFunc(sorted, func(a, b *podInfo) int {
		return cmp.Or(-cmp.Compare(priority(a), priority(b)), started(a).Compare(started(b)), cmp.Compare(a.pod.UID, b.pod.UID))
	})
	left := make([]int32, len(budgets))
	for i, b := range budgets {
		left[i] = b.Status.DisruptionsAllowed
	}
	for _, p := range sorted {
		for i, b := range budgets {
			if !guards(b, p) {
				continue
			}
			if left[i]--; left[i] < 0 {
				out[p] = true
			}
		}
	}
	return out
}

// guards reports whether the loss of the pod counts against the budget.
func guards(b *policyv1.PodDisruptionBudget, p *podInfo) bool {
	if b.Namespace != p.pod.Namespace || len(p.pod.Labels) == 0 {
		return false
	}
	match, err := metav1.LabelSelectorAsSelector(b.Spec.Selector)
	if err != nil || match.Empty() || !match.Matches(labels.Set(p.pod.Labels)) {
		return false
	}
	_, disrupted := b.Status.DisruptedPods[p.pod.Name] // counted already
	return !disrupted
}

// better reports whether losing c's victims hurts less than losing d's.
func (c *candidate) better(d *candidate) bool {
	highest := func(c *candidate) (most int32) {
		for i, v := range c.victims {
			if i == 0 || priority(v) > most {
				most = priority(v)
			}
		}
		return most
	}
	sum := func(c *candidate) (total int64) {
		for _, v := range c.victims {
			total += int64(priority(v)) + 1<<31 // so that each counts, also those below 0
		}
		return total
	}
	youngest := func(c *candidate) (at time.Time) {
		for _, v := range c.victims {
			if priority(v) == highest(c) && started(v).After(at) {
				at = started(v)
			}
		}
		return at
	}
	return cmp.Or(
		cmp.Compare(c.violations, d.violations),
		cmp.Compare(highest(c), highest(d)),
		cmp.Compare(sum(c), sum(d)),
		cmp.Compare(len(c.victims), len(d.victims)),
		-youngest(c).Compare(youngest(d)),
		cmp.Compare(c.node.name, d.node.name),
	) < 0
}

// evict tells the victims' users why they go, and deletes them.
func (s *scheduler) evict(ctx context.Context, pod *corev1.Pod, node string, victims []*corev1.Pod) error {
	for _, victim := range victims {
		if victim.DeletionTimestamp != nil {
			continue
		}
		deleted, err := disrupt.Delete(ctx, s.client, victim, corev1.PodReasonPreemptionByScheduler,
			fmt.Sprintf("%s: preempting to accommodate a higher priority pod", s.snapshot.profiles.of(pod).name), s.clock.Now())
		if err != nil {
			return fmt.Errorf("preempt %s/%s: %w", victim.Namespace, victim.Name, err)
		}
		if deleted {
			preempted.Inc()
			s.eventsFor(pod).Eventf(victim, corev1.EventTypeNormal, "Preempted", "Preempted by pod %s on node %s", pod.UID, node)
		}
	}
	return nil
}
