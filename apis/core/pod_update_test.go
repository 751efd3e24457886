package core

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

// many are tolerations of which comparing each with each takes minutes.
func many(n int) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		for i := range n {
			p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{Key: fmt.Sprintf("a%d", i), Operator: corev1.TolerationOpExists})
		}
		slices.Reverse(p.Spec.Tolerations)
	}
}

func TestValidatePodUpdate(t *testing.T) {
	const onlyFew = "spec: Forbidden: pod updates may not change fields other than `spec.containers[*].image`"
	nop := func(*corev1.Pod) {}
	gated := func(p *corev1.Pod) { p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "a"}, {Name: "b"}} }
	tests := []struct {
		name     string
		old, new func(*corev1.Pod)
		want     []string
	}{
		{"nothing", nop, nop, nil},
		{"image", nop, inContainer(func(c *corev1.Container) { c.Image = "web:1.2" }), nil},
		{"labels", nop, func(p *corev1.Pod) { p.Labels = map[string]string{"a": "b"} }, nil},
		{"name", nop, func(p *corev1.Pod) { p.Name = "other" }, []string{`metadata.name: Invalid value: "other": field is immutable`}},
		{"no resource version", nop, func(p *corev1.Pod) { p.ResourceVersion = "" }, []string{`metadata.resourceVersion: Invalid value: "": must be specified for an update`}},
		{"command", nop, inContainer(func(c *corev1.Container) { c.Command = []string{"sh"} }), []string{onlyFew}},
		{"node", nop, func(p *corev1.Pod) { p.Spec.NodeName = "n1" }, []string{onlyFew}},
		{"more containers", nop, func(p *corev1.Pod) {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "b", Image: "b"})
		}, []string{"spec.containers: Forbidden: pod updates may not add or remove containers"}},
		{"deadline set", nop, func(p *corev1.Pod) { p.Spec.ActiveDeadlineSeconds = ptr.To[int64](5) }, nil},
		{"deadline extended", func(p *corev1.Pod) { p.Spec.ActiveDeadlineSeconds = ptr.To[int64](5) }, func(p *corev1.Pod) { p.Spec.ActiveDeadlineSeconds = ptr.To[int64](6) },
			[]string{"spec.activeDeadlineSeconds: Invalid value: 6: must be less than or equal to previous value"}},
		{"deadline removed", func(p *corev1.Pod) { p.Spec.ActiveDeadlineSeconds = ptr.To[int64](5) }, nop,
			[]string{"spec.activeDeadlineSeconds: Invalid value: null: must not update from a positive integer to nil value"}},
		{"toleration added", nop, func(p *corev1.Pod) { p.Spec.Tolerations = []corev1.Toleration{{Key: "a"}} }, nil},
		{"toleration removed", func(p *corev1.Pod) { p.Spec.Tolerations = []corev1.Toleration{{Key: "a"}} }, nop,
			[]string{"spec.tolerations: Forbidden: existing toleration can not be modified except its tolerationSeconds"}},
		{"gate removed, selector narrowed", gated, func(p *corev1.Pod) {
			p.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "b"}}
			p.Spec.NodeSelector = map[string]string{"disk": "fast"}
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
				NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "a", Operator: corev1.NodeSelectorOpExists}}}}}}}
		}, nil},
		{"gate added", nop, gated, []string{
			"spec.schedulingGates[0]: Forbidden: only deletion is allowed, but found new scheduling gate 'a'",
			"spec.schedulingGates[1]: Forbidden: only deletion is allowed, but found new scheduling gate 'b'",
		}},
		{"a preference dropped while gated", func(p *corev1.Pod) {
			gated(p)
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{
				{Weight: 1, Preference: corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "a", Operator: corev1.NodeSelectorOpExists}}}}}}}
		}, gated, nil},
		{"one of many tolerations removed", many(40_000), many(39_999),
			[]string{"spec.tolerations: Forbidden: existing toleration can not be modified except its tolerationSeconds"}},
		{"selector changed without gates", nop, func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"disk": "fast"} }, []string{onlyFew}},
		{"selector widened", func(p *corev1.Pod) { gated(p); p.Spec.NodeSelector = map[string]string{"disk": "fast"} }, gated,
			[]string{"spec.nodeSelector: Invalid value: "}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			checktest.Faults(t, validatePodUpdate(newPod(test.new), newPod(test.old)), test.want...)
		})
	}
}
