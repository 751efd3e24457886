package overlay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/netsetup/wireguard"
)

// The defaults of WireGuard. All nodes tell each other their port.
const (
	DefaultWireGuard     = "clusterd-wg"
	DefaultWireGuardPort = 8475
)

// ErrNoWireGuard: the kernel has none.
var ErrNoWireGuard = errors.New("this kernel has no WireGuard")

// passes is the set of the interfaces by which packets of pods may pass.
const passes = "passes"

// FenceEncrypted is the table that keeps all ranges of pods to this node's own
// interfaces and to WireGuard: a packet for such an address leaves by no other one,
// and one from such an address comes in by no other one. It holds whatever the routes
// say, before they are set too. Pure.
func FenceEncrypted(link string, inside []string, within []netip.Prefix) nft.Table {
	names := nft.Elements{nft.Key(link): "", nft.Key("lo"): ""}
	for _, name := range inside {
		names[nft.Key(name)] = ""
	}
	in := nft.Chain{Name: "in", Type: "filter", Hook: "prerouting", Priority: -300}
	out := nft.Chain{Name: "out", Type: "filter", Hook: "postrouting", Priority: -10}
	for _, r := range outer(within) {
		in.Rules = append(in.Rules, nft.Rule{nft.From(r), nft.NotIn(passes, nft.Iif), nft.DropPacket})
		out.Rules = append(out.Rules, nft.Rule{nft.To(r), nft.NotIn(passes, nft.Oif), nft.DropPacket})
	}
	return nft.Table{
		Name:   FenceTable,
		Sets:   []nft.Set{{Name: passes, Key: []nft.Type{nft.IfName}, Elements: names}},
		Chains: []nft.Chain{in, out},
	}
}

// outer leaves out the ranges that are parts of others.
func outer(ranges []netip.Prefix) []netip.Prefix {
	var out []netip.Prefix
	for _, r := range ranges {
		part := func(o netip.Prefix) bool { return o != r.Masked() && o.Bits() <= r.Bits() && o.Overlaps(r) }
		if !slices.ContainsFunc(ranges, func(o netip.Prefix) bool { return part(o.Masked()) }) && !slices.Contains(out, r.Masked()) {
			out = append(out, r.Masked())
		}
	}
	return out
}

// encrypted is what WireGuard asks of the kernel: each range of a node whose key is
// known goes through the interface, all others within the cluster are refused.
type encrypted struct {
	routes []Route
	peers  []wireguard.Peer
	mtu    int
}

// encrypt plans it. Pure.
func encrypt(link string, n Nodes, ways map[netip.Addr]way) encrypted {
	var e encrypted
	mine := map[netip.Prefix]bool{}
	for _, own := range n.Own {
		mine[own.Masked()] = true
	}
	for _, o := range n.Others {
		known := o.Key != (wireguard.Key{})
		for i, r := range o.Ranges {
			mine[r.Masked()] = true
			route := Route{Dst: r, Dev: link, MTU: o.mtu(i)}
			if !known {
				route = Route{Dst: r, Refuse: true}
			}
			e.routes = append(e.routes, route)
		}
		if !known {
			continue
		}
		at := endpoint(o.Addrs, ways)
		e.peers = append(e.peers, wireguard.Peer{Key: o.Key, Endpoint: netip.AddrPortFrom(at, uint16(o.Port)), Allowed: o.Ranges})
		if mtu := ways[at].mtu - wireguard.Overhead; mtu > 0 && (e.mtu == 0 || mtu < e.mtu) {
			e.mtu = mtu
		}
	}
	// What no node has would follow the default route.
	for _, r := range outer(n.Within) {
		if !mine[r] && !slices.ContainsFunc(n.Own, func(own netip.Prefix) bool { return own.Bits() <= r.Bits() && own.Overlaps(r) }) {
			e.routes = append(e.routes, Route{Dst: r, Refuse: true})
		}
	}
	if e.mtu == 0 {
		e.mtu = defaultMTU - wireguard.Overhead
	}
	return e
}

// endpoint is the address that a node's packets are sent to: the first one that
// there is a way to.
func endpoint(addrs []netip.Addr, ways map[netip.Addr]way) netip.Addr {
	for _, a := range addrs {
		if ways[a].err == nil {
			return a
		}
	}
	return addrs[0]
}

// crypt keeps the interface of WireGuard.
type crypt struct {
	h      *netlink.Handle
	on     bool
	name   string
	inside []string
	log    *slog.Logger
	open   func() (wireguard.Control, error)

	mu      sync.Mutex        // guards control
	control wireguard.Control // nil: not opened yet
}

func (c *crypt) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.control != nil {
		_ = c.control.Close() // a socket
	}
}

// Guard lets no packet of a pod leave or enter in clear from now on, and makes the
// interface. It is for before there are pods: Set does the same. ErrNoWireGuard says
// that the kernel has none; the fence holds all the same.
func (m *Mesh) Guard(n Nodes) error {
	if !m.crypt.on {
		return nil
	}
	if err := n.check(); err != nil {
		return err
	}
	if err := m.fence.Set(FenceEncrypted(m.crypt.name, m.crypt.inside, n.Within)); err != nil {
		return fmt.Errorf("fence of WireGuard: %w", err)
	}
	_, err := m.crypt.link(defaultMTU - wireguard.Overhead)
	return err
}

func (m *Mesh) setEncrypted(ctx context.Context, n Nodes) error {
	if err := m.fence.Set(FenceEncrypted(m.crypt.name, m.crypt.inside, n.Within)); err != nil {
		return fmt.Errorf("fence of WireGuard: %w", err)
	}
	e := encrypt(m.crypt.name, n, m.waysTo(n))
	err := m.crypt.ensure(n, e)
	if errors.Is(err, ErrNoWireGuard) {
		for i, r := range e.routes {
			e.routes[i] = Route{Dst: r.Dst, Refuse: true}
		}
	} else if err != nil {
		return err // the routes of before lead into the interface of before, or nowhere
	}
	return errors.Join(err, m.routes.Set(ctx, e.routes), m.tunnel.remove())
}

// link makes the interface or finds it.
func (c *crypt) link(mtu int) (netlink.Link, error) {
	link, err := c.h.LinkByName(c.name)
	if isNotFound(err) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU = c.name, mtu
		err = c.h.LinkAdd(&netlink.Wireguard{LinkAttrs: attrs})
		switch {
		case errors.Is(err, unix.EOPNOTSUPP):
			return nil, fmt.Errorf("%w: modprobe wireguard, or use a kernel with CONFIG_WIREGUARD", ErrNoWireGuard)
		case err != nil && !errors.Is(err, unix.EEXIST):
			return nil, fmt.Errorf("WireGuard interface %s: create: %w", c.name, err)
		case err == nil:
			c.log.Info("WireGuard interface made", "interface", c.name, "mtu", mtu)
		}
		link, err = c.h.LinkByName(c.name)
	}
	if err != nil {
		return nil, fmt.Errorf("WireGuard interface %s: %w", c.name, err)
	}
	if link.Type() != "wireguard" {
		return nil, fmt.Errorf("an interface of type %s has the name %s, which WireGuard's is to have: rename or remove it", link.Type(), c.name)
	}
	return link, nil
}

// ensure brings the interface to what is planned.
func (c *crypt) ensure(n Nodes, e encrypted) error {
	link, err := c.link(e.mtu)
	if err != nil {
		return err
	}
	control, err := c.opened()
	if err != nil {
		return err
	}
	if err := wireguard.Set(control, c.name, wireguard.State{Private: n.Key, Hold: n.Hold, Port: DefaultWireGuardPort, Peers: e.peers}); err != nil {
		return err
	}
	if link.Attrs().MTU != e.mtu {
		if err := c.h.LinkSetMTU(link, e.mtu); err != nil {
			return fmt.Errorf("WireGuard interface %s: set MTU %d: %w", c.name, e.mtu, err)
		}
	}
	for _, a := range n.inner() {
		if err := setAddr(c.h, link, a); err != nil {
			return fmt.Errorf("WireGuard interface %s: %w", c.name, err)
		}
	}
	if err := c.h.LinkSetUp(link); err != nil {
		return fmt.Errorf("WireGuard interface %s: set up: %w", c.name, err)
	}
	return nil
}

// opened is the kernel's door, which there is once there is an interface.
func (c *crypt) opened() (_ wireguard.Control, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.control == nil {
		c.control, err = c.open()
	}
	return c.control, err
}

// remove deletes the interface; none is no error.
func (c *crypt) remove() error {
	link, err := c.h.LinkByName(c.name)
	if isNotFound(err) {
		return nil
	}
	if err == nil && link.Type() != "wireguard" {
		return nil // a stranger's
	}
	if err == nil {
		err = c.h.LinkDel(link)
	}
	if err != nil && !isNotFound(err) {
		return fmt.Errorf("remove WireGuard interface %s: %w", c.name, err)
	}
	return nil
}

// Links are the peers of the WireGuard interface, as the kernel knows them. It may
// be called at any time.
func (m *Mesh) Links() ([]wireguard.Link, error) {
	m.crypt.mu.Lock()
	control := m.crypt.control
	m.crypt.mu.Unlock()
	if control == nil {
		return nil, nil
	}
	return wireguard.Links(control, m.crypt.name)
}
