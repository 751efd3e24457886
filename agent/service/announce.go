package service

import (
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
)

// announce makes the addresses of load balancers this node's for which it is
// elected, and gives up the others.
func (p *Proxy) announce(index cache.Indexer) {
	if p.cfg.Announcer == nil || !p.cfg.Fresh() {
		return
	}
	nodes, err := p.nodes.List(labels.Everything())
	if err != nil {
		return
	}
	services, err := p.services.List(labels.Everything())
	if err != nil {
		return
	}
	var own []netip.Addr
	for _, s := range services {
		if !ours(s) || !forwarded(s) {
			continue
		}
		var near map[string]bool
		if s.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal {
			near = nodesOf(s, p, index)
		}
		for _, addr := range balancerAddresses(s) {
			if p.at.nodes[addr] || p.at.inside(addr) {
				continue // it has its place
			}
			if elect(addr, nodes, near) == p.cfg.NodeName && !slices.Contains(own, addr) {
				own = append(own, addr)
			}
		}
	}
	slices.SortFunc(own, netip.Addr.Compare)
	if err := p.cfg.Announcer.Set(own); err != nil {
		p.cfg.Logger.Error("addresses of load balancers are not announced as they should be", "err", err)
	}
}

// renew keeps what is announced here while it is not known who is elected.
func (p *Proxy) renew() {
	if p.cfg.Announcer == nil {
		return
	}
	if err := p.cfg.Announcer.Renew(); err != nil {
		p.cfg.Logger.Error("addresses of load balancers are not announced as they should be", "err", err)
	}
}

// nodesOf are the nodes with an endpoint that is given connections.
func nodesOf(s *v1.Service, p *Proxy, index cache.Indexer) map[string]bool {
	out := map[string]bool{}
	all := slicesOf(index, types.NamespacedName{Namespace: s.Namespace, Name: s.Name})
	for i := range s.Spec.Ports {
		for _, four := range []bool{true, false} {
			for _, e := range endpointsOf(all, &s.Spec.Ports[i], four) {
				if e.ready || e.serving && e.terminating {
					out[e.node] = true
				}
			}
		}
	}
	return out
}

// elect says which node answers for an address: among those that are ready, not
// excluded and, if near is given, in it, the one with the highest hash of both
// names. Every node comes to the same answer by itself, and one that dies takes
// no address but its own along. Pure.
func elect(addr netip.Addr, nodes []*v1.Node, near map[string]bool) string {
	best, most := "", uint64(0)
	for _, n := range nodes {
		if _, excluded := n.Labels[v1.LabelNodeExcludeBalancers]; excluded || !ready(n) || near != nil && !near[n.Name] {
			continue
		}
		sum := sha256.Sum256([]byte(addr.String() + "\x00" + n.Name))
		if rank := binary.BigEndian.Uint64(sum[:]); best == "" || rank > most || rank == most && n.Name < best {
			best, most = n.Name, rank
		}
	}
	return best
}

func ready(n *v1.Node) bool {
	return n.DeletionTimestamp == nil && slices.ContainsFunc(n.Status.Conditions, func(c v1.NodeCondition) bool {
		return c.Type == v1.NodeReady && c.Status == v1.ConditionTrue
	})
}
