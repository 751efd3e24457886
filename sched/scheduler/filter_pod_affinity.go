package scheduler

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// term is one pod (anti-)affinity term, ready to match.
type term struct {
	selector   labels.Selector
	namespaces map[string]bool
	nsSelector labels.Selector // nil: only the listed namespaces
	topology   string
}

type weightedTerm struct {
	term
	weight int64 // negative: anti-affinity
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
			preferred = append(preferred, weightedTerm{newTerm(pod, &w.PodAffinityTerm), int64(w.Weight)})
		}
	}
	if p := a.PodAntiAffinity; p != nil {
		for i := range p.RequiredDuringSchedulingIgnoredDuringExecution {
			repel = append(repel, newTerm(pod, &p.RequiredDuringSchedulingIgnoredDuringExecution[i]))
		}
		for i := range p.PreferredDuringSchedulingIgnoredDuringExecution {
			w := &p.PreferredDuringSchedulingIgnoredDuringExecution[i]
			preferred = append(preferred, weightedTerm{newTerm(pod, &w.PodAffinityTerm), -int64(w.Weight)})
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

// domain is one value of one topology key: "all nodes with zone=a".
type domain struct{ key, value string }

func domainOf(n *nodeInfo, key string) (domain, bool) {
	if n.node == nil {
		return domain{}, false
	}
	v, ok := n.node.Labels[key]
	return domain{key, v}, ok
}

// filterPodAffinity holds required pod affinity and anti-affinity of the pod,
// and the anti-affinity that placed pods have against it.
func filterPodAffinity(s *snapshot, p *podInfo) func(*nodeInfo) []string {
	if len(p.attract) == 0 && len(p.repel) == 0 && s.repelling == 0 {
		return nil
	}
	attracted := make([]map[domain]bool, len(p.attract)) // per term
	for i := range attracted {
		attracted[i] = map[domain]bool{}
	}
	repelled := map[domain]bool{}  // by the pod's own terms
	forbidden := map[domain]bool{} // by terms of placed pods
	for _, n := range s.nodes {
		for _, other := range n.pods {
			// Affinity counts where one pod meets all terms, as upstream does.
			if len(p.attract) > 0 && matchesAll(s, p.attract, other.pod) {
				for i := range p.attract {
					if d, ok := domainOf(n, p.attract[i].topology); ok {
						attracted[i][d] = true
					}
				}
			}
			for i := range p.repel {
				if d, ok := domainOf(n, p.repel[i].topology); ok && p.repel[i].matches(s, other.pod) {
					repelled[d] = true
				}
			}
			for i := range other.repel {
				if d, ok := domainOf(n, other.repel[i].topology); ok && other.repel[i].matches(s, p.pod) {
					forbidden[d] = true
				}
			}
		}
	}
	// The first of a group that wants to be with its like finds nobody: it may
	// go anywhere that has the topology label.
	firstOfKind := len(p.attract) > 0 && matchesAll(s, p.attract, p.pod)
	for i := range attracted {
		firstOfKind = firstOfKind && len(attracted[i]) == 0
	}
	return func(n *nodeInfo) []string {
		for i := range p.attract {
			d, ok := domainOf(n, p.attract[i].topology)
			if !ok || !attracted[i][d] && !firstOfKind {
				return []string{"node(s) didn't match pod affinity rules"}
			}
		}
		for i := range p.repel {
			if d, ok := domainOf(n, p.repel[i].topology); ok && repelled[d] {
				return []string{"node(s) didn't match pod anti-affinity rules"}
			}
		}
		for d := range forbidden {
			if v, ok := n.node.Labels[d.key]; ok && v == d.value {
				return []string{"node(s) didn't satisfy existing pods anti-affinity rules"}
			}
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
