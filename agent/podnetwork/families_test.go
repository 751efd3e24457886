package podnetwork

import (
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/netnstest"
)

// TestRootTwoRanges: pods get an address of each range, at once of use; a pod that
// has one already, from before there was a second range, gets the other when it is
// connected again; the next process knows both.
func TestRootTwoRanges(t *testing.T) {
	netnstest.NeedRoot(t)
	ns, dir := netnstest.New(t), t.TempDir()
	const four, both = "10.42.1.0/24", "10.42.1.0/24,fd42:0:0:1::/64"
	former := newReadyNode(t, ns, dir, four, 0)
	_, had, err := former.Attach(t.Context(), "old", false)
	if err != nil {
		t.Fatal(err)
	}
	former.close()

	n := newReadyNode(t, ns, dir, both, 1)
	stop := n.keep()
	n.eventually("a ready network", func() bool { return len(n.waiting()) == 1 })
	paths, addrs := map[string]string{}, map[string][]netip.Addr{}
	for _, uid := range []string{"from-ready", "another", "old"} {
		path, ips, err := n.Attach(t.Context(), uid, false)
		if err != nil || len(ips) != 2 || !ips[0].Is4() || !ips[1].Is6() {
			t.Fatal(uid, ips, err)
		}
		paths[uid], addrs[uid] = path, ips
	}
	if addrs["old"][0] != had[0] {
		t.Errorf("the pod went from %v to %v", had, addrs["old"])
	}
	stop()
	// Both ways, from the first packet on.
	listener := listen6(t, paths["another"])
	defer listener.Close()
	for _, from := range []string{"from-ready", "old"} {
		if err := netns.Do(paths[from], func() error {
			c, err := net.DialTimeout("tcp6", net.JoinHostPort(addrs["another"][1].String(), "9000"), 30*time.Second)
			if err != nil {
				return err
			}
			if got := c.LocalAddr().(*net.TCPAddr).AddrPort().Addr(); got != addrs[from][1] {
				t.Errorf("%s speaks as %s, want %s", from, got, addrs[from][1])
			}
			return c.Close()
		}); err != nil {
			t.Errorf("%s: %v", from, err)
		}
	}
	n.close()

	n = newReadyNode(t, ns, dir, both, 0)
	defer n.close()
	for uid, want := range addrs {
		if path, ips, err := n.Attach(t.Context(), uid, false); err != nil || path != paths[uid] || !slices.Equal(ips, want) {
			t.Errorf("%s attached again: %s %v %v", uid, path, ips, err)
		}
	}
	for uid := range addrs {
		if err := n.Detach(t.Context(), uid); err != nil {
			t.Error(err)
		}
	}
	if left, err := onRecord(dir); err != nil || len(left) > 0 {
		t.Errorf("addresses left: %v %v", left, err)
	}
}

// TestRootAddressesOfOneFamily: with a range of IPv6 alone pods have no other.
func TestRootAddressesOfOneFamily(t *testing.T) {
	netnstest.NeedRoot(t)
	n := newReadyNode(t, netnstest.New(t), t.TempDir(), "fd42:0:0:1::/64", 0)
	defer n.close()
	path, ips, err := n.Attach(t.Context(), "a", false)
	if err != nil || len(ips) != 1 || !ips[0].Is6() {
		t.Fatal(ips, err)
	}
	if err := netns.Do(path, func() error {
		routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
		if len(routes) > 0 {
			t.Errorf("routes of IPv4: %v", routes)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
	if err := n.Detach(t.Context(), "a"); err != nil {
		t.Error(err)
	}
}

func listen6(t *testing.T, ns string) (l net.Listener) {
	t.Helper()
	if err := netns.Do(ns, func() (err error) {
		l, err = net.Listen("tcp6", ":9000")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	return l
}
