package netpol

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/netsetup/policy"
)

// cluster is what policies are about. All of it is read only.
type cluster struct {
	node       string
	policies   []*networkingv1.NetworkPolicy
	pods       []*v1.Pod
	namespaces map[string]labels.Set
	// starting are addresses of pods of this node that the API may not know yet,
	// by UID.
	starting map[types.UID][]netip.Addr
}

// subject is a pod with addresses of its own.
type subject struct {
	pod   *v1.Pod
	addrs []netip.Addr
	own   bool // of this node
}

// translate gives the groups of this node's pods. Pure. What is wrong with a
// policy isolates all the more: its rules let nothing pass.
func translate(c cluster) []policy.Group {
	t := &translation{cluster: c, byNamespace: map[string][]subject{}}
	for _, p := range c.pods {
		if s, ok := t.subjectOf(p); ok {
			t.byNamespace[p.Namespace] = append(t.byNamespace[p.Namespace], s)
		}
	}
	groups := map[string]*policy.Group{}
	parts := map[string][]*networkingv1.NetworkPolicy{}
	members := map[string][]subject{}
	slices.SortFunc(t.policies, func(a, b *networkingv1.NetworkPolicy) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	for namespace, subjects := range t.byNamespace {
		var here []*networkingv1.NetworkPolicy
		for _, p := range t.policies {
			if p.Namespace == namespace {
				here = append(here, p)
			}
		}
		if len(here) == 0 {
			continue
		}
		selectors := make([]labels.Selector, len(here))
		for i, p := range here {
			selectors[i] = selector(&p.Spec.PodSelector)
		}
		for _, s := range subjects {
			if !s.own {
				continue
			}
			for _, d := range []policy.Direction{policy.Ingress, policy.Egress} {
				var chosen []*networkingv1.NetworkPolicy
				key := namespace
				for i, p := range here {
					if isolates(p, d) && selectors[i].Matches(labels.Set(s.pod.Labels)) {
						chosen = append(chosen, p)
						key += "\x00" + p.Name
					}
				}
				if len(chosen) == 0 {
					continue
				}
				sum := sha256.Sum256([]byte(key))
				name := hex.EncodeToString(sum[:10])
				id := d.String() + name
				if groups[id] == nil {
					groups[id] = &policy.Group{Name: name, Direction: d}
					parts[id] = chosen
				}
				groups[id].Addrs = append(groups[id].Addrs, s.addrs...)
				members[id] = append(members[id], s)
			}
		}
	}
	out := make([]policy.Group, 0, len(groups))
	for id, g := range groups {
		for _, p := range parts[id] {
			g.Rules = append(g.Rules, t.rules(p, g.Direction, members[id])...)
		}
		slices.SortFunc(g.Addrs, netip.Addr.Compare)
		out = append(out, *g)
	}
	slices.SortFunc(out, func(a, b policy.Group) int {
		return cmp.Or(cmp.Compare(a.Direction, b.Direction), strings.Compare(a.Name, b.Name))
	})
	return out
}

type translation struct {
	cluster
	byNamespace map[string][]subject
}

// subjectOf: pods of the node's network are the node, and ended ones may have
// given their addresses to others.
func (t *translation) subjectOf(p *v1.Pod) (subject, bool) {
	if p.Spec.HostNetwork || core.Finished(p) {
		return subject{}, false
	}
	s := subject{pod: p, own: p.Spec.NodeName == t.node}
	for _, ip := range p.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil {
			s.addrs = append(s.addrs, a.Unmap())
		}
	}
	if s.own {
		for _, a := range t.starting[localUID(p)] {
			if !slices.Contains(s.addrs, a) {
				s.addrs = append(s.addrs, a)
			}
		}
	}
	return s, len(s.addrs) > 0
}

// localUID is the UID by which the node knows the pod: a static pod's is not
// its mirror's.
func localUID(p *v1.Pod) types.UID {
	if uid := p.Annotations[v1.MirrorPodAnnotationKey]; uid != "" {
		return types.UID(uid)
	}
	return p.UID
}

func isolates(p *networkingv1.NetworkPolicy, d policy.Direction) bool {
	want := networkingv1.PolicyTypeIngress
	if d == policy.Egress {
		want = networkingv1.PolicyTypeEgress
	}
	return slices.Contains(p.Spec.PolicyTypes, want)
}

// selector never fails open: one that cannot be read selects nothing as a peer.
func selector(s *metav1.LabelSelector) labels.Selector {
	sel, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		return labels.Nothing()
	}
	return sel
}

func (t *translation) rules(p *networkingv1.NetworkPolicy, d policy.Direction, members []subject) []policy.Rule {
	var out []policy.Rule
	if d == policy.Ingress {
		for _, r := range p.Spec.Ingress {
			out = append(out, t.rule(p.Namespace, r.From, r.Ports, members))
		}
		return out
	}
	var everybody []subject
	for _, list := range t.byNamespace {
		everybody = append(everybody, list...)
	}
	for _, r := range p.Spec.Egress {
		out = append(out, t.rule(p.Namespace, r.To, r.Ports, everybody))
	}
	return out
}

// rule translates one; destinations are where a port's name is looked up.
func (t *translation) rule(namespace string, peers []networkingv1.NetworkPolicyPeer, ports []networkingv1.NetworkPolicyPort, destinations []subject) policy.Rule {
	r := policy.Rule{AnyPeer: len(peers) == 0, AnyPort: len(ports) == 0, Except: map[int][]netip.Prefix{}}
	seen := map[netip.Addr]bool{}
	for _, peer := range peers {
		if peer.IPBlock != nil {
			block, err := netip.ParsePrefix(peer.IPBlock.CIDR)
			if err != nil {
				continue
			}
			for _, text := range peer.IPBlock.Except {
				if e, err := netip.ParsePrefix(text); err == nil {
					r.Except[len(r.Blocks)] = append(r.Except[len(r.Blocks)], e.Masked())
				}
			}
			r.Blocks = append(r.Blocks, block.Masked())
			continue
		}
		for _, a := range t.peers(namespace, peer) {
			if !seen[a] {
				seen[a] = true
				r.Peers = append(r.Peers, a)
			}
		}
	}
	slices.SortFunc(r.Peers, netip.Addr.Compare)
	for _, p := range ports {
		name := v1.ProtocolTCP
		if p.Protocol != nil {
			name = *p.Protocol
		}
		proto, ok := nft.ParseProtocol(strings.ToLower(string(name)))
		switch {
		case !ok:
		case p.Port == nil:
			r.Ports = append(r.Ports, policy.Port{Proto: proto, Last: 65535})
		case p.Port.Type == intstr.Int:
			port := policy.Port{Proto: proto, First: uint16(p.Port.IntVal), Last: uint16(p.Port.IntVal)}
			if p.EndPort != nil {
				port.Last = uint16(*p.EndPort)
			}
			r.Ports = append(r.Ports, port)
		default:
			r.Targets = append(r.Targets, targets(destinations, p.Port.StrVal, name, proto)...)
		}
	}
	return r
}

// peers are the addresses of the pods that a peer selects.
func (t *translation) peers(namespace string, peer networkingv1.NetworkPolicyPeer) []netip.Addr {
	pods := labels.Everything()
	if peer.PodSelector != nil {
		pods = selector(peer.PodSelector)
	}
	var out []netip.Addr
	add := func(namespace string) {
		for _, s := range t.byNamespace[namespace] {
			if pods.Matches(labels.Set(s.pod.Labels)) {
				out = append(out, s.addrs...)
			}
		}
	}
	if peer.NamespaceSelector == nil {
		add(namespace)
		return out
	}
	namespaces := selector(peer.NamespaceSelector)
	for name, set := range t.namespaces {
		if namespaces.Matches(set) {
			add(name)
		}
	}
	return out
}

// targets are the ports of that name.
func targets(destinations []subject, name string, protocol v1.Protocol, proto nft.Protocol) []policy.Target {
	var out []policy.Target
	for _, s := range destinations {
		for _, c := range slices.Concat(s.pod.Spec.Containers, s.pod.Spec.InitContainers) {
			for _, p := range c.Ports {
				if p.Name != name || cmp.Or(p.Protocol, v1.ProtocolTCP) != protocol {
					continue
				}
				for _, a := range s.addrs {
					out = append(out, policy.Target{Addr: a, Proto: proto, Port: uint16(p.ContainerPort)})
				}
			}
		}
	}
	slices.SortFunc(out, func(a, b policy.Target) int { return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Port, b.Port)) })
	return slices.Compact(out)
}

// sameSubject reports whether nothing changed of a pod that policies look at.
func sameSubject(a, b *v1.Pod) bool {
	return core.Finished(a) == core.Finished(b) && a.Spec.NodeName == b.Spec.NodeName && slices.Equal(a.Status.PodIPs, b.Status.PodIPs) && labels.Equals(a.Labels, b.Labels)
}

func describe(p *networkingv1.NetworkPolicy) string { return fmt.Sprintf("%s/%s", p.Namespace, p.Name) }
