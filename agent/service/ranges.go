package service

import (
	"cmp"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/clusterd/clusterd/apis/networking"
)

// furtherRanges are the ranges that ServiceCIDRs add to those that the cluster was begun
// with, sorted; unused are those that hold the address of a node, with its name. Pure.
func furtherRanges(cidrs []*networkingv1.ServiceCIDR, begun []netip.Prefix, nodes []*v1.Node) (more []netip.Prefix, unused map[netip.Prefix]string) {
	unused = map[netip.Prefix]string{}
	for _, c := range cidrs {
		for _, r := range networking.ServedRanges(c) {
			if slices.Contains(begun, r) || slices.Contains(more, r) {
				continue
			}
			if node := within(r, nodes); node != "" {
				unused[r] = node
				continue
			}
			more = append(more, r)
		}
	}
	slices.SortFunc(more, func(a, b netip.Prefix) int {
		return cmp.Or(a.Addr().Compare(b.Addr()), cmp.Compare(a.Bits(), b.Bits()))
	})
	return more, unused
}

// within is the name of a node with an address of the range; "": there is none.
func within(r netip.Prefix, nodes []*v1.Node) string {
	for _, n := range nodes {
		for _, a := range addressesOf(n) {
			if r.Contains(a) {
				return n.Name
			}
		}
	}
	return ""
}

// addressesOf are a node's addresses.
func addressesOf(n *v1.Node) (out []netip.Addr) {
	for _, a := range n.Status.Addresses {
		if a.Type == v1.NodeInternalIP || a.Type == v1.NodeExternalIP {
			out = append(out, addresses([]string{a.Address})...)
		}
	}
	return out
}
