package networking

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func TestPolicyDefaults(t *testing.T) {
	p := &networkingv1.NetworkPolicy{Spec: networkingv1.NetworkPolicySpec{Egress: []networkingv1.NetworkPolicyEgressRule{{Ports: []networkingv1.NetworkPolicyPort{{}}}}}}
	NetworkPolicy().Default(p)
	if len(p.Spec.PolicyTypes) != 2 || *p.Spec.Egress[0].Ports[0].Protocol != corev1.ProtocolTCP {
		t.Errorf("%+v", p.Spec)
	}
	p = &networkingv1.NetworkPolicy{}
	NetworkPolicy().Default(p)
	if len(p.Spec.PolicyTypes) != 1 || p.Spec.PolicyTypes[0] != networkingv1.PolicyTypeIngress {
		t.Errorf("%+v", p.Spec)
	}
}

func TestValidatePolicy(t *testing.T) {
	from := func(p networkingv1.NetworkPolicyPeer) networkingv1.NetworkPolicySpec {
		return networkingv1.NetworkPolicySpec{Ingress: []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{p}}}}
	}
	block := func(cidr string, except ...string) networkingv1.NetworkPolicySpec {
		return from(networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: cidr, Except: except}})
	}
	to := func(p networkingv1.NetworkPolicyPort) networkingv1.NetworkPolicySpec {
		return networkingv1.NetworkPolicySpec{Egress: []networkingv1.NetworkPolicyEgressRule{{Ports: []networkingv1.NetworkPolicyPort{p}}}}
	}
	for _, tt := range []struct {
		name string
		spec networkingv1.NetworkPolicySpec
		want []string
	}{
		{"empty", networkingv1.NetworkPolicySpec{}, nil},
		{"block", block("10.0.0.0/8", "10.1.0.0/16", "10.2.3.4/32"), nil},
		{"block of IPv6", block("2001:db8::/32", "2001:db8:1::/48"), nil},
		{"block of IPv6, not as it is printed", block("2001:DB8:0::/32", "2001:DB8:1:0::/48"), nil},
		{"an address with a length", block("10.0.0.1/8"), []string{`spec.ingress[0].from[0].ipBlock.cidr: Invalid value: "10.0.0.1/8"`}},
		{"no block", block(""), []string{"spec.ingress[0].from[0].ipBlock.cidr: Required value"}},
		{"bad block", block("10.0.0.0"), []string{"spec.ingress[0].from[0].ipBlock.cidr: Invalid value"}},
		{"except outside", block("10.0.0.0/8", "11.0.0.0/16"), []string{`spec.ingress[0].from[0].ipBlock.except[0]: Invalid value: "11.0.0.0/16": must be a strict subset of cidr 10.0.0.0/8`}},
		{"except all", block("10.0.0.0/8", "10.0.0.0/8"), []string{`spec.ingress[0].from[0].ipBlock.except[0]: Invalid value: "10.0.0.0/8"`}},
		{"except of the other family", block("10.0.0.0/8", "2001:db8::/48"), []string{`spec.ingress[0].from[0].ipBlock.except[0]: Invalid value`}},
		{"no peer", from(networkingv1.NetworkPolicyPeer{}), []string{"spec.ingress[0].from[0]: Required value: must specify a peer"}},
		{"two kinds", from(networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: "10.0.0.0/8"}, PodSelector: &metav1.LabelSelector{}}), []string{"spec.ingress[0].from[0]: Forbidden: may not specify both ipBlock and another peer"}},
		{"selector", from(networkingv1.NetworkPolicyPeer{PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"a": "-"}}}), []string{"spec.ingress[0].from[0].podSelector.matchLabels: Invalid value"}},
		{"port", to(networkingv1.NetworkPolicyPort{Port: ptr.To(intstr.FromInt32(0))}), []string{"spec.egress[0].ports[0].port: Invalid value: 0"}},
		{"named port", to(networkingv1.NetworkPolicyPort{Port: ptr.To(intstr.FromString("web_1"))}), []string{`spec.egress[0].ports[0].port: Invalid value: "web_1"`}},
		{"protocol", to(networkingv1.NetworkPolicyPort{Protocol: ptr.To(corev1.Protocol("ICMP"))}), []string{`spec.egress[0].ports[0].protocol: Unsupported value: "ICMP": supported values: "SCTP", "TCP", "UDP"`}},
		{"range", to(networkingv1.NetworkPolicyPort{Port: ptr.To(intstr.FromInt32(80)), EndPort: ptr.To[int32](90)}), nil},
		{"range backwards", to(networkingv1.NetworkPolicyPort{Port: ptr.To(intstr.FromInt32(80)), EndPort: ptr.To[int32](79)}), []string{"spec.egress[0].ports[0].endPort: Invalid value: 79"}},
		{"range without a start", to(networkingv1.NetworkPolicyPort{EndPort: ptr.To[int32](79)}), []string{"spec.egress[0].ports[0].port: Required value"}},
		{"range of names", to(networkingv1.NetworkPolicyPort{Port: ptr.To(intstr.FromString("web")), EndPort: ptr.To[int32](79)}), []string{"spec.egress[0].ports[0].endPort: Invalid value: 79"}},
		{"type", networkingv1.NetworkPolicySpec{PolicyTypes: []networkingv1.PolicyType{"Both"}}, []string{`spec.policyTypes[0]: Unsupported value: "Both": supported values: "Egress", "Ingress"`}},
		{"type twice", networkingv1.NetworkPolicySpec{PolicyTypes: []networkingv1.PolicyType{"Egress", "Egress"}}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default"}, Spec: tt.spec}
			checktest.Faults(t, NetworkPolicy().Validate(p), tt.want...)
		})
	}
}

// TestPolicyOfEarlier: ranges that were let in once keep no policy from being changed.
func TestPolicyOfEarlier(t *testing.T) {
	policy := func(cidr string, except ...string) *networkingv1.NetworkPolicy {
		return &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default", ResourceVersion: "1"}, Spec: networkingv1.NetworkPolicySpec{
			Egress: []networkingv1.NetworkPolicyEgressRule{{To: []networkingv1.NetworkPolicyPeer{{IPBlock: &networkingv1.IPBlock{CIDR: cidr, Except: except}}}}},
		}}
	}
	old := policy("10.0.0.1/8", "10.01.0.0/16")
	next := policy("10.0.0.1/8", "10.01.0.0/16")
	next.Labels = map[string]string{"a": "b"}
	checktest.Faults(t, NetworkPolicy().ValidateUpdate(next, old))
	checktest.Faults(t, NetworkPolicy().ValidateUpdate(policy("10.0.0.2/8"), old), `spec.egress[0].to[0].ipBlock.cidr: Invalid value: "10.0.0.2/8"`)
}
