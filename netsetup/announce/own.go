package announce

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/internal/nlretry"
)

// Beside is an address of the other IP family on the interface that has the node's:
// one of a network rather than one that stands alone, and none that comes and goes or
// is announced here. Not valid: there is none.
func Beside(cfg Config) (netip.Addr, error) {
	a, err := Open(cfg)
	if err != nil {
		return netip.Addr{}, err
	}
	defer a.Close()
	link, _, err := a.find()
	if err != nil {
		return netip.Addr{}, err
	}
	family := netlink.FAMILY_V6
	if cfg.Node.Is6() {
		family = netlink.FAMILY_V4
	}
	addrs, err := nlretry.List(func() ([]netlink.Addr, error) { return a.h.AddrList(link, family) })
	if err != nil {
		return netip.Addr{}, err
	}
	return lasting(addrs, a.own), nil
}

// lasting is the first address that may be a node's for long: of a network, else one
// that stands alone; none of those that are announced.
func lasting(addrs []netlink.Addr, announced []netip.Addr) (alone netip.Addr) {
	for _, k := range addrs {
		ip, ok := netip.AddrFromSlice(k.IP)
		ip = ip.Unmap()
		if !ok || !ip.IsGlobalUnicast() || passing(k) || slices.Contains(announced, ip) {
			continue
		}
		if ones, bits := k.Mask.Size(); ones < bits {
			return ip
		}
		if !alone.IsValid() {
			alone = ip
		}
	}
	return alone
}

// passing: the address comes and goes (RFC 8981), goes, or is another machine's. The
// kernel marks secondary addresses of IPv4 as it does temporary ones of IPv6.
func passing(k netlink.Addr) bool {
	return k.Flags&(unix.IFA_F_DEPRECATED|unix.IFA_F_DADFAILED) != 0 || k.IP.To4() == nil && k.Flags&unix.IFA_F_TEMPORARY != 0
}

// Lasting is addr, or, where that is a temporary address of IPv6, one of the same
// interface that stays, if it has one: of the same prefix, else one that is private
// (RFC 4193) as addr is or is not, else any.
func Lasting(addr netip.Addr) (netip.Addr, error) {
	if addr.Is4() {
		return addr, nil
	}
	all, err := addresses(netlink.FAMILY_V6)
	if err != nil {
		return netip.Addr{}, err
	}
	i := slices.IndexFunc(all, func(k netlink.Addr) bool { return is(k, addr) })
	if i < 0 || !passing(all[i]) {
		return addr, nil
	}
	index, prefix := all[i].LinkIndex, all[i].IPNet
	for _, good := range []func(netlink.Addr) bool{
		func(k netlink.Addr) bool { return prefix.Contains(k.IP) },
		func(k netlink.Addr) bool { return k.IP.IsPrivate() == addr.IsPrivate() },
		func(netlink.Addr) bool { return true },
	} {
		var of []netlink.Addr
		for _, k := range all {
			if k.LinkIndex == index && good(k) {
				of = append(of, k)
			}
		}
		if stays := lasting(of, nil); stays.IsValid() {
			return stays, nil
		}
	}
	return addr, nil
}

// InnerBridges are the indexes of this machine's bridges that connect containers and
// virtual machines alone, and no interface of a network outside.
func InnerBridges() (map[int]bool, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	links, err := nlretry.List(h.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	inner := map[int]bool{}
	for _, l := range links {
		if l.Type() == "bridge" {
			inner[l.Attrs().Index] = true
		}
	}
	for _, l := range links {
		if !slices.Contains([]string{"veth", "tuntap", "vxlan"}, l.Type()) {
			delete(inner, l.Attrs().MasterIndex)
		}
	}
	return inner, nil
}

// settleTick is how often Settled looks.
const settleTick = 50 * time.Millisecond

// Settled waits until the kernel has made sure that no other machine of the network has
// an address of this one (duplicate address detection of IPv6): until then no program
// can listen there. It waits for at most that time; an address that another machine has
// is an error, one that no interface has is not.
func Settled(ctx context.Context, addr netip.Addr, most time.Duration) error {
	if addr.Is4() {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	for {
		all, err := addresses(netlink.FAMILY_V6)
		if err != nil {
			return err
		}
		i := slices.IndexFunc(all, func(k netlink.Addr) bool { return is(k, addr) })
		switch {
		case i < 0 || all[i].Flags&(unix.IFA_F_TENTATIVE|unix.IFA_F_OPTIMISTIC) != unix.IFA_F_TENTATIVE:
			return nil
		case all[i].Flags&unix.IFA_F_DADFAILED != 0:
			return fmt.Errorf("another machine of the network has the address %s (duplicate address detection): give one of the two another", addr)
		}
		select {
		case <-ctx.Done():
			return nil // listening there fails with the kernel's error
		case <-time.After(settleTick):
		}
	}
}

func is(k netlink.Addr, addr netip.Addr) bool {
	ip, ok := netip.AddrFromSlice(k.IP)
	return ok && ip.Unmap() == addr.WithZone("")
}

// addresses are all of a family on this machine.
func addresses(family int) ([]netlink.Addr, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer h.Close()
	all, err := nlretry.List(func() ([]netlink.Addr, error) { return h.AddrList(nil, family) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	return all, nil
}
