package podnet

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/clusterd/clusterd/netsetup/internal/nlretry"
	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/netnstest"
)

func TestHostIf(t *testing.T) {
	a, b := HostIf("pod-a"), HostIf("pod-b")
	if a == b || a != HostIf("pod-a") {
		t.Fatalf("%s %s", a, b)
	}
	if err := checkIfName(a); err != nil {
		t.Fatal(err)
	}
	attrs := netlink.NewLinkAttrs()
	for name, want := range map[string]bool{a: true, "cd0": false, "cdzzzzzzzzzzzz": false, "eth0": false} {
		attrs.Name = name
		if got := isHostIf(netlink.NewVeth(attrs)); got != want {
			t.Errorf("isHostIf(%s) = %v", name, got)
		}
	}
}

func TestInterfaceNames(t *testing.T) {
	for name, ok := range map[string]bool{"eth0": true, "a123456789bcdef": true, "": false, "a123456789bcdefg": false, "a b": false, "a/b": false, "a:b": false, "..": false, "ä": false} {
		if err := checkIfName(name); (err == nil) != ok {
			t.Errorf("%q: %v", name, err)
		}
	}
}

// node is a network namespace with a Network and a directory for its pods'.
type node struct {
	*netnstest.NS
	net  *Network
	pods *netns.Dir
}

func newNode(t *testing.T) node {
	t.Helper()
	n := node{NS: netnstest.New(t)}
	n.Do(func() (err error) {
		n.net, err = Open(Config{})
		return err
	})
	t.Cleanup(n.net.Close)
	var err error
	if n.pods, err = netns.Open(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		names, _ := n.pods.List()
		for _, name := range names {
			if err := n.pods.Delete(name); err != nil {
				t.Error(err)
			}
		}
	})
	return n
}

func (n node) pod(t *testing.T, id, addr string) Pod {
	t.Helper()
	path, err := n.pods.Create(id)
	if err != nil {
		t.Fatal(err)
	}
	return Pod{
		NetNS: path, HostIf: HostIf(id), Bridge: "br0", MTU: 1400,
		Addrs: []Address{{Addr: netip.MustParsePrefix(addr), Gateway: netip.MustParseAddr("10.42.1.1")}},
	}
}

var bridge = Bridge{Name: "br0", Addrs: []netip.Prefix{netip.MustParsePrefix("10.42.1.1/24")}, MTU: 1400}

// interior is what a process in the pod sees.
type interior struct {
	MAC, Addr, Route string
	MTU              int
	LoUp             bool
}

func look(t *testing.T, path string) interior {
	t.Helper()
	var in interior
	err := netns.Do(path, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		addrs, err := netlink.AddrList(link, netlink.FAMILY_V4)
		if err != nil {
			return err
		}
		routes, err := netlink.RouteList(link, netlink.FAMILY_V4)
		if err != nil {
			return err
		}
		in = interior{MAC: link.Attrs().HardwareAddr.String(), MTU: link.Attrs().MTU, LoUp: lo.Attrs().Flags&1 != 0}
		for _, a := range addrs {
			in.Addr += a.IPNet.String()
		}
		for _, r := range routes {
			if r.Gw != nil {
				in.Route += r.Dst.String() + " via " + r.Gw.String()
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return in
}

func TestRootAttach(t *testing.T) {
	netnstest.NeedRoot(t)
	n := newNode(t)
	p := n.pod(t, "a", "10.42.1.2/24")
	if err := n.net.Attach(p); !errors.Is(err, ErrNoBridge) {
		t.Fatalf("without a bridge: %v", err)
	}
	for range 2 {
		if err := n.net.EnsureBridge(bridge); err != nil {
			t.Fatal(err)
		}
	}
	want := interior{MAC: "0a:cd:0a:2a:01:02", Addr: "10.42.1.2/24", Route: "0.0.0.0/0 via 10.42.1.1", MTU: 1400, LoUp: true}
	var first int
	for range 2 {
		if err := n.net.Attach(p); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, look(t, p.NetNS)); d != "" {
			t.Fatal(d)
		}
		host, err := n.net.h.LinkByName(p.HostIf)
		if err != nil {
			t.Fatal(err)
		}
		if first != 0 && host.Attrs().Index != first {
			t.Fatal("the second Attach made a new pair")
		}
		first = host.Attrs().Index
	}
	// A single address and a gateway outside it: the route is on-link.
	single := p
	single.Addrs = []Address{{Addr: netip.MustParsePrefix("10.42.1.2/32"), Gateway: p.Addrs[0].Gateway}}
	if err := n.net.Attach(single); err != nil {
		t.Fatal(err)
	}
	want.Addr = "10.42.1.2/32"
	if d := cmp.Diff(want, look(t, p.NetNS)); d != "" {
		t.Fatal(d)
	}
	for name, bad := range map[string]Pod{
		"no namespace": {NetNS: "/nowhere", HostIf: "cdx", Bridge: "br0", Addrs: p.Addrs},
		"no address":   {NetNS: p.NetNS, HostIf: "cdx", Bridge: "br0"},
		"no host name": {NetNS: p.NetNS, Bridge: "br0", Addrs: p.Addrs},
		"not a bridge": {NetNS: p.NetNS, HostIf: "cdx", Bridge: "lo", Addrs: p.Addrs},
	} {
		if err := n.net.Attach(bad); err == nil {
			t.Errorf("%s: passed", name)
		}
	}
}

// TestRootStalePair is a crash after the pair was made, followed by a new
// namespace for the same pod.
func TestRootStalePair(t *testing.T) {
	netnstest.NeedRoot(t)
	n := newNode(t)
	if err := n.net.EnsureBridge(bridge); err != nil {
		t.Fatal(err)
	}
	old := n.pod(t, "old", "10.42.1.2/24")
	old.HostIf = HostIf("a")
	if err := n.net.Attach(old); err != nil {
		t.Fatal(err)
	}
	p := n.pod(t, "a", "10.42.1.2/24")
	if err := n.net.Attach(p); err != nil {
		t.Fatal(err)
	}
	if got := look(t, p.NetNS); got.Addr != "10.42.1.2/24" {
		t.Fatalf("inside: %+v", got)
	}
}

func TestRootBridgeChanges(t *testing.T) {
	netnstest.NeedRoot(t)
	n := newNode(t)
	if err := n.net.EnsureBridge(bridge); err != nil {
		t.Fatal(err)
	}
	changed := bridge
	changed.Addrs, changed.MTU = []netip.Prefix{netip.MustParsePrefix("10.42.7.1/24")}, 1300
	if err := n.net.EnsureBridge(changed); err != nil {
		t.Fatal(err)
	}
	link, err := n.net.h.LinkByName("br0")
	if err != nil {
		t.Fatal(err)
	}
	addrs, err := n.net.h.AddrList(link, netlink.FAMILY_V4)
	if err != nil {
		t.Fatal(err)
	}
	if len(addrs) != 1 || addrs[0].IPNet.String() != "10.42.7.1/24" || link.Attrs().MTU != 1300 {
		t.Fatalf("addresses %v, MTU %d", addrs, link.Attrs().MTU)
	}
	if err := n.net.EnsureBridge(Bridge{Name: "lo", Addrs: bridge.Addrs}); !errors.Is(err, ErrNoBridge) {
		t.Fatalf("lo as a bridge: %v", err)
	}
}

// veths lists the names of the node's veth interfaces.
func (n node) veths(t *testing.T) map[string]bool {
	t.Helper()
	links, err := nlretry.List(n.net.h.LinkList)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]bool{}
	for _, l := range links {
		if l.Type() == "veth" {
			out[l.Attrs().Name] = true
		}
	}
	return out
}

func TestRootDetachAndSweep(t *testing.T) {
	netnstest.NeedRoot(t)
	n := newNode(t)
	other := netnstest.New(t)
	netnstest.Join(t, n.NS, "uplink", other, "up0")
	if err := n.net.EnsureBridge(bridge); err != nil {
		t.Fatal(err)
	}
	pods := map[string]Pod{}
	for i, id := range []string{"keep", "detached", "stray", "dropped"} {
		p := n.pod(t, id, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 42, 1, byte(2 + i)}), 24).String())
		if err := n.net.Attach(p); err != nil {
			t.Fatal(err)
		}
		pods[id] = p
	}
	for range 2 {
		if err := n.net.Detach(pods["detached"].HostIf); err != nil {
			t.Fatal(err)
		}
	}
	if err := n.net.Detach("cdnobody"); err != nil {
		t.Fatal(err)
	}
	// Dropping the namespace alone makes the kernel delete the pair.
	if err := n.pods.Delete("dropped"); err != nil {
		t.Fatal(err)
	}
	deadline, tick := time.After(2*time.Minute), time.Tick(5*time.Millisecond)
	for n.veths(t)[pods["dropped"].HostIf] {
		select {
		case <-tick:
		case <-deadline:
			t.Fatal("the pair of a dropped namespace is still there")
		}
	}
	got, err := n.net.Sweep([]string{pods["keep"].HostIf})
	if err != nil || got != 2 {
		t.Fatalf("Sweep: %d, %v; want 2", got, err)
	}
	want := map[string]bool{"uplink": true, pods["keep"].HostIf: true}
	if d := cmp.Diff(want, n.veths(t)); d != "" {
		t.Fatal(d)
	}
	if got, err := n.net.Sweep([]string{pods["keep"].HostIf}); err != nil || got != 0 {
		t.Fatalf("second Sweep: %d, %v", got, err)
	}
	// One given up and then wanted again is taken back.
	if err := n.net.Detach(pods["keep"].HostIf); err != nil {
		t.Fatal(err)
	}
	if err := n.net.Attach(pods["keep"]); err != nil {
		t.Fatal(err)
	}
	if got, err := n.net.Sweep([]string{pods["keep"].HostIf}); err != nil || got != 0 {
		t.Fatalf("Sweep after taking back: %d, %v", got, err)
	}
	for range 2 {
		if err := n.net.CleanUp("br0"); err != nil {
			t.Fatal(err)
		}
	}
	if d := cmp.Diff(map[string]bool{"uplink": true}, n.veths(t)); d != "" {
		t.Fatal(d)
	}
}
