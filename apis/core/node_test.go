package core

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func newNode(edit func(*corev1.Node)) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", ResourceVersion: "7"}}
	edit(n)
	defaultNode(n)
	return n
}

func TestValidateNode(t *testing.T) {
	tests := []struct {
		name string
		edit func(*corev1.Node)
		want []string
	}{
		{"sound", func(*corev1.Node) {}, nil},
		{"taints", func(n *corev1.Node) {
			n.Spec.Taints = []corev1.Taint{{Key: "a", Effect: "NoSchedule"}, {Key: "a", Effect: "NoSchedule"}, {Key: "a", Effect: "NoExecute", Value: "b c"}, {Effect: "Stop"}}
		}, []string{
			"spec.taints[1]: Duplicate value: ",
			`spec.taints[2].value: Invalid value: "b c": `,
			`spec.taints[3].key: Invalid value: "": name part must be non-empty`,
			`spec.taints[3].key: Invalid value: "": name part must consist of`,
			`spec.taints[3].effect: Unsupported value: "Stop": supported values: "NoExecute", "NoSchedule", "PreferNoSchedule"`,
		}},
		{"pod addresses", func(n *corev1.Node) { n.Spec.PodCIDRs = []string{"10.0.0.0/24", "fd00::/64", "x"} }, []string{
			`spec.podCIDRs[2]: Invalid value: "x": must be a valid CIDR`,
			"spec.podCIDRs: Invalid value: ",
		}},
		{"capacity", func(n *corev1.Node) { n.Status.Capacity = corev1.ResourceList{"pods": resource.MustParse("1.5")} }, []string{
			`status.capacity[pods]: Invalid value: "1500m": must be an integer`,
			`status.allocatable[pods]: Invalid value: "1500m": must be an integer`,
		}},
		{"address twice", func(n *corev1.Node) {
			n.Status.Addresses = []corev1.NodeAddress{{Type: "InternalIP", Address: "a"}, {Type: "InternalIP", Address: "a"}}
		}, []string{"status.addresses[1]: Duplicate value: "}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) { checktest.Faults(t, validateNode(newNode(test.edit)), test.want...) })
	}
}

func TestValidateNodeUpdate(t *testing.T) {
	nop := func(*corev1.Node) {}
	tests := []struct {
		name     string
		old, new func(*corev1.Node)
		want     []string
	}{
		{"cordon", nop, func(n *corev1.Node) { n.Spec.Unschedulable = true }, nil},
		{"taint", nop, func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "a", Effect: "NoSchedule"}} }, nil},
		{"first pod addresses", nop, func(n *corev1.Node) { n.Spec.PodCIDR = "10.0.0.0/24" }, nil},
		{"other pod addresses", func(n *corev1.Node) { n.Spec.PodCIDR = "10.0.0.0/24" }, func(n *corev1.Node) { n.Spec.PodCIDR = "10.0.1.0/24" },
			[]string{`spec.podCIDRs: Forbidden: node updates may not change podCIDR except from "" to valid`}},
		{"other provider", func(n *corev1.Node) { n.Spec.ProviderID = "a" }, func(n *corev1.Node) { n.Spec.ProviderID = "b" },
			[]string{`spec.providerID: Forbidden: node updates may not change providerID except from "" to valid`}},
		{"anything else", nop, func(n *corev1.Node) { n.Spec.DoNotUseExternalID = "a" },
			[]string{"spec: Forbidden: node updates may only change labels, taints, or capacity"}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			checktest.Faults(t, validateNodeUpdate(newNode(test.new), newNode(test.old)), test.want...)
		})
	}
}

func TestNodeStatusAndRoles(t *testing.T) {
	ready := func(s corev1.ConditionStatus) []corev1.NodeCondition {
		return []corev1.NodeCondition{{Type: corev1.NodeMemoryPressure, Status: corev1.ConditionTrue}, {Type: corev1.NodeReady, Status: s}}
	}
	tests := []struct {
		edit          func(*corev1.Node)
		status, roles string
	}{
		{func(*corev1.Node) {}, "Unknown", "<none>"},
		{func(n *corev1.Node) { n.Status.Conditions = ready(corev1.ConditionTrue) }, "Ready", "<none>"},
		{func(n *corev1.Node) { n.Status.Conditions = ready(corev1.ConditionUnknown) }, "NotReady", "<none>"},
		{func(n *corev1.Node) {
			n.Spec.Unschedulable = true
			n.Status.Conditions = ready(corev1.ConditionFalse)
			n.Labels = map[string]string{"node-role.kubernetes.io/worker": "", "node-role.kubernetes.io/control-plane": "", "kubernetes.io/role": "edge"}
		}, "NotReady,SchedulingDisabled", "control-plane,edge,worker"},
	}
	for _, test := range tests {
		n := newNode(test.edit)
		if got := nodeStatus(n); got != test.status {
			t.Errorf("status %s, want %s", got, test.status)
		}
		if got := nodeRoles(n); got != test.roles {
			t.Errorf("roles %s, want %s", got, test.roles)
		}
	}
}
