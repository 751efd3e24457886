package netpol

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/netsetup/policy"
)

func pod(namespace, name, node, ip string, change ...func(*v1.Pod)) *v1.Pod {
	p := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, UID: types.UID(name), Labels: map[string]string{"app": name}},
		Spec:       v1.PodSpec{NodeName: node},
		Status:     v1.PodStatus{Phase: v1.PodRunning},
	}
	if ip != "" {
		p.Status.PodIPs = []v1.PodIP{{IP: ip}}
	}
	for _, fn := range change {
		fn(p)
	}
	return p
}

func port(name string, n int32) func(*v1.Pod) {
	return func(p *v1.Pod) {
		p.Spec.Containers = append(p.Spec.Containers, v1.Container{Ports: []v1.ContainerPort{{Name: name, ContainerPort: n, Protocol: v1.ProtocolTCP}}})
	}
}

func app(name string) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}}
}

func np(name string, spec networkingv1.NetworkPolicySpec) *networkingv1.NetworkPolicy {
	return &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: name}, Spec: spec}
}

var (
	ingress = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
	egress  = []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}
)

func TestTranslate(t *testing.T) {
	base := func(policies ...*networkingv1.NetworkPolicy) cluster {
		return cluster{
			node: "n1", policies: policies,
			namespaces: map[string]labels.Set{"a": {"team": "x"}, "b": {"team": "y"}},
			pods: []*v1.Pod{
				pod("a", "web", "n1", "10.0.1.1", port("http", 8080)),
				pod("a", "client", "n2", "10.0.2.1"),
				pod("a", "host", "n1", "192.0.2.1", func(p *v1.Pod) { p.Spec.HostNetwork = true }),
				pod("a", "ended", "n1", "10.0.1.9", func(p *v1.Pod) { p.Status.Phase = v1.PodSucceeded }),
				pod("b", "client", "n2", "10.0.2.2"),
				pod("b", "web", "n2", "10.0.2.3", port("http", 9090)),
			},
		}
	}
	from := func(peers ...networkingv1.NetworkPolicyPeer) networkingv1.NetworkPolicySpec {
		return networkingv1.NetworkPolicySpec{PodSelector: *app("web"), PolicyTypes: ingress, Ingress: []networkingv1.NetworkPolicyIngressRule{{From: peers}}}
	}
	addrs := func(texts ...string) (out []netip.Addr) {
		for _, s := range texts {
			out = append(out, netip.MustParseAddr(s))
		}
		return out
	}
	for _, tt := range []struct {
		name string
		c    cluster
		want []string
	}{
		{"no policy", base(), nil},
		{"everything shut", base(np("p", networkingv1.NetworkPolicySpec{PolicyTypes: ingress})), []string{"in [10.0.1.1]"}},
		{"both ways", base(np("p", networkingv1.NetworkPolicySpec{PolicyTypes: append(slices.Clone(ingress), egress...)})), []string{"in [10.0.1.1]", "out [10.0.1.1]"}},
		{"of another node's pod", base(np("p", networkingv1.NetworkPolicySpec{PodSelector: *app("client"), PolicyTypes: ingress})), nil},
		{"pods of the namespace", base(np("p", from(networkingv1.NetworkPolicyPeer{PodSelector: app("client")}))), []string{"in [10.0.1.1] {from [10.0.2.1]}"}},
		{"pods of some namespaces", base(np("p", from(networkingv1.NetworkPolicyPeer{PodSelector: app("client"), NamespaceSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"team": "y"}}}))), []string{"in [10.0.1.1] {from [10.0.2.2]}"}},
		{"all pods", base(np("p", from(networkingv1.NetworkPolicyPeer{NamespaceSelector: &metav1.LabelSelector{}}))), []string{"in [10.0.1.1] {from [10.0.1.1 10.0.2.1 10.0.2.2 10.0.2.3]}"}},
		{"everybody", base(np("p", from())), []string{"in [10.0.1.1] {any}"}},
		{"a selector that cannot be read", base(np("p", from(networkingv1.NetworkPolicyPeer{PodSelector: &metav1.LabelSelector{MatchExpressions: []metav1.LabelSelectorRequirement{{Key: "a", Operator: "?"}}}}))), []string{"in [10.0.1.1] {from []}"}},
		{"two are one list", base(np("q", from(networkingv1.NetworkPolicyPeer{PodSelector: app("client")})), np("p", from(networkingv1.NetworkPolicyPeer{IPBlock: &networkingv1.IPBlock{CIDR: "10.0.0.0/8", Except: []string{"10.9.0.0/16"}}}))),
			[]string{"in [10.0.1.1] {from [] [10.0.0.0/8] without map[0:[10.9.0.0/16]]} {from [10.0.2.1]}"}},
		{"a name is the pod's own port", base(np("p", networkingv1.NetworkPolicySpec{PolicyTypes: ingress, Ingress: []networkingv1.NetworkPolicyIngressRule{{Ports: []networkingv1.NetworkPolicyPort{{Port: ptr.To(intstr.FromString("http"))}}}}})),
			[]string{"in [10.0.1.1] {any to [] [{10.0.1.1 tcp 8080}]}"}},
		{"a name is each target's port", base(np("p", networkingv1.NetworkPolicySpec{PolicyTypes: egress, Egress: []networkingv1.NetworkPolicyEgressRule{{Ports: []networkingv1.NetworkPolicyPort{{Port: ptr.To(intstr.FromString("http"))}, {Port: ptr.To(intstr.FromInt32(80)), EndPort: ptr.To[int32](90)}, {Protocol: ptr.To(v1.ProtocolUDP)}}}}})),
			[]string{"out [10.0.1.1] {any to [{tcp 80 90} {udp 0 65535}] [{10.0.1.1 tcp 8080} {10.0.2.3 tcp 9090}]}"}},
		{"one that starts", func() cluster {
			c := base(np("p", networkingv1.NetworkPolicySpec{PodSelector: *app("new"), PolicyTypes: ingress}))
			c.pods = append(c.pods, pod("a", "new", "n1", ""))
			c.starting = map[types.UID][]netip.Addr{"new": addrs("10.0.1.7")}
			return c
		}(), []string{"in [10.0.1.7]"}},
		{"a static one, by its mirror", func() cluster {
			c := base(np("p", networkingv1.NetworkPolicySpec{PodSelector: *app("new"), PolicyTypes: ingress}))
			c.pods = append(c.pods, pod("a", "new", "n1", "", func(p *v1.Pod) { p.Annotations = map[string]string{v1.MirrorPodAnnotationKey: "static"} }))
			c.starting = map[types.UID][]netip.Addr{"static": addrs("10.0.1.8")}
			return c
		}(), []string{"in [10.0.1.8]"}},
	} {
		var got []string
		for _, g := range translate(tt.c) {
			text := fmt.Sprintf("%s %v", g.Direction, g.Addrs)
			for _, r := range g.Rules {
				text += " {" + describeRule(r) + "}"
			}
			got = append(got, text)
		}
		if d := cmp.Diff(tt.want, got); d != "" {
			t.Errorf("%s:\n%s", tt.name, d)
		}
	}
}

func describeRule(r policy.Rule) string {
	text := "any"
	if !r.AnyPeer {
		text = fmt.Sprintf("from %v", r.Peers)
		if len(r.Blocks) > 0 {
			text += fmt.Sprintf(" %v without %v", r.Blocks, r.Except)
		}
	}
	if !r.AnyPort {
		text += fmt.Sprintf(" to %v %v", r.Ports, r.Targets)
	}
	return text
}

// BenchmarkTranslate is 1000 policies on 1000 pods, a tenth of them here.
func BenchmarkTranslate(b *testing.B) {
	c := cluster{node: "n0", namespaces: map[string]labels.Set{}}
	for i := range 1000 {
		ns, name := fmt.Sprintf("ns%d", i%50), fmt.Sprintf("p%d", i)
		c.namespaces[ns] = labels.Set{"kubernetes.io/metadata.name": ns}
		c.pods = append(c.pods, pod(ns, name, fmt.Sprintf("n%d", i%10), fmt.Sprintf("10.0.%d.%d", i/250, i%250)))
		p := np(name, networkingv1.NetworkPolicySpec{PodSelector: *app(name), PolicyTypes: ingress, Ingress: []networkingv1.NetworkPolicyIngressRule{{
			From: []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{}}}, Ports: []networkingv1.NetworkPolicyPort{{Port: ptr.To(intstr.FromInt32(80))}}}}})
		p.Namespace = ns
		c.policies = append(c.policies, p)
	}
	for b.Loop() {
		policy.Compile(translate(c))
	}
}
