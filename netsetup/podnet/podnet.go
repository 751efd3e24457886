// Package podnet connects network namespaces to a bridge: one veth pair each,
// with one address of each family it is to have, default routes and a working
// loopback. It takes plain
// values and knows no Pod's API object.
//
// It works in the network namespace in which its Network was opened, which
// for clusterd is the one of the process.
package podnet

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/internal/nlretry"
	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/sysctl"
)

// ErrNoBridge is returned when the bridge to attach to does not exist, or the
// interface of that name is not a bridge.
var ErrNoBridge = errors.New("no such bridge")

// hostIfPrefix begins the name of every host-side interface, so that Sweep
// never touches a stranger's.
const hostIfPrefix = "cd"

// PortGroup is the interface group of the host ends in use, and DoomedGroup that
// of those that may go: a packet filter knows pods' ports by them. The kernel
// deletes a whole group in one request and waits once for all of them. The
// numbers ("clue", "clud") are unlikely to be anyone else's.
const (
	PortGroup   = 0x636c7565
	DoomedGroup = 0x636c7564
)

// Config of a Network.
type Config struct {
	// Logger; default: slog.Default().
	Logger *slog.Logger
}

// Network attaches pods in one network namespace. Its methods may be called
// concurrently for different pods.
type Network struct {
	h    *netlink.Handle
	link groupDeleter
	log  *slog.Logger
}

// Open binds a Network to the calling thread's network namespace.
func Open(cfg Config) (*Network, error) {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	d, err := newGroupDeleter()
	if err != nil {
		h.Close()
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	return &Network{h: h, link: d, log: cfg.Logger}, nil
}

// Close gives the sockets back; it changes nothing in the kernel.
func (n *Network) Close() {
	n.h.Close()
	n.link.close()
}

// Bridge is the node's switch for its pods.
type Bridge struct {
	Name string // interface name, at most 15 bytes; required
	// Addrs are the bridge's own addresses with the length of the pods' subnet:
	// the pods' gateways, "10.42.1.1/24"; one of each family at most, required.
	Addrs []netip.Prefix
	MTU   int // bytes; 0: the kernel's default
}

// EnsureBridge makes the bridge or brings it to what b says. A bridge whose
// address changed loses the old one. Its hardware address is fixed, so that it
// does not change with every pod that comes and goes. With an address of IPv6 it
// sets kernel switches of the calling thread's namespace, which has to be the
// Network's.
func (n *Network) EnsureBridge(b Bridge) error {
	if err := checkIfName(b.Name); err != nil {
		return fmt.Errorf("bridge: %w", err)
	}
	if err := checkFamilies(b.Addrs); err != nil {
		return fmt.Errorf("bridge %s: %w", b.Name, err)
	}
	link, err := n.h.LinkByName(b.Name)
	if isNotFound(err) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = b.Name
		attrs.MTU = b.MTU
		attrs.HardwareAddr = HardwareAddr(b.Addrs[0].Addr())
		err = n.h.LinkAdd(&netlink.Bridge{LinkAttrs: attrs})
		if err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("bridge %s: create: %w", b.Name, err)
		}
		link, err = n.h.LinkByName(b.Name)
	}
	if err != nil {
		return fmt.Errorf("bridge %s: %w", b.Name, err)
	}
	if link.Type() != "bridge" {
		return fmt.Errorf("bridge %s: an interface of type %s has that name: %w", b.Name, link.Type(), ErrNoBridge)
	}
	if b.MTU > 0 && link.Attrs().MTU != b.MTU {
		if err := n.h.LinkSetMTU(link, b.MTU); err != nil {
			return fmt.Errorf("bridge %s: set MTU %d: %w", b.Name, b.MTU, err)
		}
	}
	for _, a := range b.Addrs {
		if a.Addr().Is6() {
			if err := sysctl.Set(sysctl.Host6(b.Name)); err != nil {
				return fmt.Errorf("bridge %s: %w", b.Name, err)
			}
		}
		if err := setAddr(n.h, link, a); err != nil {
			return fmt.Errorf("bridge %s: %w", b.Name, err)
		}
	}
	if err := n.h.LinkSetUp(link); err != nil {
		return fmt.Errorf("bridge %s: set up: %w", b.Name, err)
	}
	return nil
}

// Pod is one network namespace to connect.
type Pod struct {
	NetNS  string    // path of the pinned namespace; required
	IfName string    // interface inside; default "eth0"
	HostIf string    // interface outside, see HostIf; required
	Bridge string    // name of the bridge; required
	Addrs  []Address // one of each family at most; required
	MTU    int       // bytes; 0: the kernel's default
}

// Address is one that a pod has.
type Address struct {
	// Addr is the address with the subnet's length; required. With single
	// addresses (/32, /128) the port is isolated: the pod reaches the others of its
	// bridge through the node, whose packet filter sees it all.
	Addr    netip.Prefix
	Gateway netip.Addr // next hop of the family's default route; zero: no such route
}

// has6 reports whether the pod has an address of IPv6.
func (p Pod) has6() bool {
	return slices.ContainsFunc(p.Addrs, func(a Address) bool { return a.Addr.Addr().Is6() })
}

// single reports whether all addresses are single ones.
func (p Pod) single() bool {
	return !slices.ContainsFunc(p.Addrs, func(a Address) bool { return !a.Addr.IsSingleIP() })
}

// HostIf derives the name of the host-side interface from an id that is unique
// on the node.
func HostIf(id string) string {
	sum := sha256.Sum256([]byte(id))
	return hostIfPrefix + hex.EncodeToString(sum[:])[:12]
}

// Attach connects the namespace as p says. Called again, also after a crash
// at any point, it completes or repeats without harm: an interface pair that
// is whole is kept with its traffic, one whose other end is elsewhere is
// replaced.
func (n *Network) Attach(p Pod) error {
	if p.IfName == "" {
		p.IfName = "eth0"
	}
	if err := n.attach(p); err != nil {
		return fmt.Errorf("attach %s to %s: %w", p.HostIf, p.Bridge, err)
	}
	return nil
}

func (n *Network) attach(p Pod) error {
	if err := p.check(); err != nil {
		return err
	}
	bridge, err := n.h.LinkByName(p.Bridge)
	if isNotFound(err) || err == nil && bridge.Type() != "bridge" {
		return fmt.Errorf("%s: %w", p.Bridge, ErrNoBridge)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", p.Bridge, err)
	}
	var inside *netlink.Handle
	err = netns.Do(p.NetNS, func() (err error) {
		if p.has6() {
			if err := sysctl.Set(sysctl.Host6("default")); err != nil { // for the interface to come
				return err
			}
		}
		inside, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err != nil {
		return err
	}
	defer inside.Close()

	host, err := n.ensurePair(p, inside, bridge)
	if err != nil {
		return err
	}
	if err := n.h.LinkSetHairpin(host, true); err != nil {
		// A pod must reach itself through a Service address.
		return fmt.Errorf("set hairpin: %w", err)
	}
	// No frame of its own making gets around the node to another such pod.
	if err := n.h.LinkSetIsolated(host, p.single()); err != nil {
		return fmt.Errorf("isolate the port: %w", err)
	}
	if err := n.h.LinkSetUp(host); err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	return configureInside(inside, p)
}

func (p Pod) check() error {
	if err := checkIfName(p.HostIf); err != nil {
		return err
	}
	if err := checkIfName(p.IfName); err != nil {
		return err
	}
	addrs := make([]netip.Prefix, len(p.Addrs))
	for i, a := range p.Addrs {
		addrs[i] = a.Addr
		if a.Gateway.IsValid() && a.Gateway.Is4() != a.Addr.Addr().Is4() {
			return fmt.Errorf("gateway %s of %s: it is of the other family", a.Gateway, a.Addr)
		}
	}
	return checkFamilies(addrs)
}

// checkFamilies refuses what are not one or two addresses of different families.
func checkFamilies(addrs []netip.Prefix) error {
	if len(addrs) == 0 {
		return errors.New("no address given")
	}
	for i, a := range addrs {
		switch {
		case !a.IsValid():
			return errors.New("no address given")
		case i > 1, i == 1 && a.Addr().Is4() == addrs[0].Addr().Is4():
			return fmt.Errorf("addresses %v: there may be one of each family", addrs)
		}
	}
	return nil
}

// ensurePair returns the host end of a pair whose other end is p.IfName inside.
func (n *Network) ensurePair(p Pod, inside *netlink.Handle, bridge netlink.Link) (netlink.Link, error) {
	host, err := n.h.LinkByName(p.HostIf)
	switch {
	case err == nil:
		whole, err := isPair(host, inside, p.IfName)
		if err != nil {
			return nil, err
		}
		if whole {
			return host, n.adopt(host, bridge, p.MTU)
		}
		// The other end is in a namespace that is going away, or was never
		// moved here: build it again. This is the slow path (tens of milliseconds).
		n.log.Info("replacing a stale interface", "interface", p.HostIf)
		if err := n.h.LinkDel(host); err != nil && !isNotFound(err) {
			return nil, fmt.Errorf("delete stale pair: %w", err)
		}
	case !isNotFound(err):
		return nil, err
	}
	ns, err := os.Open(p.NetNS)
	if err != nil {
		return nil, err
	}
	defer func() { _ = ns.Close() }()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = p.HostIf
	attrs.MTU = p.MTU
	attrs.MasterIndex = bridge.Attrs().Index
	attrs.Group = PortGroup
	veth := netlink.NewVeth(attrs)
	veth.PeerName = p.IfName
	veth.PeerNamespace = netlink.NsFd(int(ns.Fd()))
	veth.PeerHardwareAddr = HardwareAddr(p.Addrs[0].Addr.Addr())
	if err := n.h.LinkAdd(veth); err != nil {
		return nil, fmt.Errorf("create the pair: %w", err)
	}
	return veth, nil
}

// adopt brings an existing host end to the wanted bridge, MTU and group.
func (n *Network) adopt(host, bridge netlink.Link, mtu int) error {
	if host.Attrs().MasterIndex != bridge.Attrs().Index {
		if err := n.h.LinkSetMaster(host, bridge); err != nil {
			return fmt.Errorf("join the bridge: %w", err)
		}
	}
	if mtu > 0 && host.Attrs().MTU != mtu {
		if err := n.h.LinkSetMTU(host, mtu); err != nil {
			return fmt.Errorf("set MTU %d: %w", mtu, err)
		}
	}
	if host.Attrs().Group != PortGroup {
		if err := n.h.LinkSetGroup(host, PortGroup); err != nil {
			return fmt.Errorf("take into the group of ports: %w", err)
		}
	}
	return nil
}

// isPair says whether host is a veth whose peer is the interface name inside.
// A veth's parent index is its peer's index in the peer's own namespace; both
// directions must agree, as indexes repeat between namespaces.
func isPair(host netlink.Link, inside *netlink.Handle, name string) (bool, error) {
	if host.Type() != "veth" {
		return false, nil
	}
	peer, err := inside.LinkByName(name)
	if isNotFound(err) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look inside for %s: %w", name, err)
	}
	return peer.Type() == "veth" &&
		peer.Attrs().Index == host.Attrs().ParentIndex &&
		peer.Attrs().ParentIndex == host.Attrs().Index, nil
}

func configureInside(h *netlink.Handle, p Pod) error {
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("loopback: %w", err)
	}
	if err := h.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set up loopback: %w", err)
	}
	link, err := h.LinkByName(p.IfName)
	if err != nil {
		return fmt.Errorf("%s: %w", p.IfName, err)
	}
	if p.MTU > 0 && link.Attrs().MTU != p.MTU {
		if err := h.LinkSetMTU(link, p.MTU); err != nil {
			return fmt.Errorf("%s: set MTU %d: %w", p.IfName, p.MTU, err)
		}
	}
	for _, a := range p.Addrs {
		if err := setAddr(h, link, a.Addr); err != nil {
			return fmt.Errorf("%s: %w", p.IfName, err)
		}
	}
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("%s: set up: %w", p.IfName, err)
	}
	for _, a := range p.Addrs {
		if !a.Gateway.IsValid() {
			continue
		}
		route := &netlink.Route{LinkIndex: link.Attrs().Index, Gw: a.Gateway.AsSlice()}
		if !a.Addr.Contains(a.Gateway) {
			route.Flags = int(netlink.FLAG_ONLINK)
		}
		if err := h.RouteReplace(route); err != nil {
			return fmt.Errorf("%s: default route via %s: %w", p.IfName, a.Gateway, err)
		}
	}
	return nil
}

// Detach gives the host end up for deletion and returns at once; an unknown
// one is no error. Deleting a veth makes the kernel wait some 30 ms, so Detach
// does not: the pair goes when the caller drops the namespace, which the
// kernel does in batches, or at the next Sweep, whichever is first. Until then
// the address may still answer: keep it quarantined.
func (n *Network) Detach(hostIf string) error {
	link, err := n.h.LinkByName(hostIf)
	if isNotFound(err) {
		return nil
	}
	if err == nil {
		err = n.h.LinkSetGroup(link, DoomedGroup)
	}
	if err != nil && !isNotFound(err) {
		return fmt.Errorf("detach %s: %w", hostIf, err)
	}
	return nil
}

// Sweep deletes every host end of ours that is not named by live, together
// with those given up by Detach, all in one request. It returns how many it
// found. Call it after a restart and now and then.
func (n *Network) Sweep(live []string) (int, error) {
	keep := make(map[string]bool, len(live))
	for _, name := range live {
		keep[name] = true
	}
	links, err := nlretry.List(n.h.LinkList)
	if err != nil {
		return 0, fmt.Errorf("sweep interfaces: list: %w", err)
	}
	doomed := 0
	for _, l := range links {
		a := l.Attrs()
		if !isHostIf(l) {
			continue
		}
		group := uint32(DoomedGroup)
		if keep[a.Name] {
			group = PortGroup
		}
		if a.Group != group {
			err := n.h.LinkSetGroup(l, int(group))
			if isNotFound(err) {
				continue // gone with its namespace
			}
			if err != nil {
				return 0, fmt.Errorf("sweep %s: %w", a.Name, err)
			}
		}
		if group == DoomedGroup {
			doomed++
		}
	}
	if doomed == 0 {
		return 0, nil
	}
	if err := n.link.deleteGroup(DoomedGroup); err != nil {
		return 0, fmt.Errorf("sweep %d interfaces: %w", doomed, err)
	}
	return doomed, nil
}

// CleanUp removes the bridge and every host end of ours. Namespaces are their
// owner's to drop.
func (n *Network) CleanUp(bridge string) error {
	if _, err := n.Sweep(nil); err != nil {
		return err
	}
	link, err := n.h.LinkByName(bridge)
	if isNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove bridge %s: %w", bridge, err)
	}
	if link.Type() != "bridge" {
		return fmt.Errorf("remove bridge %s: it is a %s: %w", bridge, link.Type(), ErrNoBridge)
	}
	if err := n.h.LinkDel(link); err != nil && !isNotFound(err) {
		return fmt.Errorf("remove bridge %s: %w", bridge, err)
	}
	return nil
}

// isHostIf recognises what HostIf names.
func isHostIf(l netlink.Link) bool {
	name := l.Attrs().Name
	if l.Type() != "veth" || len(name) != len(hostIfPrefix)+12 || name[:len(hostIfPrefix)] != hostIfPrefix {
		return false
	}
	_, err := hex.DecodeString(name[len(hostIfPrefix):])
	return err == nil
}

// setAddr makes addr the only global address of its family on the interface.
func setAddr(h *netlink.Handle, link netlink.Link, addr netip.Prefix) error {
	family := netlink.FAMILY_V4
	if addr.Addr().Is6() {
		family = netlink.FAMILY_V6
	}
	have, err := nlretry.List(func() ([]netlink.Addr, error) { return h.AddrList(link, family) })
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	want := &net.IPNet{IP: addr.Addr().AsSlice(), Mask: net.CIDRMask(addr.Bits(), addr.Addr().BitLen())}
	found := false
	for _, a := range have {
		switch {
		case a.IPNet.String() == want.String():
			found = true
		case a.Scope == unix.RT_SCOPE_UNIVERSE:
			if err := h.AddrDel(link, &a); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
				return fmt.Errorf("remove the old address %s: %w", a.IPNet, err)
			}
		}
	}
	if found {
		return nil
	}
	na := &netlink.Addr{IPNet: want}
	if addr.Addr().Is6() {
		na.Flags = unix.IFA_F_NODAD // unique by construction; DAD would hold up the start by a second
	}
	if err := h.AddrReplace(link, na); err != nil {
		return fmt.Errorf("add address %s: %w", addr, err)
	}
	return nil
}

// HardwareAddr derives a locally administered MAC from an address, so that a
// neighbour's cache entry stays right when an address moves to a new pod.
func HardwareAddr(a netip.Addr) net.HardwareAddr {
	if a.Is4() {
		b := a.As4()
		return net.HardwareAddr{0x0a, 0xcd, b[0], b[1], b[2], b[3]}
	}
	sum := sha256.Sum256(a.AsSlice())
	return net.HardwareAddr{0x0a, 0xcd, sum[0], sum[1], sum[2], sum[3]}
}

func checkIfName(name string) error {
	if name == "" || len(name) >= unix.IFNAMSIZ || name == "." || name == ".." {
		return fmt.Errorf("interface name %q: must have 1 to %d bytes", name, unix.IFNAMSIZ-1)
	}
	for _, r := range name {
		if r <= ' ' || r == '/' || r == ':' || r > '~' {
			return fmt.Errorf("interface name %q: must be printable, without space, slash and colon", name)
		}
	}
	return nil
}

func isNotFound(err error) bool {
	var nf netlink.LinkNotFoundError
	return errors.As(err, &nf) || errors.Is(err, unix.ENODEV)
}
