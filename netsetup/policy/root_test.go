package policy

import (
	"errors"
	"flag"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/netnstest"
	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/netsetup/podnet"
	"github.com/clusterd/clusterd/netsetup/sysctl"
)

// connectTimeout is how long a connection that is allowed may take on a busy machine.
const connectTimeout = 30 * time.Second

var seed = flag.Uint64("seed", 1, "what is random is drawn from it")

// manyBlocks are blocks of all sizes that hold none of those addresses.
func manyBlocks(rnd *rand.Rand, n int, without ...netip.Addr) (out []netip.Prefix) {
	for len(out) < n {
		p := netip.PrefixFrom(netip.AddrFrom4([4]byte{byte(1 + rnd.IntN(220)), byte(rnd.IntN(256)), byte(rnd.IntN(256)), byte(rnd.IntN(256))}), 12+rnd.IntN(21)).Masked()
		if !slices.ContainsFunc(without, p.Contains) {
			out = append(out, p)
		}
	}
	return out
}

// TestRootPackets sends packets between two of a node and judges them.
func TestRootPackets(t *testing.T) {
	netnstest.NeedRoot(t)
	ns := netnstest.New(t)
	var links *podnet.Network
	var tables *nft.Tables
	ns.Do(func() (err error) {
		if links, err = podnet.Open(podnet.Config{}); err != nil {
			return err
		}
		if tables, err = nft.OpenTables(); err != nil {
			return err
		}
		return errors.Join(sysctl.Set(sysctl.Router()), sysctl.SetPresent(sysctl.Bridge()), links.EnsureBridge(podnet.Bridge{Name: "br0", Addrs: []netip.Prefix{prefix("10.42.1.1/24")}}))
	})
	t.Cleanup(func() { links.Close(); _ = tables.Close() })
	spaces, err := netns.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	pod := func(name, a string) string {
		path, err := spaces.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = spaces.Delete(name) })
		if err := links.Attach(podnet.Pod{NetNS: path, HostIf: podnet.HostIf(name), Bridge: "br0", Addrs: []podnet.Address{{Addr: netip.PrefixFrom(addr(a), 32), Gateway: addr("10.42.1.1")}}}); err != nil {
			t.Fatal(err)
		}
		return path
	}
	client, server := pod("client", "10.42.1.2"), pod("server", "10.42.1.3")
	var ln net.Listener
	if err := netns.Do(server, func() (err error) {
		ln, err = net.Listen("tcp", ":80")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	dial := func(from string, wait time.Duration) (c net.Conn, err error) {
		doErr := netns.Do(from, func() error {
			c, err = net.DialTimeout("tcp", "10.42.1.3:80", wait)
			return nil
		})
		return c, errors.Join(err, doErr)
	}
	e := New(Config{Kernel: tables})
	passes := func(what string, want bool, groups ...Group) {
		t.Helper()
		began := time.Now()
		if err := e.Set(groups); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(began); took > time.Second/4 {
			t.Logf("%s: set in %s", what, took)
		}
		wait := connectTimeout
		if !want {
			wait = time.Second
		}
		c, err := dial(client, wait)
		if err == nil {
			c.Close()
		}
		if (err == nil) != want {
			t.Errorf("%s: %v", what, err)
		}
		c, err = dial(ns.Path, connectTimeout)
		if err != nil {
			t.Errorf("%s: the node does not reach it: %v", what, err)
			return
		}
		c.Close()
	}
	in := func(rules ...Rule) Group {
		return Group{Name: "g", Direction: Ingress, Addrs: []netip.Addr{addr("10.42.1.3")}, Rules: rules}
	}
	out := func(rules ...Rule) Group {
		return Group{Name: "g", Direction: Egress, Addrs: []netip.Addr{addr("10.42.1.2")}, Rules: rules}
	}
	peer := []netip.Addr{addr("10.42.1.2")}
	passes("nothing said", true)
	passes("no peer may", false, in())
	passes("no peer may go out", false, out())
	passes("a peer", true, in(Rule{Peers: peer, AnyPort: true}))
	passes("another peer", false, in(Rule{Peers: []netip.Addr{addr("10.42.1.9")}, AnyPort: true}))
	passes("its port", true, in(Rule{Peers: peer, Ports: []Port{{tcp, 79, 81}}}))
	passes("another port", false, in(Rule{AnyPeer: true, Ports: []Port{{tcp, 81, 99}, {udp, 80, 80}}}))
	passes("a block", true, in(Rule{Blocks: []netip.Prefix{prefix("10.0.0.0/8")}, AnyPort: true}))
	passes("not in the block", false, in(Rule{Blocks: []netip.Prefix{prefix("10.0.0.0/8")}, Except: map[int][]netip.Prefix{0: {prefix("10.42.1.2/32")}}, AnyPort: true}))
	rnd := rand.New(rand.NewPCG(*seed, 0))
	t.Logf("seed %d", *seed)
	many := manyBlocks(rnd, 10_000, addr("10.42.1.2"), addr("10.42.1.3"))
	passes("10 000 blocks, none the peer's", false, in(Rule{Blocks: many, AnyPort: true}))
	at := rnd.IntN(len(many))
	many[at] = prefix("10.42.1.2/31")
	passes("10 000 blocks, one of them the peer's", true, in(Rule{Blocks: many, AnyPort: true}))
	passes("10 000 blocks, the peer excepted", false, in(Rule{Blocks: many, Except: map[int][]netip.Prefix{at: {prefix("10.42.1.2/32")}}, AnyPort: true}))
	passes("a named port", true, in(Rule{AnyPeer: true, Targets: []Target{{addr("10.42.1.3"), tcp, 80}}}))
	passes("the name is another port", false, in(Rule{AnyPeer: true, Targets: []Target{{addr("10.42.1.3"), tcp, 81}}}))
	passes("out and in", true, out(Rule{Peers: []netip.Addr{addr("10.42.1.3")}, Ports: []Port{{tcp, 80, 80}}}), in(Rule{Peers: peer, AnyPort: true}))
	passes("out but not in", false, out(Rule{AnyPeer: true, AnyPort: true}), in())
	// An answer is not judged, a connection that was there before is.
	if err := e.Set([]Group{{Name: "s", Direction: Egress, Addrs: []netip.Addr{addr("10.42.1.3")}}}); err != nil {
		t.Fatal(err)
	}
	c, err := dial(client, connectTimeout)
	if err != nil {
		t.Fatalf("answers are judged: %v", err)
	}
	defer c.Close()
	peerConn, err := ln.Accept()
	for err == nil && peerConn.RemoteAddr().String() != c.LocalAddr().String() {
		peerConn.Close()
		peerConn, err = ln.Accept()
	}
	if err != nil {
		t.Fatal(err)
	}
	defer peerConn.Close()
	if err := e.Set([]Group{in()}); err != nil {
		t.Fatal(err)
	}
	_, _ = c.Write([]byte("x"))
	_ = peerConn.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
	if _, err := peerConn.Read(make([]byte, 1)); err == nil {
		t.Error("a policy does not hold for a connection that was there before")
	}
	// A deleted table is restored.
	if err := tables.Delete(nft.Table{Name: TableName}); err != nil {
		t.Fatal(err)
	}
	if err := e.Check(); err != nil {
		t.Fatal(err)
	}
	if c, err := dial(client, time.Second); err == nil {
		c.Close()
		t.Error("the table is not restored")
	}
	// A new process finds the rules and alters nothing that is as it should be.
	before, err := tables.Generation()
	if err != nil {
		t.Fatal(err)
	}
	if err := New(Config{Kernel: tables}).Set([]Group{in()}); err != nil {
		t.Fatal(err)
	}
	if after, err := tables.Generation(); err != nil || after != before {
		t.Errorf("rules that were right were changed: %v", err)
	}
	if err := e.CleanUp(); err != nil {
		t.Fatal(err)
	}
}
