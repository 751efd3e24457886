package lb

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

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
	ranges []netip.Prefix
}

// OpenWays binds Ways to the calling thread's network namespace. The device
// need not exist yet.
func OpenWays(device string, ranges []netip.Prefix) (*Ways, error) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	return &Ways{h, device, ranges}, nil
}

// Close gives the socket back; the routes stay.
func (w *Ways) Close() { w.h.Close() }

// Ensure sets the routes that are missing. Without the device it does nothing:
// the node has no pods then.
func (w *Ways) Ensure() error {
	link, err := w.h.LinkByName(w.device)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%s: %w", w.device, err)
	}
	var errs []error
	for _, r := range w.ranges {
		dst := &net.IPNet{IP: r.Masked().Addr().AsSlice(), Mask: net.CIDRMask(r.Bits(), r.Addr().BitLen())}
		family := netlink.FAMILY_V4
		if r.Addr().Is6() {
			family = netlink.FAMILY_V6
		}
		route := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: dst, Scope: netlink.SCOPE_LINK, Protocol: routeProtocol}
		have, err := nlretry.List(func() ([]netlink.Route, error) {
			return w.h.RouteListFiltered(family, route, netlink.RT_FILTER_DST|netlink.RT_FILTER_OIF|netlink.RT_FILTER_PROTOCOL)
		})
		if err == nil && len(have) == 0 {
			err = w.h.RouteReplace(route)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("route to %s by %s: %w", r, w.device, err))
		}
	}
	return errors.Join(errs...)
}
