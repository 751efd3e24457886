package scheduler

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// interPodAffinity is the rule whose weights a profile may choose.
const interPodAffinity = "InterPodAffinity"

// term is one pod (anti-)affinity term, ready to match.
type term struct {
	selector   labels.Selector
	namespaces map[string]bool
	nsSelector labels.Selector // nil: only the listed namespaces
	topology   string
	key        string // which pods it matches, as text
	id         string // that, and where it counts
}

type weightedTerm struct {
	term
	weight int // negative: anti-affinity
}

func terms(pod *corev1.Pod) (attract, repel []term, preferred []weightedTerm) {
	a := pod.Spec.Affinity
	if a == nil {
		return nil, nil, nil
	}
	if p := a.PodAffinity; p != nil {
		for i := range p.RequiredDuringSchedulingIgnoredDuringExecution {
			attract = append(attract, newTerm(pod, &p.RequiredDuringSchedulingIgnoredDuringExecution[i]))
		}
		for i := range p.PreferredDuringSchedulingIgnoredDuringExecution {
			w := &p.PreferredDuringSchedulingIgnoredDuringExecution[i]
			preferred = append(preferred, weightedTerm{newTerm(pod, &w.PodAffinityTerm), int(w.Weight)})
		}
	}
	if p := a.PodAntiAffinity; p != nil {
		for i := range p.RequiredDuringSchedulingIgnoredDuringExecution {
			repel = append(repel, newTerm(pod, &p.RequiredDuringSchedulingIgnoredDuringExecution[i]))
		}
		for i := range p.PreferredDuringSchedulingIgnoredDuringExecution {
			w := &p.PreferredDuringSchedulingIgnoredDuringExecution[i]
			preferred = append(preferred, weightedTerm{newTerm(pod, &w.PodAffinityTerm), -int(w.Weight)})
		}
	}
	return attract, repel, preferred
}

func newTerm(pod *corev1.Pod, t *corev1.PodAffinityTerm) term {
	out := term{selector: selector(t.LabelSelector), topology: t.TopologyKey, namespaces: map[string]bool{}}
	out.selector = withPodLabels(out.selector, pod, t.MatchLabelKeys, t.MismatchLabelKeys)
	for _, ns := range t.Namespaces {
		out.namespaces[ns] = true
	}
	if t.NamespaceSelector != nil {
		out.nsSelector = selector(t.NamespaceSelector)
	} else if len(t.Namespaces) == 0 {
		out.namespaces[pod.Namespace] = true
	}
	out.key = keyOf(&out)
	out.id = out.topology + " " + out.key
	return out
}

// selector turns a label selector that validation let pass into its matcher; a
// broken one matches nothing.
func selector(s *metav1.LabelSelector) labels.Selector {
	out, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		return labels.Nothing()
	}
	return out
}

// withPodLabels narrows a selector to pods that agree (or disagree) with the
// pod in the values of some labels.
func withPodLabels(s labels.Selector, pod *corev1.Pod, match, mismatch []string) labels.Selector {
	for _, key := range match {
		if v, ok := pod.Labels[key]; ok {
			s = s.Add(requirement(key, "=", v)...)
		}
	}
	for _, key := range mismatch {
		if v, ok := pod.Labels[key]; ok {
			s = s.Add(requirement(key, "!=", v)...)
		}
	}
	return s
}

func requirement(key, op, value string) labels.Requirements {
	parsed, err := labels.ParseToRequirements(key + op + value)
	if err != nil {
		return nil // label keys and values were validated
	}
	return parsed
}

func (t *term) matches(s *snapshot, pod *corev1.Pod) bool {
	if !t.namespaces[pod.Namespace] && (t.nsSelector == nil || !t.nsSelector.Matches(s.namespaces[pod.Namespace])) {
		return false
	}
	return t.selector.Matches(labels.Set(pod.Labels))
}

// filterPodAffinity holds required pod affinity and anti-affinity of the pod,
// and the anti-affinity that placed pods have against it.
func filterPodAffinity(s *snapshot, p *podInfo) func(*nodeInfo) []string {
	if len(p.attract) == 0 && len(p.repel) == 0 && len(s.repelling.byID) == 0 {
		return nil
	}
	// where is a topology key with the domains that have pods of interest.
	type where struct {
		topology string
		pods     map[string]int
	}
	var attracted, repelled, forbidden []where
	if len(p.attract) > 0 {
		met := s.meeting(p.attract...) // affinity counts where one pod meets all terms, as upstream does
		for i := range p.attract {
			attracted = append(attracted, where{p.attract[i].topology, met.in(p.attract[i].topology)})
		}
	}
	for i := range p.repel {
		repelled = append(repelled, where{p.repel[i].topology, s.meeting(p.repel[i]).in(p.repel[i].topology)})
	}
	s.repelling.concerning(s, p, func(r *held) {
		forbidden = append(forbidden, where{r.topology, r.in(r.topology)})
	})
	if len(attracted)+len(repelled)+len(forbidden) == 0 {
		return nil // the terms of placed pods are about others
	}
	// The first of a group that wants to be with its like finds none: it may
	// go anywhere that has the topology label.
	firstOfKind := len(p.attract) > 0 && matchesAll(s, p.attract, p.pod)
	for _, w := range attracted {
		firstOfKind = firstOfKind && len(w.pods) == 0
	}
	in := func(n *nodeInfo, list []where) bool {
		for _, w := range list {
			if value, ok := topologyValue(n, w.topology); ok && w.pods[value] > 0 {
				return true
			}
		}
		return false
	}
	return func(n *nodeInfo) []string {
		for _, w := range attracted {
			value, ok := topologyValue(n, w.topology)
			if !ok || w.pods[value] == 0 && !firstOfKind {
				return []string{"node(s) didn't match pod affinity rules"}
			}
		}
		switch {
		case in(n, repelled):
			return []string{"node(s) didn't match pod anti-affinity rules"}
		case in(n, forbidden):
			return []string{"node(s) didn't satisfy existing pods anti-affinity rules"}
		}
		return nil
	}
}

func matchesAll(s *snapshot, terms []term, pod *corev1.Pod) bool {
	for i := range terms {
		if !terms[i].matches(s, pod) {
			return false
		}
	}
	return true
}
