package overlay

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/internal/nlretry"
	"github.com/clusterd/clusterd/netsetup/sysctl"
)

// Peer is the other end of a tunnel.
type Peer struct {
	// MAC is that of its node in the tunnel. It follows from the node's range, so
	// that nodes need not tell each other.
	MAC net.HardwareAddr
	// Inner are the addresses behind which it has the MAC.
	Inner []netip.Addr
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
// learned: what the kernel knows about peers is what was set here.
type vxlan struct {
	h    *netlink.Handle
	name string
	vni  int
	port int
	log  *slog.Logger
}

// tunnelMAC is the MAC in the tunnel, locally administered, of the node whose first
// range gives it that address there.
func tunnelMAC(inner netip.Addr) net.HardwareAddr {
	b := inner.As16()
	if inner.Is6() { // the ends of all nodes' addresses are alike
		sum := sha256.Sum256(b[:])
		copy(b[12:], sum[:4])
	}
	return net.HardwareAddr{0x0e, 0xcd, b[12], b[13], b[14], b[15]}
}

// linkLocal is the address that follows from a MAC (RFC 4291, appendix A).
func linkLocal(m net.HardwareAddr) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 8: m[0] ^ 2, m[1], m[2], 0xff, 0xfe, m[3], m[4], m[5]})
}

// ensure makes the interface or brings it to what is wanted: own are the node's
// addresses in the tunnel.
func (v *vxlan) ensure(own []netip.Addr, p plan) (netlink.Link, error) {
	mac := tunnelMAC(own[0])
	link, err := v.h.LinkByName(v.name)
	if err == nil {
		have, ok := link.(*netlink.Vxlan)
		if !ok {
			return nil, fmt.Errorf("an interface of type %s has that name", link.Type())
		}
		local, _ := netip.AddrFromSlice(have.SrcAddr)
		otherwise := len(p.peers) > 0 && local.Unmap() != p.local // without peers, either will do
		if have.VxlanId != v.vni || have.Port != v.port || have.Learning || otherwise {
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
		attrs.Name, attrs.MTU, attrs.HardwareAddr = v.name, p.mtu, mac
		tunnel := &netlink.Vxlan{LinkAttrs: attrs, VxlanId: v.vni, Port: v.port, Learning: false}
		if p.local.IsValid() {
			tunnel.SrcAddr = p.local.AsSlice()
		}
		err := v.h.LinkAdd(tunnel)
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return nil, fmt.Errorf("create: %w", err)
		}
		if link, err = v.h.LinkByName(v.name); err != nil {
			return nil, err
		}
		v.log.Info("tunnel made", "interface", v.name, "port", v.port, "mtu", p.mtu)
	}
	if link.Attrs().MTU != p.mtu {
		if err := v.h.LinkSetMTU(link, p.mtu); err != nil {
			return nil, fmt.Errorf("set MTU %d: %w", p.mtu, err)
		}
	}
	if link.Attrs().HardwareAddr.String() != mac.String() {
		if err := v.h.LinkSetHardwareAddr(link, mac); err != nil {
			return nil, fmt.Errorf("set hardware address: %w", err)
		}
	}
	for _, a := range own {
		if err := setAddr(v.h, link, a); err != nil {
			return nil, err
		}
	}
	if err := v.h.LinkSetUp(link); err != nil {
		return nil, fmt.Errorf("set up: %w", err)
	}
	return link, nil
}

// setAddr makes own the interface's only address of its family, but for that of
// the link: what the node itself sends through the tunnel bears it, and is answered
// through the tunnel.
func setAddr(h *netlink.Handle, link netlink.Link, own netip.Addr) error {
	family := netlink.FAMILY_V4
	if own.Is6() {
		family = netlink.FAMILY_V6
		if err := sysctl.Set(sysctl.Host6(link.Attrs().Name)); err != nil {
			return err
		}
	}
	have, err := nlretry.List(func() ([]netlink.Addr, error) { return h.AddrList(link, family) })
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	want := &netlink.Addr{IPNet: &net.IPNet{IP: own.AsSlice(), Mask: net.CIDRMask(own.BitLen(), own.BitLen())}}
	found := false
	for _, a := range have {
		if a.IPNet.String() == want.IPNet.String() {
			found = true
		} else if a.IP.IsLinkLocalUnicast() && own.Is6() {
			continue
		} else if err := h.AddrDel(link, &a); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("remove address %s: %w", a.IPNet, err)
		}
	}
	if found {
		return nil
	}
	if own.Is6() {
		want.Flags = unix.IFA_F_NODAD // unique by construction
	}
	if err := h.AddrReplace(link, want); err != nil {
		return fmt.Errorf("add address %s: %w", own, err)
	}
	return nil
}

// setPeers makes the neighbours of the interface exactly those given.
func (v *vxlan) setPeers(link netlink.Link, peers []Peer) error {
	index := link.Attrs().Index
	nodes, macs := map[string]netip.Addr{}, map[netip.Addr]net.HardwareAddr{}
	var errs []error
	for _, p := range peers {
		if p.Node.Is4() != peers[0].Node.Is4() {
			errs = append(errs, fmt.Errorf("peer at %s: another is at %s: one tunnel has nodes of one IP family, give all of them an address of IPv4 or none", p.Node, peers[0].Node))
		}
		nodes[p.MAC.String()] = p.Node
		for _, a := range p.Inner {
			macs[a] = p.MAC
		}
	}
	// Where a MAC is: the bridge table.
	table, err := nlretry.List(func() ([]netlink.Neigh, error) { return v.h.NeighList(index, unix.AF_BRIDGE) })
	if err != nil {
		return fmt.Errorf("list forwarding entries: %w", err)
	}
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
	known := map[netip.Addr]bool{}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		have, err := nlretry.List(func() ([]netlink.Neigh, error) { return v.h.NeighList(index, family) })
		if err != nil {
			return fmt.Errorf("list neighbours: %w", err)
		}
		for _, n := range have {
			a, _ := netip.AddrFromSlice(n.IP)
			a = a.Unmap()
			mac, inner := macs[a]
			if inner && n.State&netlink.NUD_PERMANENT != 0 && n.HardwareAddr.String() == mac.String() {
				known[a] = true
				continue
			}
			if inner || a.IsMulticast() {
				continue // replaced below; the kernel's own
			}
			if err := v.h.NeighDel(&n); err != nil && !errors.Is(err, unix.ENOENT) {
				errs = append(errs, fmt.Errorf("remove neighbour %s: %w", a, err))
			}
		}
	}
	for _, p := range peers {
		if !there[p.MAC.String()] {
			err := v.h.NeighSet(&netlink.Neigh{LinkIndex: index, Family: unix.AF_BRIDGE, State: netlink.NUD_PERMANENT | netlink.NUD_NOARP,
				Flags: netlink.NTF_SELF, IP: p.Node.AsSlice(), HardwareAddr: p.MAC})
			if err != nil {
				errs = append(errs, fmt.Errorf("peer %s at %s: %w", p.MAC, p.Node, err))
			}
		}
		for _, a := range p.Inner {
			if known[a] {
				continue
			}
			if err := v.h.NeighSet(&netlink.Neigh{LinkIndex: index, State: netlink.NUD_PERMANENT, IP: a.AsSlice(), HardwareAddr: p.MAC}); err != nil {
				errs = append(errs, fmt.Errorf("neighbour %s: %w", a, err))
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
