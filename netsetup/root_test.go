package netsetup_test

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sync/errgroup"

	"github.com/clusterd/clusterd/netsetup/internal/nlretry"
	"github.com/clusterd/clusterd/netsetup/ipam"
	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/netnstest"
	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/netsetup/overlay"
	"github.com/clusterd/clusterd/netsetup/podnet"
	"github.com/clusterd/clusterd/netsetup/sysctl"
	"github.com/clusterd/clusterd/netsetup/wireguard"
)

const (
	clusterCIDR  = "10.42.0.0/16"
	clusterCIDR6 = "fd42::/32"
	outsideAddr  = "192.0.2.254"
	waitAtMost   = 30 * time.Second
)

// node is one machine, made of the room's packages as clusterd would do it.
type node struct {
	t     *testing.T
	ns    *netnstest.NS
	addr  netip.Addr
	cidr  netip.Prefix
	net   *podnet.Network
	over  *overlay.Mesh
	kept  *nft.Tables
	nft   *nft.Keeper
	rules nft.Ruleset
	pool  *ipam.Pool
	pods  *netns.Dir
	state string

	// The second family's, if the node has one; addr6 may be invalid all the same.
	addr6 netip.Addr
	cidr6 netip.Prefix
	pool6 *ipam.Pool

	mtu int // of the others' routes to it; 0: none

	// A node that encrypts: its private key, and whether the others know it.
	key       wireguard.Key
	announced bool
}

func newNode(t *testing.T, addr, cidr string) *node {
	t.Helper()
	return (&node{t: t, addr: netip.MustParseAddr(addr), cidr: netip.MustParsePrefix(cidr)}).open()
}

// open makes the machine with what the node's addresses and ranges ask for.
func (n *node) open() *node {
	t := n.t
	t.Helper()
	n.ns, n.state = netnstest.New(t), t.TempDir()
	n.ns.Do(func() (err error) {
		if n.net, err = podnet.Open(podnet.Config{}); err != nil {
			return err
		}
		if n.kept, err = nft.OpenTables(); err != nil {
			return err
		}
		encrypt := n.key != (wireguard.Key{})
		if n.over, err = overlay.OpenMesh(overlay.MeshConfig{Kernel: n.kept, Encrypt: encrypt, Inside: []string{"pods0"}}); err != nil {
			return err
		}
		n.nft = nft.NewKeeper(nft.KeeperConfig{Kernel: n.kept})
		return errors.Join(sysctl.Set(sysctl.Router()), sysctl.SetPresent(sysctl.Bridge()))
	})
	t.Cleanup(func() {
		n.net.Close()
		n.over.Close()
		_ = n.kept.Close()
	})
	var err error
	if n.pods, err = netns.Open(filepath.Join(n.state, "netns")); err != nil {
		t.Fatal(err)
	}
	n.pool, err = ipam.Open(ipam.Config{File: filepath.Join(n.state, "ipam.json"), Prefix: n.cidr, Reserved: []netip.Addr{n.gateway()}})
	if err != nil {
		t.Fatal(err)
	}
	all := netip.MustParsePrefix(clusterCIDR)
	if n.cidr.Addr().Is6() {
		all = netip.MustParsePrefix(clusterCIDR6)
	}
	n.rules = nft.Ruleset{
		Forward:    []netip.Prefix{all},
		Masquerade: []nft.Masquerade{{From: n.cidr, Except: []netip.Prefix{all}}},
	}
	bridge := podnet.Bridge{Name: "pods0", Addrs: []netip.Prefix{netip.PrefixFrom(n.gateway(), n.cidr.Bits())}}
	if n.cidr6.IsValid() || n.cidr.Addr().Is6() {
		n.ns.Do(func() error { return errors.Join(sysctl.KeepRouters(), sysctl.Set(sysctl.Router6())) })
	}
	if n.cidr6.IsValid() {
		n.pool6, err = ipam.Open(ipam.Config{File: filepath.Join(n.state, "ipam6.json"), Prefix: n.cidr6, Reserved: []netip.Addr{n.cidr6.Addr().Next()}})
		if err != nil {
			t.Fatal(err)
		}
		bridge.Addrs = append(bridge.Addrs, netip.PrefixFrom(n.cidr6.Addr().Next(), n.cidr6.Bits()))
		all := netip.MustParsePrefix(clusterCIDR6)
		n.rules.Forward = append(n.rules.Forward, all)
		n.rules.Masquerade = append(n.rules.Masquerade, nft.Masquerade{From: n.cidr6, Except: []netip.Prefix{all}})
	}
	n.ns.Do(func() error { return n.net.EnsureBridge(bridge) })
	n.filter(t, n.rules)
	return n
}

// filter gives the packet filter the rules.
func (n *node) filter(t *testing.T, r nft.Ruleset) {
	t.Helper()
	table, err := r.Table(nft.DefaultTable)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.nft.Set(table); err != nil {
		t.Fatal(err)
	}
}

func (n *node) gateway() netip.Addr { return n.cidr.Addr().Next() }

// pod is a namespace with a web server that answers with its name and the
// caller's address.
type pod struct {
	path        string
	addr, addr6 netip.Addr
}

func (n *node) startPod(name string) pod {
	n.t.Helper()
	path, err := n.pods.Create(name)
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = n.pods.Delete(name) })
	addr, err := n.pool.Allocate(name)
	if err != nil {
		n.t.Fatal(err)
	}
	p := pod{path: path, addr: addr.Addr()}
	attached := podnet.Pod{NetNS: path, HostIf: podnet.HostIf(name), Bridge: "pods0", Addrs: []podnet.Address{{Addr: netip.PrefixFrom(p.addr, p.addr.BitLen()), Gateway: n.gateway()}}}
	listen := p.addr.String()
	if n.pool6 != nil {
		addr6, err := n.pool6.Allocate(name)
		if err != nil {
			n.t.Fatal(err)
		}
		p.addr6, listen = addr6.Addr(), ""
		attached.Addrs = append(attached.Addrs, podnet.Address{Addr: netip.PrefixFrom(p.addr6, 128), Gateway: n.cidr6.Addr().Next()})
	}
	for range 2 { // twice is once
		if err = n.net.Attach(attached); err != nil {
			n.t.Fatal(err)
		}
	}
	serve(n.t, path, net.JoinHostPort(listen, "80"), name)
	return p
}

// serve runs a web server in a namespace until the test ends.
func serve(t *testing.T, ns, addr, name string) {
	t.Helper()
	var l net.Listener
	err := netns.Do(ns, func() (err error) {
		l, err = net.Listen("tcp", addr)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, _ := net.SplitHostPort(r.RemoteAddr)
		fmt.Fprintf(w, "%s saw %s", name, host)
		if r.URL.Path == "/big" {
			_, _ = w.Write(make([]byte, bigPage))
		}
	})}
	var g errgroup.Group
	g.Go(func() error { return srv.Serve(l) })
	t.Cleanup(func() { _ = srv.Close(); _ = g.Wait() })
}

// fetch gets a page from inside a namespace, trying until the deadline: the
// far end's link may still be coming up.
func fetch(t *testing.T, ns string, to string) string {
	t.Helper()
	return fetchPage(t, ns, to, "/")
}

// bigPage is what the page "/big" has besides, in bytes: many full packets.
const bigPage = 1 << 20

func fetchPage(t *testing.T, ns, to, page string) string {
	t.Helper()
	var body string
	deadline := time.Now().Add(waitAtMost)
	for {
		err := netns.Do(ns, func() error {
			if _, _, err := net.SplitHostPort(to); err != nil {
				to = net.JoinHostPort(to, "80")
			}
			conn, err := net.DialTimeout("tcp", to, 10*time.Second)
			if err != nil {
				return err
			}
			defer func() { _ = conn.Close() }()
			if err := conn.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
				return err
			}
			if _, err := io.WriteString(conn, "GET "+page+" HTTP/1.0\r\n\r\n"); err != nil {
				return err
			}
			answer, err := io.ReadAll(conn)
			_, body, _ = splitHeader(string(answer))
			return err
		})
		if err == nil {
			return body
		}
		if time.Now().After(deadline) {
			t.Fatalf("fetch from %s: %v", to, err)
		}
	}
}

func splitHeader(s string) (head, body string, ok bool) {
	for i := 0; i+4 <= len(s); i++ {
		if s[i:i+4] == "\r\n\r\n" {
			return s[:i], s[i+4:], true
		}
	}
	return s, "", false
}

// join connects the namespaces by a switch in a namespace of its own.
func join(t *testing.T, outside *netnstest.NS, nodes ...*node) {
	t.Helper()
	outside.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "switch"
		br := &netlink.Bridge{LinkAttrs: attrs}
		if err := netlink.LinkAdd(br); err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(outsideAddr + "/24")
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(br, addr); err != nil {
			return err
		}
		return netlink.LinkSetUp(br)
	})
	for i, n := range nodes {
		port := fmt.Sprintf("port%d", i)
		netnstest.Join(t, outside, port, n.ns, "up0")
		outside.Do(func() error {
			br, err := netlink.LinkByName("switch")
			if err != nil {
				return err
			}
			link, err := netlink.LinkByName(port)
			if err != nil {
				return err
			}
			return netlink.LinkSetMaster(link, br)
		})
		n.ns.Do(func() error {
			link, err := netlink.LinkByName("up0")
			if err != nil {
				return err
			}
			addr, err := netlink.ParseAddr(n.addr.String() + "/24")
			if err != nil {
				return err
			}
			if err := netlink.AddrAdd(link, addr); err != nil || !n.addr6.IsValid() {
				return err
			}
			return address6("up0", n.addr6.String()+"/64")
		})
	}
}

// TestRootTwoNodes joins two nodes by a switch and sends pages between their
// pods, then takes all down and looks for remains.
func TestRootTwoNodes(t *testing.T) {
	netnstest.NeedRoot(t)
	outside := netnstest.New(t)
	a := newNode(t, "192.0.2.1", "10.42.1.0/24")
	b := newNode(t, "192.0.2.2", "10.42.2.0/24")
	join(t, outside, a, b)
	a.reach(b)
	b.reach(a)
	a1, a2, b1 := a.startPod("a1"), a.startPod("a2"), b.startPod("b1")
	serve(t, outside.Path, net.JoinHostPort(outsideAddr, "80"), "outside")

	for _, tt := range []struct{ name, from, to, want string }{
		{"same node", a1.path, a2.addr.String(), "a2 saw 10.42.1.2"},
		{"other node, address kept", a1.path, b1.addr.String(), "b1 saw 10.42.1.2"},
		{"and back", b1.path, a1.addr.String(), "a1 saw 10.42.2.2"},
		{"itself", a1.path, a1.addr.String(), "a1 saw 10.42.1.2"},
		{"own node to pod", a.ns.Path, a1.addr.String(), "a1 saw 10.42.1.1"},
		{"other node to pod", b.ns.Path, a1.addr.String(), "a1 saw 192.0.2.2"},
		{"outside sees the node", a1.path, outsideAddr, "outside saw 192.0.2.1"},
		{"outside sees the other node", b1.path, outsideAddr, "outside saw 192.0.2.2"},
	} {
		if got := fetch(t, tt.from, tt.to); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}

	a.publish(t, nft.Publish{Protocol: "tcp", Port: 8080, To: netip.AddrPortFrom(a1.addr, 80)},
		nft.Publish{Protocol: "tcp", Addr: netip.MustParseAddr("127.0.0.1"), Port: 8081, To: netip.AddrPortFrom(a2.addr, 80)})
	for _, tt := range []struct{ name, from, to, want string }{
		{"a port of the node, from outside", outside.Path, "192.0.2.1:8080", "a1 saw " + outsideAddr},
		{"from another node's pod", b1.path, "192.0.2.1:8080", "a1 saw 192.0.2.2"},
		{"from a neighbour", a2.path, "192.0.2.1:8080", "a1 saw 10.42.1.3"},
		{"from itself", a1.path, "192.0.2.1:8080", "a1 saw 10.42.1.1"},
		{"from the node", a.ns.Path, "192.0.2.1:8080", "a1 saw 192.0.2.1"},
		{"from the node's loopback", a.ns.Path, "127.0.0.1:8080", "a1 saw 10.42.1.1"},
		{"a port of the loopback alone", a.ns.Path, "127.0.0.1:8081", "a2 saw 10.42.1.1"},
	} {
		if got := fetch(t, tt.from, tt.to); got != tt.want {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}

	for _, n := range []*node{a, b} {
		n.takeDown(t)
	}
}

// reach connects the node with others.
func (n *node) reach(others ...*node) {
	n.t.Helper()
	of := func(n *node) overlay.Node {
		o := overlay.Node{Ranges: []netip.Prefix{n.cidr}, Addrs: []netip.Addr{n.addr}}
		if n.cidr6.IsValid() {
			o.Ranges = append(o.Ranges, n.cidr6)
		}
		if n.addr6.IsValid() {
			o.Addrs = append(o.Addrs, n.addr6)
		}
		if n.mtu > 0 {
			o.MTUs = []int{n.mtu}
		}
		if n.announced {
			o.Key, o.Port = n.key.PublicKey(), overlay.DefaultWireGuardPort
		}
		return o
	}
	nodes := overlay.Nodes{Own: of(n).Ranges, Key: n.key, Hold: !n.announced, Within: n.rules.Forward}
	for _, o := range others {
		nodes.Others = append(nodes.Others, of(o))
	}
	for range 2 { // twice is once
		n.ns.Do(func() error { return n.over.Set(n.t.Context(), nodes) })
	}
}

// publish adds ports of the node to its rules.
func (n *node) publish(t *testing.T, ports ...nft.Publish) {
	t.Helper()
	n.ns.Do(func() error { return sysctl.Set(map[string]string{"net.ipv4.conf.pods0.route_localnet": "1"}) })
	r := n.rules
	r.Publish, r.Inside = ports, nft.Inside{Ranges: []netip.Prefix{n.cidr}, Interface: "pods0"}
	if n.cidr6.IsValid() {
		r.Inside.Ranges = append(r.Inside.Ranges, n.cidr6)
	}
	n.filter(t, r)
}

// takeDown removes what the node made and checks that nothing is left.
func (n *node) takeDown(t *testing.T) {
	t.Helper()
	names, err := n.pods.List()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if err := n.pods.Delete(name); err != nil {
			t.Error(err)
		}
	}
	if _, err := n.pool.Reconcile(nil); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := n.net.CleanUp("pods0"); err != nil {
			t.Error(err)
		}
		if err := n.over.CleanUp(t.Context()); err != nil {
			t.Error(err)
		}
		if err := n.nft.CleanUp(nft.Table{Name: nft.DefaultTable}); err != nil {
			t.Error(err)
		}
	}
	n.ns.Do(func() error {
		links, err := nlretry.List(netlink.LinkList)
		if err != nil {
			return err
		}
		for _, l := range links {
			if name := l.Attrs().Name; name != "lo" && name != "up0" {
				t.Errorf("interface left: %s", name)
			}
		}
		return nil
	})
	if routes, err := n.over.List(); err != nil || len(routes) > 0 {
		t.Errorf("routes left: %v, %v", routes, err)
	}
	if table, err := n.rules.Table(nft.DefaultTable); err != nil {
		t.Error(err)
	} else if have, err := n.kept.Read(table, true); err != nil || have.Whole {
		t.Errorf("rules left: %+v, %v", have, err)
	}
	if names, err := n.pods.List(); err != nil || len(names) > 0 {
		t.Errorf("namespaces left: %v, %v", names, err)
	}
}
