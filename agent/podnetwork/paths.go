package podnetwork

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/paths"
	"github.com/clusterd/clusterd/netsetup/overlay"
	"github.com/clusterd/clusterd/netsetup/pathprobe"
)

// probed is what of the nodes the ways are measured from and to: first pod
// addresses, of families that this node has, and which of the nodes are Ready.
type probed struct {
	own   []netip.Addr
	peers []pathprobe.Peer
	ready map[string]bool // by node
}

func makeProbed(self string, nodes []*v1.Node, encrypted bool) probed {
	p := probed{ready: map[string]bool{}}
	four, six := false, false
	var here *v1.Node
	for _, node := range nodes {
		if node.Name == self {
			here = node
			for _, r := range rangesOf(node) {
				p.own = append(p.own, gatewayOf(r))
				four, six = four || r.Addr().Is4(), six || r.Addr().Is6()
			}
		}
	}
	for _, node := range nodes {
		if node.Name == self || len(internalIPs(node)) == 0 {
			continue
		}
		p.ready[node.Name] = core.NodeReady(node)
		for _, r := range rangesOf(node) {
			if r.Addr().Is4() && four || r.Addr().Is6() && six {
				p.peers = append(p.peers, pathprobe.Peer{Name: node.Name, Addr: gatewayOf(r), Way: wayOf(here, node, encrypted)})
			}
		}
	}
	return p
}

// wayOf names what the length of packets to a node depends on: where it and this one
// are, and what is around the packets.
func wayOf(here, node *v1.Node, encrypted bool) string {
	out := fmt.Sprint(internalIPs(node))
	if here != nil {
		out = fmt.Sprint(internalIPs(here), " ", out)
	}
	if encrypted {
		out += " wireguard"
	}
	return out
}

// bounded gives the routes to other nodes the length of packets that their ways were
// found to carry, where that is less than the interface takes: packets that are
// longer would be lost without a word. Pure.
func bounded(others []overlay.Node, measured []pathprobe.Result) []overlay.Node {
	carries := map[netip.Addr]int{}
	for _, r := range measured {
		if r.Carries >= shortestIPv6 || r.Carries > 0 && r.Addr.Is4() {
			carries[r.Addr] = r.Carries
		}
	}
	out := slices.Clone(others)
	for i, o := range out {
		out[i].MTUs = make([]int, len(o.Ranges))
		for j, r := range o.Ranges {
			out[i].MTUs[j] = carries[gatewayOf(r)]
		}
	}
	return out
}

// shortestIPv6 is what each way carries (RFC 8200); one that does not is none.
const shortestIPv6 = 1280

// Paths is what was measured of the ways to other nodes. It may be called at any
// time.
func (n *Network) Paths() paths.Report {
	now := time.Now()
	n.mu.Lock()
	ready, keys := n.readyNodes, n.keys
	n.mu.Unlock()
	tunnels := n.tunnels()
	out := paths.Report{Node: n.cfg.NodeName, Paths: []paths.Path{}}
	for _, r := range n.probes.Results() {
		p := paths.Path{
			Peer: r.Name, Address: r.Addr.String(), Expected: ready[r.Name],
			Sent: r.Sent, Lost: r.Lost, LostThere: r.LostThere, LostBack: r.LostBack, Silent: r.Silent,
			RTT: milliseconds(r.RTT), MaxRTT: milliseconds(r.MaxRTT), Heard: -1,
			MTU: r.MTU, Carries: r.Carries, Damaged: r.Damaged, Streamed: !r.Streamed.IsZero(),
		}
		if !r.Heard.IsZero() {
			p.Heard = now.Sub(r.Heard).Seconds()
		}
		if r.MTU == 0 {
			p.Carries = 0 // of a former process, and not tried again yet
		}
		if r.Stream != nil {
			p.Stream = r.Stream.Error()
		}
		keys[r.Name].tellTunnel(&p, tunnels, now)
		out.Paths = append(out.Paths, p)
	}
	return out
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
