package lb

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/internal/nlretry"
)

// routeProtocol marks our routes, as overlay's.
const routeProtocol = 203

// Ways gives ranges of virtual addresses a route, so that packets of the node's
// own programs get as far as the rules even where there is no default route,
// with the address of that interface as their source. It works in the network
// namespace in which it was opened.
type Ways struct {
	h      *netlink.Handle
	device string
}

// OpenWays binds Ways to the calling thread's network namespace. The device
// need not exist yet.
func OpenWays(device string) (*Ways, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	return &Ways{h, device}, nil
}

// Close gives the socket back; the routes stay.
func (w *Ways) Close() { w.h.Close() }

// Ensure gives these ranges routes by the device: it sets what is missing and, if these
// are all ranges, takes away ours to others. Without the device it does nothing: the node
// has no pods then.
func (w *Ways) Ensure(ranges []netip.Prefix, all bool) error {
	link, err := w.h.LinkByName(w.device)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", w.device, err)
	}
	ours := netlink.Route{LinkIndex: link.Attrs().Index, Scope: netlink.SCOPE_LINK, Protocol: routeProtocol}
	have := map[netip.Prefix]bool{}
	var errs []error
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		list, err := nlretry.List(func() ([]netlink.Route, error) {
			return w.h.RouteListFiltered(family, &ours, netlink.RT_FILTER_OIF|netlink.RT_FILTER_PROTOCOL)
		})
		if err != nil {
			return fmt.Errorf("list the routes by %s: %w", w.device, err)
		}
		for _, k := range list {
			to, ok := rangeOf(k.Dst)
			if !ok || len(k.Gw) > 0 {
				continue // package overlay's
			}
			if have[to] = slices.Contains(ranges, to); have[to] || !all {
				continue
			}
			if err := w.h.RouteDel(&k); err != nil && !errors.Is(err, unix.ESRCH) {
				errs = append(errs, fmt.Errorf("remove the route to %s by %s: %w", to, w.device, err))
			}
		}
	}
	for _, r := range ranges {
		if have[r] {
			continue
		}
		route := ours
		route.Dst = &net.IPNet{IP: r.Addr().AsSlice(), Mask: net.CIDRMask(r.Bits(), r.Addr().BitLen())}
		if err := w.h.RouteReplace(&route); err != nil {
			errs = append(errs, fmt.Errorf("route to %s by %s: %w", r, w.device, err))
		}
	}
	return errors.Join(errs...)
}

func rangeOf(n *net.IPNet) (netip.Prefix, bool) {
	if n == nil {
		return netip.Prefix{}, false
	}
	addr, ok := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(addr.Unmap(), bits), ok
}
