package fence

import (
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/claim"
	"github.com/clusterd/clusterd/apis/names"
)

// Guarded reports whether the API knows that the pod is fenced.
func Guarded(pod *v1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c v1.PodCondition) bool {
		return c.Type == names.SelfFencingCondition && c.Status == v1.ConditionTrue
	})
}

// wish says whether the pod is to be fenced if its volumes allow it, and whether
// it has asked for that itself. claims: the node does so with every pod that has
// claims. Any value of the annotation but true and false counts as none.
func wish(pod *v1.Pod, claims bool) (asked, wanted bool) {
	switch pod.Annotations[names.SelfFencing] {
	case "true":
		return true, true
	case "false":
		return false, false
	}
	return false, claims && len(claimsOf(pod)) > 0
}

func claimsOf(pod *v1.Pod) (out []string) {
	for i := range pod.Spec.Volumes {
		if name := claim.NameOf(pod, &pod.Spec.Volumes[i]); name != "" {
			out = append(out, name)
		}
	}
	return out
}

// NodeBound reports whether one node alone reaches the volume: it is a directory or
// a disk of that node, or its affinity names just one host. A pod that uses it
// can come back nowhere else.
func NodeBound(v *v1.PersistentVolume) bool {
	if v.Spec.Local != nil {
		return true
	}
	if v.Spec.NodeAffinity == nil || v.Spec.NodeAffinity.Required == nil {
		return false
	}
	hosts := map[string]bool{}
	for _, term := range v.Spec.NodeAffinity.Required.NodeSelectorTerms {
		one := ""
		for _, e := range term.MatchExpressions {
			if e.Key == v1.LabelHostname && e.Operator == v1.NodeSelectorOpIn && len(e.Values) == 1 {
				one = e.Values[0]
			}
		}
		for _, e := range term.MatchFields {
			if e.Key == "metadata.name" && e.Operator == v1.NodeSelectorOpIn && len(e.Values) == 1 {
				one = e.Values[0]
			}
		}
		if one == "" {
			return false
		}
		hosts[one] = true
	}
	return len(hosts) == 1
}
