package podnetwork

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/clusterd/clusterd/apis/paths"
	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/netnstest"
	"github.com/clusterd/clusterd/netsetup/pathprobe"
)

// narrowNode is a machine of the test's network, whose clusterd can be started again.
type narrowNode struct {
	t     *testing.T
	ns    *netnstest.NS
	dir   string
	name  string
	addr  string
	index int // of its link
}

// start makes the node's Network as a process does, and brings the kernel to what the
// nodes say once, as its first look does; then it measures until stop.
func (m *narrowNode) start(nodes []*v1.Node) (n *Network, stop func()) {
	m.t.Helper()
	m.ns.Do(func() (err error) {
		n, err = New(Config{NodeName: m.name, NodeIPs: []netip.Addr{netip.MustParseAddr(m.addr)}, Client: fake.NewClientset(), Dir: m.dir, Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			return err
		}
		// The prober asks from threads of other namespaces here.
		n.probes = pathprobe.New(pathprobe.Config{Port: paths.Port, Logger: n.cfg.Logger, MTU: func(netip.Addr) (mtu int, err error) {
			return mtu, netns.Do(m.ns.Path, func() error {
				link, err := netlink.LinkByIndex(m.index)
				if err == nil {
					mtu = link.Attrs().MTU
				}
				return err
			})
		}})
		n.probes.Recall(n.recallLengths())
		return nil
	})
	m.apply(n, nodes)
	ctx, cancel := context.WithCancel(m.t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { m.ns.Do(func() error { n.probes.Run(ctx); return nil }) })
	return n, func() { cancel(); wg.Wait(); n.close() }
}

func (m *narrowNode) apply(n *Network, nodes []*v1.Node) {
	m.t.Helper()
	m.ns.Do(func() error { return n.apply(context.WithoutCancel(m.t.Context()), nodes) })
}

// routeMTU is that of the route to the other node's pods.
func (m *narrowNode) routeMTU(n *Network) int {
	m.t.Helper()
	routes, err := n.routes.List()
	if err != nil || len(routes) != 1 {
		m.t.Fatal(routes, err)
	}
	return routes[0].MTU
}

// TestRootLengthOutlivesRestart: what a way carries is known to the next process from
// its first look at the nodes on, so that large packets go on being carried; it is
// forgotten where a node has another address.
func TestRootLengthOutlivesRestart(t *testing.T) {
	netnstest.NeedRoot(t)
	a := &narrowNode{t: t, ns: netnstest.New(t), dir: t.TempDir(), name: "n1", addr: "192.0.2.1"}
	b := &narrowNode{t: t, ns: netnstest.New(t), dir: t.TempDir(), name: "n2", addr: "192.0.2.2"}
	netnstest.Join(t, a.ns, "up0", b.ns, "up0")
	for _, m := range []*narrowNode{a, b} {
		m.ns.Do(func() error {
			link, err := netlink.LinkByName("up0")
			if err != nil {
				return err
			}
			m.index = link.Attrs().Index
			addr, err := netlink.ParseAddr(m.addr + "/24")
			if err != nil {
				return err
			}
			if m == b { // longer packets do not come in, and nothing says so
				err = netlink.LinkSetMTU(link, 1400)
			}
			return errors.Join(err, netlink.AddrAdd(link, addr))
		})
	}
	nodes := []*v1.Node{node("n1", "10.42.1.0/24", a.addr), node("n2", "10.42.2.0/24", b.addr)}
	other, stopOther := b.start(nodes)
	defer stopOther()
	n, stop := a.start(nodes)
	if mtu := a.routeMTU(n); mtu != 0 {
		t.Errorf("the route's MTU is %d before anything was measured", mtu)
	}
	for end := time.Now().Add(3 * time.Minute); ; <-time.After(200 * time.Millisecond) {
		a.apply(n, nodes)
		if mtu := a.routeMTU(n); mtu > 1390 && mtu <= 1400 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("what the way carries was not found in three minutes: %+v", n.probes.Results())
		}
	}
	from, _, err := n.Attach(t.Context(), "from", false)
	if err != nil {
		t.Fatal(err)
	}
	to, toAddrs, err := other.Attach(t.Context(), "to", false)
	if err != nil {
		t.Fatal(err)
	}
	found := a.routeMTU(n)
	stop()

	// The machine has started again, too: no route is there to say it.
	a.ns.Do(func() error {
		routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
		for _, r := range routes {
			if r.Protocol == 203 {
				err = errors.Join(err, netlink.RouteDel(&r))
			}
		}
		return err
	})
	n, stop = a.start(nodes)
	if mtu := a.routeMTU(n); mtu != found {
		t.Errorf("after a restart the route's MTU is %d, want %d", mtu, found)
	}
	carryLarge(t, from, to, toAddrs[0])
	if err := errors.Join(n.Detach(t.Context(), "from"), other.Detach(t.Context(), "to")); err != nil {
		t.Error(err)
	}
	a.apply(n, nodes)
	if mtu := a.routeMTU(n); mtu != found {
		t.Errorf("a while after the restart the route's MTU is %d, want %d", mtu, found)
	}
	stop()

	// The other node is elsewhere now.
	moved := []*v1.Node{nodes[0], node("n2", "10.42.2.0/24", "192.0.2.3")}
	n, stop = a.start(moved)
	if mtu := a.routeMTU(n); mtu != 0 {
		t.Errorf("the route by another address has an MTU of %d", mtu)
	}
	stop()
	if b, err := os.ReadFile(filepath.Join(a.dir, lengthsFile)); err != nil || !strings.Contains(string(b), `"lengths":[]`) {
		t.Errorf("the file of a node that moved: %s, %v", b, err)
	}

	// A file that cannot be read is as none.
	for _, text := range []string{"{", `{"version":9,"lengths":[{"node":"n2","addr":"10.42.2.1","way":"","carries":100}]}`} {
		if err := os.WriteFile(filepath.Join(a.dir, lengthsFile), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		n, stop = a.start(nodes)
		if mtu := a.routeMTU(n); mtu != 0 {
			t.Errorf("%s: the route's MTU is %d", text, mtu)
		}
		stop()
	}
}

// carryLarge sends packets of the pods' own length from pod to pod, which may be cut
// on the way, until one arrives. Without the route's MTU none does. TCP would show
// nothing here: a veth lets its segments pass uncut, whatever its MTU.
func carryLarge(t *testing.T, from, to string, addr netip.Addr) {
	t.Helper()
	var listener net.PacketConn
	var sender *net.UDPConn
	err := netns.Do(to, func() (err error) {
		listener, err = net.ListenPacket("udp4", ":9000")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if err := netns.Do(from, func() (err error) {
		sender, err = net.DialUDP("udp4", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, 9000)))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer sender.Close()
	raw, err := sender.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DONT)
	}); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
	sent, buf := make([]byte, 1500-28), make([]byte, 2000)
	for end := time.Now().Add(30 * time.Second); ; {
		if _, err := sender.Write(sent); err != nil {
			t.Fatal(err)
		}
		_ = listener.SetReadDeadline(time.Now().Add(time.Second))
		if n, _, err := listener.ReadFrom(buf); err == nil && n == len(sent) {
			return
		}
		if time.Now().After(end) {
			t.Error("large packets are lost")
			return
		}
	}
}
