package scheduler

import (
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
)

// held is one (anti-)affinity term with the tally of the placed pods that have it:
// their number, or the sum of the weights that they give it.
type held struct {
	*tally
	term
}

// heldTerms are terms of placed pods, each once however many pods have it. They are
// found by what a pod must have that one of them matches, so that a decision asks
// those that may concern its pod, however many there are.
type heldTerms struct {
	byID map[string]*held
	at   map[anchor]map[*held]bool
}

// anchor is what each pod has that a term matches: its namespace ("": any may do)
// and a label (no key: any may do).
type anchor struct{ namespace, key, value string }

func newHeldTerms() *heldTerms {
	return &heldTerms{byID: map[string]*held{}, at: map[anchor]map[*held]bool{}}
}

// add counts a pod on n that has the term, by that much.
func (h *heldTerms) add(n *nodeInfo, t *term, by int) {
	e := h.byID[t.id]
	if e == nil {
		e = &held{tally: newTally(), term: *t}
		e.in(t.topology)
		h.byID[t.id] = e
		for _, a := range t.anchors() {
			if h.at[a] == nil {
				h.at[a] = map[*held]bool{}
			}
			h.at[a][e] = true
		}
	}
	// Sums of weights that cancel each other out are as good as none.
	if e.add(n, by); len(e.nodes) > 0 {
		return
	}
	delete(h.byID, t.id)
	for _, a := range e.anchors() {
		if delete(h.at[a], e); len(h.at[a]) == 0 {
			delete(h.at, a)
		}
	}
}

// concerning calls yield with each term that matches the pod.
func (h *heldTerms) concerning(s *snapshot, p *podInfo, yield func(*held)) {
	if len(h.byID) == 0 {
		return
	}
	ask := func(a anchor) {
		for e := range h.at[a] {
			if e.matches(s, p.pod) {
				yield(e)
			}
		}
	}
	for _, namespace := range [...]string{"", p.pod.Namespace} {
		ask(anchor{namespace: namespace})
		for key, value := range p.pod.Labels {
			ask(anchor{namespace, key, value})
		}
	}
}

// anchors are under what the term is found. A pod that it matches has exactly one of
// them.
func (t *term) anchors() []anchor {
	var label anchor
	requirements, selectable := t.selector.Requirements()
	if !selectable {
		return nil // it matches no pod
	}
	for i := range requirements {
		if key, value, ok := fixed1(&requirements[i]); ok {
			label.key, label.value = key, value
			break
		}
	}
	if t.nsSelector != nil {
		return []anchor{label}
	}
	out := make([]anchor, 0, len(t.namespaces))
	for namespace := range t.namespaces {
		out = append(out, anchor{namespace, label.key, label.value})
	}
	return out
}

// fixed1 is the label that a requirement asks for, if it is one value of it.
func fixed1(r *labels.Requirement) (key, value string, ok bool) {
	switch r.Operator() {
	case selection.Equals, selection.DoubleEquals, selection.In:
	default:
		return "", "", false
	}
	values := r.ValuesUnsorted()
	if len(values) != 1 {
		return "", "", false
	}
	return r.Key(), values[0], true
}

func (h *heldTerms) relabel(n *nodeInfo, before map[string]string) {
	for _, e := range h.byID {
		e.relabel(n, before)
	}
}
