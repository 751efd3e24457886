package announce

import (
	"context"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netnstest"
)

// TestRootLasting: an address that comes and goes is not taken for the machine's where
// its interface has another.
func TestRootLasting(t *testing.T) {
	netnstest.NeedRoot(t)
	ns, other := netnstest.New(t), netnstest.New(t)
	netnstest.Join(t, ns, "up0", other, "up0")
	netnstest.Join(t, ns, "up1", other, "up1")
	const passes, stays = "2001:db8::abcd", "2001:db8::7"
	add := func(dev, addr string, preferred int) error {
		link, err := netlink.LinkByName(dev)
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(addr + "/64")
		if err != nil {
			return err
		}
		a.Flags, a.PreferedLft, a.ValidLft = unix.IFA_F_NODAD, preferred, 1000
		return netlink.AddrReplace(link, a)
	}
	is := func(addr, want string) {
		t.Helper()
		ns.Do(func() error {
			if got, err := Lasting(netip.MustParseAddr(addr)); err != nil || got.String() != want {
				t.Errorf("%s: %s, %v; want %s", addr, got, err, want)
			}
			return nil
		})
	}
	// A program cannot make a temporary address; a deprecated one passes as well.
	ns.Do(func() error { return add("up0", passes, 0) })
	ns.Do(func() error { return add("up1", "2001:db8:1::7", 1000) }) // of another interface
	is(passes, passes)
	is("192.0.2.1", "192.0.2.1")
	is("2001:db8:9::1", "2001:db8:9::1")
	for _, tc := range []struct{ addr, want string }{ // the kernel lists the latest first
		{"fd00::7", "fd00::7"},
		{"2001:db8:5::7", "2001:db8:5::7"},
		{"fd00::8", "2001:db8:5::7"},
		{stays, stays},
		{"2001:db8:5::8", stays},
		{"fd00::9", stays},
	} {
		ns.Do(func() error { return add("up0", tc.addr, 1000) })
		is(passes, tc.want)
	}
	is(stays, stays)
}

// TestRootSettled: an address is waited for while the kernel makes sure of it, and one
// that another machine has is an error.
func TestRootSettled(t *testing.T) {
	netnstest.NeedRoot(t)
	ns, other := netnstest.New(t), netnstest.New(t)
	netnstest.Join(t, ns, "up0", other, "up0")
	add := func(addr string, flags int) error {
		link, err := netlink.LinkByName("up0")
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(addr + "/64")
		if err != nil {
			return err
		}
		a.Flags = flags
		return netlink.AddrAdd(link, a)
	}
	const free, taken = "2001:db8::7", "2001:db8::8"
	other.Do(func() error { return add(taken, unix.IFA_F_NODAD) })
	ns.Do(func() error { return add(free, 0) })
	ns.Do(func() error {
		addr := netip.MustParseAddr(free)
		if err := Settled(t.Context(), addr, time.Minute); err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(fd) }()
		return unix.Bind(fd, &unix.SockaddrInet6{Addr: addr.As16()})
	})
	ns.Do(func() error { return add(taken, 0) })
	ns.Do(func() error {
		if err := Settled(t.Context(), netip.MustParseAddr(taken), time.Minute); err == nil || !strings.Contains(err.Error(), taken) {
			t.Errorf("an address that another machine has: %v", err)
		}
		for _, addr := range []string{"192.0.2.1", "2001:db8::9"} {
			if err := Settled(t.Context(), netip.MustParseAddr(addr), time.Minute); err != nil {
				t.Errorf("%s: %v", addr, err)
			}
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		return Settled(ctx, netip.MustParseAddr(free), time.Minute)
	})
}
