package lb

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/internal/nlretry"
	"github.com/clusterd/clusterd/netsetup/nft"
)

// Flow names connections that the kernel tracks: those made to a frontend and
// sent to an endpoint. A zero endpoint names those that were sent nowhere else; with
// an unspecified address those to the node itself.
type Flow struct {
	Frontend Frontend
	Endpoint netip.AddrPort
}

// Conntrack forgets connections, in the network namespace in which it was
// opened.
type Conntrack struct{ h *netlink.Handle }

// Tracked says how many connections the kernel tracks in the network namespace of the
// calling thread, and how many it can: it drops packets of further ones. An error that
// is fs.ErrNotExist: it tracks none.
func Tracked() (used, most int, err error) {
	for name, n := range map[string]*int{"nf_conntrack_count": &used, "nf_conntrack_max": &most} {
		b, err := os.ReadFile("/proc/sys/net/netfilter/" + name)
		if err != nil {
			return 0, 0, err
		}
		if *n, err = strconv.Atoi(strings.TrimSpace(string(b))); err != nil {
			return 0, 0, fmt.Errorf("%s: %w", name, err)
		}
	}
	return used, most, nil
}

// OpenConntrack binds a Conntrack to the calling thread's network namespace.
func OpenConntrack() (*Conntrack, error) {
	h, err := netlink.NewHandle(unix.NETLINK_NETFILTER, unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	return &Conntrack{h}, nil
}

// Close gives the socket back.
func (c *Conntrack) Close() { c.h.Close() }

// Delete forgets the connections of the flows and no others. The next packet of
// one begins a new connection, which goes where the rules now say.
func (c *Conntrack) Delete(flows []Flow) (deleted uint, err error) {
	want := flowSet{flows: map[Flow]bool{}}
	families := map[netlink.InetFamily]bool{}
	for _, f := range flows {
		want.flows[f] = true
		if f.Frontend.everywhere() && !f.Endpoint.IsValid() && want.own == nil {
			if want.own, err = c.ownAddresses(); err != nil {
				return 0, err
			}
		}
		if f.Frontend.Addr.Is4() {
			families[unix.AF_INET] = true
		} else {
			families[unix.AF_INET6] = true
		}
	}
	for family := range families {
		n, err := c.h.ConntrackDeleteFilters(netlink.ConntrackTable, family, want)
		deleted += n
		if err != nil {
			return deleted, fmt.Errorf("forget tracked connections: %w", err)
		}
	}
	return deleted, nil
}

// DeleteOthers forgets the connections that go where none of their frontend's
// endpoints is: what a former process could not forget. Those of datagram protocols
// also if no frontend has their address and it is of ranges, which hold frontends
// alone, or if they were sent nowhere though there is an endpoint now. TCP to the
// node's own ports is left alone: it ends by itself.
func (c *Conntrack) DeleteOthers(serving map[Frontend][]netip.AddrPort, ranges []netip.Prefix) (deleted uint, err error) {
	own, err := c.ownAddresses()
	if err != nil {
		return 0, err
	}
	others := otherFlows{map[Frontend]map[netip.AddrPort]bool{}, ranges, own}
	for f, all := range serving {
		others.serving[f] = map[netip.AddrPort]bool{}
		for _, a := range all {
			others.serving[f][a] = true
		}
	}
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		n, err := c.h.ConntrackDeleteFilters(netlink.ConntrackTable, family, others)
		deleted += n
		if err != nil {
			return deleted, fmt.Errorf("forget tracked connections: %w", err)
		}
	}
	return deleted, nil
}

// otherFlows is the filter of DeleteOthers.
type otherFlows struct {
	serving map[Frontend]map[netip.AddrPort]bool
	ranges  []netip.Prefix
	own     map[netip.Addr]bool // the node's addresses
}

// MatchConntrackFlow implements netlink's filter.
func (o otherFlows) MatchConntrackFlow(c *netlink.ConntrackFlow) bool {
	to, from := addrPort(c.Forward.DstIP, c.Forward.DstPort), addrPort(c.Reverse.SrcIP, c.Reverse.SrcPort)
	if !to.IsValid() || !from.IsValid() {
		return false
	}
	f := Frontend{to.Addr(), nft.Protocol(c.Forward.Protocol), to.Port()}
	datagrams := f.Proto == udp || f.Proto == sctp
	endpoints, ok := o.serving[f]
	if !ok && datagrams {
		f.Addr = familyOf(to.Addr()).any
		endpoints, ok = o.serving[f]
	}
	switch {
	case from == to:
		return datagrams && len(endpoints) > 0 && (!f.everywhere() || isOwn(o.own, to.Addr()))
	case ok:
		return !endpoints[from]
	}
	return datagrams && slices.ContainsFunc(o.ranges, func(r netip.Prefix) bool { return r.Contains(to.Addr()) })
}

// ownAddresses are the node's.
func (c *Conntrack) ownAddresses() (map[netip.Addr]bool, error) {
	addrs, err := nlretry.List(func() ([]netlink.Addr, error) { return c.h.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list the node's addresses: %w", err)
	}
	own := map[netip.Addr]bool{}
	for _, a := range addrs {
		own[addrPort(a.IP, 0).Addr()] = true
	}
	return own, nil
}

// flowSet answers for one tracked connection whether it is one of many flows,
// by look-up. own are the node's addresses.
type flowSet struct {
	flows map[Flow]bool
	own   map[netip.Addr]bool
}

// MatchConntrackFlow implements netlink's filter.
func (s flowSet) MatchConntrackFlow(c *netlink.ConntrackFlow) bool {
	to, from := addrPort(c.Forward.DstIP, c.Forward.DstPort), addrPort(c.Reverse.SrcIP, c.Reverse.SrcPort)
	if !to.IsValid() || !from.IsValid() {
		return false
	}
	if from == to {
		from = netip.AddrPort{}
	}
	f := Flow{Frontend{to.Addr(), nft.Protocol(c.Forward.Protocol), to.Port()}, from}
	if s.flows[f] {
		return true
	}
	f.Frontend.Addr = familyOf(to.Addr()).any
	// Others ask that port of other machines, through this one.
	return s.flows[f] && (f.Endpoint.IsValid() || isOwn(s.own, to.Addr()))
}

func isOwn(own map[netip.Addr]bool, a netip.Addr) bool { return own[a] || a.IsLoopback() }

func addrPort(ip net.IP, port uint16) netip.AddrPort {
	a, ok := netip.AddrFromSlice(ip)
	if !ok {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(a.Unmap(), port)
}
