package main

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/netsetup/netnstest"
)

// TestRootFindAddress gives a machine addresses and routes and looks at which one it
// would advertise, and at the ranges that follow.
func TestRootFindAddress(t *testing.T) {
	netnstest.NeedRoot(t)
	const v4, v6 = "192.0.2.7/24", "2001:db8:1::7/64"
	for _, tc := range []struct {
		what   string
		addrs  []string // of up0; after "bridge ", of a bridge of containers; after "uplink ", of one with another port
		routes []string // gateways of default routes
		toward string   // the server to join by
		want   string
		ranges string
		err    string
	}{
		{what: "no network", want: "127.0.0.1", ranges: DefaultClusterCIDR},
		{what: "IPv4 alone", addrs: []string{v4}, routes: []string{"192.0.2.1"}, want: "192.0.2.7", ranges: DefaultClusterCIDR},
		{what: "IPv6 alone", addrs: []string{v6}, routes: []string{"2001:db8:1::1"}, want: "2001:db8:1::7", ranges: DefaultClusterCIDR6},
		{what: "IPv6 alone, no route", addrs: []string{v6}, want: "2001:db8:1::7", ranges: DefaultClusterCIDR6},
		{what: "IPv6 alone, of a private network", addrs: []string{"fd00::7/64"}, want: "fd00::7", ranges: DefaultClusterCIDR6},
		{what: "both", addrs: []string{v6, v4}, routes: []string{"2001:db8:1::1", "192.0.2.1"}, want: "192.0.2.7", ranges: DefaultClusterCIDR},
		{what: "both, no route", addrs: []string{v6, v4}, want: "192.0.2.7", ranges: DefaultClusterCIDR},
		{what: "both, an IPv6 route alone", addrs: []string{v6, "10.0.0.7/24"}, routes: []string{"2001:db8:1::1"}, want: "10.0.0.7", ranges: DefaultClusterCIDR},
		{what: "both, an IPv6 route alone, IPv4 on a bridge of a network", addrs: []string{v6, "uplink 10.0.0.7/24"}, routes: []string{"2001:db8:1::1"}, want: "10.0.0.7", ranges: DefaultClusterCIDR},
		{what: "a container engine's bridge, no route", addrs: []string{"bridge 172.17.0.1/16", v6}, want: "2001:db8:1::7", ranges: DefaultClusterCIDR6},
		{what: "a container engine's bridge, IPv4 without a route", addrs: []string{"bridge 172.17.0.1/16", v4}, want: "192.0.2.7", ranges: DefaultClusterCIDR},
		{what: "a container engine's bridge alone", addrs: []string{"bridge 172.17.0.1/16"}, want: "172.17.0.1", ranges: DefaultClusterCIDR},
		{what: "a container engine's bridge", addrs: []string{"bridge 172.17.0.1/16", v6}, routes: []string{"2001:db8:1::1"}, want: "2001:db8:1::7", ranges: DefaultClusterCIDR6},

		{what: "IPv4 that is link-local", addrs: []string{"169.254.3.7/16"}, routes: []string{"169.254.0.1"}, want: "169.254.3.7", ranges: DefaultClusterCIDR},

		{what: "both, to a server of IPv6", addrs: []string{v6, v4}, routes: []string{"2001:db8:1::1", "192.0.2.1"}, toward: "[2001:db8:1::8]:6443", want: "2001:db8:1::7"},
		{what: "both, to a server of IPv6 that no route leads to", addrs: []string{v6, v4}, routes: []string{"192.0.2.1"}, toward: "[2001:db8:2::8]:6443", want: "2001:db8:1::7"},
		{what: "both, to a server of IPv4", addrs: []string{v6, v4}, routes: []string{"2001:db8:1::1"}, toward: "192.0.2.8:6443", want: "192.0.2.7"},
		{what: "IPv4 alone, to a server of IPv6", addrs: []string{v4}, routes: []string{"192.0.2.1"}, toward: "[2001:db8:1::8]:6443",
			err: "--advertise: the server [2001:db8:1::8]:6443 is reached by IPv6 alone, and no interface of this machine has an address of that family"},
		{what: "IPv6 alone, to a server of IPv4", addrs: []string{v6}, toward: "192.0.2.8:6443",
			err: "--advertise: the server 192.0.2.8:6443 is reached by IPv4 alone"},
		{what: "a server on the loopback", toward: "[::1]:6443", want: "::1"},
	} {
		t.Run(tc.what, func(t *testing.T) {
			ns, peer := netnstest.New(t), netnstest.New(t)
			netnstest.Join(t, ns, "up0", peer, "up0")
			c := Config{Toward: tc.toward}
			var got netip.Addr
			var findErr error
			ns.Do(func() error {
				if err := addBridges(); err != nil {
					return err
				}
				for _, addr := range tc.addrs {
					dev := "up0"
					if rest, ok := strings.CutPrefix(addr, "bridge "); ok {
						dev, addr = "br0", rest
					}
					if rest, ok := strings.CutPrefix(addr, "uplink "); ok {
						dev, addr = "br1", rest
					}
					if err := addAddress(dev, addr); err != nil {
						return err
					}
				}
				for _, gw := range tc.routes {
					up, err := netlink.LinkByName("up0")
					if err != nil {
						return err
					}
					if err := netlink.RouteAdd(&netlink.Route{LinkIndex: up.Attrs().Index, Gw: netip.MustParseAddr(gw).AsSlice()}); err != nil {
						return err
					}
				}
				got, findErr = c.findAddress()
				return nil
			})
			if tc.err != "" {
				if findErr == nil || !strings.Contains(findErr.Error(), tc.err) {
					t.Errorf("%v, %v; want the error %q", got, findErr, tc.err)
				}
				return
			}
			if findErr != nil || got.String() != tc.want {
				t.Fatalf("%v, %v; want %s", got, findErr, tc.want)
			}
			if c.Advertise = got.String(); tc.ranges != "" {
				if c.defaultRanges(); c.ClusterCIDR != tc.ranges {
					t.Errorf("the pods' range is %s, want %s", c.ClusterCIDR, tc.ranges)
				}
			}
		})
	}
}

// addBridges makes br0, with a container's port, and br1, with another one as well.
func addBridges() error {
	for _, l := range []netlink.Link{
		&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}},
		&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br1"}},
		&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "pod0"}, PeerName: "inside0"},
		&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "pod1"}, PeerName: "inside1"},
		&netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: "net1"}},
	} {
		if err := netlink.LinkAdd(l); err != nil {
			return fmt.Errorf("%s: %w", l.Attrs().Name, err)
		}
	}
	for port, bridge := range map[string]string{"pod0": "br0", "pod1": "br1", "net1": "br1"} {
		p, err := netlink.LinkByName(port)
		if err != nil {
			return err
		}
		b, err := netlink.LinkByName(bridge)
		if err != nil {
			return err
		}
		if err := errors.Join(netlink.LinkSetMaster(p, b), netlink.LinkSetUp(b)); err != nil {
			return err
		}
	}
	return nil
}

// addAddress gives an interface an address that is of use at once.
func addAddress(dev, addr string) error {
	link, err := netlink.LinkByName(dev)
	if err != nil {
		return err
	}
	a, err := netlink.ParseAddr(addr)
	if err != nil {
		return err
	}
	if a.IP.To4() == nil {
		a.Flags = unix.IFA_F_NODAD
	}
	return netlink.AddrAdd(link, a)
}

// TestDefaultRanges: what was not given is of the family of what was, and of the node's
// address.
func TestDefaultRanges(t *testing.T) {
	for _, tc := range []struct {
		args           string
		pods, services string
		first          string // the error of init
	}{
		{"--advertise=192.0.2.7", DefaultClusterCIDR, DefaultServiceCIDR, ""},
		{"--advertise=2001:db8::7", DefaultClusterCIDR6, DefaultServiceCIDR6, ""},
		{"--advertise=2001:db8::7 --cluster-cidr=fd01::/48", "fd01::/48", DefaultServiceCIDR6, ""},
		{"--advertise=2001:db8::7 --service-cidr=fd01::/112", DefaultClusterCIDR6, "fd01::/112", ""},
		{"--advertise=192.0.2.7 --service-cidr=10.32.0.0/16", DefaultClusterCIDR, "10.32.0.0/16", ""},
		{"--advertise=2001:db8::7 --cluster-cidr=10.32.0.0/14", "10.32.0.0/14", DefaultServiceCIDR, "--cluster-cidr 10.32.0.0/14, --service-cidr 10.96.0.0/16: the nodes' addresses are of IPv6, as --advertise 2001:db8::7 is"},
	} {
		c, err := parse(t, "", strings.Fields(tc.args)...)
		if err != nil || c.ClusterCIDR != tc.pods || c.ServiceCIDR != tc.services {
			t.Errorf("%s: %s and %s, %v; want %s and %s", tc.args, c.ClusterCIDR, c.ServiceCIDR, err, tc.pods, tc.services)
			continue
		}
		if err := c.checkFirstFamily(); (err == nil) != (tc.first == "") || err != nil && !strings.Contains(err.Error(), tc.first) {
			t.Errorf("%s: %v, want %q", tc.args, err, tc.first)
		}
	}
	// An existing cluster of this kind still starts.
	if c, err := parse(t, "advertise: 2001:db8::7\nclusterCIDR: 10.244.0.0/14\nserviceCIDR: 10.96.0.0/16\n"); err != nil || c.ClusterCIDR != DefaultClusterCIDR {
		t.Errorf("%s, %v", c.ClusterCIDR, err)
	}
}

func TestServerAddress(t *testing.T) {
	for text, want := range map[string]string{
		"192.0.2.7": "192.0.2.7:6443", "192.0.2.7:7": "192.0.2.7:7", "n1": "n1:6443", "2001:db8::7": "[2001:db8::7]:6443",
		"[2001:db8::7]": "[2001:db8::7]:6443", "[2001:db8::7]:7": "[2001:db8::7]:7", "[fe80::1%eth0]": "[fe80::1%eth0]:6443",
	} {
		if got, err := serverAddress(text); err != nil || got != want {
			t.Errorf("%s: %s, %v; want %s", text, got, err, want)
		}
	}
	for _, bad := range []string{"", ":6443", "[]:6443", "n1:0", "n1:many"} {
		if got, err := serverAddress(bad); err == nil {
			t.Errorf("%q: %s", bad, got)
		}
	}
}

// TestJoinCommandQuoted: a shell hands the line on as it is.
func TestJoinCommandQuoted(t *testing.T) {
	for addr, want := range map[string]string{
		"192.0.2.7:6443": "clusterd join 192.0.2.7:6443 --token ", "[2001:db8::7]:6443": "clusterd join '[2001:db8::7]:6443' --token ",
	} {
		if got := joinCommand(netip.MustParseAddrPort(addr), pki.Token{}); !strings.HasPrefix(got, want) {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

func TestStandaloneRange(t *testing.T) {
	four, six := netip.MustParseAddr("192.0.2.7"), netip.MustParseAddr("2001:db8::7")
	for _, tc := range []struct {
		text string
		node netip.Addr
		want string // "": refused
	}{
		{"", four, DefaultStandaloneCIDR},
		{"", six, DefaultStandaloneCIDR6},
		{"10.1.2.0/29", six, "10.1.2.0/29"},
		{"fd01::/64", four, "fd01::/64"},
		{"fd01::/48", six, "fd01::/48"},
		{"10.1.2.0/30", four, ""},
		{"10.1.2.1/24", four, ""},
		{"fd01::/72", six, ""},
		{"fd01::1/64", six, ""},
		{"::ffff:10.0.0.0/64", six, ""},
		{"10.1.2.0", four, ""},
	} {
		got, err := standaloneRange(tc.text, tc.node)
		if tc.want == "" && (err == nil || !strings.Contains(err.Error(), "--pod-cidr "+strconv.Quote(tc.text))) || tc.want != "" && (err != nil || got.String() != tc.want) {
			t.Errorf("%q: %s, %v; want %q", tc.text, got, err, tc.want)
		}
	}
}
