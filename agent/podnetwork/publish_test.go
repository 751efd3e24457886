package podnetwork

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/netsetup/lb"
	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/netnstest"
	"github.com/clusterd/clusterd/netsetup/nft"
)

func TestWithPorts(t *testing.T) {
	inside := nft.Inside{Ranges: []netip.Prefix{netip.MustParsePrefix("10.42.1.0/24"), netip.MustParsePrefix("fd42:0:0:1::/64")}, Interface: "clusterd0"}
	got := withPorts(nft.Ruleset{}, inside, map[string]podsPorts{
		"b":   {Addr: netip.MustParseAddr("10.42.1.3"), Ports: []podstate.HostPort{{Protocol: "udp", HostIP: netip.MustParseAddr("127.0.0.1"), HostPort: 53, Port: 5353}}},
		"a":   {Addr: netip.MustParseAddr("10.42.1.2"), Other: netip.MustParseAddr("fd42:0:0:1::2"), Ports: []podstate.HostPort{{Protocol: "tcp", HostPort: 8080, Port: 80}}},
		"old": {Addr: netip.MustParseAddr("10.99.1.2"), Ports: []podstate.HostPort{{Protocol: "tcp", HostPort: 1, Port: 1}}},
	}).Text("t")
	want := `table inet t {
	chain guard {
		type filter hook prerouting priority raw; policy accept;
		iifname "clusterd0" ip daddr 127.0.0.0/8 drop
	}

	chain prerouting {
		type nat hook prerouting priority dstnat; policy accept;
		ip daddr 127.0.0.1/32 udp dport 53 dnat ip to 10.42.1.3:5353
		fib daddr type local tcp dport 8080 dnat ip to 10.42.1.2:80
		fib daddr type local tcp dport 8080 dnat ip6 to [fd42:0:0:1::2]:80
	}

	chain output {
		type nat hook output priority dstnat; policy accept;
		ip6 daddr ::1/128 return
		ip daddr 127.0.0.1/32 udp dport 53 dnat ip to 10.42.1.3:5353
		fib daddr type local tcp dport 8080 dnat ip to 10.42.1.2:80
		fib daddr type local tcp dport 8080 dnat ip6 to [fd42:0:0:1::2]:80
	}

	chain forward {
		type filter hook forward priority filter; policy accept;
	}

	chain postrouting {
		type nat hook postrouting priority srcnat; policy accept;
		ip saddr 127.0.0.0/8 ip daddr 10.42.1.0/24 ct status dnat masquerade
		ip saddr 10.42.1.3/32 ip daddr 10.42.1.3/32 ct status dnat masquerade
		ip saddr 10.42.1.2/32 ip daddr 10.42.1.2/32 ct status dnat masquerade
		ip6 saddr fd42:0:0:1::2/128 ip6 daddr fd42:0:0:1::2/128 ct status dnat masquerade
	}
}
`
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("rules (-want +got):\n%s", d)
	}
}

func TestFlowsOf(t *testing.T) {
	pod := podsPorts{Addr: netip.MustParseAddr("10.42.1.2"), Other: netip.MustParseAddr("fd42::2"), Ports: []podstate.HostPort{
		{Protocol: "udp", HostPort: 53, Port: 5353}, {Protocol: "tcp", HostPort: 80, Port: 8080}, {Protocol: "sctp", HostIP: netip.MustParseAddr("192.0.2.1"), HostPort: 9, Port: 9},
	}}
	texts := func(flows []lb.Flow) (out []string) {
		for _, f := range flows {
			out = append(out, f.Frontend.String()+" "+f.Endpoint.String())
		}
		return out
	}
	want := []string{"udp 0.0.0.0:53 10.42.1.2:5353", "udp [::]:53 [fd42::2]:5353", "sctp 192.0.2.1:9 10.42.1.2:9"}
	if d := cmp.Diff(want, texts(flowsOf(pod, podsPorts{}))); d != "" {
		t.Errorf("of a pod that goes (-want +got):\n%s", d)
	}
	want = []string{"udp 0.0.0.0:53 invalid AddrPort", "udp [::]:53 invalid AddrPort", "sctp 192.0.2.1:9 invalid AddrPort"}
	if d := cmp.Diff(want, texts(flowsOf(podsPorts{}, pod))); d != "" {
		t.Errorf("of a pod that comes (-want +got):\n%s", d)
	}
}

// The bug: a client that asks a port of the node by UDP all the time, from one port of
// its own, got no answer: it had begun before there was a pod, or
// asked the pod that was there before.
func TestRootSteadyFlowToHostPort(t *testing.T) {
	netnstest.NeedRoot(t)
	ns := netnstest.New(t)
	n := newReadyNode(t, ns, t.TempDir(), "10.42.1.0/24", 0)
	defer n.close()
	const node = "192.0.2.1"
	inside := netip.MustParsePrefix("10.42.1.0/24")
	rules := nft.Ruleset{Masquerade: []nft.Masquerade{{From: inside}}} // so that flows are tracked from the beginning
	var client *net.UDPConn
	ns.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		addr, err := netlink.ParseAddr(node + "/32")
		if err != nil {
			return err
		}
		if err := errors.Join(netlink.LinkSetUp(lo), netlink.AddrAdd(lo, addr), n.setRules(rules, []netip.Prefix{inside})); err != nil {
			return err
		}
		client, err = net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.MustParseAddrPort(node+":53")))
		return err
	})
	defer client.Close()
	// answered asks until the answer comes from the pod of that name.
	answered := func(name string) {
		t.Helper()
		b := make([]byte, 64)
		n.eventually("an answer of "+name, func() bool {
			_ = client.SetDeadline(time.Now().Add(100 * time.Millisecond))
			if _, err := client.Write([]byte("?")); err != nil {
				return false
			}
			got, err := client.Read(b)
			return err == nil && string(b[:got]) == name
		})
	}
	ports := []podstate.HostPort{{Protocol: "udp", HostPort: 53, Port: 5353}}
	if _, err := client.Write([]byte("is anybody there?")); err != nil {
		t.Fatal(err)
	}
	for _, uid := range []string{"first", "second"} {
		path, addrs, err := n.Attach(t.Context(), uid, false)
		if err != nil {
			t.Fatal(err)
		}
		var server net.PacketConn
		if err := netns.Do(path, func() (err error) {
			server, err = net.ListenPacket("udp4", ":5353")
			return err
		}); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		wg.Go(func() {
			b := make([]byte, 64)
			for {
				_, from, err := server.ReadFrom(b)
				if err != nil {
					return
				}
				_, _ = server.WriteTo([]byte(uid), from)
			}
		})
		ns.Do(func() error { return n.Publish(t.Context(), uid, addrs, ports) })
		answered(uid)
		_ = server.Close()
		wg.Wait()
		ns.Do(func() error { return n.Detach(t.Context(), uid) })
		_ = client.SetDeadline(time.Now().Add(time.Minute))
		_, _ = client.Write([]byte("between"))
	}
}

// TestPortsFile: what was written is found again, and what is not understood
// is refused.
func TestPortsFile(t *testing.T) {
	dir := t.TempDir()
	n := &Network{cfg: Config{Dir: dir}, ports: map[string]podsPorts{
		"a": {Addr: netip.MustParseAddr("10.42.1.2"), Ports: []podstate.HostPort{{Protocol: "tcp", HostPort: 8080, Port: 80}}},
	}}
	if err := n.savePorts(); err != nil {
		t.Fatal(err)
	}
	const golden = `{"version":1,"pods":{"a":{"addr":"10.42.1.2","ports":[{"protocol":"tcp","hostPort":8080,"port":80}]}}}`
	file := filepath.Join(dir, hostPortsFile)
	if b, err := os.ReadFile(file); err != nil || string(b) != golden {
		t.Errorf("the file: %s (%v), want %s", b, err, golden)
	}
	got, err := loadPorts(dir)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(n.ports, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); d != "" {
		t.Error(d)
	}
	if got, err := loadPorts(t.TempDir()); err != nil || len(got) > 0 {
		t.Errorf("no file: %v, %v", got, err)
	}
	for text, want := range map[string]string{"{": "hostports.json", `{"version":2}`: "has version 2"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := loadPorts(dir); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// TestPortsThatFail: what could not be put on record is tried again by the next call,
// and is not forgotten when it was to be taken back.
func TestPortsThatFail(t *testing.T) {
	dir := t.TempDir()
	n := &Network{cfg: Config{Dir: filepath.Join(dir, "later")}, ports: map[string]podsPorts{}}
	addrs, ports := []netip.Addr{netip.MustParseAddr("10.42.1.2")}, []podstate.HostPort{{Protocol: "tcp", HostPort: 8080, Port: 80}}
	for range 2 {
		if err := n.Publish(t.Context(), "a", addrs, ports); err == nil {
			t.Fatal("published without a record")
		}
	}
	if len(n.ports) != 0 {
		t.Errorf("it counts as published: %v", n.ports)
	}
	n.cfg.Dir = dir
	if err := n.Publish(t.Context(), "a", addrs, ports); err != nil {
		t.Fatal(err)
	}
	n.cfg.Dir = filepath.Join(dir, "later")
	none := func(string) bool { return false }
	for range 2 {
		if err := n.unpublish(none); err == nil {
			t.Error("taken back without a record")
		}
	}
	n.cfg.Dir = dir
	if err := n.unpublish(none); err != nil || len(n.ports) != 0 {
		t.Errorf("%v, left %v", err, n.ports)
	}
	if got, err := loadPorts(dir); err != nil || len(got) != 0 {
		t.Errorf("on disk: %v, %v", got, err)
	}
}
