package overlay

import (
	"errors"
	"flag"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestChoose(t *testing.T) {
	near, far, far6 := route("10.42.2.0/24", "192.0.2.2"), route("10.42.3.0/24", "198.51.100.3"), route("10.42.4.0/24", "2001:db8::4")
	of := func(routes ...Route) (out []Node) {
		for _, r := range routes {
			out = append(out, Node{Ranges: []netip.Prefix{r.Dst}, Addrs: []netip.Addr{r.Via}})
		}
		return out
	}
	dual := func(addrs ...string) Node {
		n := Node{Ranges: []netip.Prefix{near.Dst, netip.MustParsePrefix("fd42:2::/64")}}
		for _, a := range addrs {
			n.Addrs = append(n.Addrs, netip.MustParseAddr(a))
		}
		return n
	}
	through := func(dst, inner string) Route {
		r := route(dst, inner)
		r.Dev = "tun"
		return r
	}
	peer := func(node netip.Addr, mac string, inner ...string) Peer {
		p := Peer{Node: node}
		p.MAC, _ = net.ParseMAC(mac)
		for _, a := range inner {
			p.Inner = append(p.Inner, netip.MustParseAddr(a))
		}
		return p
	}
	six := netip.MustParseAddr("2001:db8::2")
	for _, tt := range []struct {
		name   string
		others []Node
		ways   map[netip.Addr]way
		want   plan
	}{
		{"alone", nil, nil, plan{mtu: 1450}},
		{"on the segment", of(near), map[netip.Addr]way{near.Via: {mtu: 9000}}, plan{routes: []Route{near}, mtu: 1450}},
		{"behind a gateway", of(near, far), map[netip.Addr]way{near.Via: {mtu: 1500}, far.Via: {gateway: true, mtu: 1500}},
			plan{routes: []Route{near, through("10.42.3.0/24", "10.42.3.1")}, peers: []Peer{peer(far.Via, "0e:cd:0a:2a:03:01", "10.42.3.1")}, mtu: 1450}},
		{"the narrowest way counts", of(far, far6), map[netip.Addr]way{far.Via: {gateway: true, mtu: 9000}, far6.Via: {gateway: true, mtu: 1400}},
			plan{routes: []Route{through("10.42.3.0/24", "10.42.3.1"), through("10.42.4.0/24", "10.42.4.1")},
				peers: []Peer{peer(far.Via, "0e:cd:0a:2a:03:01", "10.42.3.1"), peer(far6.Via, "0e:cd:0a:2a:04:01", "10.42.4.1")}, mtu: 1330}},
		{"no way: the kernel says why", of(far), map[netip.Addr]way{far.Via: {err: errors.New("unreachable")}}, plan{routes: []Route{far}, mtu: 1450}},
		{"both families on the segment", []Node{dual("192.0.2.2", "2001:db8::2")}, map[netip.Addr]way{near.Via: {mtu: 1500}, six: {mtu: 1500}},
			plan{routes: []Route{near, route("fd42:2::/64", "2001:db8::2")}, mtu: 1450}},
		{"no address of the second family: its range through the tunnel", []Node{dual("192.0.2.2")}, map[netip.Addr]way{near.Via: {mtu: 1500}},
			plan{routes: []Route{near, through("fd42:2::/64", "fe80::ccd:aff:fe2a:201")}, peers: []Peer{peer(near.Via, "0e:cd:0a:2a:02:01", "fe80::ccd:aff:fe2a:201")}, mtu: 1450}},
		{"no way by the second family", []Node{dual("192.0.2.2", "2001:db8::2")}, map[netip.Addr]way{near.Via: {mtu: 1500}, six: {err: errors.New("unreachable")}},
			plan{routes: []Route{near, through("fd42:2::/64", "fe80::ccd:aff:fe2a:201")}, peers: []Peer{peer(near.Via, "0e:cd:0a:2a:02:01", "fe80::ccd:aff:fe2a:201")}, mtu: 1450}},
		{"both behind a gateway", []Node{dual("2001:db8::2", "192.0.2.2")}, map[netip.Addr]way{near.Via: {gateway: true, mtu: 1500}, six: {gateway: true, mtu: 1500}},
			plan{routes: []Route{through("10.42.2.0/24", "10.42.2.1"), through("fd42:2::/64", "fe80::ccd:aff:fe2a:201")},
				peers: []Peer{peer(near.Via, "0e:cd:0a:2a:02:01", "10.42.2.1", "fe80::ccd:aff:fe2a:201")}, mtu: 1450}},
		{"IPv6 alone, behind a gateway", of(route("fd42:2::/64", "2001:db8::2")), map[netip.Addr]way{six: {gateway: true, mtu: 1500, src: netip.MustParseAddr("2001:db8:1::1")}},
			plan{routes: []Route{through("fd42:2::/64", linkLocal(tunnelMAC(netip.MustParseAddr("fd42:2::1"))).String())},
				peers: []Peer{peer(six, tunnelMAC(netip.MustParseAddr("fd42:2::1")).String(), linkLocal(tunnelMAC(netip.MustParseAddr("fd42:2::1"))).String())},
				mtu:   1430, local: netip.MustParseAddr("2001:db8:1::1")}},
	} {
		got := choose("tun", Nodes{Own: []netip.Prefix{netip.MustParsePrefix("10.42.1.0/24")}, Others: tt.others}, tt.ways)
		eq := cmp.Options{cmp.AllowUnexported(plan{}), cmp.Comparer(func(x, y Route) bool { return x == y }), cmp.Comparer(func(x, y netip.Addr) bool { return x == y })}
		if d := cmp.Diff(tt.want, got, eq); d != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, d)
		}
	}
}

func TestFenceGolden(t *testing.T) {
	got := Fence(DefaultPort, Nodes{Own: []netip.Prefix{netip.MustParsePrefix("10.42.1.0/24")}, Others: []Node{
		{Addrs: []netip.Addr{netip.MustParseAddr("192.0.2.2")}}, {Addrs: []netip.Addr{netip.MustParseAddr("198.51.100.3"), netip.MustParseAddr("2001:db8::4")}},
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
	own, at := []netip.Prefix{netip.MustParsePrefix("10.42.1.0/24")}, []netip.Addr{netip.MustParseAddr("192.0.2.2")}
	for name, n := range map[string]Nodes{
		"no own range":      {Others: []Node{{Ranges: own, Addrs: at}}},
		"an own range of 0": {Own: make([]netip.Prefix, 1)},
		"no range":          {Own: own, Others: []Node{{Addrs: at}}},
		"no address":        {Own: own, Others: []Node{{Ranges: own}}},
		"nonsense":          {Own: own, Others: []Node{{Ranges: own, Addrs: make([]netip.Addr, 1)}}},
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
