package overlay

import (
	"errors"
	"flag"
	"net/netip"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestChoose(t *testing.T) {
	a := netip.MustParseAddr
	near, far, far6 := route("10.42.2.0/24", "192.0.2.2"), route("10.42.3.0/24", "198.51.100.3"), route("10.42.4.0/24", "2001:db8::4")
	through := func(dst, inner string) Route {
		r := route(dst, inner)
		r.Dev = "tun"
		return r
	}
	for _, tt := range []struct {
		name   string
		routes []Route
		ways   map[netip.Addr]way
		want   plan
	}{
		{"alone", nil, nil, plan{mtu: 1450}},
		{"on the segment", []Route{near}, map[netip.Addr]way{near.Via: {mtu: 9000}}, plan{routes: []Route{near}, mtu: 1450}},
		{"behind a gateway", []Route{near, far}, map[netip.Addr]way{near.Via: {mtu: 1500}, far.Via: {gateway: true, mtu: 1500}},
			plan{routes: []Route{near, through("10.42.3.0/24", "10.42.3.1")}, peers: []Peer{{a("10.42.3.1"), far.Via}}, mtu: 1450}},
		{"the narrowest way counts", []Route{far, far6}, map[netip.Addr]way{far.Via: {gateway: true, mtu: 9000}, far6.Via: {gateway: true, mtu: 1400}},
			plan{routes: []Route{through("10.42.3.0/24", "10.42.3.1"), through("10.42.4.0/24", "10.42.4.1")},
				peers: []Peer{{a("10.42.3.1"), far.Via}, {a("10.42.4.1"), far6.Via}}, mtu: 1330}},
		{"no way: the kernel says why", []Route{far}, map[netip.Addr]way{far.Via: {err: errors.New("unreachable")}}, plan{routes: []Route{far}, mtu: 1450}},
		{"IPv6 ranges have host routes alone", []Route{route("fd42:2::/64", "2001:db8::4")}, map[netip.Addr]way{far6.Via: {gateway: true, mtu: 1500}},
			plan{routes: []Route{route("fd42:2::/64", "2001:db8::4")}, mtu: 1450}},
	} {
		got := choose("tun", Nodes{Own: netip.MustParsePrefix("10.42.1.0/24"), Routes: tt.routes}, tt.ways)
		eq := cmp.Options{cmp.AllowUnexported(plan{}), cmp.Comparer(func(x, y Route) bool { return x == y }), cmp.Comparer(func(x, y Peer) bool { return x == y })}
		if d := cmp.Diff(tt.want, got, eq); d != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, d)
		}
	}
}

func TestFenceGolden(t *testing.T) {
	got := Fence(DefaultPort, Nodes{Own: netip.MustParsePrefix("10.42.1.0/24"), Routes: []Route{
		route("10.42.2.0/24", "192.0.2.2"), route("10.42.3.0/24", "198.51.100.3"), route("10.42.4.0/24", "2001:db8::4"),
	}}).Text()
	const file = "testdata/fence.nft"
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), got); d != "" {
		t.Fatalf("fence (-want +got), rewrite with -update:\n%s", d)
	}
}

func TestNodesThatMakeNoSenseAreRefused(t *testing.T) {
	own := netip.MustParsePrefix("10.42.1.0/24")
	dev := route("10.42.2.0/24", "192.0.2.2")
	dev.Dev = "eth0"
	for name, n := range map[string]Nodes{
		"no own range": {Routes: []Route{route("10.42.2.0/24", "192.0.2.2")}},
		"no range":     {Own: own, Routes: []Route{{Via: netip.MustParseAddr("192.0.2.2")}}},
		"no node":      {Own: own, Routes: []Route{{Dst: own}}},
		"an interface": {Own: own, Routes: []Route{dev}},
	} {
		if n.check() == nil {
			t.Errorf("%s: passed", name)
		}
	}
}

func TestTunnelMAC(t *testing.T) {
	if got := tunnelMAC(netip.MustParseAddr("10.42.3.1")).String(); got != "0e:cd:0a:2a:03:01" {
		t.Errorf("got %s: nodes of different versions would not find each other", got)
	}
}
