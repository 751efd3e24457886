// Package service makes Services answer on this node: it watches Services,
// EndpointSlices and Nodes and translates them into the values of netsetup/lb
// and netsetup/announce. It serves the health checks of load balancers too.
package service

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/netsetup/lb"
	"github.com/clusterd/clusterd/netsetup/nft"
)

// labelProxyName on a Service says that another program serves it.
const labelProxyName = "service.kubernetes.io/service-proxy-name"

// claim is what one Service wants of a frontend.
type claim struct {
	backend lb.Backend
	// known are all endpoints that there are, ready or not: connections to
	// others are lost.
	known []netip.AddrPort
}

// view is what translating depends on beside the Service.
type view struct {
	node, zone string
	// ranges are those of cluster addresses.
	ranges []netip.Prefix
	// nodes are the addresses of all nodes.
	nodes map[netip.Addr]bool
}

// inside: the address is one of those that the API server gives Services.
func (v view) inside(addr netip.Addr) bool {
	return slices.ContainsFunc(v.ranges, func(r netip.Prefix) bool { return r.Contains(addr) })
}

// translate is what a Service asks of this node: frontends with what is behind
// them. Pure.
func translate(s *v1.Service, slicesOf []*discoveryv1.EndpointSlice, at view) map[lb.Frontend]claim {
	out := map[lb.Frontend]claim{}
	if !forwarded(s) {
		return out
	}
	affinity := affinityOf(s)
	for i := range s.Spec.Ports {
		port := &s.Spec.Ports[i]
		proto, ok := protocol(port.Protocol)
		if !ok {
			continue
		}
		byFamily := map[bool]choice{}
		for _, four := range []bool{true, false} {
			byFamily[four] = choose(endpointsOf(slicesOf, port, four), at)
		}
		put := func(addr netip.Addr, number int32, b lb.Backend, c choice) {
			b.Affinity = affinity
			out[lb.Frontend{Addr: addr, Proto: proto, Port: uint16(number)}] = claim{b, c.known}
		}
		for _, addr := range addresses(s.Spec.ClusterIPs) {
			c := byFamily[addr.Is4()]
			put(addr, port.Port, c.inside(s), c)
		}
		for _, addr := range addresses(s.Spec.ExternalIPs) {
			if at.inside(addr) {
				continue // it belongs to the Service that is given it, cluster DNS for one
			}
			c := byFamily[addr.Is4()]
			put(addr, port.Port, c.outside(s), c)
		}
		for _, addr := range balancerAddresses(s) {
			if at.inside(addr) {
				continue
			}
			c := byFamily[addr.Is4()]
			b := c.outside(s)
			// A node's other ports are its own, and what another program's address is
			// beside, that knows.
			b.Sources, b.Virtual = sources(s), ours(s) && !at.nodes[addr]
			put(addr, port.Port, b, c)
		}
		if port.NodePort != 0 {
			for _, four := range familiesOf(s) {
				addr := netip.IPv4Unspecified()
				if !four {
					addr = netip.IPv6Unspecified()
				}
				c := byFamily[four]
				put(addr, port.NodePort, c.outside(s), c)
			}
		}
	}
	return out
}

// forwarded: the Service has an address that something has to lead on.
func forwarded(s *v1.Service) bool {
	_, other := s.Labels[labelProxyName]
	return !other && s.Spec.Type != v1.ServiceTypeExternalName && s.Spec.ClusterIP != v1.ClusterIPNone && s.Spec.ClusterIP != ""
}

func protocol(p v1.Protocol) (nft.Protocol, bool) {
	switch p {
	case v1.ProtocolTCP, "":
		return nft.ParseProtocol("tcp")
	case v1.ProtocolUDP:
		return nft.ParseProtocol("udp")
	case v1.ProtocolSCTP:
		return nft.ParseProtocol("sctp")
	}
	return 0, false
}

// addresses parses what can be parsed; the API has checked it.
func addresses(texts []string) (out []netip.Addr) {
	for _, t := range texts {
		if a, err := netip.ParseAddr(t); err == nil {
			out = append(out, a.Unmap())
		}
	}
	return out
}

// balancerAddresses are those of the status that packets come to unchanged.
func balancerAddresses(s *v1.Service) (out []netip.Addr) {
	if s.Spec.Type != v1.ServiceTypeLoadBalancer {
		return nil
	}
	for _, in := range s.Status.LoadBalancer.Ingress {
		if in.IPMode == nil || *in.IPMode == v1.LoadBalancerIPModeVIP {
			out = append(out, addresses([]string{in.IP})...)
		}
	}
	return out
}

// ours: the Service's addresses are of the cluster's own pool, as far as is known.
func ours(s *v1.Service) bool {
	return s.Spec.Type == v1.ServiceTypeLoadBalancer && s.Spec.LoadBalancerClass == nil && !core.BalancedElsewhere(s)
}

// sources are the ranges that may ask; none: all. The API lets space stand around
// them. Where none can be read nobody is let in, rather than everybody.
func sources(s *v1.Service) (out []netip.Prefix) {
	for _, t := range s.Spec.LoadBalancerSourceRanges {
		if p, err := netip.ParsePrefix(strings.TrimSpace(t)); err == nil {
			out = append(out, p.Masked())
		}
	}
	if len(out) == 0 && len(s.Spec.LoadBalancerSourceRanges) > 0 {
		return []netip.Prefix{nowhere}
	}
	return out
}

// nowhere is a range that no packet comes from: of addresses for documents (RFC 9637).
var nowhere = netip.MustParsePrefix("3fff::/128")

func familiesOf(s *v1.Service) (four []bool) {
	for _, f := range s.Spec.IPFamilies {
		four = append(four, f == v1.IPv4Protocol)
	}
	if len(four) == 0 {
		for _, a := range addresses(s.Spec.ClusterIPs) {
			four = append(four, a.Is4())
		}
	}
	return four
}

func affinityOf(s *v1.Service) time.Duration {
	if s.Spec.SessionAffinity != v1.ServiceAffinityClientIP {
		return 0
	}
	seconds := v1.DefaultClientIPServiceAffinitySeconds
	if c := s.Spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
		seconds = *c.ClientIP.TimeoutSeconds
	}
	return time.Duration(seconds) * time.Second
}

// candidate is an endpoint of one port.
type candidate struct {
	addr           netip.AddrPort
	node           string
	ready, serving bool
	terminating    bool
	zoneHints      []string
	nodeHints      []string
}

func endpointsOf(all []*discoveryv1.EndpointSlice, port *v1.ServicePort, four bool) (out []candidate) {
	want := discoveryv1.AddressTypeIPv6
	if four {
		want = discoveryv1.AddressTypeIPv4
	}
	for _, slice := range all {
		if slice.AddressType != want {
			continue
		}
		for _, p := range slice.Ports {
			if ptr.Deref(p.Name, "") != port.Name || !sameProtocol(ptr.Deref(p.Protocol, ""), port.Protocol) || p.Port == nil || *p.Port <= 0 || *p.Port > 65535 {
				continue
			}
			for i := range slice.Endpoints {
				e := &slice.Endpoints[i]
				if len(e.Addresses) == 0 {
					continue
				}
				addr, err := netip.ParseAddr(e.Addresses[0])
				if err != nil || addr.Is4() != four {
					continue
				}
				c := candidate{
					addr:        netip.AddrPortFrom(addr, uint16(*p.Port)),
					node:        ptr.Deref(e.NodeName, ""),
					ready:       ptr.Deref(e.Conditions.Ready, true),
					terminating: ptr.Deref(e.Conditions.Terminating, false),
				}
				c.serving = ptr.Deref(e.Conditions.Serving, c.ready)
				if e.Hints != nil {
					for _, z := range e.Hints.ForZones {
						c.zoneHints = append(c.zoneHints, z.Name)
					}
					for _, n := range e.Hints.ForNodes {
						c.nodeHints = append(c.nodeHints, n.Name)
					}
				}
				out = append(out, c)
			}
		}
	}
	better := func(a, b bool) int { // what is true comes first
		switch {
		case a == b:
			return 0
		case a:
			return -1
		}
		return 1
	}
	slices.SortFunc(out, func(a, b candidate) int {
		return cmp.Or(a.addr.Compare(b.addr), better(a.ready, b.ready), better(a.serving, b.serving))
	})
	// One address may be in two slices while it moves from one to the other: the
	// better half counts.
	return slices.CompactFunc(out, func(a, b candidate) bool { return a.addr == b.addr })
}

// sameProtocol compares protocols; none is TCP.
func sameProtocol(a, b v1.Protocol) bool {
	return cmp.Or(a, v1.ProtocolTCP) == cmp.Or(b, v1.ProtocolTCP)
}

// choice is who answers for one port and family.
type choice struct {
	all, near []lb.Endpoint
	known     []netip.AddrPort
}

// choose is who answers: the ready ones, near ones of them where hints say so;
// if none is ready, those that still serve while they end.
func choose(all []candidate, at view) choice {
	var c choice
	var ready, near []candidate
	for _, e := range all {
		c.known = append(c.known, e.addr)
		if e.ready {
			ready = append(ready, e)
		}
	}
	usable := hinted(ready, at)
	if len(ready) == 0 {
		usable = ending(all)
	}
	own := func(e candidate) bool { return e.node == at.node && e.node != "" }
	for _, e := range ready {
		if own(e) {
			near = append(near, e)
		}
	}
	if len(near) == 0 {
		for _, e := range ending(all) {
			if own(e) {
				near = append(near, e)
			}
		}
	}
	values := func(list []candidate) (out []lb.Endpoint) {
		for _, e := range list {
			out = append(out, lb.Endpoint{Addr: e.addr, Own: own(e)})
		}
		return out
	}
	c.all, c.near = values(usable), values(near)
	return c
}

// ending are the endpoints that serve while they end.
func ending(all []candidate) (out []candidate) {
	for _, e := range all {
		if e.serving && e.terminating {
			out = append(out, e)
		}
	}
	return out
}

// hinted are the endpoints meant for this node, else for its zone. All must have
// a hint, and one must be meant for here: else the hints are half written, or
// of other zones alone, and no endpoint would answer.
func hinted(ready []candidate, at view) []candidate {
	pick := func(of func(candidate) []string, here string) []candidate {
		var out []candidate
		for _, e := range ready {
			if len(of(e)) == 0 {
				return nil
			}
			if slices.Contains(of(e), here) {
				out = append(out, e)
			}
		}
		return out
	}
	if got := pick(func(e candidate) []string { return e.nodeHints }, at.node); len(got) > 0 {
		return got
	}
	if at.zone == "" {
		return ready
	}
	if got := pick(func(e candidate) []string { return e.zoneHints }, at.zone); len(got) > 0 {
		return got
	}
	return ready
}

// inside is what is behind the cluster address.
func (c choice) inside(s *v1.Service) lb.Backend {
	if ptr.Deref(s.Spec.InternalTrafficPolicy, v1.ServiceInternalTrafficPolicyCluster) == v1.ServiceInternalTrafficPolicyLocal {
		return lb.Backend{Endpoints: c.near, Silent: len(c.near) == 0 && len(c.all) > 0}
	}
	return lb.Backend{Endpoints: c.all}
}

// outside is what is behind addresses that clients elsewhere use.
func (c choice) outside(s *v1.Service) lb.Backend {
	b := lb.Backend{Endpoints: c.all}
	if s.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal {
		b.Local, b.Near = true, c.near
	}
	return b
}

// older says which of two Services that want one frontend has it: the older.
func older(a, b metav1.Object) int {
	return cmp.Or(a.GetCreationTimestamp().Time.Compare(b.GetCreationTimestamp().Time),
		cmp.Compare(a.GetNamespace(), b.GetNamespace()), cmp.Compare(a.GetName(), b.GetName()))
}
