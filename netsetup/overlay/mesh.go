package overlay

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/netsetup/wireguard"
)

// The tunnel's defaults. The port is not that of VXLAN (4789), which other
// programs of a machine use with packets from elsewhere: ours takes members'.
const (
	DefaultTunnel = "clusterd-vx"
	DefaultVNI    = 52013
	DefaultPort   = 8473
)

// MeshConfig of a Mesh.
type MeshConfig struct {
	Config
	// Tunnel is the interface's name, VNI and Port are those of VXLAN; zero: the
	// defaults. All nodes need the same VNI and Port.
	Tunnel    string
	VNI, Port int
	Kernel    nft.TableKernel // required: holds the fence
	// Encrypt sends all that goes from node to node through WireGuard, and nothing
	// in clear: not to a node whose key is not known either.
	Encrypt bool
	// Inside are the interfaces of this node's own pods, the bridge: what Encrypt
	// lets pass by them, beside the loopback.
	Inside []string
	// Repaired is called when another program's change of the fence was undone; see
	// nft.KeeperConfig.
	Repaired func(table, what string)
}

// Node is another node. Ranges and Addrs are of one or both families, the
// cluster's first one first: the node's MAC in the tunnel follows from its first
// range, on all nodes alike.
type Node struct {
	Ranges []netip.Prefix
	Addrs  []netip.Addr
	// MTUs are those of the routes to Ranges, see Route; missing: none is set.
	MTUs []int
	// Key and Port are those of its WireGuard; no key: it has published none.
	Key  wireguard.Key
	Port int
}

// mtu is that of the route to the i-th range.
func (n Node) mtu(i int) int {
	if i < len(n.MTUs) {
		return n.MTUs[i]
	}
	return 0
}

// Nodes is what a Mesh connects: this node and the others.
type Nodes struct {
	// Own are this node's ranges; the first address of each is the node's in the
	// tunnel, on all nodes alike.
	Own    []netip.Prefix
	Others []Node

	// With Encrypt: Key is this node's private key, and Hold leaves the interface
	// the one that it has; see wireguard.State.
	Key  wireguard.Key
	Hold bool
	// Within are all ranges of pods, whose packets leave and enter no other way.
	Within []netip.Prefix
}

// Mesh carries packets to each other node the plainest way there is: by a host
// route where the kernel reaches the node without a gateway, else by VXLAN. It
// works in the network namespace in which it was opened. Calls of Set and
// CleanUp must not overlap.
type Mesh struct {
	routes *HostGW
	tunnel vxlan
	fence  *nft.Keeper
	crypt  crypt
}

// OpenMesh binds a Mesh to the calling thread's network namespace. It changes
// nothing yet.
func OpenMesh(cfg MeshConfig) (*Mesh, error) {
	if cfg.Tunnel == "" {
		cfg.Tunnel = DefaultTunnel
	}
	if cfg.VNI == 0 {
		cfg.VNI = DefaultVNI
	}
	if cfg.Port == 0 {
		cfg.Port = DefaultPort
	}
	routes, err := OpenHostGW(cfg.Config)
	if err != nil {
		return nil, err
	}
	return &Mesh{
		routes: routes,
		tunnel: vxlan{h: routes.h, name: cfg.Tunnel, vni: cfg.VNI, port: cfg.Port, log: routes.log},
		fence:  nft.NewKeeper(nft.KeeperConfig{Kernel: cfg.Kernel, Logger: cfg.Logger, Repaired: cfg.Repaired}),
		crypt:  crypt{h: routes.h, on: cfg.Encrypt, name: routes.wg, inside: cfg.Inside, log: routes.log, open: wireguard.OpenControl},
	}, nil
}

// Close gives the socket back; routes and tunnel stay.
func (m *Mesh) Close() {
	m.routes.Close()
	m.crypt.close()
}

// Run keeps the fence right until ctx ends.
func (m *Mesh) Run(ctx context.Context) { m.fence.Run(ctx) }

// List returns our routes as the kernel has them, sorted by range.
func (m *Mesh) List() ([]Route, error) { return m.routes.List() }

// Set connects this node with the others, as they are now: call it again when
// one comes, goes or moves, and now and then, as ways may change without a word.
// A node that cannot be reached does not keep the others away.
func (m *Mesh) Set(ctx context.Context, n Nodes) error {
	if err := n.check(); err != nil {
		return err
	}
	if m.crypt.on {
		return m.setEncrypted(ctx, n)
	}
	// First the fence: no packet comes out of a tunnel that has none.
	if err := m.fence.Set(Fence(m.tunnel.port, n)); err != nil {
		return fmt.Errorf("fence of the tunnel: %w", err)
	}
	plan := choose(m.tunnel.name, n, m.waysTo(n))
	err := m.setTunnel(n, plan)
	if err != nil && len(plan.peers) == 0 {
		// This node needs no tunnel; packets of a node that uses one are lost.
		m.tunnel.log.Debug("no tunnel", "err", err)
		err = nil
	}
	return errors.Join(err, m.routes.Set(ctx, plan.routes), m.crypt.remove())
}

func (m *Mesh) setTunnel(n Nodes, p plan) error {
	if len(n.Others) == 0 {
		return m.tunnel.remove()
	}
	link, err := m.tunnel.ensure(n.inner(), p)
	if err == nil {
		err = m.tunnel.setPeers(link, p.peers)
	}
	if err != nil {
		return fmt.Errorf("tunnel %s: %w", m.tunnel.name, err)
	}
	return nil
}

// CleanUp removes routes, tunnel and fence, also those of an earlier process.
func (m *Mesh) CleanUp(ctx context.Context) error {
	return errors.Join(m.routes.CleanUp(ctx), m.tunnel.remove(), m.crypt.remove(), m.fence.CleanUp(nft.Table{Name: FenceTable}))
}

func (n Nodes) check() error {
	if len(n.Others) > 0 && len(n.Own) == 0 {
		return errors.New("set routes: this node has no range")
	}
	for _, p := range n.Own {
		if !p.IsValid() {
			return errors.New("set routes: an own range is invalid")
		}
	}
	for _, o := range n.Others {
		invalid := len(o.Ranges) == 0 || len(o.Addrs) == 0
		for _, p := range o.Ranges {
			invalid = invalid || !p.IsValid()
		}
		for _, a := range o.Addrs {
			invalid = invalid || !a.IsValid()
		}
		if invalid {
			return fmt.Errorf("set routes: invalid node with ranges %v at %v", o.Ranges, o.Addrs)
		}
	}
	return nil
}

// inner is a node's address in the tunnel.
func inner(p netip.Prefix) netip.Addr { return p.Masked().Addr().Next() }

func (n Nodes) inner() []netip.Addr {
	out := make([]netip.Addr, len(n.Own))
	for i, p := range n.Own {
		out[i] = inner(p)
	}
	return out
}

// way is how the kernel reaches a node.
type way struct {
	gateway bool // through another machine
	mtu     int
	src     netip.Addr // the sender's address of packets that go there
	err     error      // not at all, at present
}

// waysTo asks the kernel for its way to each address of the others.
func (m *Mesh) waysTo(n Nodes) map[netip.Addr]way {
	ways := map[netip.Addr]way{}
	for _, o := range n.Others {
		for _, a := range o.Addrs {
			w, err := m.wayTo(a)
			if err != nil {
				w.err = err
			}
			ways[a] = w
		}
	}
	return ways
}

func (m *Mesh) wayTo(node netip.Addr) (way, error) {
	found, err := m.routes.h.RouteGet(node.AsSlice())
	if err != nil || len(found) == 0 {
		return way{}, fmt.Errorf("no way to node %s: %w", node, err)
	}
	r := found[0]
	w := way{gateway: len(r.Gw) > 0 || r.Via != nil, mtu: r.MTU}
	if src, ok := netip.AddrFromSlice(r.Src); ok {
		w.src = src.Unmap()
	}
	link, err := m.routes.h.LinkByIndex(r.LinkIndex)
	if err != nil {
		return way{}, fmt.Errorf("way to node %s: %w", node, err)
	}
	if w.mtu == 0 || link.Attrs().MTU < w.mtu {
		w.mtu = link.Attrs().MTU
	}
	return w, nil
}

// plan is what a Mesh asks of the kernel.
type plan struct {
	routes []Route
	peers  []Peer
	mtu    int // of the tunnel
	// local is this node's address that the tunnel is bound to, where its packets
	// between nodes are of IPv6; invalid: they are of IPv4.
	local netip.Addr
}

// defaultMTU is that of Ethernet, for a tunnel without peers yet.
const defaultMTU = 1500

// choose takes, for each range of each node, a host route by the node's address of
// that family where there is no gateway before it; else the tunnel, to the node's
// address of IPv4 if it has one: one interface sends packets of one family. A node
// that there is no way to keeps a plain route, which the kernel refuses with its
// reason. Pure.
func choose(tunnel string, n Nodes, ways map[netip.Addr]way) plan {
	var p plan
	for _, o := range n.Others {
		peer := Peer{MAC: tunnelMAC(inner(o.Ranges[0])), Node: underlay(o.Addrs)}
		for i, r := range o.Ranges {
			same := slices.IndexFunc(o.Addrs, func(a netip.Addr) bool { return a.Is4() == r.Addr().Is4() })
			direct := same >= 0 && ways[o.Addrs[same]].err == nil && !ways[o.Addrs[same]].gateway
			if lost := ways[peer.Node].err != nil; direct || lost && same >= 0 {
				p.routes = append(p.routes, Route{Dst: r, Via: o.Addrs[same], MTU: o.mtu(i)})
				continue
			}
			via := inner(r)
			if via.Is6() {
				// An address of the link, which the kernel asks no other route about.
				via = linkLocal(peer.MAC)
			}
			peer.Inner = append(peer.Inner, via)
			p.routes = append(p.routes, Route{Dst: r, Via: via, Dev: tunnel, MTU: o.mtu(i)})
		}
		if len(peer.Inner) > 0 {
			p.peers = append(p.peers, peer)
		}
	}
	// One interface serves all: the narrowest way counts.
	six := len(p.peers) > 0
	for _, peer := range p.peers {
		if mtu := ways[peer.Node].mtu - overhead(peer.Node); mtu > 0 && (p.mtu == 0 || mtu < p.mtu) {
			p.mtu = mtu
		}
		six = six && peer.Node.Is6()
	}
	if six {
		p.local = ways[p.peers[0].Node].src
	}
	if p.mtu == 0 {
		p.mtu = defaultMTU - overhead(netip.IPv4Unspecified())
	}
	return p
}

// underlay is the address of a node that packets of the tunnel are sent to.
func underlay(addrs []netip.Addr) netip.Addr {
	for _, a := range addrs {
		if a.Is4() {
			return a
		}
	}
	return addrs[0]
}

// FenceTable is the table that lets members alone into the tunnel.
const FenceTable = "clusterd_overlay"
