package service

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/names"
)

// announce makes the addresses of load balancers this node's for which it is elected, and
// gives up the others. False: who is elected is not known.
func (p *Proxy) announce(index cache.Indexer) bool {
	if p.cfg.Announcer == nil {
		return true
	}
	nodes, err := p.nodes.List(labels.Everything())
	if err != nil {
		return false
	}
	services, err := p.services.List(labels.Everything())
	if err != nil {
		return false
	}
	services = slices.DeleteFunc(services, func(s *v1.Service) bool {
		return !ours(s) || !forwarded(s) || len(balancerAddresses(s)) == 0
	})
	if len(services) > 0 && !p.known() { // to announce nothing is always right
		return false
	}
	alone := p.alone(nodes)
	candidates := electable(nodes, alone)
	var own []netip.Addr
	takeovers := map[netip.Addr][]netip.Addr{}
	for _, s := range services {
		var near map[string]bool
		if s.Spec.ExternalTrafficPolicy == v1.ServiceExternalTrafficPolicyLocal {
			near = nodesOf(s, p, index)
		}
		for _, addr := range balancerAddresses(s) {
			if p.at.nodes[addr] || p.at.inside(addr) {
				continue // it has its place
			}
			switch elected, next := elect(addr, candidates, near); p.cfg.NodeName {
			case elected:
				if !slices.Contains(own, addr) {
					own = append(own, addr)
				}
			case next:
				if node := segmentAddress(elected, p.cfg.NodeName, nodes); node.IsValid() && !slices.Contains(takeovers[node], addr) {
					takeovers[node] = append(takeovers[node], addr)
				}
			}
		}
	}
	for _, addr := range p.standby.set(slices.Clone(own), takeovers) {
		if !slices.Contains(own, addr) {
			own = append(own, addr)
		}
	}
	slices.SortFunc(own, netip.Addr.Compare)
	if err := p.cfg.Announcer.Set(own, alone); err != nil {
		p.cfg.Logger.Error("addresses of load balancers are not announced as they should be", "err", err)
	}
	return true
}

// alone reports whether no other node can be elected while this one's clusterd does not
// run: there is none, and none can join without its only server.
func (p *Proxy) alone(nodes []*v1.Node) bool {
	return p.cfg.Server && len(nodes) == 1 && nodes[0].Name == p.cfg.NodeName
}

// known reports whether the watches show who is elected. If it is not known whether they
// do, that is looked at.
func (p *Proxy) known() bool {
	n := p.cfg.Fresh()
	if n == 0 || n == p.shown.Load() {
		return n != 0
	}
	select {
	case p.check <- n:
	default:
	}
	return false
}

// currentTimeout bounds one wait for watches to be current; after one in vain is the next
// later and later.
const (
	currentTimeout  = 10 * time.Second
	maxCurrentDelay = 30 * time.Second
)

// keepCurrent waits until watches are current, when it is asked to.
func (p *Proxy) keepCurrent(ctx context.Context) {
	delay := time.Second
	for {
		var n uint64
		select {
		case <-ctx.Done():
			return
		case n = <-p.check:
		}
		look, stop := context.WithTimeout(ctx, currentTimeout)
		err := p.cfg.Current(look)
		stop()
		switch {
		case ctx.Err() != nil:
			return
		case err != nil: // the next tick asks again
			wait := delay/2 + rand.N(delay) // all nodes have the same outage
			p.cfg.Logger.Warn("it is not known who announces the addresses of load balancers, will retry", "after", wait, "err", err)
			select {
			case <-ctx.Done():
				return
			case <-time.After(wait):
			}
			delay = min(2*delay, maxCurrentDelay)
		default:
			delay = time.Second
			p.shown.Store(n)
		}
		p.poke()
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

// electable are the nodes that may have an address: those that are Ready and not excluded.
// One that is alone need not be Ready, since its clusterd may just have started: no other
// node could answer. Pure.
func electable(nodes []*v1.Node, alone bool) []*v1.Node {
	return slices.DeleteFunc(slices.Clone(nodes), func(n *v1.Node) bool {
		_, excluded := n.Labels[v1.LabelNodeExcludeBalancers]
		return excluded || !alone && !ready(n)
	})
}

// elect says which of the electable nodes answers for an address: of all or, if near is
// given, of those in it, the one with the highest hash of both names. Nodes in the address's own network come first: neighbours of no other ask for
// it. Every node comes to the same answer by itself, and one that dies takes
// no address but its own along. next is the one of these that is elected without best.
// Pure.
func elect(addr netip.Addr, nodes []*v1.Node, near map[string]bool) (best, next string) {
	nodes = neighbours(addr, slices.DeleteFunc(slices.Clone(nodes), func(n *v1.Node) bool { return near != nil && !near[n.Name] }))
	var most, second uint64
	for _, n := range nodes {
		sum := sha256.Sum256([]byte(addr.String() + "\x00" + n.Name))
		rank := binary.BigEndian.Uint64(sum[:])
		switch {
		case best == "" || rank > most || rank == most && n.Name < best:
			best, most, next, second = n.Name, rank, best, most
		case next == "" || rank > second || rank == second && n.Name < next:
			next, second = n.Name, rank
		}
	}
	return best, next
}

// segmentAddress is an address of a node by which another one can ask for it in the
// segment that both are in. Not valid: they are in none together, or do not say so. Pure.
func segmentAddress(node, asker string, nodes []*v1.Node) (out netip.Addr) {
	networks := networksOf(asker, nodes)
	for _, n := range nodes {
		if n.Name != node {
			continue
		}
		for _, a := range n.Status.Addresses {
			addr, err := netip.ParseAddr(a.Address)
			if a.Type == v1.NodeInternalIP && err == nil && slices.ContainsFunc(networks, func(r netip.Prefix) bool { return r.Contains(addr) }) {
				return addr
			}
		}
	}
	return netip.Addr{}
}

// networksOf are the networks in which a node says that it announces addresses. Pure.
func networksOf(node string, nodes []*v1.Node) (out []netip.Prefix) {
	for _, n := range nodes {
		if n.Name != node {
			continue
		}
		for s := range strings.SplitSeq(n.Annotations[names.AnnounceNetworks], ",") {
			if r, err := netip.ParsePrefix(s); err == nil {
				out = append(out, r)
			}
		}
	}
	return out
}

// neighbours are the nodes in the address's network, or all where there are none: its
// packets come by a router then. So it is while some node does not say its networks, as
// one of an older version, which elects among all. Pure.
func neighbours(addr netip.Addr, nodes []*v1.Node) []*v1.Node {
	var out []*v1.Node
	for _, n := range nodes {
		text, says := n.Annotations[names.AnnounceNetworks]
		if !says {
			return nodes
		}
		if slices.ContainsFunc(strings.Split(text, ","), func(s string) bool {
			r, err := netip.ParsePrefix(s)
			return err == nil && r.Contains(addr)
		}) {
			out = append(out, n)
		}
	}
	if len(out) == 0 {
		return nodes
	}
	return out
}

func ready(n *v1.Node) bool {
	return n.DeletionTimestamp == nil && core.NodeReady(n)
}
