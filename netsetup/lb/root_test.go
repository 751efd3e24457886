package lb

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/netnstest"
	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/netsetup/sysctl"
)

// world is a node with two things behind it, "a" and "b" (inside), and a client
// in front of it. All are joined by cables of their own.
type world struct {
	t                  *testing.T
	node, a, b, client *netnstest.NS
	tables             *nft.Tables
	lb                 *Balancer
	ct                 *Conntrack
}

const nodeAddr, clientAddr = "198.51.100.1", "198.51.100.7"

func newWorld(t *testing.T) *world {
	netnstest.NeedRoot(t)
	w := &world{t: t, node: netnstest.New(t), a: netnstest.New(t), b: netnstest.New(t), client: netnstest.New(t)}
	w.cable(w.a, "a", "10.42.1.1/32", "10.42.1.2", "fd42::a1", "fd42::2")
	w.cable(w.b, "b", "10.42.1.1/32", "10.42.1.3", "fd42::b1", "fd42::3")
	w.cable(w.client, "c", nodeAddr+"/32", clientAddr, "fd51::1", "fd51::7")
	w.node.Do(func() (err error) {
		if err = sysctl.Set(map[string]string{"net.ipv4.ip_forward": "1", "net.ipv6.conf.all.forwarding": "1", "net.ipv4.conf.all.send_redirects": "0"}); err != nil {
			return err
		}
		if w.tables, err = nft.OpenTables(); err != nil {
			return err
		}
		w.ct, err = OpenConntrack()
		return err
	})
	t.Cleanup(func() { _ = w.tables.Close(); w.ct.Close() })
	w.lb = New(w.tables, quiet())
	if err := w.lb.SetBase(base); err != nil {
		t.Fatal(err)
	}
	for ns, name := range map[*netnstest.NS]string{w.a: "a", w.b: "b"} {
		w.serve(ns, name)
	}
	return w
}

// cable joins the node with ns; both know the way to each other's addresses.
func (w *world) cable(ns *netnstest.NS, name, nodeCIDR, addr, node6, addr6 string) {
	netnstest.Join(w.t, w.node, "to-"+name, ns, "eth0")
	set := func(link, own, own6, other, other6 string, gateway bool) func() error {
		return func() error {
			l, err := netlink.LinkByName(link)
			if err != nil {
				return err
			}
			for _, s := range []string{own, own6 + "/128"} {
				a, err := netlink.ParseAddr(s)
				if err != nil {
					return err
				}
				a.Flags = syscall.IFA_F_NODAD
				if err := netlink.AddrAdd(l, a); err != nil {
					return fmt.Errorf("%s: %w", s, err)
				}
			}
			for _, s := range []string{other, other6} {
				bits := 32
				if strings.Contains(s, ":") {
					bits = 128
				}
				dst := &net.IPNet{IP: net.ParseIP(s), Mask: net.CIDRMask(bits, bits)}
				if bits == 32 {
					dst.IP = dst.IP.To4()
				}
				if err := netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: dst, Scope: netlink.SCOPE_LINK}); err != nil {
					return fmt.Errorf("route to %s: %w", s, err)
				}
				if gateway {
					zero := &net.IPNet{IP: make(net.IP, len(dst.IP)), Mask: net.CIDRMask(0, bits)}
					if err := netlink.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: zero, Gw: dst.IP}); err != nil {
						return fmt.Errorf("default route by %s: %w", s, err)
					}
				}
			}
			return nil
		}
	}
	own, _, _ := strings.Cut(nodeCIDR, "/")
	w.node.Do(set("to-"+name, nodeCIDR, node6, addr, addr6, false))
	ns.Do(set("eth0", addr+"/32", addr6, own, node6, true))
}

// serve answers TCP and UDP on port 80 of all addresses with "NAME CLIENT".
func (w *world) serve(ns *netnstest.NS, name string) {
	var l net.Listener
	var p net.PacketConn
	ns.Do(func() (err error) {
		if l, err = net.Listen("tcp", ":80"); err != nil {
			return err
		}
		p, err = net.ListenPacket("udp", ":80")
		return err
	})
	w.t.Cleanup(func() { _ = l.Close(); _ = p.Close() })
	host := func(a net.Addr) string { return netip.MustParseAddrPort(a.String()).Addr().Unmap().String() }
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fmt.Fprintf(c, "%s %s", name, host(c.RemoteAddr()))
			_ = c.Close()
		}
	}()
	go func() {
		b := make([]byte, 64)
		for {
			_, from, err := p.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = p.WriteTo([]byte(name+" "+host(from)), from)
		}
	}()
}

// ask connects from a namespace and returns the answer; a refused connection is
// "refused", one without an answer "silence".
func (w *world) ask(from *netnstest.NS, network, to string) string {
	w.t.Helper()
	return w.askFor(30*time.Second, from, network, to) // longer than a busy machine takes
}

// askFor is ask that takes no answer within wait for silence.
func (w *world) askFor(wait time.Duration, from *netnstest.NS, network, to string) string {
	w.t.Helper()
	var out string
	err := netns.Do(from.Path, func() error {
		c, err := net.DialTimeout(network, to, wait)
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		_ = c.SetDeadline(time.Now().Add(wait))
		if network == "udp" {
			if _, err := c.Write([]byte("?")); err != nil {
				return err
			}
			b := make([]byte, 64)
			n, err := c.Read(b)
			out = string(b[:n])
			return err
		}
		b, err := io.ReadAll(c)
		out = string(b)
		return err
	})
	var timeout net.Error
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case errors.As(err, &timeout) && timeout.Timeout():
		return "silence"
	case err != nil:
		return err.Error()
	}
	return out
}

func (w *world) update(f Frontend, b *Backend) {
	w.t.Helper()
	if err := w.lb.Update(map[Frontend]*Backend{f: b}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) expect(what string, from *netnstest.NS, network, to string, want ...string) {
	w.t.Helper()
	wait := 30 * time.Second
	if want[0] == "silence" {
		wait = time.Second
	}
	got := w.askFor(wait, from, network, to)
	for _, s := range want {
		if got == s {
			return
		}
	}
	w.t.Errorf("%s: %s to %s: got %q, want one of %q", what, network, to, got, want)
}

// TestRootTraffic sends real connections through the kernel.
func TestRootTraffic(t *testing.T) {
	w := newWorld(t)
	a, b := ends("10.42.1.2:80"), ends("10.42.1.2:80", "10.42.1.3:80")
	for _, proto := range []nft.Protocol{tcp, udp} {
		network := proto.String()
		w.update(front(proto, "10.43.0.1:80"), &Backend{Endpoints: b})
		seen := map[string]bool{}
		for range 40 {
			seen[w.ask(w.client, network, "10.43.0.1:80")] = true
		}
		if len(seen) != 2 || !seen["a 10.42.1.1"] || !seen["b 10.42.1.1"] {
			t.Errorf("%s: 40 connections of a stranger were answered by %v, want both, and the client hidden", network, seen)
		}
		w.update(front(proto, "10.43.0.1:80"), &Backend{Endpoints: a})
		w.expect("inside keeps its address", w.b, network, "10.43.0.1:80", "a 10.42.1.3")
		w.expect("itself", w.a, network, "10.43.0.1:80", "a 10.42.1.1")
		w.update(front(proto, "10.43.0.1:80"), &Backend{})
		w.expect("no endpoint", w.client, network, "10.43.0.1:80", "refused")
		w.update(front(proto, "10.43.0.1:80"), nil)
		w.expect("no frontend", w.b, network, "10.43.0.1:80", "refused")
		w.update(front(proto, "10.43.0.1:80"), &Backend{Silent: true})
		w.expect("silent", w.b, network, "10.43.0.1:80", "silence")

		w.update(front(proto, "0.0.0.0:30080"), &Backend{Endpoints: a})
		w.expect("node port", w.client, network, nodeAddr+":30080", "a 10.42.1.1")
		w.update(front(proto, "0.0.0.0:30080"), &Backend{Endpoints: b, Local: true, Near: a})
		for range 8 {
			w.expect("node port that keeps the client", w.client, network, nodeAddr+":30080", "a "+clientAddr)
		}
		w.update(front(proto, "0.0.0.0:30080"), &Backend{Endpoints: b, Local: true})
		w.expect("node port without a near endpoint", w.client, network, nodeAddr+":30080", "silence")
		w.expect("the same from inside", w.b, network, "10.42.1.1:30080", "a 10.42.1.3", "b 10.42.1.1")

		vip := front(proto, "192.0.2.100:80")
		w.update(vip, &Backend{Endpoints: a, Virtual: true, Sources: []netip.Prefix{netip.MustParsePrefix("198.51.100.8/32")}})
		w.expect("a client that may not", w.client, network, "192.0.2.100:80", "silence")
		w.update(vip, &Backend{Endpoints: a, Virtual: true, Sources: []netip.Prefix{netip.MustParsePrefix("198.51.100.0/29"), netip.MustParsePrefix("198.51.100.7/32")}})
		w.expect("a client that may", w.client, network, "192.0.2.100:80", "a 10.42.1.1")
		w.expect("another port of a virtual address", w.client, network, "192.0.2.100:81", "refused")

		w.update(front(proto, "[fd43::1]:80"), &Backend{Endpoints: ends("[fd42::2]:80")})
		w.expect("inside, IPv6", w.b, network, "[fd43::1]:80", "a fd42::3")
		w.expect("itself, IPv6", w.a, network, "[fd43::1]:80", "a fd42::a1")
		w.expect("a stranger, IPv6", w.client, network, "[fd43::1]:80", "a fd42::a1")
		w.update(front(proto, "[::]:30080"), &Backend{Endpoints: ends("[fd42::2]:80"), Local: true, Near: ends("[fd42::2]:80")})
		w.expect("node port, IPv6", w.client, network, "[fd51::1]:30080", "a fd51::7")
	}
	w.expect("the node itself by its own port", w.node, "tcp", nodeAddr+":30080", "a 10.42.1.1", "b 10.42.1.1")
}

// TestRootAffinity: a client stays where it was until that goes.
func TestRootAffinity(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		f    Frontend
		to   string
		ends []Endpoint
	}{
		{front(tcp, "10.43.0.1:80"), "10.43.0.1:80", ends("10.42.1.2:80", "10.42.1.3:80")},
		{front(tcp, "[fd43::1]:80"), "[fd43::1]:80", ends("[fd42::2]:80", "[fd42::3]:80")},
		{front(tcp, "0.0.0.0:30080"), nodeAddr + ":30080", ends("10.42.1.2:80", "10.42.1.3:80")},
	} {
		w.update(c.f, &Backend{Endpoints: c.ends, Affinity: time.Hour})
		first := w.ask(w.client, "tcp", c.to)
		for range 12 {
			w.expect("again", w.client, "tcp", c.to, first)
		}
		other := c.ends[1]
		if strings.HasPrefix(first, "b") {
			other = c.ends[0]
		}
		w.update(c.f, &Backend{Endpoints: []Endpoint{other}, Affinity: time.Hour})
		if err := w.lb.Forget(); err != nil {
			t.Fatal(err)
		}
		second := w.ask(w.client, "tcp", c.to)
		if second == first || !strings.HasPrefix(second, map[bool]string{true: "b", false: "a"}[strings.HasPrefix(first, "a")]) {
			t.Errorf("%s: after its endpoint went the client was answered by %q, before by %q", c.to, second, first)
		}
		// One that the kernel has dropped by itself does not keep the others.
		def, fam := skeleton(w.lb.base), familyOf(c.f.Addr)
		set := slices.IndexFunc(def.Sets, func(s nft.Set) bool { return s.Name == affinitySet+fam.suffix })
		have, err := w.tables.Elements(TableName, def.Sets[set])
		if err != nil || len(have) == 0 {
			t.Fatalf("remembered: %x (%v)", have, err)
		}
		gone := []element{{affinitySet + fam.suffix, nft.Key(fam.any, fam.any, tcp, uint16(9)), nft.Key(fam.any, uint16(9))}}
		for key, data := range have {
			gone = append(gone, element{affinitySet + fam.suffix, key, data})
		}
		if err := w.lb.take(def, gone); err != nil {
			t.Error(err)
		}
		if have, err := w.tables.Elements(TableName, def.Sets[set]); err != nil || len(have) > 0 {
			t.Errorf("still remembered: %x (%v)", have, err)
		}
		w.expect("again after all was forgotten", w.client, "tcp", c.to, second)
		w.update(c.f, &Backend{Endpoints: c.ends, Affinity: time.Hour})
		for range 6 {
			w.expect("after the first came back", w.client, "tcp", c.to, second)
		}
	}
}

// The bug: with as many clients remembered as there may be no other one got an
// answer.
func TestRootAffinityFull(t *testing.T) {
	w := newWorld(t)
	small := base
	small.clients = 1
	w.lb = New(w.tables, quiet())
	if err := w.lb.SetBase(small); err != nil {
		t.Fatal(err)
	}
	w.update(front(tcp, "10.43.0.1:80"), &Backend{Endpoints: ends("10.42.1.2:80", "10.42.1.3:80"), Affinity: time.Hour})
	first := w.ask(w.client, "tcp", "10.43.0.1:80")
	for range 12 {
		w.expect("one that is not remembered", w.b, "tcp", "10.43.0.1:80", "a 10.42.1.3", "b 10.42.1.1")
		w.expect("one that is", w.client, "tcp", "10.43.0.1:80", first)
	}
	def := skeleton(small)
	i := slices.IndexFunc(def.Sets, func(s nft.Set) bool { return s.Name == affinitySet+"4" })
	if have, err := w.tables.Elements(TableName, def.Sets[i]); err != nil || len(have) != 1 {
		t.Errorf("remembered: %x (%v), want one client: the test shows nothing", have, err)
	}
}

// TestRootFlows: a client that keeps its port moves when its endpoint goes, and
// one of another flow does not notice.
func TestRootFlows(t *testing.T) {
	w := newWorld(t)
	f := front(udp, "10.43.0.1:80")
	ask := func(port int) string {
		var out string
		_ = netns.Do(w.client.Path, func() error {
			c, err := net.DialUDP("udp", &net.UDPAddr{Port: port}, net.UDPAddrFromAddrPort(ap("10.43.0.1:80")))
			if err != nil {
				return err
			}
			defer func() { _ = c.Close() }()
			_ = c.SetDeadline(time.Now().Add(30 * time.Second))
			_, _ = c.Write([]byte("?"))
			b := make([]byte, 64)
			n, err := c.Read(b)
			out = string(b[:n])
			return err
		})
		return out
	}
	w.update(f, &Backend{Endpoints: ends("10.42.1.2:80")})
	if got := ask(4000); got != "a 10.42.1.1" {
		t.Fatal(got)
	}
	w.update(f, &Backend{Endpoints: ends("10.42.1.3:80")})
	if got := ask(4001); got != "b 10.42.1.1" {
		t.Fatal(got)
	}
	if got := ask(4000); got != "a 10.42.1.1" {
		t.Fatalf("the old flow moved by itself: %q; the test shows nothing", got)
	}
	if n, err := w.ct.DeleteOthers(map[Frontend][]netip.AddrPort{f: {ap("10.42.1.2:80"), ap("10.42.1.3:80")}}, base.Ranges); err != nil || n != 0 {
		t.Errorf("%d flows to endpoints that are there were forgotten (%v)", n, err)
	}
	n, err := w.ct.Delete([]Flow{{f, ap("10.42.1.2:80")}, {front(udp, "10.43.0.2:80"), ap("10.42.1.3:80")}})
	if err != nil || n != 1 {
		t.Errorf("%d flows were forgotten, want 1 (%v)", n, err)
	}
	if got := ask(4000); got != "b 10.42.1.1" {
		t.Errorf("the flow to the endpoint that went: %q", got)
	}
	// The same after a start that does not know what went.
	w.update(f, &Backend{Endpoints: ends("10.42.1.2:80")})
	if n, err := w.ct.DeleteOthers(map[Frontend][]netip.AddrPort{f: {ap("10.42.1.2:80")}}, base.Ranges); err != nil || n != 2 {
		t.Errorf("%d flows were forgotten, want 2 (%v)", n, err)
	}
	if got := ask(4001); got != "a 10.42.1.1" {
		t.Errorf("a flow to the endpoint that went before the start: %q", got)
	}
}

// TestRootRestart: what the kernel holds is taken over by the next process, and
// a deleted table comes back.
func TestRootRestart(t *testing.T) {
	w := newWorld(t)
	all := map[Frontend]*Backend{}
	for f, b := range sample() {
		all[f] = &b
	}
	if err := w.lb.Update(all); err != nil {
		t.Fatal(err)
	}
	gen, err := w.tables.Generation()
	if err != nil || gen == 0 {
		t.Fatal(gen, err)
	}
	next := New(w.tables, quiet())
	next.base = base
	if err := next.Update(all); err != nil {
		t.Fatal(err)
	}
	if now, _ := w.tables.Generation(); now != gen {
		have, _ := w.tables.Read(Compile(base, next.frontends), true)
		t.Errorf("the next process changed rules that were right: generation %d, was %d; %+v", now, gen, nft.Diff(have, Compile(base, next.frontends)))
	}
	if err := w.tables.Delete(nft.Table{Name: TableName}); err != nil {
		t.Fatal(err)
	}
	if err := next.Check(false); err != nil {
		t.Fatal(err)
	}
	have, err := w.tables.Read(Compile(base, next.frontends), true)
	if c := nft.Diff(have, Compile(base, next.frontends)); err != nil || !have.Whole || !c.Empty() {
		t.Errorf("after the table was deleted: %v %+v", err, c)
	}
}

// TestRootMany: ten thousand frontends of ten endpoints fit into a transaction,
// and a change of one endpoint stays small.
func TestRootMany(t *testing.T) {
	w := newWorld(t)
	many := manyFrontends(10000, 10)
	start := time.Now()
	if err := w.lb.Update(many); err != nil {
		t.Fatal(err)
	}
	t.Logf("10000 x 10 set in %v", time.Since(start))
	w.update(front(tcp, "10.43.0.1:80"), &Backend{Endpoints: ends("10.42.1.2:80")})
	w.expect("among many", w.client, "tcp", "10.43.0.1:80", "a 10.42.1.1")
	start = time.Now()
	next := New(w.tables, quiet())
	next.base = base
	if err := next.Update(many); err != nil {
		t.Fatal(err)
	}
	t.Logf("read and compared in %v", time.Since(start))
}

func manyFrontends(services, endpoints int) map[Frontend]*Backend {
	out := map[Frontend]*Backend{}
	for i := range services {
		b := &Backend{}
		for e := range endpoints {
			n := i*endpoints + e
			b.Endpoints = append(b.Endpoints, Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 44 + byte(n>>16), byte(n >> 8), byte(n)}), 8080)})
		}
		out[Frontend{netip.AddrFrom4([4]byte{10, 43, byte(1 + i>>8), byte(i)}), tcp, 80}] = b
	}
	return out
}
