package noderestriction

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
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

// TestANodeNamesNoOwner: the garbage collector would delete it with one that is not
// there, which a node may not do.
func TestANodeNamesNoOwner(t *testing.T) {
	n1 := &user.DefaultInfo{Name: "system:node:n1", Groups: []string{user.NodesGroup}}
	node := func(owners ...string) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
		for _, name := range owners {
			n.OwnerReferences = append(n.OwnerReferences, metav1.OwnerReference{APIVersion: "v1", Kind: "Namespace", Name: name, UID: "u"})
		}
		return n
	}
	for _, tt := range []struct {
		name      string
		old, new  *corev1.Node
		operation admission.Operation
		sub       string
		ok        bool
	}{
		{"made with one", nil, node("a"), admission.Create, "", false},
		{"made without", nil, node(), admission.Create, "", true},
		{"given one", node(), node("a"), admission.Update, "", false},
		{"given one by its status", node(), node("a"), admission.Update, "status", false},
		{"given another", node("a"), node("b"), admission.Update, "", false},
		{"taken away", node("a"), node(), admission.Update, "", false},
		{"one that it has", node("a"), node("a"), admission.Update, "status", true},
	} {
		var obj, old runtime.Object
		obj = tt.new
		if tt.old != nil {
			old = tt.old
		}
		a := admission.NewAttributesRecord(obj, old, corev1.SchemeGroupVersion.WithKind("Node"), "", "n1", corev1.SchemeGroupVersion.WithResource("nodes"), tt.sub, tt.operation, nil, false, n1)
		if err := New(nothing{}).(admission.ValidationInterface).Validate(t.Context(), a, nil); (err == nil) != tt.ok {
			t.Errorf("%s: %v", tt.name, err)
		}
	}
}
