package netsetup_test

import (
	"errors"
	"net"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netnstest"
	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/netsetup/overlay"
	"github.com/clusterd/clusterd/netsetup/sysctl"
)

// address6 gives an interface an address that is of use at once.
func address6(name, addr string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	a, err := netlink.ParseAddr(addr)
	if err != nil {
		return err
	}
	a.Flags = unix.IFA_F_NODAD
	return netlink.AddrAdd(link, a)
}

// newDual is a node with ranges of both families, and an address of IPv6 unless
// that is "".
func newDual(t *testing.T, addr, cidr, addr6, cidr6 string) *node {
	t.Helper()
	n := &node{t: t, addr: netip.MustParseAddr(addr), cidr: netip.MustParsePrefix(cidr), cidr6: netip.MustParsePrefix(cidr6)}
	if addr6 != "" {
		n.addr6 = netip.MustParseAddr(addr6)
	}
	return n.open()
}

const outsideAddr6 = "2001:db8::fe"

// TestRootTwoFamilies joins three nodes whose pods have addresses of both
// families: two have addresses of both themselves, and get host routes; the third
// one has IPv4 alone, and its IPv6 range is behind the tunnel.
func TestRootTwoFamilies(t *testing.T) {
	netnstest.NeedRoot(t)
	outside := netnstest.New(t)
	a := newDual(t, "192.0.2.1", "10.42.1.0/24", "2001:db8::1", "fd42:0:0:1::/64")
	b := newDual(t, "192.0.2.2", "10.42.2.0/24", "2001:db8::2", "fd42:0:0:2::/64")
	c := newDual(t, "192.0.2.3", "10.42.3.0/24", "", "fd42:0:0:3::/64")
	join(t, outside, a, b, c)
	outside.Do(func() error { return address6("switch", outsideAddr6+"/64") })
	a.reach(b, c)
	b.reach(a, c)
	c.reach(a, b)
	byTunnel := func(o *node) overlay.Route {
		routes, err := a.over.List()
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range routes {
			if r.Dst == o.cidr6 {
				return r
			}
		}
		t.Fatalf("no route to %s among %v", o.cidr6, routes)
		return overlay.Route{}
	}
	if r := byTunnel(b); r.Via != b.addr6 || r.Dev != "" {
		t.Errorf("the way to %s: %+v, want a host route", b.cidr6, r)
	}
	if r := byTunnel(c); r.Dev != overlay.DefaultTunnel {
		t.Errorf("the way to %s: %+v, want the tunnel", c.cidr6, r)
	}
	a1, a2, b1, c1 := a.startPod("a1"), a.startPod("a2"), b.startPod("b1"), c.startPod("c1")
	serve(t, outside.Path, net.JoinHostPort(outsideAddr6, "80"), "outside")
	for _, tt := range []struct{ name, from, to, want string }{
		{"same node", a1.path, a2.addr6.String(), "a2 saw fd42:0:0:1::2"},
		{"same node, IPv4", a1.path, a2.addr.String(), "a2 saw 10.42.1.2"},
		{"other node, address kept", a1.path, b1.addr6.String(), "b1 saw fd42:0:0:1::2"},
		{"and back", b1.path, a1.addr6.String(), "a1 saw fd42:0:0:2::2"},
		{"other node, IPv4", a1.path, b1.addr.String(), "b1 saw 10.42.1.2"},
		{"through the tunnel", a1.path, c1.addr6.String(), "c1 saw fd42:0:0:1::2"},
		{"and back", c1.path, a1.addr6.String(), "a1 saw fd42:0:0:3::2"},
		{"a node through the tunnel", a.ns.Path, c1.addr6.String(), "c1 saw fd42:0:0:1::1"},
		{"and back", c.ns.Path, a1.addr6.String(), "a1 saw fd42:0:0:3::1"},
		{"itself", a1.path, a1.addr6.String(), "a1 saw fd42:0:0:1::2"},
		{"own node to pod", a.ns.Path, a1.addr6.String(), "a1 saw fd42:0:0:1::1"},
		{"outside sees the node", a1.path, outsideAddr6, "outside saw 2001:db8::1"},
	} {
		if got := fetch(t, tt.from, tt.to); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
	for from, to := range map[string]netip.Addr{a1.path: c1.addr6, c1.path: a1.addr6} {
		if got := len(fetchPage(t, from, to.String(), "/big")); got < bigPage {
			t.Errorf("%d bytes of a big page came from %s", got, to)
		}
	}
	a.publish(t, nft.Publish{Protocol: "tcp", Port: 8080, To: netip.AddrPortFrom(a1.addr6, 80)}, nft.Publish{Protocol: "tcp", Port: 8080, To: netip.AddrPortFrom(a1.addr, 80)})
	for _, tt := range []struct{ name, from, to, want string }{
		{"a port of the node, from outside", outside.Path, "[2001:db8::1]:8080", "a1 saw " + outsideAddr6},
		{"of IPv4", outside.Path, "192.0.2.1:8080", "a1 saw " + outsideAddr},
		{"from itself", a1.path, "[2001:db8::1]:8080", "a1 saw fd42:0:0:1::1"},
		{"from the node", a.ns.Path, "[2001:db8::1]:8080", "a1 saw 2001:db8::1"},
	} {
		if got := fetch(t, tt.from, tt.to); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
	a.ns.Do(func() error {
		if conn, err := net.Dial("tcp", "[::1]:8080"); !errors.Is(err, unix.ECONNREFUSED) {
			t.Errorf("a port of the node at ::1: %v, %v; want a refusal at once", conn, err)
		}
		return nil
	})
	// The third node gets an address of IPv6: its range moves to a host route, and
	// into the tunnel again when that is taken away.
	c.ns.Do(func() error { return address6("up0", "2001:db8::3/64") })
	c.addr6 = netip.MustParseAddr("2001:db8::3")
	a.reach(b, c)
	if r := byTunnel(c); r.Dev != "" {
		t.Errorf("the way to %s: %+v, want a host route", c.cidr6, r)
	}
	if got := fetch(t, a1.path, c1.addr6.String()); got != "c1 saw fd42:0:0:1::2" {
		t.Errorf("after an address came: %q", got)
	}
	c.addr6 = netip.Addr{}
	a.reach(b, c)
	if r := byTunnel(c); r.Dev != overlay.DefaultTunnel {
		t.Errorf("the way to %s: %+v, want the tunnel again", c.cidr6, r)
	}
	for _, n := range []*node{a, b, c} {
		n.takeDown(t)
	}
}

// TestRootTunnelOverIPv6 puts a router between two nodes that have addresses of
// IPv6 alone.
func TestRootTunnelOverIPv6(t *testing.T) {
	netnstest.NeedRoot(t)
	router := netnstest.New(t)
	only6 := func(addr, cidr string) *node {
		return (&node{t: t, addr: netip.MustParseAddr(addr), cidr: netip.MustParsePrefix(cidr)}).open()
	}
	a, b := only6("2001:db8:a::1", "fd42:0:0:1::/64"), only6("2001:db8:b::1", "fd42:0:0:2::/64")
	for name, n := range map[string]*node{"a": a, "b": b} {
		netnstest.Join(t, router, name, n.ns, "up0")
		gateway := "2001:db8:" + name + "::fe"
		router.Do(func() error { return address6(name, gateway+"/64") })
		n.ns.Do(func() error {
			if err := address6("up0", n.addr.String()+"/64"); err != nil {
				return err
			}
			return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(gateway)})
		})
	}
	router.Do(func() error { return sysctl.Set(sysctl.Router6()) })
	a.reach(b)
	b.reach(a)
	want := []overlay.Route{{Dst: b.cidr, Dev: overlay.DefaultTunnel}}
	got, err := a.over.List()
	if d := cmp.Diff(want, got, cmp.Comparer(func(x, y overlay.Route) bool { return x.Dst == y.Dst && x.Dev == y.Dev })); err != nil || d != "" {
		t.Fatalf("%v, routes (-want +got):\n%s", err, d)
	}
	a1, b1 := a.startPod("a1"), b.startPod("b1")
	for _, tt := range []struct{ from, to, want string }{
		{a1.path, b1.addr.String(), "b1 saw fd42:0:0:1::2"},
		{b1.path, a1.addr.String(), "a1 saw fd42:0:0:2::2"},
	} {
		if got := fetch(t, tt.from, tt.to); got != tt.want {
			t.Errorf("got %q, want %q", got, tt.want)
		}
	}
	if got := len(fetchPage(t, a1.path, b1.addr.String(), "/big")); got < bigPage {
		t.Errorf("%d bytes of a big page came through the tunnel", got)
	}
	for _, n := range []*node{a, b} {
		n.takeDown(t)
	}
}
