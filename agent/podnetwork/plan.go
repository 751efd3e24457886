package podnetwork

import (
	"cmp"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/netsetup/overlay"
)

// internalIPs are the node's addresses, one of each family at most.
func internalIPs(n *v1.Node) (out []netip.Addr) {
	for _, a := range n.Status.Addresses {
		if a.Type != v1.NodeInternalIP {
			continue
		}
		ip, err := netip.ParseAddr(a.Address)
		if err == nil && !slices.ContainsFunc(out, func(o netip.Addr) bool { return o.Is4() == ip.Is4() }) {
			out = append(out, ip)
		}
	}
	return out
}

// rangesOf are the node's pod ranges, one of each family at most.
func rangesOf(n *v1.Node) (out []netip.Prefix) {
	texts := n.Spec.PodCIDRs
	if len(texts) == 0 {
		texts = []string{n.Spec.PodCIDR}
	}
	for _, text := range texts {
		p, err := netip.ParsePrefix(text)
		if err == nil && !slices.ContainsFunc(out, func(o netip.Prefix) bool { return o.Addr().Is4() == p.Addr().Is4() }) {
			out = append(out, p.Masked())
		}
	}
	return out
}

// plan is what the nodes ask of this node's network. Pure.
type plan struct {
	own    []netip.Prefix
	others []overlay.Node
	within []netip.Prefix // all ranges of pods
	rules  nft.Ruleset
}

func makePlan(self string, cluster []netip.Prefix, nodes []*v1.Node, keys nodeKeys) plan {
	var p plan
	within := slices.Clone(cluster)
	for _, node := range nodes {
		ranges := rangesOf(node)
		if len(ranges) == 0 {
			continue // not yet
		}
		within = append(within, ranges...)
		if node.Name == self {
			p.own = ranges
			continue
		}
		if addrs := internalIPs(node); len(addrs) > 0 {
			p.others = append(p.others, overlay.Node{Ranges: ranges, Addrs: addrs, Key: keys[node.Name].Key, Port: keys[node.Name].Port})
		}
	}
	slices.SortFunc(p.others, func(a, b overlay.Node) int { return comparePrefix(a.Ranges[0], b.Ranges[0]) })
	slices.SortFunc(within, comparePrefix)
	within = slices.Compact(within)
	p.within = within
	if len(p.own) > 0 {
		p.rules.Forward = within
	}
	for _, own := range p.own {
		m := nft.Masquerade{From: own}
		for _, w := range within {
			if w.Addr().Is4() == own.Addr().Is4() {
				m.Except = append(m.Except, w)
			}
		}
		p.rules.Masquerade = append(p.rules.Masquerade, m)
	}
	return p
}

func comparePrefix(a, b netip.Prefix) int {
	return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
}
