package overlay

import (
	"context"
	"net"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/clusterd/clusterd/netsetup/netnstest"
)

func route(dst, via string) Route {
	return Route{Dst: netip.MustParsePrefix(dst), Via: netip.MustParseAddr(via)}
}

func TestProtocolRange(t *testing.T) {
	for _, n := range []int{-1, 1, 4, 256} {
		if _, err := OpenHostGW(Config{Protocol: n}); err == nil {
			t.Errorf("protocol %d was accepted", n)
		}
	}
}

func TestRootHostGW(t *testing.T) {
	netnstest.NeedRoot(t)
	ctx := t.Context()
	a, b := netnstest.New(t), netnstest.New(t)
	netnstest.Join(t, a, "up0", b, "up0")
	var g *HostGW
	foreign := &netlink.Route{Dst: mustNet("10.99.0.0/24"), Gw: net.ParseIP("192.0.2.2")}
	a.Do(func() error {
		link, err := netlink.LinkByName("up0")
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr("192.0.2.1/24")
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, addr); err != nil {
			return err
		}
		if err := netlink.RouteAdd(foreign); err != nil {
			return err
		}
		g, err = OpenHostGW(Config{})
		return err
	})
	defer g.Close()

	expect := func(want ...Route) {
		t.Helper()
		got, err := g.List()
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got, cmp.Comparer(func(x, y Route) bool { return x == y })); d != "" && len(want)+len(got) > 0 {
			t.Fatal(d)
		}
	}
	set := func(routes ...Route) {
		t.Helper()
		for range 2 { // twice is once
			if err := g.Set(ctx, routes); err != nil {
				t.Fatal(err)
			}
		}
	}
	set(route("10.42.2.7/24", "192.0.2.2"), route("10.42.3.0/24", "192.0.2.3"))
	expect(route("10.42.2.0/24", "192.0.2.2"), route("10.42.3.0/24", "192.0.2.3"))
	// One gets an MTU, and loses it again.
	narrow := route("10.42.2.0/24", "192.0.2.2")
	narrow.MTU = 1400
	set(narrow, route("10.42.3.0/24", "192.0.2.3"))
	expect(narrow, route("10.42.3.0/24", "192.0.2.3"))
	set(route("10.42.2.7/24", "192.0.2.2"), route("10.42.3.0/24", "192.0.2.3"))
	expect(route("10.42.2.0/24", "192.0.2.2"), route("10.42.3.0/24", "192.0.2.3"))
	// One range moves, one goes, one comes.
	set(route("10.42.2.0/24", "192.0.2.9"), route("10.42.4.0/24", "192.0.2.4"))
	expect(route("10.42.2.0/24", "192.0.2.9"), route("10.42.4.0/24", "192.0.2.4"))
	// A bad one does not keep the good one away.
	if err := g.Set(ctx, []Route{route("10.42.1.0/24", "203.0.113.1"), route("10.42.5.0/24", "192.0.2.5")}); err == nil {
		t.Fatal("a route via an unreachable gateway passed")
	}
	expect(route("10.42.5.0/24", "192.0.2.5"))
	// Contradictions and empty values are refused before anything is touched.
	for _, bad := range [][]Route{{{}}, {route("10.42.5.0/24", "192.0.2.5"), route("10.42.5.0/24", "192.0.2.6")}} {
		if err := g.Set(ctx, bad); err == nil {
			t.Errorf("%v passed", bad)
		}
	}
	canceled, cancel := context.WithCancel(ctx)
	cancel()
	if err := g.Set(canceled, []Route{route("10.42.6.0/24", "192.0.2.6")}); err == nil {
		t.Error("a canceled Set passed")
	}
	if err := g.CleanUp(ctx); err != nil {
		t.Fatal(err)
	}
	expect()
	a.Do(func() error {
		routes, err := netlink.RouteListFiltered(netlink.FAMILY_V4, foreign, netlink.RT_FILTER_DST)
		if err == nil && len(routes) != 1 {
			t.Errorf("another program's route: found %d times", len(routes))
		}
		return err
	})
}

func mustNet(s string) *net.IPNet {
	_, n, err := net.ParseCIDR(s)
	if err != nil {
		panic(err)
	}
	return n
}
