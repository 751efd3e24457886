package podnetwork

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/netnstest"
	"github.com/clusterd/clusterd/netsetup/nft"
)

// TestRootForgedSourceGetsNowhere: what a pod sends in its neighbour's name does
// not reach a third one, its own does; so it is with networks kept ready, and
// for the next process, too.
func TestRootForgedSourceGetsNowhere(t *testing.T) {
	netnstest.NeedRoot(t)
	ns, dir := netnstest.New(t), t.TempDir()
	n := newReadyNode(t, ns, dir, "10.42.1.0/24", 1)
	stop := n.keep()
	n.eventually("a ready network", func() bool { return len(n.waiting()) == 1 })
	paths, addrs := map[string]string{}, map[string]netip.Addr{}
	for _, uid := range []string{"from-ready", "neighbour", "listener"} {
		path, ips, err := n.Attach(t.Context(), uid, false)
		if err != nil {
			t.Fatal(err)
		}
		paths[uid], addrs[uid] = path, ips[0]
	}
	stop()
	var listener net.PacketConn
	if err := netns.Do(paths["listener"], func() (err error) {
		listener, err = net.ListenPacket("udp4", ":9000")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	raw := rawSocket(t, paths["from-ready"])
	to := addrs["listener"]
	send := func(from netip.Addr, text string) {
		t.Helper()
		if err := unix.Sendto(raw, udp(from, to, 9000, text), 0, &unix.SockaddrInet4{Addr: to.As4()}); err != nil {
			t.Fatal(err)
		}
	}
	// hear sends a forged and an honest packet, and both again, until one with the
	// last word arrives. It reports whether a forged one of this round did.
	hear := func(round, last string) (forged bool) {
		t.Helper()
		buf := make([]byte, 100)
		for end := time.Now().Add(time.Minute); ; {
			send(addrs["neighbour"], "forged "+round)
			send(addrs["from-ready"], "honest "+round)
			for {
				_ = listener.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
				n, _, err := listener.ReadFrom(buf)
				if err != nil {
					break
				}
				text := string(buf[:n])
				forged = forged || text == "forged "+round
				if text == last+" "+round {
					return forged
				}
			}
			if time.Now().After(end) {
				t.Fatalf("%s: nothing %s arrives", round, last)
			}
		}
	}
	if hear("at first", "honest") {
		t.Error("a forged packet arrived")
	}
	n.close()
	n = newReadyNode(t, ns, dir, "10.42.1.0/24", 0)
	defer n.close()
	if hear("after a restart", "honest") {
		t.Error("a forged packet arrived after a restart")
	}
	if err := n.tables.Delete(nft.Table{Name: "clusterd_ports", Family: nft.Bridge}); err != nil {
		t.Fatal(err)
	}
	hear("without the rules", "forged") // or the test would show nothing
	if err := n.frames.Check(); err != nil {
		t.Fatal(err)
	}
	if hear("put right", "honest") {
		t.Error("a forged packet arrived after the rules were put right")
	}
	for uid := range paths {
		if err := n.Detach(t.Context(), uid); err != nil {
			t.Error(err)
		}
	}
}

// TestRootRulesComeBack: what an administrator flushes is put right with the next
// look, and told once; what this process changes itself is not.
func TestRootRulesComeBack(t *testing.T) {
	netnstest.NeedRoot(t)
	n := newReadyNode(t, netnstest.New(t), t.TempDir(), "10.42.1.0/24", 0)
	defer n.close()
	var told []string
	n.filter = nft.NewKeeper(nft.KeeperConfig{
		Kernel: n.tables, Logger: n.cfg.Logger,
		Repaired: func(table, what string) { told = append(told, table+": "+what) },
	})
	own := netip.MustParsePrefix("10.42.1.0/24")
	want := nft.Ruleset{Forward: []netip.Prefix{own}, Masquerade: []nft.Masquerade{{From: own, Except: []netip.Prefix{own}}}}
	check := func(events int) {
		t.Helper()
		if err := n.filter.Check(); err != nil {
			t.Fatal(err)
		}
		// What Network adds, without host ports: the guard of the node's loopback.
		table, err := withPorts(want, nft.Inside{Ranges: []netip.Prefix{own}, Interface: n.cfg.Bridge}, nil).Table(nft.DefaultTable)
		if err != nil {
			t.Fatal(err)
		}
		have, err := n.tables.Read(table, true)
		if c := nft.Diff(have, table); err != nil || !have.Whole || !c.Empty() {
			t.Errorf("the rules are not there: %+v, %v", have, err)
		}
		if len(told) != events {
			t.Errorf("told: %q, want %d", told, events)
		}
	}
	if err := n.setRules(want, []netip.Prefix{own}); err != nil {
		t.Fatal(err)
	}
	check(0)
	if err := n.tables.Delete(nft.Table{Name: nft.DefaultTable}); err != nil {
		t.Fatal(err)
	}
	check(1)
	check(1)
	fewer, err := withPorts(nft.Ruleset{Forward: want.Forward}, nft.Inside{Ranges: []netip.Prefix{own}, Interface: n.cfg.Bridge}, nil).Table(nft.DefaultTable)
	if err != nil {
		t.Fatal(err)
	}
	if err := n.tables.Replace(fewer); err != nil {
		t.Fatal(err)
	}
	check(2)
	want.Masquerade = nil
	if err := n.setRules(want, []netip.Prefix{own}); err != nil {
		t.Fatal(err)
	}
	check(2)
}

// rawSocket writes IP packets with headers of one's own making.
func rawSocket(t *testing.T, ns string) (fd int) {
	t.Helper()
	err := netns.Do(ns, func() (err error) {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW); err != nil {
			return err
		}
		return unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_HDRINCL, 1)
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	return fd
}

// udp is a packet without checksums: the kernel adds that of IP, and UDP needs
// none.
func udp(from, to netip.Addr, port uint16, text string) []byte {
	b := make([]byte, 28, 28+len(text))
	b[0], b[8], b[9] = 0x45, 64, unix.IPPROTO_UDP
	copy(b[12:], from.AsSlice())
	copy(b[16:], to.AsSlice())
	binary.BigEndian.PutUint16(b[20:], 9001)
	binary.BigEndian.PutUint16(b[22:], port)
	binary.BigEndian.PutUint16(b[24:], uint16(8+len(text)))
	return append(b, text...)
}
