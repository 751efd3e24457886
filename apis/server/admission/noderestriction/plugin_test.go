package noderestriction

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestChangedLabels(t *testing.T) {
	node := func(labels map[string]string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: labels}}
	}
	const role, tier = "node-role.kubernetes.io/control-plane", "team.node-restriction.kubernetes.io/tier"
	for _, tt := range []struct {
		name     string
		old, new map[string]string
		want     []string
	}{
		{name: "what a node says of itself", new: map[string]string{
			corev1.LabelHostname: "n1", corev1.LabelOSStable: "linux", corev1.LabelArchStable: "amd64", "beta.kubernetes.io/os": "linux",
			corev1.LabelTopologyZone: "z", corev1.LabelTopologyRegion: "r", corev1.LabelInstanceTypeStable: "big",
			"node.kubernetes.io/gpu": "1", "feature.node.kubernetes.io/x": "1", "kubelet.kubernetes.io/x": "1",
			"plain": "1", "example.com/disk": "ssd", "notkubernetes.io/x": "1",
		}},
		{name: "a role", new: map[string]string{role: ""}, want: []string{role}},
		{name: "taking a role away", old: map[string]string{role: ""}, want: []string{role}},
		{name: "another value", old: map[string]string{role: "a"}, new: map[string]string{role: "b"}, want: []string{role}},
		{name: "a role that it has", old: map[string]string{role: ""}, new: map[string]string{role: "", "plain": "1"}},
		{name: "restricted", new: map[string]string{tier: "1", "node-restriction.kubernetes.io/x": "1"}, want: []string{"node-restriction.kubernetes.io/x", tier}},
		{name: "unknown ones of Kubernetes", new: map[string]string{"kubernetes.io/x": "1", "a.k8s.io/y": "1", "k8s.io/z": "1"}, want: []string{"a.k8s.io/y", "k8s.io/z", "kubernetes.io/x"}},
	} {
		if got := changedLabels(node(tt.old), node(tt.new)); !slices.Equal(got, tt.want) {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.want)
		}
	}
	if got := changedLabels(nil, node(map[string]string{role: ""})); !slices.Equal(got, []string{role}) {
		t.Errorf("on registration: %q", got)
	}
}
