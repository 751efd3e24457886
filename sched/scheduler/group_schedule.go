package scheduler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	resourcev1 "k8s.io/api/resource/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
)

// scheduleGroup decides for the group of a pod that the queue gave. Either as
// many of its pods as it needs are assumed on nodes, and returned to be bound, or
// none is: a group that has to wait holds nothing. handled is false if the pod is
// to be placed by itself.
func (s *scheduler) scheduleGroup(ctx context.Context, pod *corev1.Pod) (places []placement, handled bool) {
	key, ok := groupOf(pod)
	if !ok {
		return nil, false
	}
	group, err := s.groups.get(key)
	if err != nil {
		s.queue.fail(pod.UID)
		return nil, true
	}
	if group != nil && group.Spec.SchedulingPolicy.Gang == nil {
		return nil, false
	}
	s.mu.Lock()
	if _, placed := s.snapshot.placed[pod.UID]; placed || !s.stillWaiting(pod) {
		s.mu.Unlock()
		return nil, false // it goes out of the queue like any other
	}
	n := s.countGroup(key)
	why, need := lack(key, group, n)
	if why != "" || s.groups.preparing[key] {
		delete(s.groups.refused, key) // of another time
		released := s.snapshot.release(n.waiting)
		s.mu.Unlock()
		if released {
			s.queue.changed(podGone)
		}
		s.groups.reporter.EnqueueAfter(key, groupPause)
		s.queue.park(pod.UID, groupChanged)
		return nil, true
	}
	if need == 0 {
		s.mu.Unlock()
		return nil, false
	}
	members := s.gather(pod, n.waiting)
	if len(members) < need {
		s.mu.Unlock()
		for _, p := range members {
			s.queue.park(p.pod.UID, groupChanged)
		}
		return nil, true // one of them is on its way into the queue, and brings the others along
	}
	a := s.placeAll(members, need)
	if len(a.places) >= need {
		delete(s.groups.refused, key)
		if slices.ContainsFunc(a.places, placement.prepares) {
			s.groups.preparing[key] = true
		}
		s.mu.Unlock()
		for _, p := range a.left {
			s.queue.fail(p.pod.UID) // beyond those needed: each by itself
		}
		s.queue.changed(podPlaced)
		return a.places, true
	}
	message := a.explain(key, group, n.placed, need)
	released := false
	if group.Spec.PreemptionPolicy == nil || *group.Spec.PreemptionPolicy != schedulingv1beta1.PreemptNever {
		released = s.displace(members, need)
	}
	s.groups.refused[key] = message
	reasons := make([]*reason, len(members))
	for i, p := range members {
		reasons[i] = &reason{uid: p.pod.UID, message: message, node: s.snapshot.nominated[p.pod.UID].node}
		if a.first == p {
			reasons[i].astray = p.devices.givesBack(p.pod)
		}
		if asksWhy(p.pod) && a.each != "" {
			reasons[i].message += "\n" + a.each
		}
		reasons[i].victims = s.snapshot.leaving(p) // also of an attempt whose reason is not written yet
	}
	s.mu.Unlock()

	if released {
		s.queue.changed(podGone)
	}
	for i, p := range members {
		attempts.WithLabelValues("unschedulable").Inc()
		s.refuse(p.pod, reasons[i])
		s.queue.park(p.pod.UID, a.wokenBy|groupChanged)
	}
	s.groups.reporter.EnqueueAfter(key, groupPause)
	klog.FromContext(ctx).V(3).Info("pod group fits nowhere", "group", key, "why", message)
	return nil, true
}

// refuse lets the reporter say why the pod of a group has no node. The event
// comes with another reason only: all members have the same one.
func (s *scheduler) refuse(pod *corev1.Pod, why *reason) {
	if now, err := s.lister.Pods(pod.Namespace).Get(pod.Name); err == nil {
		if c := pods.Condition(now, corev1.PodScheduled); c == nil || c.Message != why.message {
			s.eventsFor(pod).Event(pod, corev1.EventTypeWarning, "FailedScheduling", why.message)
		}
	}
	key := loop.KeyOf(pod)
	s.why.Store(key, why)
	s.reporter.Enqueue(key)
}

// gather takes the other waiting pods of first's group out of the queue, to be
// decided with it: the most important first, then the largest, which are the
// hardest to place. s.mu is held.
func (s *scheduler) gather(first *corev1.Pod, waiting []*corev1.Pod) []*podInfo {
	members := []*podInfo{newPodInfo(first)}
	for _, pod := range waiting {
		if pod.UID != first.UID && s.stillWaiting(pod) && s.queue.takeToo(pod.UID) {
			members = append(members, newPodInfo(pod))
		}
	}
	slices.SortFunc(members, func(a, b *podInfo) int {
		return cmp.Or(-cmp.Compare(priority(a), priority(b)), -cmp.Compare(a.requests.cpu, b.requests.cpu), -cmp.Compare(a.requests.memory, b.requests.memory),
			a.pod.CreationTimestamp.Compare(b.pod.CreationTimestamp.Time), cmp.Compare(a.pod.UID, b.pod.UID))
	})
	return members
}

// attempt is what trying to place a group came to.
type attempt struct {
	places []placement
	left   []*podInfo // those without a place
	found  int        // how many places there were before it was given up
	// first is the first pod that fitted nowhere, verdict why, each why on every
	// node if a member asks for that.
	first   *podInfo
	verdict verdict
	each    string
	wokenBy change
}

// placeAll assumes the pods on nodes, one after the other, so that each sees where
// those before it went. If fewer than need have a place, all are taken off again.
// s.mu is held.
//
// Where the first pod with a claim that several share goes decides where the others
// can: if that does not do, other nodes are tried for it.
func (s *scheduler) placeAll(members []*podInfo, need int) (a attempt) {
	shared, avoid := sharedBy(members), map[string]bool{}
	for try := range sharedTries {
		got, chose := s.placeOnce(members, need, shared, avoid)
		if try == 0 || len(got.places) >= need {
			a = got // the reason is that of the node which the scheduler prefers
		}
		if len(got.places) >= need || chose == "" {
			break
		}
		avoid[chose] = true
	}
	return a
}

// sharedTries is on how many nodes the devices of a claim that pods of a gang
// share are tried.
const sharedTries = 8

// sharedBy are the names of claims that more than one of the pods uses.
func sharedBy(members []*podInfo) map[string]bool {
	seen, out := map[string]bool{}, map[string]bool{}
	for _, p := range members {
		for i := range p.pod.Spec.ResourceClaims {
			if name := p.pod.Spec.ResourceClaims[i].ResourceClaimName; name != nil {
				out[*name] = seen[*name]
				seen[*name] = true
			}
		}
	}
	maps.DeleteFunc(out, func(_ string, twice bool) bool { return !twice })
	return out
}

// allocatesShared reports whether the pod is to have a claim allocated that others use.
func (p *podInfo) allocatesShared(shared map[string]bool) bool {
	return p.devices != nil && slices.ContainsFunc(p.devices.waiting, func(claim *resourcev1.ResourceClaim) bool { return shared[claim.Name] })
}

// placeOnce is placeAll for one choice of nodes for shared claims: those to avoid
// are not taken. chose is the node of the first of them; "": there was none left.
func (s *scheduler) placeOnce(members []*podInfo, need int, shared, avoid map[string]bool) (a attempt, chose string) {
	if s.devices != nil {
		s.devices.shared = map[types.UID]*sharedClaim{}
		defer func() { s.devices.shared = nil }()
	}
	promised := s.snapshot.promisesTo(members)
	asked := slices.ContainsFunc(members, func(p *podInfo) bool { return asksWhy(p.pod) })
	hopeless := 0
	// A pod that is to be near another of its group may be one too early.
	for left, again := members, true; again; {
		again, a.left, a.first = false, nil, nil
		before := len(a.places)
		for i, p := range left {
			v := runFilters(s.snapshot, p)
			first := chose == "" && p.allocatesShared(shared)
			if first {
				v.fit = slices.DeleteFunc(v.fit, func(n *nodeInfo) bool { return avoid[n.name] })
			}
			if len(v.fit) > 0 {
				a.places = append(a.places, s.take(p, v))
				if first {
					chose = a.places[len(a.places)-1].node
				}
				continue
			}
			a.left = append(a.left, p)
			a.wokenBy |= v.wokenBy
			if a.first == nil {
				a.first, a.verdict = p, v
				if asked && v.blocked == "" {
					a.each = whyEach(s.snapshot, p)
				}
			}
			if v.wokenBy&podPlaced != 0 {
				again = true
				continue
			}
			if hopeless++; len(members)-hopeless < need {
				a.left = append(a.left, left[i+1:]...)
				again = false
				break
			}
		}
		left = a.left
		again = again && len(a.places) > before && len(members)-hopeless >= need
		if again {
			hopeless = 0
		}
	}
	a.found = len(a.places)
	if a.found < need {
		for _, place := range a.places {
			s.untake(place)
		}
		a.places, a.left = nil, members
		s.snapshot.promise(promised)
	}
	return a, chose
}

// explain says why the group has no places.
func (a *attempt) explain(key loop.Key, group *schedulingv1beta1.PodGroup, placed, need int) string {
	message := fmt.Sprintf("PodGroup %q needs nodes for %d pods at the same time", key.Name, group.Spec.SchedulingPolicy.Gang.MinCount)
	if placed > 0 {
		message += fmt.Sprintf(", of which %d have one", placed)
	}
	message += fmt.Sprintf("; %d of %d found one", a.found, need)
	if a.first != nil {
		message += fmt.Sprintf("; pod %q: %s", a.first.pod.Name, a.verdict.explain())
	}
	return message
}

// promisesTo are the nominations of the pods.
func (s *snapshot) promisesTo(members []*podInfo) (out []nomination) {
	for _, p := range members {
		if n, ok := s.nominated[p.pod.UID]; ok {
			out = append(out, n)
		}
	}
	return out
}

func (s *snapshot) promise(list []nomination) {
	for _, n := range list {
		s.nominate(n)
	}
}

// release takes back what nodes the pods were promised; it reports whether there
// was any.
func (s *snapshot) release(list []*corev1.Pod) (any bool) {
	for _, pod := range list {
		if _, ok := s.nominated[pod.UID]; ok {
			delete(s.nominated, pod.UID)
			any = true
		}
	}
	return any
}

// displace looks for pods of lower priority whose loss lets need of the members
// have nodes at once, and promises them those nodes: for less no pod is displaced. It
// tries on the snapshot and leaves it as it was. Earlier promises did not do if
// those who were to go have gone: released reports that there were some. s.mu is
// held.
func (s *scheduler) displace(members []*podInfo, need int) (released bool) {
	if slices.ContainsFunc(members, func(p *podInfo) bool { return !mayPreempt(s.snapshot, p) }) {
		return false // one does not, or waits for others to go
	}
	for _, p := range members {
		released = s.snapshot.release([]*corev1.Pod{p.pod}) || released
	}
	budgets, err := s.budgets.List(labels.Everything())
	if err != nil {
		return released
	}
	if s.devices != nil {
		s.devices.shared = map[types.UID]*sharedClaim{}
		defer func() { s.devices.shared = nil }()
	}
	own, _ := groupOf(members[0].pod)
	plan := map[types.UID]nomination{}
	victims := 0
	var undo []func()
	for i, p := range members {
		if len(plan) == need || len(plan)+len(members)-i < need {
			break
		}
		n := nomination{p: p}
		v := runFilters(s.snapshot, p)
		if len(v.fit) == 0 {
			c := s.candidateFor(p, v, budgets, own)
			if c == nil {
				continue
			}
			for _, victim := range c.victims {
				n.victims = append(n.victims, victim.pod.UID)
				undo = append(undo, s.snapshot.without1(victim, c.node.name))
			}
			budgets = spent(budgets, c.victims)
			victims += len(c.victims)
			// The room is made on that node, though others may fit now as well: those
			// of a zone that a victim leaves.
			if !fits(s.snapshot, p, c.node) {
				break // a rule that the search for victims does not know
			}
			v.fit = []*nodeInfo{c.node}
		}
		place := s.take(p, v)
		undo = append(undo, func() { s.untake(place) })
		n.node = place.node
		plan[p.pod.UID] = n
	}
	for _, f := range slices.Backward(undo) {
		f()
	}
	if len(plan) < need || victims == 0 {
		return released
	}
	for _, n := range plan {
		s.snapshot.nominate(n)
	}
	return released
}

// candidateFor is a node that p fits once pods of lower priority, none of its own
// group, have gone.
func (s *scheduler) candidateFor(p *podInfo, v verdict, budgets []*policyv1.PodDisruptionBudget, own loop.Key) *candidate {
	if v.blocked != "" {
		return nil
	}
	c := preempt(s.snapshot, p, budgets)
	if c == nil || slices.ContainsFunc(c.victims, func(victim *podInfo) bool {
		key, ok := groupOf(victim.pod)
		return ok && key == own && victim.pod.Namespace == p.pod.Namespace
	}) {
		return nil
	}
	return c
}

// without1 takes a placed pod off its node, and returns what puts it back.
func (s *snapshot) without1(p *podInfo, node string) (back func()) {
	assumed := s.assumed[p.pod.UID]
	s.removePod(p.pod.UID)
	return func() {
		s.put(p, node)
		if assumed {
			s.assumed[p.pod.UID] = true
		}
	}
}

// spent returns the budgets as they are once the victims have gone.
func spent(budgets []*policyv1.PodDisruptionBudget, victims []*podInfo) []*policyv1.PodDisruptionBudget {
	if len(victims) == 0 {
		return budgets
	}
	out := slices.Clone(budgets)
	for i, b := range out {
		n := int32(0)
		for _, victim := range victims {
			if guards(b, victim) {
				n++
			}
		}
		if n > 0 {
			out[i] = b.DeepCopy()
			out[i].Status.DisruptionsAllowed -= n
		}
	}
	return out
}

// bindGroup binds the pods of a group that have places. What is written before
// that is written for all of them first; if it fails for one, all are taken off
// their nodes again and the group is tried again.
func (s *scheduler) bindGroup(ctx context.Context, places []placement, start time.Time, binds, waits *errgroup.Group) {
	all := func() {
		for _, place := range places {
			binds.Go(func() error { s.bind(ctx, place.pod, place.node, start); return nil })
		}
	}
	if len(places) == 0 || !slices.ContainsFunc(places, placement.prepares) {
		all()
		return
	}
	key, _ := groupOf(places[0].pod)
	waits.Go(func() error {
		// Each learns what becomes of its writes, also if another fails; but then none
		// waits for anything else any more.
		var preparing errgroup.Group
		off := make(chan struct{})
		callOff := sync.OnceFunc(func() { close(off) })
		errs := make([]error, len(places))
		for i, place := range places {
			place.off = off
			preparing.Go(func() error {
				if errs[i] = s.prepare(ctx, place); errs[i] != nil {
					callOff()
				}
				return errs[i]
			})
		}
		err := preparing.Wait()
		for _, each := range errs {
			if each != nil && !errors.Is(each, errCalledOff) {
				err = each // the reason, which may have come after those that were called off for it
				break
			}
		}
		s.mu.Lock()
		delete(s.groups.preparing, key)
		s.mu.Unlock()
		if err == nil {
			all()
		}
		for i, place := range places {
			switch {
			case err == nil:
			case errs[i] == nil, errors.Is(errs[i], errCalledOff): // the others' reason is no fault of this pod
				s.unprepare(ctx, place)
				s.unbound(ctx, place.pod, place.node, fmt.Errorf("taken back with PodGroup %q: %s", key.Name, err.Error()))
			default:
				s.unprepare(ctx, place) // what was written for it before that
				s.unbound(ctx, place.pod, place.node, errs[i])
			}
		}
		s.wakeGroup(key) // those that came meanwhile
		return nil
	})
}
