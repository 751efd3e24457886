// Package overlay carries packets between the nodes' pod ranges. A backend is
// given the whole desired state as one value; setting it twice is fine.
//
// HostGW, the one here, adds plain routes and needs the nodes to share a link.
// An encapsulating backend (VXLAN) will be a second type with the same methods.
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
	Via netip.Addr   // the node's address
}

// Config of a HostGW.
type Config struct {
	// Protocol is the route protocol number, 5…255; default DefaultProtocol.
	Protocol int
	// Logger; default: slog.Default().
	Logger *slog.Logger
}

// HostGW keeps one route per node. It works in the network namespace in which
// it was opened. Calls of Set and CleanUp must not overlap.
type HostGW struct {
	h     *netlink.Handle
	proto netlink.RouteProtocol
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
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	return &HostGW{h: h, proto: netlink.RouteProtocol(cfg.Protocol), log: cfg.Logger}, nil
}

// Close gives the socket back; the routes stay.
func (g *HostGW) Close() { g.h.Close() }

// Set makes the routes exactly those given. One that cannot be added does not
// keep the others away: all errors are returned together, and the next Set
// tries again.
func (g *HostGW) Set(ctx context.Context, routes []Route) error {
	want := map[netip.Prefix]netip.Addr{}
	for _, r := range routes {
		if !r.Dst.IsValid() || !r.Via.IsValid() {
			return fmt.Errorf("set routes: invalid route %s via %s", r.Dst, r.Via)
		}
		dst := r.Dst.Masked()
		if via, twice := want[dst]; twice && via != r.Via {
			return fmt.Errorf("set routes: %s via both %s and %s", dst, via, r.Via)
		}
		want[dst] = r.Via
	}
	have, err := g.list()
	if err != nil {
		return fmt.Errorf("set routes: %w", err)
	}
	var errs []error
	current := map[netip.Prefix]bool{}
	for _, k := range have {
		if via, ok := want[k.Dst]; ok {
			current[k.Dst] = via == k.Via
			continue
		}
		if err := g.h.RouteDel(k.kernel); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("delete %s via %s: %w", k.Dst, k.Via, err))
			continue
		}
		g.log.Info("route removed", "dst", k.Dst.String(), "via", k.Via.String())
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
		if err := g.h.RouteReplace(g.kernelRoute(dst, want[dst])); err != nil {
			errs = append(errs, fmt.Errorf("add %s via %s: %w", dst, want[dst], err))
			continue
		}
		g.log.Info("route set", "dst", dst.String(), "via", want[dst].String())
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
func (g *HostGW) kernelRoute(dst netip.Prefix, via netip.Addr) *netlink.Route {
	return &netlink.Route{
		Dst:      &net.IPNet{IP: dst.Addr().AsSlice(), Mask: net.CIDRMask(dst.Bits(), dst.Addr().BitLen())},
		Gw:       via.AsSlice(),
		Protocol: g.proto,
	}
}

// installed is a route of ours with what the kernel needs to delete it.
type installed struct {
	Route
	kernel *netlink.Route
}

func (g *HostGW) list() ([]installed, error) {
	var out []installed
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
			addr, ok1 := netip.AddrFromSlice(r.Dst.IP)
			via, ok2 := netip.AddrFromSlice(r.Gw)
			bits, _ := r.Dst.Mask.Size()
			if !ok1 || !ok2 {
				continue
			}
			out = append(out, installed{Route{Dst: netip.PrefixFrom(addr.Unmap(), bits), Via: via.Unmap()}, &r})
		}
	}
	sort.Slice(out, func(i, j int) bool { return out[i].Dst.Compare(out[j].Dst) < 0 })
	return out, nil
}

func sortedKeys(m map[netip.Prefix]netip.Addr) []netip.Prefix {
	keys := make([]netip.Prefix, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	sort.Slice(keys, func(i, j int) bool { return keys[i].Compare(keys[j]) < 0 })
	return keys
}
