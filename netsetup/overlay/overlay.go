// Package overlay carries packets between the nodes' pod ranges. A backend is
// given the whole desired state as one value; setting it twice is fine.
//
// HostGW adds plain routes and needs the nodes to share a segment. Mesh does so
// where they do, and goes through a VXLAN tunnel where they do not. Or it sends all
// of it through WireGuard, and nothing in clear.
package overlay

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sort"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/internal/nlretry"
)

// DefaultProtocol marks our routes in the kernel's table ("proto 203"). Other
// daemons leave foreign numbers alone, and we touch no other.
const DefaultProtocol = 203

// Route says that a range of pods lives behind a node.
type Route struct {
	Dst netip.Prefix // the node's pod range
	Via netip.Addr   // the node's address; with Dev, the other end of the tunnel
	// Dev is the interface of a tunnel that it goes by, "" for the one that leads
	// to Via. That of WireGuard needs no Via.
	Dev string
	// MTU is how long a packet may be that goes by it, with its IP header, where that
	// is less than the interface takes; 0: it is not. Senders get an ICMP error.
	MTU int
	// Refuse: nothing is sent there, and senders get an ICMP error; it has no Via.
	Refuse bool
}

func (r Route) valid() bool {
	if r.Refuse {
		return r.Dst.IsValid() && !r.Via.IsValid() && r.Dev == ""
	}
	return r.Dst.IsValid() && (r.Via.IsValid() || r.Dev != "")
}

// way is what the log says of it.
func (r Route) way() string {
	switch {
	case r.Refuse:
		return "refused"
	case !r.Via.IsValid():
		return r.Dev
	}
	return r.Via.String()
}

// Config of a HostGW.
type Config struct {
	// Protocol is the route protocol number, 5…255; default DefaultProtocol.
	Protocol int
	// WireGuard is the interface whose routes have no gateway; default
	// DefaultWireGuard.
	WireGuard string
	// Logger; default: slog.Default().
	Logger *slog.Logger
}

// HostGW keeps one route per node. It works in the network namespace in which
// it was opened. Calls of Set and CleanUp must not overlap.
type HostGW struct {
	h     *netlink.Handle
	proto netlink.RouteProtocol
	wg    string
	log   *slog.Logger
}

// OpenHostGW binds a HostGW to the calling thread's network namespace.
func OpenHostGW(cfg Config) (*HostGW, error) {
	if cfg.Protocol == 0 {
		cfg.Protocol = DefaultProtocol
	}
	if cfg.Protocol <= unix.RTPROT_STATIC || cfg.Protocol > 255 {
		return nil, fmt.Errorf("route protocol %d: must be 5 to 255", cfg.Protocol)
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.WireGuard == "" {
		cfg.WireGuard = DefaultWireGuard
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	return &HostGW{h: h, proto: netlink.RouteProtocol(cfg.Protocol), wg: cfg.WireGuard, log: cfg.Logger}, nil
}

// Close gives the socket back; the routes stay.
func (g *HostGW) Close() { g.h.Close() }

// Set makes the routes exactly those given. One that cannot be added does not
// keep the others away: all errors are returned together, and the next Set
// tries again.
func (g *HostGW) Set(ctx context.Context, routes []Route) error {
	want := map[netip.Prefix]Route{}
	for _, r := range routes {
		if !r.valid() {
			return fmt.Errorf("set routes: invalid route %s via %s", r.Dst, r.Via)
		}
		r.Dst = r.Dst.Masked()
		if other, twice := want[r.Dst]; twice && other != r {
			return fmt.Errorf("set routes: %s via both %s and %s", r.Dst, other.way(), r.way())
		}
		want[r.Dst] = r
	}
	have, err := g.list()
	if err != nil {
		return fmt.Errorf("set routes: %w", err)
	}
	var errs []error
	current := map[netip.Prefix]bool{}
	for _, k := range have {
		if r, ok := want[k.Dst]; ok {
			current[k.Dst] = r.Via == k.Via && r.Refuse == k.Refuse && r.MTU == k.MTU && (r.Dev == k.Dev || r.Dev == "" && !k.tunnel)
			continue
		}
		if err := g.h.RouteDel(k.kernel); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("delete %s via %s: %w", k.Dst, k.way(), err))
			continue
		}
		g.log.Info("route removed", "dst", k.Dst.String(), "via", k.way())
	}
	for _, dst := range sortedKeys(want) {
		if err := ctx.Err(); err != nil {
			errs = append(errs, err)
			break
		}
		if current[dst] {
			continue
		}
		// Replace: a range that moved to another node is never without a route.
		r := want[dst]
		kernel, err := g.kernelRoute(r)
		if err == nil {
			err = g.h.RouteReplace(kernel)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("add %s via %s: %w", dst, r.way(), err))
			continue
		}
		g.log.Info("route set", "dst", dst.String(), "via", r.way(), "tunnel", r.Dev, "mtu", r.MTU)
	}
	if len(errs) > 0 {
		return fmt.Errorf("set routes: %w", errors.Join(errs...))
	}
	return nil
}

// CleanUp removes every route of ours, also those of an earlier process.
func (g *HostGW) CleanUp(ctx context.Context) error { return g.Set(ctx, nil) }

// List returns our routes as the kernel has them, sorted by range.
func (g *HostGW) List() ([]Route, error) {
	have, err := g.list()
	if err != nil {
		return nil, err
	}
	routes := make([]Route, len(have))
	for i, k := range have {
		routes[i] = k.Route
	}
	return routes, nil
}

// kernelRoute is the form in which the kernel takes a route.
func (g *HostGW) kernelRoute(r Route) (*netlink.Route, error) {
	k := &netlink.Route{
		Dst:      &net.IPNet{IP: r.Dst.Addr().AsSlice(), Mask: net.CIDRMask(r.Dst.Bits(), r.Dst.Addr().BitLen())},
		Gw:       r.Via.AsSlice(),
		Protocol: g.proto,
		MTU:      r.MTU,
	}
	if r.Refuse {
		k.Type = unix.RTN_UNREACHABLE
	}
	if r.Dev != "" {
		link, err := g.h.LinkByName(r.Dev)
		if err != nil {
			return nil, fmt.Errorf("interface %s: %w", r.Dev, err)
		}
		k.LinkIndex = link.Attrs().Index
		if !r.Via.IsValid() {
			k.Scope = netlink.SCOPE_LINK
		} else if !r.Via.IsLinkLocalUnicast() { // those are on the link
			k.Flags = int(netlink.FLAG_ONLINK)
		}
	}
	return k, nil
}

// installed is a route of ours with what the kernel needs to delete it.
type installed struct {
	Route
	tunnel bool // it leads to an address that is on the link by its own word alone, or by WireGuard
	kernel *netlink.Route
}

func (g *HostGW) list() ([]installed, error) {
	var out []installed
	names := map[int]string{}
	name := func(index int) string {
		if names[index] == "" {
			if link, err := g.h.LinkByIndex(index); err == nil {
				names[index] = link.Attrs().Name
			}
		}
		return names[index]
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := nlretry.List(func() ([]netlink.Route, error) {
			return g.h.RouteListFiltered(family, &netlink.Route{Protocol: g.proto}, netlink.RT_FILTER_PROTOCOL)
		})
		if err != nil {
			return nil, fmt.Errorf("list routes: %w", err)
		}
		for _, r := range routes {
			if r.Dst == nil {
				continue
			}
			addr, ok := netip.AddrFromSlice(r.Dst.IP)
			bits, _ := r.Dst.Mask.Size()
			if !ok {
				continue
			}
			k := installed{Route: Route{Dst: netip.PrefixFrom(addr.Unmap(), bits), MTU: r.MTU, Refuse: r.Type == unix.RTN_UNREACHABLE}, kernel: &r}
			via, gateway := netip.AddrFromSlice(r.Gw)
			switch {
			case k.Refuse:
			case gateway:
				k.Via = via.Unmap()
				if k.tunnel = r.Flags&int(netlink.FLAG_ONLINK) != 0 || k.Via.IsLinkLocalUnicast(); k.tunnel {
					k.Dev = name(r.LinkIndex)
				}
			case name(r.LinkIndex) == g.wg:
				k.Dev, k.tunnel = g.wg, true
			default:
				continue // another package's
			}
			out = append(out, k)
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Dst.Compare(out[j].Dst) < 0 })
	return out, nil
}

func sortedKeys(m map[netip.Prefix]Route) []netip.Prefix {
	keys := make([]netip.Prefix, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Slice(keys, func(i, j int) bool { return keys[i].Compare(keys[j]) < 0 })
	return keys
}
