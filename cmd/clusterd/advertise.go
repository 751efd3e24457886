package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/clusterd/clusterd/netsetup/announce"
)

// family is one of the two IP families.
type family struct {
	name string
	six  bool
	// away is an address of documentation, which the default route leads to.
	away netip.Addr
}

var (
	ip4 = family{name: "IPv4", away: netip.MustParseAddr("192.0.2.1")}
	ip6 = family{name: "IPv6", six: true, away: netip.MustParseAddr("2001:db8::1")}
)

// familyOf an address.
func familyOf(a netip.Addr) family {
	if a.Is6() && !a.Is4In6() {
		return ip6
	}
	return ip4
}

// lookupTimeout bounds the question for the addresses of a server that has a name.
const lookupTimeout = 5 * time.Second

// familiesOf are the IP families by which a server, HOST:PORT, is reached, and its
// address if it has no name. A server that is not known here may have both.
func familiesOf(server string) (families []family, at netip.Addr) {
	host, _, err := net.SplitHostPort(server)
	if err != nil {
		return []family{ip4, ip6}, netip.Addr{}
	}
	if a, err := netip.ParseAddr(host); err == nil {
		return []family{familyOf(a)}, a
	}
	ctx, cancel := context.WithTimeout(context.Background(), lookupTimeout)
	defer cancel()
	addrs, _ := net.DefaultResolver.LookupNetIP(ctx, "ip", host) // the join itself reports the error
	has := map[bool]bool{}
	for _, a := range addrs {
		has[familyOf(a).six] = true
	}
	for _, f := range []family{ip4, ip6} {
		if has[f.six] || len(has) == 0 {
			families = append(families, f)
		}
	}
	return families, netip.Addr{}
}

// findAddress is the default of --advertise.
func (c *Config) findAddress() (netip.Addr, error) {
	families, at := familiesOf(c.Toward)
	addr, err := findAddress(families, at)
	if errors.Is(err, errNotOfFamily) {
		return addr, fmt.Errorf("--advertise: the server %s is reached by %s alone, and %w: give it one and join again (`ip address` lists those there are)", c.Toward, families[0].name, err)
	}
	if err != nil {
		return addr, fmt.Errorf("--advertise: no address could be found (%w): give one", err)
	}
	return addr, nil
}

var errNotOfFamily = errors.New("no interface of this machine has an address of that family")

// findAddress chooses the address to advertise without sending a packet: of the first
// family that has one beyond bridges of containers, the one by which the default route
// leads, or the way to at if that is of IPv6, else one of an interface. No default route
// is needed: a box on one cable, or none, is a cluster too.
func findAddress(families []family, at netip.Addr) (netip.Addr, error) {
	on, err := interfaceAddresses()
	if err != nil {
		return netip.Addr{}, err
	}
	for _, f := range families {
		to := f.away
		if f.six && at.IsValid() {
			to = at
		}
		a := routed(to)
		if !a.IsValid() || f.six && a.IsLinkLocalUnicast() || a.IsLoopback() && !at.IsLoopback() {
			a = on.networks[f.six]
		}
		if a.IsValid() {
			return announce.Lasting(a)
		}
	}
	for _, f := range families {
		if a := on.bridges[f.six]; a.IsValid() {
			return announce.Lasting(a)
		}
	}
	if len(families) == 1 && !at.IsLoopback() {
		return netip.Addr{}, errNotOfFamily
	}
	for _, f := range families {
		if a := on.loopback[f.six]; a.IsValid() {
			return a, nil
		}
	}
	return netip.Addr{}, errors.New("no interface is up")
}

// firstAddresses are the first address of each kind of interface, by whether it is of
// IPv6.
type firstAddresses struct {
	networks, bridges, loopback map[bool]netip.Addr
}

// interfaceAddresses looks at this machine's interfaces that are up.
func interfaceAddresses() (on firstAddresses, err error) {
	on = firstAddresses{map[bool]netip.Addr{}, map[bool]netip.Addr{}, map[bool]netip.Addr{}}
	inner, err := announce.InnerBridges()
	if err != nil {
		return on, err
	}
	interfaces, err := net.Interfaces()
	if err != nil {
		return on, err
	}
	for _, i := range interfaces {
		addrs, err := i.Addrs()
		if err != nil {
			return on, err
		}
		kind := on.networks
		switch {
		case i.Flags&net.FlagUp == 0:
			continue
		case i.Flags&net.FlagLoopback != 0: // addresses there are this machine's alone
			kind = on.loopback
		case inner[i.Index]:
			kind = on.bridges
		}
		for _, a := range addrs {
			p, err := netip.ParsePrefix(a.String())
			if err != nil {
				continue
			}
			ip := p.Addr()
			usable := ip.IsGlobalUnicast()
			if i.Flags&net.FlagLoopback != 0 {
				usable = ip.IsLoopback()
			}
			if usable && !kind[ip.Is6()].IsValid() {
				kind[ip.Is6()] = ip
			}
		}
	}
	return on, nil
}

// routed is the address that packets to another would leave with: "connecting" a UDP
// socket only asks the routing table. Not valid: there is no way.
func routed(to netip.Addr) netip.Addr {
	c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 9)))
	if err != nil {
		return netip.Addr{}
	}
	defer func() { _ = c.Close() }()
	return c.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap()
}

// settleTime is how long the kernel may take to make sure of an address of IPv6.
const settleTime = 5 * time.Second

// settleAddress waits until this machine may listen at the address that it advertises.
func (c *Config) settleAddress(ctx context.Context) error {
	if err := announce.Settled(ctx, c.addr().Addr(), settleTime); err != nil {
		return fmt.Errorf("--advertise %s: %w", c.Advertise, err)
	}
	return nil
}
