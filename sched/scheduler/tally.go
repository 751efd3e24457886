package scheduler

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
)

// tally counts placed pods, node by node and domain by domain. It is counted
// once and kept up to date with each pod that comes or goes and each node whose
// labels change: pods of one template ask the same question, and counting again
// for each would cost as much as there are pods.
type tally struct {
	nodes map[*nodeInfo]int // none is 0
	// domains are the sums by topology key and value, for keys asked for.
	domains map[string]map[string]int
}

func newTally() *tally {
	return &tally{nodes: map[*nodeInfo]int{}, domains: map[string]map[string]int{}}
}

func (t *tally) add(n *nodeInfo, by int) {
	if t.nodes[n] += by; t.nodes[n] == 0 {
		delete(t.nodes, n)
	}
	for topology, sums := range t.domains {
		if value, ok := topologyValue(n, topology); ok {
			addTo(sums, value, by)
		}
	}
}

func addTo(sums map[string]int, value string, by int) {
	if sums[value] += by; sums[value] == 0 {
		delete(sums, value)
	}
}

// in returns the sums by value of a topology key; the tally keeps it.
func (t *tally) in(topology string) map[string]int {
	sums, ok := t.domains[topology]
	if !ok {
		sums = map[string]int{}
		for n, count := range t.nodes {
			if value, ok := topologyValue(n, topology); ok {
				addTo(sums, value, count)
			}
		}
		t.domains[topology] = sums
	}
	return sums
}

// relabel moves a node's pods to other domains. before are the node's labels so
// far; n has the new ones.
func (t *tally) relabel(n *nodeInfo, before map[string]string) {
	count := t.nodes[n]
	if count == 0 {
		return
	}
	for topology, sums := range t.domains {
		if value, ok := before[topology]; ok {
			addTo(sums, value, -count)
		}
		if value, ok := topologyValue(n, topology); ok {
			addTo(sums, value, count)
		}
	}
}

// matching is the tally of the pods that match something.
type matching struct {
	*tally
	match func(*corev1.Pod) bool
	// byNamespaceLabels: the answer changes with a namespace's labels.
	byNamespaceLabels bool
}

// maxMatching bounds what is kept: each costs a match for every pod that comes
// or goes. Templates beyond that are counted each time.
const maxMatching = 64

// matching returns the tally under a key that says all that match depends on.
func (s *snapshot) matching(key string, byNamespaceLabels bool, match func(*corev1.Pod) bool) *tally {
	if m := s.matchings[key]; m != nil {
		return m.tally
	}
	m := &matching{tally: newTally(), match: match, byNamespaceLabels: byNamespaceLabels}
	for _, n := range s.list {
		for _, p := range n.pods {
			if match(p.pod) {
				m.add(n, 1)
			}
		}
	}
	if len(s.matchings) >= maxMatching {
		clear(s.matchings)
	}
	s.matchings[key] = m
	return m.tally
}

// living counts a namespace's pods that match and are not about to go.
func (s *snapshot) living(namespace string, match labels.Selector) *tally {
	return s.matching("living "+namespace+" "+match.String(), false, func(pod *corev1.Pod) bool {
		return pod.Namespace == namespace && pod.DeletionTimestamp == nil && match.Matches(labels.Set(pod.Labels))
	})
}

// owned counts a controller's pods that are not about to go. It is kept while it has
// any: unlike a matching it costs nothing for pods of others, and constraints that hold
// for all controllers ask for that of each.
func (s *snapshot) owned(owner types.UID) *tally {
	t := s.byOwner[owner]
	if t != nil {
		return t
	}
	maps.DeleteFunc(s.byOwner, func(_ types.UID, t *tally) bool { return len(t.nodes) == 0 })
	t = newTally()
	for _, n := range s.list {
		if count := n.owners[owner]; count > 0 {
			t.add(n, count)
		}
	}
	s.byOwner[owner] = t
	return t
}

// own adds to what is counted of a controller's pods on a node.
func (s *snapshot) own(n *nodeInfo, owner types.UID, by int) {
	if n.owners[owner] += by; n.owners[owner] == 0 {
		delete(n.owners, owner)
	}
	s.zones.add(owner, n.zoneID, by)
	if t := s.byOwner[owner]; t != nil {
		t.add(n, by)
	}
}

// meeting counts the pods that match all of the terms.
func (s *snapshot) meeting(terms ...term) *tally {
	key := "meeting"
	byLabels := false
	for i := range terms {
		key += " " + terms[i].key
		byLabels = byLabels || terms[i].nsSelector != nil
	}
	return s.matching(key, byLabels, func(pod *corev1.Pod) bool { return matchesAll(s, terms, pod) })
}

// tallied adds a pod that came (by 1) to, or takes one that went (by -1) from,
// every tally that it is part of.
func (s *snapshot) tallied(n *nodeInfo, p *podInfo, by int) {
	for _, m := range s.matchings {
		if m.match(p.pod) {
			m.add(n, by)
		}
	}
	for i := range p.repel {
		s.repelling.add(n, &p.repel[i], by)
	}
	for i := range p.attract {
		s.attracting.add(n, &p.attract[i], by)
	}
	for i := range p.preferred {
		s.preferring.add(n, &p.preferred[i].term, by*p.preferred[i].weight)
	}
}

// relabelled moves what is counted on a node to its new labels' domains.
func (s *snapshot) relabelled(n *nodeInfo, before map[string]string) {
	s.rezone(n)
	for owner := range n.owners {
		if t := s.byOwner[owner]; t != nil {
			t.relabel(n, before)
		}
	}
	for _, m := range s.matchings {
		m.relabel(n, before)
	}
	for _, h := range []*heldTerms{s.repelling, s.attracting, s.preferring} {
		h.relabel(n, before)
	}
}

// setNamespace takes note of a namespace's labels; nil: it is gone.
func (s *snapshot) setNamespace(name string, set labels.Set) {
	switch before, known := s.namespaces[name]; {
	case set == nil:
		delete(s.namespaces, name)
	case known && maps.Equal(before, set):
		return
	default:
		s.namespaces[name] = set
	}
	maps.DeleteFunc(s.matchings, func(_ string, m *matching) bool { return m.byNamespaceLabels })
}

// keyOf says which pods a term matches; its topology is no part of it.
func keyOf(t *term) string {
	in := "-"
	if t.nsSelector != nil {
		in = "{" + t.nsSelector.String() + "}"
	}
	return strings.Join(slices.Sorted(maps.Keys(t.namespaces)), ",") + " " + in + " {" + t.selector.String() + "}"
}
