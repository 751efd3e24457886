// Package loopback gives a node addresses that are its own alone: every node
// may have the same ones, as they are announced nowhere. The node's programs
// and hosts behind one of its interfaces reach them without translation.
package loopback

import (
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// label marks what is ours; the kernel wants the interface's name before it.
const label = "lo:clusterd"

// forever is how long the kernel keeps an address without an end.
const forever = math.MaxUint32

// Interface is a network namespace's loopback.
type Interface struct{ h *netlink.Handle }

// Open binds an Interface to the calling thread's network namespace.
func Open() (*Interface, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	return &Interface{h}, nil
}

// Close gives the socket back; addresses stay.
func (i *Interface) Close() { i.h.Close() }

// Ensure puts addr on the loopback unless it is there. It is not chosen as the
// sender's address of other packets.
func (i *Interface) Ensure(addr netip.Addr) error {
	lo, err := i.h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("loopback: %w", err)
	}
	if err := i.h.AddrAdd(lo, address(addr)); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("add %s to the loopback: %w", addr, err)
	}
	return nil
}

// Remove takes addr away; one that is not there is no error.
func (i *Interface) Remove(addr netip.Addr) error {
	lo, err := i.h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("loopback: %w", err)
	}
	if err := i.h.AddrDel(lo, address(addr)); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
		return fmt.Errorf("remove %s from the loopback: %w", addr, err)
	}
	return nil
}

func address(a netip.Addr) *netlink.Addr {
	n := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}, Scope: unix.RT_SCOPE_HOST}
	if a.Is4() {
		n.Label = label
	} else {
		n.Flags = unix.IFA_F_NODAD
		// Deprecated from the beginning: IPv6 takes no account of the scope when it
		// chooses a sender's address.
		n.ValidLft, n.PreferedLft = forever, 0
	}
	return n
}
