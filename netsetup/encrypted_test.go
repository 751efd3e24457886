package netsetup_test

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/netnstest"
	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/netsetup/overlay"
	"github.com/clusterd/clusterd/netsetup/wireguard"
)

// marker is what must not be seen between the nodes, control what is sent in clear to
// show that it would be.
const (
	marker  = "marker-of-the-plain-text"
	control = "in-clear-on-purpose"
)

func newKey(t *testing.T) wireguard.Key {
	t.Helper()
	k, err := wgtypes.GeneratePrivateKey()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// newEncryptedNode is a node of two families, the second of which the underlay
// lacks.
func newEncryptedNode(t *testing.T, addr, cidr, cidr6 string) *node {
	t.Helper()
	n := &node{t: t, addr: netip.MustParseAddr(addr), cidr: netip.MustParsePrefix(cidr), cidr6: netip.MustParsePrefix(cidr6), key: newKey(t)}
	return n.open()
}

// capture counts what passes an interface: frames to a UDP port, and
// those with the marker and the control.
type capture struct {
	mu sync.Mutex
	counted
}

type counted struct{ port, marked, controls int }

func (c *capture) counts() counted {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.counted
}

// listen captures what passes the interface until the test ends.
func listen(t *testing.T, ns *netnstest.NS, device string, port uint16) *capture {
	t.Helper()
	c := &capture{}
	netnstest.Capture(t, ns.Do, device, func(f []byte) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if len(f) > 38 && f[12] == 8 && f[13] == 0 && f[23] == unix.IPPROTO_UDP && binary.BigEndian.Uint16(f[36:]) == port {
			c.port++
		}
		if bytes.Contains(f, []byte(marker)) {
			c.marked++
		}
		if bytes.Contains(f, []byte(control)) {
			c.controls++
		}
	})
	return c
}

// shout sends the marker by UDP from a namespace, some times, and returns what the
// kernel says of it.
func shout(t *testing.T, ns, to string) error { return send(t, ns, to, marker) }

func send(t *testing.T, ns, to, text string) (failed error) {
	t.Helper()
	err := netns.Do(ns, func() error {
		conn, err := net.Dial("udp", net.JoinHostPort(to, "9000"))
		if err != nil {
			failed = err
			return nil
		}
		defer func() { _ = conn.Close() }()
		for range 5 {
			if _, err := conn.Write([]byte(text)); err != nil {
				failed = err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return failed
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !holds(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what)
		}
	}
}

// readInClear says how often the marker was seen, once the capture has seen what is
// sent in clear after all of it.
func readInClear(t *testing.T, c *capture, from *node) int {
	t.Helper()
	before := c.counts().controls
	eventually(t, "the capture does not see what is sent in clear: it shows nothing", func() bool {
		_ = send(t, from.ns.Path, outsideAddr, control)
		return c.counts().controls > before
	})
	return c.counts().marked
}

// refused says whether a connection is refused a way, by the kernel's own answer:
// UDP sockets do not report that.
func refused(t *testing.T, ns, to string) bool {
	t.Helper()
	var failed error
	err := netns.Do(ns, func() error {
		conn, err := net.DialTimeout("tcp", net.JoinHostPort(to, "80"), 10*time.Second)
		if err == nil {
			_ = conn.Close()
		}
		failed = err
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return errors.Is(failed, unix.EHOSTUNREACH) || errors.Is(failed, unix.ENETUNREACH)
}

// addRoute gives the node a route that another program might have.
func (n *node) addRoute(dst string, via netip.Addr) {
	n.t.Helper()
	n.ns.Do(func() error {
		_, to, err := net.ParseCIDR(dst)
		if err != nil {
			return err
		}
		return netlink.RouteReplace(&netlink.Route{Dst: to, Gw: via.AsSlice()})
	})
}

// TestRootNoWireGuardNothingInClear: where the kernel has no WireGuard, or the other's
// key is not known, no packet of a pod leaves the node, whatever the routes say, and
// the senders get an error. It needs no WireGuard: that is what it is about.
func TestRootNoWireGuardNothingInClear(t *testing.T) {
	netnstest.NeedRoot(t)
	outside := netnstest.New(t)
	a := newEncryptedNode(t, "192.0.2.1", "10.42.1.0/24", "fd42:0:1::/64")
	b := newEncryptedNode(t, "192.0.2.2", "10.42.2.0/24", "fd42:0:2::/64")
	join(t, outside, a, b)
	seen := listen(t, outside, "port0", overlay.DefaultWireGuardPort)
	a1, a2, b1 := a.startPod("a1"), a.startPod("a2"), b.startPod("b1")
	for _, n := range []*node{a, b} {
		other := map[*node]*node{a: b, b: a}[n]
		n.ns.Do(func() error {
			err := n.over.Set(t.Context(), overlay.Nodes{
				Own: []netip.Prefix{n.cidr, n.cidr6}, Key: n.key, Within: n.rules.Forward,
				Others: []overlay.Node{{Ranges: []netip.Prefix{other.cidr, other.cidr6}, Addrs: []netip.Addr{other.addr}}},
			})
			if errors.Is(err, overlay.ErrNoWireGuard) {
				return nil
			}
			return err
		})
	}
	if got := fetch(t, a1.path, a2.addr.String()); got != "a2 saw 10.42.1.2" {
		t.Errorf("within the node: %q", got)
	}
	for _, to := range []string{b1.addr.String(), b1.addr6.String(), "10.42.77.1", "fd42:0:77::1"} {
		eventually(t, "a1 gets no error although there is no route to "+to, func() bool { return refused(t, a1.path, to) })
		_ = shout(t, a1.path, to)
		if !refused(t, a.ns.Path, to) {
			t.Errorf("the node gets no error although there is no route to %s", to)
		}
	}
	// Routes of others lead there in clear: the fence stands.
	a.addRoute("10.42.2.0/25", b.addr)
	a.addRoute("10.42.77.0/24", b.addr)
	for _, to := range []string{b1.addr.String(), "10.42.77.1"} {
		for _, from := range []string{a1.path, a.ns.Path} {
			_ = shout(t, from, to)
		}
	}
	if marked := readInClear(t, seen, a); marked > 0 {
		t.Errorf("%d packets of pods were sent in clear", marked)
	}
	// Without the fence they are, or this shows nothing.
	if err := a.kept.Delete(nft.Table{Name: overlay.FenceTable}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "without the fence nothing is sent in clear either", func() bool {
		_ = shout(t, a1.path, b1.addr.String())
		return seen.counts().marked > 0
	})
	a.takeDown(t)
	b.takeDown(t)
}

// TestVMWireguard joins nodes by a switch that is listened to: what their pods send
// to each other arrives, in both families, and no byte of it can be read on the way. A
// key is changed under a connection; a node that goes is out at once.
func TestVMWireguard(t *testing.T) {
	if os.Getenv("CLUSTERD_VM") == "" {
		t.Skip("needs a kernel with WireGuard: make test-vm VM_TESTS=TestVMWireguard")
	}
	t.Setenv("CLUSTERD_ROOT", "1")
	outside := netnstest.New(t)
	a := newEncryptedNode(t, "192.0.2.1", "10.42.1.0/24", "fd42:0:1::/64")
	b := newEncryptedNode(t, "192.0.2.2", "10.42.2.0/24", "fd42:0:2::/64")
	c := newEncryptedNode(t, "192.0.2.3", "10.42.3.0/24", "fd42:0:3::/64")
	join(t, outside, a, b, c)
	seen := listen(t, outside, "port0", overlay.DefaultWireGuardPort)
	a1, b1, c1 := a.startPod("a1"), b.startPod("b1"), c.startPod("c1")

	// The keys are not known yet.
	reach := func(nodes ...*node) {
		t.Helper()
		for _, n := range nodes {
			var others []*node
			for _, o := range nodes {
				if o != n {
					others = append(others, o)
				}
			}
			n.reach(others...)
		}
	}
	reach(a, b, c)
	eventually(t, "a1 gets no error although there is no route yet", func() bool { return refused(t, a1.path, b1.addr.String()) })
	a.announced, b.announced, c.announced = true, true, true
	reach(a, b, c)
	for _, tt := range []struct{ name, from, to, want string }{
		{"address kept", a1.path, b1.addr.String(), "b1 saw 10.42.1.2"},
		{"and back", b1.path, a1.addr.String(), "a1 saw 10.42.2.2"},
		{"the third", c1.path, b1.addr.String(), "b1 saw 10.42.3.2"},
		{"IPv6", a1.path, b1.addr6.String(), "b1 saw fd42:0:1::2"},
		{"a node to a pod", a.ns.Path, b1.addr.String(), "b1 saw 10.42.1.1"},
		{"a node to a pod, IPv6", b.ns.Path, a1.addr6.String(), "a1 saw fd42:0:2::1"},
	} {
		if got := fetch(t, tt.from, tt.to); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
	if got := len(fetchPage(t, a1.path, b1.addr.String(), "/big")); got < bigPage {
		t.Errorf("%d bytes of a big page came", got)
	}
	a.ns.Do(func() error {
		link, err := netlink.LinkByName(overlay.DefaultWireGuard)
		if err == nil && link.Attrs().MTU != 1500-wireguard.Overhead {
			t.Errorf("the MTU is %d", link.Attrs().MTU)
		}
		return err
	})

	flow := b.echo(b1)
	talk := dialEcho(t, a1.path, flow)
	talk(marker)
	ab, ba := a.link(t, b), b.link(t, a)
	if ab.Handshake.IsZero() || ba.Handshake.IsZero() || ab.Sent < 1000 || ba.Sent < bigPage || ab.Received < bigPage || ba.Received < 1000 {
		t.Errorf("a says %+v, b says %+v", ab, ba)
	}
	if port := seen.counts().port; port < bigPage/1500 {
		t.Errorf("%d packets went to WireGuard's port", port)
	}
	if marked := readInClear(t, seen, a); marked > 0 {
		t.Errorf("the marker was seen %d times on the way", marked)
	}

	// A clear packet with a pod's address does not get in.
	b.keepsOut(t, outside, netip.MustParseAddr("10.42.3.77"), a1, b1)

	// b gets another key: the others receive it, then it goes over.
	was, began := b.key, time.Now()
	b.key, b.announced = newKey(t), false
	b.reach(a, c) // it holds the one it has
	talk("before the others know")
	b.announced = true
	a.reach(b, c)
	b.reach(a, c)
	talk("after the change")
	t.Logf("a connection went on %s after the change of a key", time.Since(began))
	if a.link(t, b).Key == was.PublicKey() {
		t.Error("the old key is still a peer")
	}
	if got := fetch(t, b1.path, a1.addr.String()); got != "a1 saw 10.42.2.2" {
		t.Errorf("after the change: %q", got)
	}

	// A record goes: nothing passes any more, to it or from it; the others go on.
	c.reach(b)
	a.reach(c)
	c.reach(a, b)
	if links, err := a.over.Links(); err != nil || len(links) != 1 || links[0].Key != c.key.PublicKey() {
		t.Errorf("after the removal a has %v, %v", links, err)
	}
	eventually(t, "a1 still has a way to b1", func() bool { return refused(t, a1.path, b1.addr.String()) })
	heard := count(t, a1.path)
	for range 3 {
		_ = shout(t, b1.path, a1.addr.String()) // b still thinks that a is there
	}
	eventually(t, "c1 does not reach a1", func() bool { _ = shout(t, c1.path, a1.addr.String()); return heard(c1.addr) > 0 })
	if n := heard(b1.addr); n > 0 {
		t.Errorf("%d packets of a removed node came in", n)
	}
	for _, n := range []*node{a, b, c} {
		n.takeDown(t)
		if s, err := n.kept.Read(nft.Table{Name: overlay.FenceTable}, false); err != nil || len(s.Chains) > 0 {
			t.Errorf("the fence is left: %v, %v", s, err)
		}
	}
}

// link is what the node's WireGuard says of the other.
func (n *node) link(t *testing.T, other *node) wireguard.Link {
	t.Helper()
	links, err := n.over.Links()
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		if l.Key == other.key.PublicKey() {
			return l
		}
	}
	t.Fatalf("%v is no peer: %v", other.addr, links)
	return wireguard.Link{}
}

// echo answers each line on TCP in a pod.
func (n *node) echo(p pod) string {
	n.t.Helper()
	var l net.Listener
	at := net.JoinHostPort(p.addr.String(), "9001")
	err := netns.Do(p.path, func() (err error) {
		l, err = net.Listen("tcp", at)
		return err
	})
	if err != nil {
		n.t.Fatal(err)
	}
	var wg sync.WaitGroup
	taken := make(chan net.Conn, 1)
	wg.Go(func() {
		defer close(taken)
		conn, err := l.Accept()
		if err != nil {
			return
		}
		taken <- conn
		_, _ = io.Copy(conn, conn)
	})
	n.t.Cleanup(func() {
		_ = l.Close()
		if conn := <-taken; conn != nil {
			_ = conn.Close() // the other end may be out of reach by now
		}
		wg.Wait()
	})
	return at
}

// dialEcho connects and returns what says a line and waits for it to come back.
func dialEcho(t *testing.T, ns, to string) func(line string) {
	t.Helper()
	var conn net.Conn
	err := netns.Do(ns, func() (err error) {
		conn, err = net.DialTimeout("tcp", to, waitAtMost)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	lines := bufio.NewReader(conn)
	return func(line string) {
		t.Helper()
		if err := conn.SetDeadline(time.Now().Add(2 * time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := fmt.Fprintln(conn, line); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		if got, err := lines.ReadString('\n'); err != nil || got != line+"\n" {
			t.Fatalf("%s: got %q, %v", line, got, err)
		}
	}
}

// count receives UDP packets in a pod until the test ends, and says how many came
// from an address.
func count(t *testing.T, ns string) func(from netip.Addr) int {
	t.Helper()
	var l net.PacketConn
	err := netns.Do(ns, func() (err error) {
		l, err = net.ListenPacket("udp4", ":9000")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	heard := map[netip.Addr]int{}
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, 1500)
		for {
			_, from, err := l.ReadFrom(buf)
			if err != nil {
				return
			}
			mu.Lock()
			heard[from.(*net.UDPAddr).AddrPort().Addr().Unmap()]++
			mu.Unlock()
		}
	})
	t.Cleanup(func() { _ = l.Close(); wg.Wait() })
	return func(from netip.Addr) int {
		mu.Lock()
		defer mu.Unlock()
		return heard[from]
	}
}

// keepsOut sends packets in clear to a pod of n, from an address of pods that a
// machine gives itself, and waits for those of a pod.
func (n *node) keepsOut(t *testing.T, outside *netnstest.NS, stranger netip.Addr, from, to pod) {
	t.Helper()
	heard := count(t, to.path)
	outside.Do(func() error {
		_, dst, err := net.ParseCIDR(n.cidr.String())
		if err != nil {
			return err
		}
		return errors.Join(address("lo", stranger.String()+"/32"), netlink.RouteReplace(&netlink.Route{Dst: dst, Gw: n.addr.AsSlice(), Src: stranger.AsSlice()}))
	})
	_ = send(t, outside.Path, to.addr.String(), control)
	eventually(t, "the pod does not hear another pod", func() bool { _ = shout(t, from.path, to.addr.String()); return heard(from.addr) > 0 })
	if got := heard(stranger); got > 0 {
		t.Errorf("%d packets came in in clear", got)
	}
	// Without the fence they do, or this shows nothing.
	if err := n.kept.Delete(nft.Table{Name: overlay.FenceTable}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "without the fence the stranger is not heard either", func() bool {
		_ = send(t, outside.Path, to.addr.String(), control)
		return heard(stranger) > 0
	})
}
