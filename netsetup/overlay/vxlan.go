package overlay

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/internal/nlretry"
)

// Peer is the other end of a tunnel.
type Peer struct {
	// Inner is the address that its node has in the tunnel. Its MAC there follows
	// from it, so that nodes need not tell each other.
	Inner netip.Addr
	// Node is where its packets are sent, by UDP.
	Node netip.Addr
}

// overhead is what VXLAN adds to a packet: an Ethernet, a VXLAN, a UDP and an IP
// header.
func overhead(node netip.Addr) int {
	if node.Is4() {
		return 14 + 8 + 8 + 20
	}
	return 14 + 8 + 8 + 40
}

// vxlan keeps one tunnel interface with its neighbours. Nothing in it is
// learned: what the kernel knows of peers is what it was told here.
type vxlan struct {
	h    *netlink.Handle
	name string
	vni  int
	port int
	log  *slog.Logger
}

// tunnelMAC is the MAC of a node in the tunnel, locally administered.
func tunnelMAC(inner netip.Addr) net.HardwareAddr {
	b := inner.As16()
	return net.HardwareAddr{0x0e, 0xcd, b[12], b[13], b[14], b[15]}
}

// ensure makes the interface or brings it to what is wanted: own is the node's
// address in the tunnel.
func (v *vxlan) ensure(own netip.Addr, mtu int) (netlink.Link, error) {
	link, err := v.h.LinkByName(v.name)
	if err == nil {
		have, ok := link.(*netlink.Vxlan)
		if !ok {
			return nil, fmt.Errorf("an interface of type %s has that name", link.Type())
		}
		if have.VxlanId != v.vni || have.Port != v.port || have.Learning {
			if err := v.h.LinkDel(link); err != nil && !isNotFound(err) {
				return nil, fmt.Errorf("remove a former one: %w", err)
			}
			link = nil
		}
	} else if !isNotFound(err) {
		return nil, err
	}
	if link == nil || isNotFound(err) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.HardwareAddr = v.name, mtu, tunnelMAC(own)
		err := v.h.LinkAdd(&netlink.Vxlan{LinkAttrs: attrs, VxlanId: v.vni, Port: v.port, Learning: false})
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return nil, fmt.Errorf("create: %w", err)
		}
		if link, err = v.h.LinkByName(v.name); err != nil {
			return nil, err
		}
		v.log.Info("tunnel made", "interface", v.name, "port", v.port, "mtu", mtu)
	}
	if link.Attrs().MTU != mtu {
		if err := v.h.LinkSetMTU(link, mtu); err != nil {
			return nil, fmt.Errorf("set MTU %d: %w", mtu, err)
		}
	}
	if mac := tunnelMAC(own); link.Attrs().HardwareAddr.String() != mac.String() {
		if err := v.h.LinkSetHardwareAddr(link, mac); err != nil {
			return nil, fmt.Errorf("set hardware address: %w", err)
		}
	}
	if err := v.setAddr(link, own); err != nil {
		return nil, err
	}
	if err := v.h.LinkSetUp(link); err != nil {
		return nil, fmt.Errorf("set up: %w", err)
	}
	return link, nil
}

// setAddr makes own the interface's only IPv4 address: what the node itself
// sends through the tunnel bears it, and is answered through the tunnel.
func (v *vxlan) setAddr(link netlink.Link, own netip.Addr) error {
	have, err := nlretry.List(func() ([]netlink.Addr, error) { return v.h.AddrList(link, netlink.FAMILY_V4) })
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	want := &netlink.Addr{IPNet: &net.IPNet{IP: own.AsSlice(), Mask: net.CIDRMask(own.BitLen(), own.BitLen())}}
	found := false
	for _, a := range have {
		if a.IPNet.String() == want.IPNet.String() {
			found = true
		} else if err := v.h.AddrDel(link, &a); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("remove address %s: %w", a.IPNet, err)
		}
	}
	if found {
		return nil
	}
	if err := v.h.AddrReplace(link, want); err != nil {
		return fmt.Errorf("add address %s: %w", own, err)
	}
	return nil
}

// setPeers makes the neighbours of the interface exactly those given.
func (v *vxlan) setPeers(link netlink.Link, peers []Peer) error {
	index := link.Attrs().Index
	nodes, inner := map[string]netip.Addr{}, map[netip.Addr]bool{}
	for _, p := range peers {
		nodes[tunnelMAC(p.Inner).String()] = p.Node
		inner[p.Inner] = true
	}
	// Where a MAC is: the bridge table.
	table, err := nlretry.List(func() ([]netlink.Neigh, error) { return v.h.NeighList(index, unix.AF_BRIDGE) })
	if err != nil {
		return fmt.Errorf("list forwarding entries: %w", err)
	}
	var errs []error
	there := map[string]bool{}
	for _, n := range table {
		node, _ := netip.AddrFromSlice(n.IP)
		mac := n.HardwareAddr.String()
		if want, ok := nodes[mac]; ok && want == node.Unmap() {
			there[mac] = true
			continue
		}
		n.Family, n.Flags = unix.AF_BRIDGE, netlink.NTF_SELF
		if err := v.h.NeighDel(&n); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("remove the entry of %s: %w", mac, err))
		}
	}
	// Which MAC an address has: the neighbour table.
	have, err := nlretry.List(func() ([]netlink.Neigh, error) { return v.h.NeighList(index, netlink.FAMILY_V4) })
	if err != nil {
		return fmt.Errorf("list neighbours: %w", err)
	}
	known := map[netip.Addr]bool{}
	for _, n := range have {
		a, _ := netip.AddrFromSlice(n.IP)
		a = a.Unmap()
		if inner[a] && n.State&netlink.NUD_PERMANENT != 0 && n.HardwareAddr.String() == tunnelMAC(a).String() {
			known[a] = true
			continue
		}
		if inner[a] || a.IsMulticast() {
			continue // replaced below; the kernel's own
		}
		if err := v.h.NeighDel(&n); err != nil && !errors.Is(err, unix.ENOENT) {
			errs = append(errs, fmt.Errorf("remove neighbour %s: %w", a, err))
		}
	}
	for _, p := range peers {
		mac := tunnelMAC(p.Inner)
		if !there[mac.String()] {
			err := v.h.NeighSet(&netlink.Neigh{LinkIndex: index, Family: unix.AF_BRIDGE, State: netlink.NUD_PERMANENT | netlink.NUD_NOARP,
				Flags: netlink.NTF_SELF, IP: p.Node.AsSlice(), HardwareAddr: mac})
			if err != nil {
				errs = append(errs, fmt.Errorf("peer %s at %s: %w", p.Inner, p.Node, err))
			}
		}
		if !known[p.Inner] {
			err := v.h.NeighSet(&netlink.Neigh{LinkIndex: index, State: netlink.NUD_PERMANENT, IP: p.Inner.AsSlice(), HardwareAddr: mac})
			if err != nil {
				errs = append(errs, fmt.Errorf("neighbour %s: %w", p.Inner, err))
			}
		}
	}
	return errors.Join(errs...)
}

// remove deletes the interface; none is no error.
func (v *vxlan) remove() error {
	link, err := v.h.LinkByName(v.name)
	if isNotFound(err) {
		return nil
	}
	if err == nil && link.Type() != "vxlan" {
		return nil // a stranger's
	}
	if err == nil {
		err = v.h.LinkDel(link)
	}
	if err != nil && !isNotFound(err) {
		return fmt.Errorf("remove tunnel %s: %w", v.name, err)
	}
	return nil
}

func isNotFound(err error) bool {
	var nf netlink.LinkNotFoundError
	return errors.As(err, &nf) || errors.Is(err, unix.ENODEV)
}
