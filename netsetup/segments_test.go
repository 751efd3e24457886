package netsetup_test

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/netnstest"
	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/netsetup/overlay"
	"github.com/clusterd/clusterd/netsetup/sysctl"
)

// TestRootTwoSegments puts a router between nodes: pages go through the tunnel
// to those behind it, and by a host route to the neighbour; only a member
// gets into the tunnel.
func TestRootTwoSegments(t *testing.T) {
	netnstest.NeedRoot(t)
	router := netnstest.New(t)
	a := newNode(t, "192.0.2.1", "10.42.1.0/24")
	near := newNode(t, "192.0.2.3", "10.42.3.0/24")
	b := newNode(t, "198.51.100.2", "10.42.2.0/24")
	join(t, router, a, near)
	netnstest.Join(t, router, "far", b.ns, "up0")
	router.Do(func() error {
		return errors.Join(sysctl.Set(map[string]string{"net.ipv4.ip_forward": "1"}), address("far", "198.51.100.254/24"), mtu("far", 1400))
	})
	b.ns.Do(func() error { return errors.Join(address("up0", "198.51.100.2/24"), mtu("up0", 1400)) })
	for n, via := range map[*node]string{a: "192.0.2.254", near: "192.0.2.254", b: "198.51.100.254"} {
		n.ns.Do(func() error { return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(via)}) })
	}
	a.reach(b, near)
	near.reach(a, b)
	b.reach(a, near)
	want := []overlay.Route{
		{Dst: b.cidr, Via: b.gateway(), Dev: overlay.DefaultTunnel},
		{Dst: near.cidr, Via: near.addr},
	}
	got, err := a.over.List()
	if d := cmp.Diff(want, got, cmp.Comparer(func(x, y overlay.Route) bool { return x == y })); err != nil || d != "" {
		t.Fatalf("%v, routes (-want +got):\n%s", err, d)
	}
	a1, b1, n1 := a.startPod("a1"), b.startPod("b1"), near.startPod("n1")
	for _, tt := range []struct{ name, from, to, want string }{
		{"through the tunnel, address kept", a1.path, b1.addr.String(), "b1 saw 10.42.1.2"},
		{"and back", b1.path, a1.addr.String(), "a1 saw 10.42.2.2"},
		{"the neighbour", a1.path, n1.addr.String(), "n1 saw 10.42.1.2"},
		{"the neighbour to the far one", n1.path, b1.addr.String(), "b1 saw 10.42.3.2"},
		{"a node to a far pod", a.ns.Path, b1.addr.String(), "b1 saw 10.42.1.1"},
		{"and back", b.ns.Path, a1.addr.String(), "a1 saw 10.42.2.1"},
	} {
		if got := fetch(t, tt.from, tt.to); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
	// Full packets, both ways: the tunnel is narrower than the pods' interfaces.
	for from, to := range map[string]netip.Addr{a1.path: b1.addr, b1.path: a1.addr} {
		if got := len(fetchPage(t, from, to.String(), "/big")); got < bigPage {
			t.Errorf("%d bytes of a big page came from %s", got, to)
		}
	}
	b.ns.Do(func() error {
		link, err := netlink.LinkByName(overlay.DefaultTunnel)
		if err == nil && link.Attrs().MTU != 1350 {
			t.Errorf("the tunnel's MTU is %d on a way of 1400", link.Attrs().MTU)
		}
		return err
	})
	t.Run("members alone", func(t *testing.T) { membersAlone(t, router, a, b, a1, b1) })

	// The far node gets another address while its pods run.
	b.ns.Do(func() error {
		link, err := netlink.LinkByName("up0")
		if err != nil {
			return err
		}
		old, err := netlink.ParseAddr("198.51.100.2/24")
		if err != nil {
			return err
		}
		return errors.Join(netlink.AddrDel(link, old), address("up0", "198.51.100.9/24"), // in this order; the route went with it
			netlink.RouteReplace(&netlink.Route{Gw: net.ParseIP("198.51.100.254")}))
	})
	b.addr = netip.MustParseAddr("198.51.100.9")
	a.reach(b, near)
	near.reach(a, b)
	b.reach(a, near)
	for _, tt := range []struct{ name, from, to, want string }{
		{"after a move", a1.path, b1.addr.String(), "b1 saw 10.42.1.2"},
		{"and back", b1.path, n1.addr.String(), "n1 saw 10.42.2.2"},
	} {
		if got := fetch(t, tt.from, tt.to); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
	// It goes: nothing of it stays.
	a.reach(near)
	a.ns.Do(func() error {
		link, err := netlink.LinkByName(overlay.DefaultTunnel)
		if err != nil {
			return err
		}
		for _, family := range []int{netlink.FAMILY_V4, 7 /* AF_BRIDGE */} {
			left, err := netlink.NeighList(link.Attrs().Index, family)
			if err != nil {
				return err
			}
			for _, n := range left {
				if n.State&netlink.NUD_PERMANENT != 0 && !n.IP.IsMulticast() {
					t.Errorf("left of a node that is gone: %v", n)
				}
			}
		}
		return nil
	})
	for _, n := range []*node{a, b, near} {
		n.takeDown(t)
		if s, err := n.kept.Read(nft.Table{Name: overlay.FenceTable}, false); err != nil || len(s.Chains) > 0 {
			t.Errorf("the fence is left: %v, %v", s, err)
		}
	}
}

// TestRootNarrowWay: where packets of the interface's length are lost without a word,
// a pod learns by the route's MTU how long they may be, and shorter ones arrive.
func TestRootNarrowWay(t *testing.T) {
	netnstest.NeedRoot(t)
	outside := netnstest.New(t)
	a, b := newNode(t, "192.0.2.1", "10.42.1.0/24"), newNode(t, "192.0.2.2", "10.42.2.0/24")
	join(t, outside, a, b)
	b.ns.Do(func() error { return mtu("up0", 1400) }) // longer ones do not come in
	b.mtu = 1400
	a.reach(b)
	b.reach(a)
	a1, b1 := a.startPod("a1"), b.startPod("b1")
	var listener net.PacketConn
	var sender *net.UDPConn
	if err := errors.Join(netns.Do(b1.path, func() (err error) {
		listener, err = net.ListenPacket("udp4", ":9000")
		return err
	}), netns.Do(a1.path, func() (err error) {
		sender, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(b1.addr, 9000)))
		return err
	})); err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	defer sender.Close()
	raw, err := sender.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	control := func(do func(fd int) error) {
		t.Helper()
		var err error
		if cerr := raw.Control(func(fd uintptr) { err = do(int(fd)) }); cerr != nil || err != nil {
			t.Fatal(cerr, err)
		}
	}
	control(func(fd int) error {
		return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO)
	})
	const headers = 28
	for end := time.Now().Add(waitAtMost); ; <-time.After(10 * time.Millisecond) {
		if _, err := sender.Write(make([]byte, 1500-headers)); errors.Is(err, unix.EMSGSIZE) {
			break
		}
		if time.Now().After(end) {
			t.Fatal("the pod does not learn that packets of 1500 bytes are too long")
		}
	}
	control(func(fd int) error {
		got, err := unix.GetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_MTU)
		if got != b.mtu {
			t.Errorf("the pod learned of %d bytes, want %d", got, b.mtu)
		}
		return err
	})
	buf := make([]byte, 2000)
	for end := time.Now().Add(waitAtMost); ; {
		_, _ = sender.Write(make([]byte, b.mtu-headers))
		_ = listener.SetReadDeadline(time.Now().Add(time.Second))
		if n, _, err := listener.ReadFrom(buf); err == nil && n == b.mtu-headers {
			break
		}
		if time.Now().After(end) {
			t.Fatal("packets of the route's MTU do not arrive")
		}
	}
}

// membersAlone sends packets for b's pod into b's tunnel: as another member,
// which passes, as a stranger, and as a pod of another node, which do not.
func membersAlone(t *testing.T, router *netnstest.NS, a, b *node, a1, b1 pod) {
	var listener net.PacketConn
	err := netns.Do(b1.path, func() (err error) {
		listener, err = net.ListenPacket("udp4", ":9000")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	send := func(from, text string) {
		t.Helper()
		err := netns.Do(from, func() error {
			c, err := net.DialUDP("udp4", nil, &net.UDPAddr{IP: b.addr.AsSlice(), Port: overlay.DefaultPort})
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Write(encapsulated(b.gateway(), a1.addr, b1.addr, text))
			if errors.Is(err, net.ErrClosed) || err != nil && strings.Contains(err.Error(), "refused") {
				return nil // said by the kernel for a former one
			}
			return err
		})
		if err != nil {
			t.Fatalf("%s: %v", text, err)
		}
	}
	buf := make([]byte, 100)
	for end := time.Now().Add(waitAtMost); ; {
		send(router.Path, "stranger")
		send(a1.path, "pod")
		send(a.ns.Path, "member")
		_ = listener.SetReadDeadline(time.Now().Add(time.Second))
		n, _, err := listener.ReadFrom(buf)
		switch text := string(buf[:n]); {
		case err == nil && text == "member":
		case err == nil:
			t.Errorf("a packet of the %s came out of the tunnel", text)
			continue
		case time.Now().After(end):
			t.Fatal("a member's packet does not come out of the tunnel: the test shows nothing")
		default:
			continue
		}
		break
	}
	// Without the fence both others pass, or the test would show nothing of them.
	for _, n := range []*node{a, b} {
		if err := n.kept.Delete(nft.Table{Name: overlay.FenceTable}); err != nil {
			t.Fatal(err)
		}
	}
	heard := map[string]bool{}
	for end := time.Now().Add(waitAtMost); !heard["stranger"] || !heard["pod"]; {
		send(router.Path, "stranger")
		send(a1.path, "pod")
		_ = listener.SetReadDeadline(time.Now().Add(time.Second))
		if n, _, err := listener.ReadFrom(buf); err == nil {
			heard[string(buf[:n])] = true
		}
		if time.Now().After(end) {
			t.Fatalf("without the fence only %v came out of the tunnel: the test shows nothing", heard)
		}
	}
}

// encapsulated is a UDP packet from and to pods in VXLAN, for the node with that
// address in the tunnel.
func encapsulated(inner, from, to netip.Addr, text string) []byte {
	b := []byte{8, 0, 0, 0, 0, 0, 0, 0}
	binary.BigEndian.PutUint32(b[4:], overlay.DefaultVNI<<8)
	b = append(append(b, 0x0e, 0xcd), inner.AsSlice()...) // its MAC there
	b = append(append(b, 0x0e, 0xcd), from.AsSlice()...)
	b = append(b, 8, 0)
	ip := make([]byte, 28)
	ip[0], ip[8], ip[9] = 0x45, 64, 17
	binary.BigEndian.PutUint16(ip[2:], uint16(28+len(text)))
	copy(ip[12:], from.AsSlice())
	copy(ip[16:], to.AsSlice())
	var sum uint32
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(ip[i:]))
	}
	sum = sum&0xffff + sum>>16
	binary.BigEndian.PutUint16(ip[10:], ^uint16(sum&0xffff+sum>>16))
	binary.BigEndian.PutUint16(ip[20:], 9001)
	binary.BigEndian.PutUint16(ip[22:], 9000)
	binary.BigEndian.PutUint16(ip[24:], uint16(8+len(text)))
	return append(append(b, ip...), text...)
}

func address(name, addr string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	a, err := netlink.ParseAddr(addr)
	if err != nil {
		return err
	}
	return netlink.AddrAdd(link, a)
}

func mtu(name string, n int) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return netlink.LinkSetMTU(link, n)
}
