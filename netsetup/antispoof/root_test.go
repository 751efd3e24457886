package antispoof

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/netnstest"
	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/netsetup/podnet"
	"github.com/clusterd/clusterd/netsetup/sysctl"
)

// waitAtMost is for one frame on a busy machine.
const waitAtMost = 30 * time.Second

// TestRootForgedFramesAreDropped: a pod with a raw socket writes frames in the
// name of others and of itself; the node takes what bears its own addresses
// alone. Without the table it takes all of them, or the test would show nothing.
func TestRootForgedFramesAreDropped(t *testing.T) {
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
		return errors.Join(sysctl.Set(sysctl.Router()), sysctl.SetPresent(sysctl.Bridge()), links.EnsureBridge(podnet.Bridge{Name: "br0", Addrs: []netip.Prefix{netip.MustParsePrefix("10.42.1.1/24")}}))
	})
	t.Cleanup(func() { links.Close(); _ = tables.Close() })
	own, other := addr("10.42.1.2"), addr("10.42.1.3")
	own6, other6 := addr("fd42::2"), addr("fd42::3")
	mine, others := podnet.HardwareAddr(own), podnet.HardwareAddr(other)

	g := New(Config{Kernel: tables, Groups: []uint32{podnet.PortGroup, podnet.DoomedGroup}})
	port := Port{podnet.HostIf("pod"), mine, []netip.Addr{own, own6}}
	if err := errors.Join(g.Set(nil), g.Add(port), g.Add(Port{podnet.HostIf("other"), others, []netip.Addr{other, other6}})); err != nil {
		t.Fatal(err)
	}
	spaces, err := netns.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	path, err := spaces.Create("pod")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = spaces.Delete("pod") })
	attach := func() {
		t.Helper()
		if err := links.Attach(podnet.Pod{NetNS: path, HostIf: podnet.HostIf("pod"), Bridge: "br0", Addrs: []podnet.Address{{Addr: netip.PrefixFrom(own, 32), Gateway: addr("10.42.1.1")}}}); err != nil {
			t.Fatal(err)
		}
	}
	attach()
	send := packetSocket(t, path, "eth0")
	heard := packetSocket(t, ns.Path, "br0") // has what the bridge let through
	ll, llOther := linkLocal(mine), linkLocal(others)
	frames := []frame{
		{"own IPv4", true, ether(mine, unix.ETH_P_IP, ipv4(own))},
		{"own IPv6", true, ether(mine, unix.ETH_P_IPV6, ipv6(own6, unix.IPPROTO_UDP, make([]byte, 8)))},
		{"own link-local", true, ether(mine, unix.ETH_P_IPV6, ipv6(ll, unix.IPPROTO_UDP, make([]byte, 8)))},
		{"own ARP", true, ether(mine, unix.ETH_P_ARP, arp(2, mine, own))},
		{"own neighbour advertisement", true, ether(mine, unix.ETH_P_IPV6, neighbour(own6, 136, own6))},
		{"own question for an address", true, ether(mine, unix.ETH_P_IPV6, neighbour(netip.IPv6Unspecified(), 135, own6))},
		{"another's IPv4", false, ether(mine, unix.ETH_P_IP, ipv4(other))},
		{"another's IPv4 and MAC", false, ether(others, unix.ETH_P_IP, ipv4(other))},
		{"another's MAC", false, ether(others, unix.ETH_P_IP, ipv4(own))},
		{"the gateway's IPv4", false, ether(mine, unix.ETH_P_IP, ipv4(addr("10.42.1.1")))},
		{"no address", false, ether(mine, unix.ETH_P_IP, ipv4(addr("0.0.0.0")))},
		{"another's IPv6", false, ether(mine, unix.ETH_P_IPV6, ipv6(other6, unix.IPPROTO_UDP, make([]byte, 8)))},
		{"another's link-local", false, ether(mine, unix.ETH_P_IPV6, ipv6(llOther, unix.IPPROTO_UDP, make([]byte, 8)))},
		{"ARP answer for another", false, ether(mine, unix.ETH_P_ARP, arp(2, mine, other))},
		{"ARP question in another's name", false, ether(mine, unix.ETH_P_ARP, arp(1, others, own))},
		{"ARP for the gateway", false, ether(mine, unix.ETH_P_ARP, arp(2, mine, addr("10.42.1.1")))},
		{"advertisement of another's address", false, ether(mine, unix.ETH_P_IPV6, neighbour(own6, 136, other6))},
		{"question for another's address before one's own", false, ether(mine, unix.ETH_P_IPV6, neighbour(netip.IPv6Unspecified(), 135, other6))},
		{"router advertisement", false, ether(mine, unix.ETH_P_IPV6, neighbour(ll, 134, own6))},
		{"router advertisement behind an extension header", false, ether(mine, unix.ETH_P_IPV6, hopByHop(neighbour(ll, 134, own6)))},
		{"redirect", false, ether(mine, unix.ETH_P_IPV6, neighbour(ll, 137, own6))},
		{"a VLAN's tag before own IPv4", false, ether(mine, unix.ETH_P_8021Q, append([]byte{0, 5, 8, 0}, ipv4(own)...))},
		{"another protocol", false, ether(mine, 0x88b5, make([]byte, 46))},
		{"a frame too short for its header", false, ether(mine, unix.ETH_P_IP, []byte{0x45, 0})},
	}
	// passed sends all with a tag and says which ones the bridge let through; the
	// last one is honest, so that its arrival ends the wait.
	passed := func(round byte) map[string]bool {
		t.Helper()
		got := map[string]bool{}
		all := append(frames[:len(frames):len(frames)], frame{"the end", true, ether(mine, unix.ETH_P_IP, ipv4(own))})
		for i, f := range all {
			if _, err := unix.Write(send, append(f.bytes, tag(round, i)...)); err != nil {
				t.Fatalf("%s: %v", f.name, err)
			}
		}
		buf := make([]byte, 2048)
		for deadline := time.Now().Add(waitAtMost); !got["the end"]; {
			if time.Now().After(deadline) {
				t.Fatalf("round %d: the honest frame at the end is lost; got through: %v", round, got)
			}
			n, err := unix.Read(heard, buf)
			if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil {
				t.Fatal(err)
			}
			for i, f := range all {
				if strings.Contains(string(buf[:n]), string(tag(round, i))) {
					got[f.name] = true
				}
			}
		}
		return got
	}
	check := func(round byte, when string) {
		t.Helper()
		got := passed(round)
		for _, f := range frames {
			if got[f.name] != f.ok {
				t.Errorf("%s: %s: got through: %t, want %t", when, f.name, got[f.name], f.ok)
			}
		}
	}
	check(1, "at first")
	if err := tables.Delete(nft.Table{Name: TableName, Family: nft.Bridge}); err != nil {
		t.Fatal(err)
	}
	open := passed(2)
	for _, f := range frames {
		if !open[f.name] && f.name != "a VLAN's tag before own IPv4" { // which the bridge itself keeps from the node
			t.Errorf("without the table %s does not get through: the test shows nothing of it", f.name)
		}
	}
	if err := g.Check(); err != nil {
		t.Fatal(err)
	}
	check(3, "after it was restored")
	// The next process finds the table and alters nothing.
	before, err := tables.Generation()
	if err != nil {
		t.Fatal(err)
	}
	next := New(Config{Kernel: tables, Groups: []uint32{podnet.PortGroup, podnet.DoomedGroup}})
	if err := next.Set([]Port{port, {podnet.HostIf("other"), others, []netip.Addr{other, other6}}}); err != nil {
		t.Fatal(err)
	}
	if after, err := tables.Generation(); err != nil || after != before {
		t.Errorf("rules that were right were changed: %v", err)
	}
	// What is not allowed, and what is given up, sends nothing.
	if err := next.Remove(port.Interface); err != nil {
		t.Fatal(err)
	}
	if getsThrough(t, send, heard, mine, own, 4) {
		t.Error("a port that nothing is known of may send")
	}
	if err := errors.Join(next.Add(port), links.Detach(port.Interface)); err != nil {
		t.Fatal(err)
	}
	attach()
	check(5, "given up and taken back")
	if err := next.CleanUp(); err != nil {
		t.Fatal(err)
	}
}

// frame is what the pod sends; ok: it may.
type frame struct {
	name  string
	ok    bool
	bytes []byte
}

// getsThrough sends an honest frame and reports whether it got through within half a
// second. A frame that is later than that on a busy machine is missed here, which
// lets a fault pass and fails no one who is right.
func getsThrough(t *testing.T, send, heard int, mac net.HardwareAddr, from netip.Addr, round byte) bool {
	t.Helper()
	if _, err := unix.Write(send, append(ether(mac, unix.ETH_P_IP, ipv4(from)), tag(round, 0)...)); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 2048)
	for end := time.Now().Add(500 * time.Millisecond); time.Now().Before(end); {
		n, err := unix.Read(heard, buf)
		if err == nil && strings.Contains(string(buf[:n]), string(tag(round, 0))) {
			return true
		}
	}
	return false
}

// packetSocket is a raw socket at an interface of a namespace; a read of it
// waits for a tenth of a second.
func packetSocket(t *testing.T, ns, name string) (fd int) {
	t.Helper()
	err := netns.Do(ns, func() error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		all := binary.NativeEndian.Uint16([]byte{unix.ETH_P_ALL >> 8, unix.ETH_P_ALL})
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(all)); err != nil {
			return err
		}
		return errors.Join(
			unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: all, Ifindex: link.Attrs().Index}),
			unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}))
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

// tag tells frames apart where they are heard.
func tag(round byte, i int) []byte { return []byte{0xc1, 'c', 'l', 'u', 'e', round, byte(i), 0xc2} }

func ether(from net.HardwareAddr, typ uint16, payload []byte) []byte {
	b := append([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, from...)
	return append(binary.BigEndian.AppendUint16(b, typ), payload...)
}

// room is that of a tag: lengths in headers count it.
const room = 8

func ipv4(from netip.Addr) []byte {
	b := make([]byte, 28)
	b[0], b[8], b[9] = 0x45, 64, unix.IPPROTO_UDP
	binary.BigEndian.PutUint16(b[2:], 28+room)
	copy(b[12:], from.AsSlice())
	copy(b[16:], []byte{10, 42, 1, 1})
	return b
}

func ipv6(from netip.Addr, next byte, payload []byte) []byte {
	b := make([]byte, 40, 40+len(payload))
	b[0], b[6], b[7] = 0x60, next, 255
	binary.BigEndian.PutUint16(b[4:], uint16(len(payload)+room))
	copy(b[8:], from.AsSlice())
	copy(b[24:], netip.IPv6LinkLocalAllNodes().AsSlice())
	return append(b, payload...)
}

// neighbour is a message of ICMPv6 about a target.
func neighbour(from netip.Addr, typ byte, target netip.Addr) []byte {
	return ipv6(from, unix.IPPROTO_ICMPV6, append([]byte{typ, 0, 0, 0, 0, 0, 0, 0}, target.AsSlice()...))
}

// hopByHop puts an extension header before the payload of an IPv6 packet.
func hopByHop(p []byte) []byte {
	ext := []byte{p[6], 0, 1, 4, 0, 0, 0, 0} // a padding option of 4 bytes
	out := append(append(append([]byte{}, p[:40]...), ext...), p[40:]...)
	out[6] = unix.IPPROTO_HOPOPTS
	binary.BigEndian.PutUint16(out[4:], uint16(len(p)-40+len(ext)+room))
	return out
}

func arp(op byte, from net.HardwareAddr, of netip.Addr) []byte {
	b := append([]byte{0, 1, 8, 0, 6, 4, 0, op}, from...)
	b = append(b, of.AsSlice()...)
	return append(append(b, make([]byte, 6)...), 10, 42, 1, 1)
}
