package lb

import (
	"net"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/clusterd/clusterd/netsetup/netnstest"
)

// TestRootWays: the routes by the device follow the ranges, also those that a former
// process set, and what is not ours stays.
func TestRootWays(t *testing.T) {
	netnstest.NeedRoot(t)
	ns := netnstest.New(t)
	netnstest.Join(t, ns, "pods0", netnstest.New(t), "eth0")
	ns.Do(func() error {
		link, err := netlink.LinkByName("pods0")
		if err != nil {
			return err
		}
		other := netip.MustParsePrefix("10.1.0.0/16")
		foreign := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: &net.IPNet{IP: other.Addr().AsSlice(), Mask: net.CIDRMask(16, 32)}, Scope: netlink.SCOPE_LINK}
		if err := netlink.RouteAdd(foreign); err != nil {
			return err
		}
		for _, texts := range [][]string{{"10.96.0.0/16", "fd00:96::/112"}, {"10.96.0.0/16", "10.97.0.0/16"}, {"10.97.0.0/16"}} {
			w, err := OpenWays("pods0")
			if err != nil {
				return err
			}
			want := []netip.Prefix{other}
			for _, text := range texts {
				want = append(want, netip.MustParsePrefix(text))
			}
			for range 2 {
				if err := w.Ensure(want[1:], true); err != nil {
					return err
				}
			}
			routes := func(what string, want []netip.Prefix) error {
				var got []netip.Prefix
				for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
					list, err := netlink.RouteList(link, family)
					if err != nil {
						return err
					}
					for _, r := range list {
						if p, ok := rangeOf(r.Dst); ok && !p.Addr().IsLinkLocalUnicast() && !p.Addr().IsMulticast() {
							got = append(got, p)
						}
					}
				}
				slices.SortFunc(got, netip.Prefix.Compare)
				slices.SortFunc(want, netip.Prefix.Compare)
				if !slices.Equal(got, want) {
					t.Errorf("%s: routes to %v, want %v", what, got, want)
				}
				return nil
			}
			if err := routes("all", slices.Clone(want)); err != nil {
				return err
			}
			// Who does not know all ranges takes no route away.
			if err := w.Ensure([]netip.Prefix{netip.MustParsePrefix("10.99.0.0/16")}, false); err != nil {
				return err
			}
			if err := routes("not all", append(slices.Clone(want), netip.MustParsePrefix("10.99.0.0/16"))); err != nil {
				return err
			}
			w.Close()
		}
		return nil
	})
}
