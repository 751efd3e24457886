package node

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// Registration is what a Node is made with. It is no desired state: what others change
// of it later stays as they want it, so that an administrator can take a taint away.
type Registration struct {
	Labels map[string]string
	Taints []v1.Taint
}

// begin is the object as it is created.
func (r Registration) begin(node *v1.Node) *v1.Node {
	node = node.DeepCopy()
	for key, value := range r.Labels {
		if _, own := node.Labels[key]; !own { // what the node says by itself is so
			node.Labels[key] = value
		}
	}
	node.Spec.Taints = append(node.Spec.Taints, r.Taints...)
	return node
}

// ownLabels are those that each node has by itself.
var ownLabels = []string{v1.LabelHostname, v1.LabelOSStable, v1.LabelArchStable, "beta.kubernetes.io/os", "beta.kubernetes.io/arch"}

// ParseLabels reads KEY=VALUE, separated by commas.
func ParseLabels(text string) (map[string]string, error) {
	labels := map[string]string{}
	for part := range parts(text) {
		key, value, ok := strings.Cut(part, "=")
		if !ok {
			return nil, fmt.Errorf("%q: write it as KEY=VALUE, such as disk=ssd", part)
		}
		if err := checkKeyValue(part, key, value); err != nil {
			return nil, err
		}
		if slices.Contains(ownLabels, key) {
			return nil, fmt.Errorf("%q: each node has %s by itself: leave it out", part, key)
		}
		if _, twice := labels[key]; twice {
			return nil, fmt.Errorf("%q: %s is given twice", part, key)
		}
		labels[key] = value
	}
	return labels, nil
}

// ParseTaints reads KEY=VALUE:EFFECT or KEY:EFFECT, separated by commas.
func ParseTaints(text string) (taints []v1.Taint, err error) {
	for part := range parts(text) {
		at := strings.LastIndexByte(part, ':')
		if at < 0 {
			return nil, fmt.Errorf("%q: write it as KEY=VALUE:EFFECT, such as dedicated=db:NoSchedule", part)
		}
		key, value, _ := strings.Cut(part[:at], "=")
		t := v1.Taint{Key: key, Value: value, Effect: v1.TaintEffect(part[at+1:])}
		if err := checkKeyValue(part, key, value); err != nil {
			return nil, err
		}
		switch t.Effect {
		case v1.TaintEffectNoSchedule, v1.TaintEffectPreferNoSchedule, v1.TaintEffectNoExecute:
		default:
			return nil, fmt.Errorf("%q: the effect is NoSchedule, PreferNoSchedule or NoExecute, not %q", part, t.Effect)
		}
		if slices.ContainsFunc(taints, func(o v1.Taint) bool { return o.MatchTaint(&t) }) {
			return nil, fmt.Errorf("%q: %s with the effect %s is given twice", part, key, t.Effect)
		}
		taints = append(taints, t)
	}
	return taints, nil
}

// parts are what stands between commas, without what is empty.
func parts(text string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for part := range strings.SplitSeq(text, ",") {
			if part = strings.TrimSpace(part); part != "" && !yield(part) {
				return
			}
		}
	}
}

func checkKeyValue(part, key, value string) error {
	if errs := validation.IsQualifiedName(key); len(errs) > 0 {
		return fmt.Errorf("%q: the key %q: %s", part, key, errs[0])
	}
	if errs := validation.IsValidLabelValue(value); len(errs) > 0 {
		return fmt.Errorf("%q: the value %q: %s", part, value, errs[0])
	}
	return nil
}
