package pathprobe

import (
	"context"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netnstest"
)

// TestRootFaultyWays: a way that carries less than the interface promises, and
// one that leads in one direction alone, are found on real interfaces.
func TestRootFaultyWays(t *testing.T) {
	netnstest.NeedRoot(t)
	a, b := netnstest.New(t), netnstest.New(t)
	netnstest.Join(t, a, "eth0", b, "eth0")
	addrs := map[*netnstest.NS]netip.Addr{a: netip.MustParseAddr("192.0.2.1"), b: netip.MustParseAddr("192.0.2.2")}
	setMTU := func(ns *netnstest.NS, mtu int) {
		t.Helper()
		ns.Do(func() error {
			link, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			return netlink.LinkSetMTU(link, mtu)
		})
	}
	probers := map[*netnstest.NS]*Prober{}
	names := map[*netnstest.NS]string{a: "a", b: "b"}
	for ns, other := range map[*netnstest.NS]*netnstest.NS{a: b, b: a} {
		ns.Do(func() error {
			link, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			addr, err := netlink.ParseAddr(addrs[ns].String() + "/24")
			if err != nil {
				return err
			}
			return netlink.AddrAdd(link, addr)
		})
		p := New(Config{Port: 8474, MTU: func(addr netip.Addr) (mtu int, err error) {
			ns.Do(func() error { mtu, err = kernelMTU(addr); return nil })
			return mtu, err
		}})
		probers[ns] = p
		p.Set([]netip.Addr{addrs[ns]}, []Peer{{Name: names[other], Addr: addrs[other]}})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		// Run opens its sockets in the namespace of its own thread, and they stay
		// there; streams are dialled by other threads, outside.
		wg.Go(func() { ns.Do(func() error { p.Run(ctx); return nil }) })
		t.Cleanup(func() { cancel(); wg.Wait() })
	}
	wait(t, probers[a], "b", "answers", func(r Result) bool { return r.MTU == 1500 && r.Sent > 1 && r.Silent == 0 && r.Carries == 0 })

	setMTU(b, 1400) // frames that are longer do not come in
	wait(t, probers[a], "b", "the length that passes", func(r Result) bool { return r.Carries > 1390 && r.Carries <= 1400 && r.Silent == 0 })
	// A route that keeps to it does not hide that the way is mended.
	narrow := &netlink.Route{Dst: netlink.NewIPNet(addrs[b].AsSlice()), Scope: netlink.SCOPE_LINK, MTU: 1400}
	a.Do(func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		narrow.LinkIndex = link.Attrs().Index
		return netlink.RouteAdd(narrow)
	})
	probers[a].lookAgain()
	setMTU(b, 1500)
	wait(t, probers[a], "b", "the length that passes again", func(r Result) bool { return r.MTU == 1500 && r.Carries == 0 })

	// b does not answer a, and hears it.
	b.Do(func() error {
		return netlink.RouteAdd(&netlink.Route{Dst: netlink.NewIPNet(addrs[a].AsSlice()), Type: unix.RTN_BLACKHOLE})
	})
	a.Do(func() error { return netlink.RouteDel(narrow) })
	wait(t, probers[b], "a", "one direction", func(r Result) bool { return r.Silent >= 3 && r.Heard.After(r.Answered) })
	wait(t, probers[a], "b", "silence", func(r Result) bool { return r.Silent >= 3 && !r.Heard.After(r.Answered.Add(answerTimeout)) })
}

// lookAgain makes the prober ask for the interfaces' MTU with the next ping.
func (p *Prober) lookAgain() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, o := range p.peers {
		o.asked = time.Time{}
	}
}
