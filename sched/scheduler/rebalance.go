package scheduler

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// What makes a move worth a pod's life.
const (
	// farAbove is how much more of a resource, in hundredths of what it has, a node's
	// pods ask for than the pods of all nodes do, before one of them is moved.
	farAbove = 20
	// lighter is how much less, in hundredths, the other node must be asked for with
	// the pod than the pod's node is.
	lighter = 10
	// gain is by how many points the scheduler must prefer the other node.
	gain = 5
	// looks is how many pods are looked at in one pass for rules that they break; the
	// next pass goes on with others.
	looks = 200
	// tries is how many pods of a node that is asked for too much are tried.
	tries = 20
)

// Kinds of reasons for a move.
const (
	MoveRule     = "rule"     // the pod's node breaks a rule that it did not break once
	MoveAffinity = "affinity" // another node meets more of the node affinity that the pod prefers
	MoveSpread   = "spread"   // the pod's topology spread, a wish, is better on another node
	MoveLoad     = "load"     // the pod's node is asked for far more than the mean
)

// Move is a pod that would be better on another node.
type Move struct {
	Pod      *corev1.Pod
	From, To string
	Kind     string // one of the constants above
	Why      string
}

// Planner says which pods would be better on other nodes, by the rules and the
// preferences of the scheduler. Its methods may be called from one goroutine.
type Planner struct {
	s    *scheduler
	last types.UID // the pod that was looked at last
}

// Moves returns at most most moves of pods that may be moved. Nothing comes of it
// while the scheduler is at work: pods wait for a binding, or for others to go.
func (p *Planner) Moves(may func(*corev1.Pod) bool, most int) []Move {
	p.s.mu.Lock()
	defer p.s.mu.Unlock()
	if len(p.s.snapshot.assumed)+len(p.s.snapshot.nominated) > 0 {
		return nil
	}
	var out []Move
	out, p.last = rebalance(p.s.snapshot, may, most, p.last)
	return out
}

// rebalance plans moves one after the other, each on the state that those before
// it lead to, and leaves the snapshot as it was. Moves by rules come first, then
// those by preferences, then by load. A later kind never undoes an earlier one: it
// takes only nodes that are as good by what comes before it. A node that gets a
// pod for load's sake is not far above the mean then, so that it gives none away.
func rebalance(s *snapshot, may func(*corev1.Pod) bool, most int, last types.UID) (moves []Move, now types.UID) {
	next := s.next
	var undo []func()
	do := func(m *Move, p *podInfo) {
		moves = append(moves, *m)
		back := s.without1(p, m.From)
		s.put(p, m.To)
		undo = append(undo, func() { s.removePod(p.pod.UID); back() })
	}
	var all []*podInfo
	for _, n := range s.list {
		if !givesPods(n) {
			continue
		}
		for _, p := range n.pods {
			if s.profile(p) != nil && may(p.pod) {
				all = append(all, p)
			}
		}
	}
	slices.SortFunc(all, func(a, b *podInfo) int { return cmp.Compare(a.pod.UID, b.pod.UID) })
	start, _ := slices.BinarySearchFunc(all, last, func(p *podInfo, uid types.UID) int { return cmp.Compare(p.pod.UID, uid+"\x00") })
	now = last
	for i := 0; i < min(looks, len(all)) && len(moves) < most; i++ {
		p := all[(start+i)%len(all)]
		now = p.pod.UID
		if m := s.misplaced(p); m != nil {
			do(m, p)
		}
	}
	for len(moves) < most {
		p, m := s.tooLoaded(may, moves)
		if m == nil {
			break
		}
		do(m, p)
	}
	for _, f := range slices.Backward(undo) {
		f()
	}
	s.next = next
	return moves, now
}

// givesPods reports whether pods may be moved from the node. One that is cordoned,
// or in trouble, is left to those who see to it.
func givesPods(n *nodeInfo) bool {
	return !n.out && !n.cordoned &&
		!slices.ContainsFunc(n.taints, func(t corev1.Taint) bool { return strings.HasPrefix(t.Key, "node.kubernetes.io/") })
}

// balanced are the rules that can be broken by what happens after a pod was bound.
var balanced = map[string]bool{"TaintToleration": true, "NodeAffinity": true, interPodAffinity: true, topologySpread: true}

// dryRun is what the scheduler would do with a placed pod, if it had no node.
type dryRun struct {
	from, to *nodeInfo
	broken   string // the rule that from breaks; "": none
	reason   string // in its words
	points   int64  // by which to is preferred to from
	// affinity and spread are the values of from and to by those preferences.
	affinity, spread [2]int64
}

// dryRun decides about p on the snapshot without it; nil: no other node fits it,
// or none is preferred.
func (s *snapshot) dryRun(p *podInfo) *dryRun {
	out := &dryRun{from: s.nodes[s.placed[p.pod.UID]]}
	defer s.without1(p, out.from.name)()
	pod := p.pod.DeepCopy()
	pod.Spec.NodeName = ""
	q := newPodInfo(pod)
	q.choosy = true // among all nodes
	v := runFilters(s, q)
	for _, f := range s.profile(q).filters {
		if !balanced[f.Name] || v.blocked != "" {
			continue
		}
		if check := f.prepare(s, q); check != nil {
			if reasons := check(out.from); len(reasons) > 0 {
				out.broken, out.reason = f.Name, reasons[0]
				break
			}
		}
	}
	if len(v.fit) == 0 {
		return nil
	}
	slices.SortFunc(v.fit, func(a, b *nodeInfo) int { return cmp.Compare(a.name, b.name) })
	sums := total(s, q, v.fit)
	best, here := 0, slices.Index(v.fit, out.from)
	for i := range sums {
		if sums[i] > sums[best] {
			best = i
		}
	}
	if best == here || here < 0 && out.broken == "" {
		return nil // it is well here, or something else is in its way here
	}
	out.to = v.fit[best]
	if here >= 0 {
		out.points = sums[best] - sums[here]
	}
	for i, n := range []*nodeInfo{out.from, out.to} {
		if of := scoreNodeAffinity(s, q); of != nil {
			out.affinity[i] = of(n)
		}
		if of := scoreSpread(s, q); of != nil {
			out.spread[i] = of(n)
		}
	}
	return out
}

// misplaced says where the pod would be better by rules and its own preferences;
// nil: it is well where it is.
func (s *snapshot) misplaced(p *podInfo) *Move {
	if !p.choosy && !s.breaksARule(p) {
		return nil
	}
	d := s.dryRun(p)
	if d == nil {
		return nil
	}
	m := &Move{Pod: p.pod, From: d.from.name, To: d.to.name}
	switch {
	case d.broken != "":
		m.Kind, m.Why = MoveRule, fmt.Sprintf("%s is broken on node %s by now (%s), and not on %s", d.broken, m.From, d.reason, m.To)
	case d.points < gain:
		return nil
	case d.affinity[1] > d.affinity[0]:
		m.Kind, m.Why = MoveAffinity, fmt.Sprintf("node %s meets preferred node affinity of weight %d, %s of %d", m.To, d.affinity[1], m.From, d.affinity[0])
	case d.affinity[1] == d.affinity[0] && d.spread[1] < d.spread[0]:
		m.Kind, m.Why = MoveSpread, fmt.Sprintf("beside it %d pods that match its topologySpreadConstraints are in the domains of node %s, %d in those of %s", d.spread[0], m.From, d.spread[1], m.To)
	default:
		return nil
	}
	return m
}

// breaksARule reports whether a rule refuses the pod's own node.
func (s *snapshot) breaksARule(p *podInfo) bool {
	n := s.nodes[s.placed[p.pod.UID]]
	defer s.without1(p, n.name)()
	return slices.ContainsFunc(s.profile(p).filters, func(f Filter) bool {
		if !balanced[f.Name] {
			return false
		}
		check := f.prepare(s, p)
		return check != nil && len(check(n)) > 0
	})
}

// measured are the resources whose load counts.
var measured = []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory}

// share is how much of a resource the node's pods ask for, in hundredths.
func (n *nodeInfo) share(name corev1.ResourceName, more int64) float64 {
	if has := n.allocatable.of(name); has > 0 {
		return 100 * float64(n.requested.of(name)+more) / float64(has)
	}
	return 0
}

// means are the shares of all nodes together that take and give pods.
func (s *snapshot) means() map[corev1.ResourceName]float64 {
	out := map[corev1.ResourceName]float64{}
	for _, name := range measured {
		asked, has := int64(0), int64(0)
		for _, n := range s.list {
			if givesPods(n) {
				asked, has = asked+n.requested.of(name), has+n.allocatable.of(name)
			}
		}
		if has > 0 {
			out[name] = 100 * float64(asked) / float64(has)
		}
	}
	return out
}

// tooLoaded finds a pod to move from a node that is asked for far more than the
// mean, the worst node first, its largest pods first. Pods of moves have been moved.
func (s *snapshot) tooLoaded(may func(*corev1.Pod) bool, moves []Move) (*podInfo, *Move) {
	means := s.means()
	type load struct {
		n     *nodeInfo
		name  corev1.ResourceName
		share float64
	}
	var loads []load
	for _, n := range s.list {
		for _, name := range measured {
			if share := n.share(name, 0); givesPods(n) && share > means[name]+farAbove {
				loads = append(loads, load{n, name, share})
			}
		}
	}
	slices.SortFunc(loads, func(a, b load) int {
		return cmp.Or(-cmp.Compare(a.share-means[a.name], b.share-means[b.name]), cmp.Compare(a.n.name, b.n.name), cmp.Compare(a.name, b.name))
	})
	for _, l := range loads {
		var here []*podInfo
		for _, p := range l.n.pods {
			if p.requests.of(l.name) > 0 && s.profile(p) != nil && may(p.pod) && !slices.ContainsFunc(moves, func(m Move) bool { return m.Pod.UID == p.pod.UID }) {
				here = append(here, p)
			}
		}
		slices.SortFunc(here, func(a, b *podInfo) int {
			return cmp.Or(-cmp.Compare(a.requests.of(l.name), b.requests.of(l.name)), cmp.Compare(a.pod.UID, b.pod.UID))
		})
		for _, p := range here[:min(tries, len(here))] {
			d := s.dryRun(p)
			if d == nil || d.broken != "" || d.points < gain || d.affinity[1] < d.affinity[0] || d.spread[1] > d.spread[0] {
				continue
			}
			after := d.to.share(l.name, p.requests.of(l.name))
			if after > l.share-lighter || slices.ContainsFunc(measured, func(name corev1.ResourceName) bool {
				return d.to.share(name, p.requests.of(name)) > means[name]+farAbove
			}) {
				continue
			}
			return p, &Move{Pod: p.pod, From: l.n.name, To: d.to.name, Kind: MoveLoad, Why: fmt.Sprintf("pods ask for %.0f%% of the %s of node %s, for %.0f%% of all nodes' (mean); with it for %.0f%% of that of %s",
				l.share, l.name, l.n.name, means[l.name], after, d.to.name)}
		}
	}
	return nil, nil
}
