package announce

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netnstest"
)

// TestSaveLeavesNothing: what could not take the file's name does not stay
// beside it, and what was recorded before still counts.
func TestSaveLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	old, now := []netip.Addr{netip.MustParseAddr("192.0.2.1")}, []netip.Addr{netip.MustParseAddr("192.0.2.2")}
	a := &Announcer{cfg: Config{File: filepath.Join(dir, "announced.json")}}
	if err := a.save(old); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(a.cfg.File); err != nil || string(b) != `["192.0.2.1"]` {
		t.Errorf("the file holds %s %v", b, err)
	}
	a.cfg.File = filepath.Join(dir, "taken")
	if err := os.MkdirAll(filepath.Join(a.cfg.File, "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := a.save(now); err == nil {
		t.Error("saved over a folder")
	}
	if own := a.Own(); len(own) != 1 || own[0] != old[0] {
		t.Errorf("own are %v, want %v", own, old)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 2 {
		t.Errorf("left in the folder: %v %v", left, err)
	}
}

// TestRootBeside: the address of the other family is one of a network; what is
// announced here, and what stands alone while there is another, is none.
func TestRootBeside(t *testing.T) {
	netnstest.NeedRoot(t)
	ns, other := netnstest.New(t), netnstest.New(t)
	netnstest.Join(t, ns, "up0", other, "up0")
	file := filepath.Join(t.TempDir(), "announced.json")
	if err := os.WriteFile(file, []byte(`["2001:db8::100"]`), 0o600); err != nil {
		t.Fatal(err)
	}
	add := func(addr string) error {
		link, err := netlink.LinkByName("up0")
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(addr)
		if err != nil {
			return err
		}
		a.Flags = unix.IFA_F_NODAD
		if strings.Contains(addr, ".") {
			a.Flags = 0
		}
		return netlink.AddrAdd(link, a)
	}
	ns.Do(func() error {
		if err := add("192.0.2.1/24"); err != nil {
			return err
		}
		for _, step := range []struct{ add, want string }{
			{"2001:db8::100/128", "invalid IP"}, // announced; the link's own address is none either
			{"2001:db8::7/128", "2001:db8::7"},
			{"2001:db8::8/64", "2001:db8::8"},
		} {
			if err := add(step.add); err != nil {
				return err
			}
			got, err := Beside(Config{Node: netip.MustParseAddr("192.0.2.1"), File: file})
			if err != nil || got.String() != step.want {
				t.Errorf("with %s: %s, %v; want %s", step.add, got, err, step.want)
			}
		}
		if got, err := Beside(Config{Node: netip.MustParseAddr("2001:db8::8"), File: file}); err != nil || got.String() != "192.0.2.1" {
			t.Errorf("beside IPv6: %s, %v", got, err)
		}
		if _, err := Beside(Config{Node: netip.MustParseAddr("192.0.2.9"), File: file}); err == nil {
			t.Error("an address that is on no interface has one beside it")
		}
		return nil
	})
}

// TestRootNoSendersAddress: the machine itself does not send from an address that
// it announces, also when a version before has set it.
func TestRootNoSendersAddress(t *testing.T) {
	netnstest.NeedRoot(t)
	ns, other := netnstest.New(t), netnstest.New(t)
	netnstest.Join(t, ns, "up0", other, "up0")
	node, announced := netip.MustParseAddr("2001:db8:1::1"), netip.MustParseAddr("2001:db8:2::100")
	ns.Do(func() error {
		link, err := netlink.LinkByName("up0")
		if err != nil {
			return err
		}
		add := func(text string) error {
			a, err := netlink.ParseAddr(text)
			if err != nil {
				return err
			}
			a.Flags = unix.IFA_F_NODAD
			return netlink.AddrAdd(link, a)
		}
		if err := add("2001:db8:1::1/64"); err != nil {
			return err
		}
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Family: netlink.FAMILY_V6, Gw: net.ParseIP("2001:db8:1::2")}); err != nil {
			return err
		}
		sender := func(name string) {
			// The longest common prefix is that of the announced address.
			routes, err := netlink.RouteGet(net.ParseIP("2001:db8:2::200"))
			if err != nil || len(routes) != 1 || !routes[0].Src.Equal(node.AsSlice()) {
				t.Errorf("%s: sent by %v (%v), want %s", name, routes, err, node)
			}
		}
		file := filepath.Join(t.TempDir(), "announced.json")
		set := func(addrs ...netip.Addr) error {
			a, err := Open(Config{Node: node, File: file})
			if err != nil {
				return err
			}
			defer a.Close()
			return a.Set(addrs, false)
		}
		if err := set(announced); err != nil {
			return err
		}
		sender("announced")
		if err := set(); err != nil {
			return err
		}
		if err := os.WriteFile(file, []byte(`["2001:db8:2::100"]`), 0o600); err != nil {
			return err
		}
		if err := add("2001:db8:2::100/128"); err != nil {
			return err
		}
		if routes, err := netlink.RouteGet(net.ParseIP("2001:db8:2::200")); err != nil || !routes[0].Src.Equal(announced.AsSlice()) {
			t.Errorf("the test shows nothing: sent by %v, %v", routes, err)
		}
		if err := set(announced); err != nil {
			return err
		}
		sender("as a version before has set it")
		addrs, err := netlink.AddrList(link, netlink.FAMILY_V6)
		if err != nil || !slices.ContainsFunc(addrs, func(a netlink.Addr) bool { return a.IP.Equal(announced.AsSlice()) }) {
			t.Errorf("the address is not there any more: %v, %v", addrs, err)
		}
		return nil
	})
}

// The bug: an address stayed on the interface of a machine whose clusterd had ended, or was
// cut off, while another had taken it over: both answered for it.
func TestRootEndsAndYields(t *testing.T) {
	netnstest.NeedRoot(t)
	ns, other := netnstest.New(t), netnstest.New(t)
	netnstest.Join(t, ns, "up0", other, "up0")
	addrs := []netip.Addr{netip.MustParseAddr("192.0.2.100"), netip.MustParseAddr("192.0.2.101"), netip.MustParseAddr("2001:db8::100"), netip.MustParseAddr("2001:db8::101")}
	open := func(ns *netnstest.NS, node string) (a *Announcer) {
		ns.Do(func() error {
			link, err := netlink.LinkByName("up0")
			if err != nil {
				return err
			}
			own, err := netlink.ParseAddr(node + "/24")
			if err != nil {
				return err
			}
			if err := netlink.AddrAdd(link, own); err != nil {
				return err
			}
			a, err = Open(Config{Node: netip.MustParseAddr(node), File: filepath.Join(t.TempDir(), "announced.json")})
			return err
		})
		t.Cleanup(a.Close)
		return a
	}
	// left are the seconds that each address has still.
	left := func(a *Announcer) map[netip.Addr]int {
		list, err := a.h.AddrList(nil, netlink.FAMILY_ALL)
		if err != nil {
			t.Fatal(err)
		}
		out := map[netip.Addr]int{}
		for _, k := range list {
			if ip, ok := netip.AddrFromSlice(k.IP); ok && slices.Contains(addrs, ip.Unmap()) {
				out[ip.Unmap()] = k.ValidLft
			}
		}
		return out
	}
	a, b := open(ns, "192.0.2.1"), open(other, "192.0.2.2")
	if err := a.Set(addrs, false); err != nil {
		t.Fatal(err)
	}
	most := int(a.cfg.Lifetime / time.Second)
	for addr, seconds := range left(a) {
		if seconds <= 0 || seconds > most {
			t.Errorf("%s stays for %d s, want %d at most", addr, seconds, most)
		}
	}
	// Nobody else has them: they stay, for longer.
	for addr := range left(a) {
		short := single(addr, a.cfg.Lifetime)
		short.ValidLft, short.PreferedLft = 5, min(5, short.PreferedLft)
		link, _, err := a.find()
		if err == nil {
			err = a.h.AddrReplace(link, short)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Renew(); err != nil {
		t.Fatal(err)
	}
	for _, addr := range addrs {
		if seconds := left(a)[addr]; seconds <= 5 {
			t.Errorf("%s stays for %d s after it was renewed", addr, seconds)
		}
	}
	// Another machine has taken two over.
	if err := b.Set([]netip.Addr{addrs[1], addrs[3]}, false); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(time.Minute); ; { // a busy machine may hear an answer too late
		if err := a.Renew(); err != nil {
			t.Fatal(err)
		}
		if len(left(a)) == 2 || time.Now().After(end) {
			break
		}
	}
	if got := left(a); len(got) != 2 || got[addrs[0]] == 0 || got[addrs[2]] == 0 {
		t.Errorf("left are %v, want %s and %s", got, addrs[0], addrs[2])
	}
	if own := a.Own(); len(own) != 2 || len(b.Own()) != 2 {
		t.Errorf("on record are %v and %v", own, b.Own())
	}
	// Who knows that they are its own takes them back.
	if err := a.Set(addrs, false); err != nil || len(left(a)) != 4 {
		t.Errorf("%v, %v", left(a), err)
	}
}

// oneNode gives an interface of ns an address in 192.0.2.0/24, and is an Announcer on it.
func oneNode(t *testing.T, ns *netnstest.NS, device, node string) (a *Announcer) {
	t.Helper()
	ns.Do(func() error {
		link, err := netlink.LinkByName(device)
		if err != nil {
			return err
		}
		own, err := netlink.ParseAddr(node + "/24")
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, own); err != nil {
			return err
		}
		a, err = Open(Config{Node: netip.MustParseAddr(node), File: filepath.Join(t.TempDir(), "announced.json")})
		return err
	})
	t.Cleanup(a.Close)
	return a
}

// The bug: addresses that no other machine could take over ended with the program. They
// stay, also through Renew, until another answers; and pass when they may be taken over.
func TestRootStays(t *testing.T) {
	netnstest.NeedRoot(t)
	ns, other := netnstest.New(t), netnstest.New(t)
	netnstest.Join(t, ns, "up0", other, "up0")
	a, b := oneNode(t, ns, "up0", "192.0.2.1"), oneNode(t, other, "up0", "192.0.2.2")
	addrs := []netip.Addr{netip.MustParseAddr("192.0.2.100"), netip.MustParseAddr("2001:db8::100")}
	look := func(what string, want presence) {
		t.Helper()
		_, has, err := a.find()
		if err != nil {
			t.Fatal(err)
		}
		for _, addr := range addrs {
			if has[addr] != want {
				t.Errorf("%s: %s: %d, want %d", what, addr, has[addr], want)
			}
		}
	}
	for _, step := range []struct {
		what string
		do   func() error
		want presence
	}{
		{"with others", func() error { return a.Set(addrs, false) }, passes},
		{"alone", func() error { return a.Set(addrs, true) }, stays},
		{"alone, and not known", a.Renew, stays},
		{"another has come", func() error { return a.Set(addrs, false) }, passes},
		{"alone again", func() error { return a.Set(addrs, true) }, stays},
		{"another has it", func() error {
			if err := b.Set(addrs, false); err != nil {
				return err
			}
			for end := time.Now().Add(time.Minute); ; { // a busy machine may hear an answer too late
				if err := a.Renew(); err != nil {
					return err
				}
				_, has, err := a.find()
				if err != nil || has[addrs[0]] == absent && has[addrs[1]] == absent || time.Now().After(end) {
					return err
				}
			}
		}, absent},
	} {
		if err := step.do(); err != nil {
			t.Fatalf("%s: %v", step.what, err)
		}
		look(step.what, step.want)
	}
}

// The bugs: once the neighbours had been asked all IPv6 packets that the node received were
// copied for the answers, and drove them out; and a second interface of the machine in
// the segment, which the kernel has answer for all addresses, counted as another machine.
func TestRootAnswersAlone(t *testing.T) {
	netnstest.NeedRoot(t)
	ns, other := netnstest.New(t), netnstest.New(t)
	netnstest.Join(t, ns, "up0", other, "port0")
	netnstest.Join(t, ns, "up1", other, "port1")
	other.Do(func() error {
		bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "segment0"}}
		if err := netlink.LinkAdd(bridge); err != nil {
			return err
		}
		for _, port := range []string{"port0", "port1"} {
			link, err := netlink.LinkByName(port)
			if err == nil {
				err = netlink.LinkSetMaster(link, bridge)
			}
			if err != nil {
				return err
			}
		}
		return netlink.LinkSetUp(bridge)
	})
	a := oneNode(t, ns, "up0", "192.0.2.1")
	addrs := []netip.Addr{netip.MustParseAddr("192.0.2.100"), netip.MustParseAddr("2001:db8::100")}
	if err := a.Set(addrs, false); err != nil {
		t.Fatal(err)
	}
	// A flood of IPv6 from the neighbour, while asking and after it.
	var from, to net.HardwareAddr
	var index, fd int
	ns.Do(func() error {
		link, err := netlink.LinkByName("up0")
		to = link.Attrs().HardwareAddr
		return err
	})
	other.Do(func() error {
		link, err := netlink.LinkByName("segment0")
		if err != nil {
			return err
		}
		from, index = link.Attrs().HardwareAddr, link.Attrs().Index
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return err
	})
	defer unix.Close(fd)
	flood := func(n int) {
		frame := append(append(slices.Clone(to), from...), 0x86, 0xdd, 0x60, 0, 0, 0, 0, 8, unix.IPPROTO_UDP, 64)
		frame = append(frame, make([]byte, 32+8)...)
		for range n {
			if err := unix.Sendto(fd, frame, 0, &unix.SockaddrLinklayer{Ifindex: index, Protocol: network(unix.ETH_P_IPV6), Halen: 6}); err != nil {
				t.Fatal(err)
			}
		}
	}
	answered := func(four bool) uint32 { // the count is reset by that
		fd := a.asks.six
		if four {
			fd = a.asks.four
		}
		s, err := unix.GetsockoptTpacketStats(fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
		if err != nil {
			t.Fatal(err)
		}
		return s.Packets
	}
	ended := make(chan error, 1)
	go func() { ended <- a.Renew() }()
	for done := false; !done; {
		flood(100)
		select {
		case err := <-ended:
			if err != nil {
				t.Fatal(err)
			}
			done = true
		default:
		}
	}
	_, has, err := a.find()
	if err != nil {
		t.Fatal(err)
	}
	for _, addr := range addrs {
		if has[addr] == absent {
			t.Errorf("%s was given up, though only this machine has it", addr)
		}
	}
	if n := answered(true); n == 0 {
		t.Error("the other interface did not answer: the test shows nothing")
	}
	if n := answered(false); n > 100 {
		t.Errorf("%d packets were taken for answers", n)
	}
	flood(1000)
	if n := answered(false) + answered(true); n > 0 {
		t.Errorf("%d packets were copied while nobody was asked", n)
	}
	if got, err := networksIn(ns, "192.0.2.1"); err != nil || got != "[192.0.2.0/24]" {
		t.Errorf("its networks are %s (%v)", got, err)
	}
}

func networksIn(ns *netnstest.NS, node string) (text string, err error) {
	ns.Do(func() error {
		var all []netip.Prefix
		all, err = Networks(netip.MustParseAddr(node))
		text = fmt.Sprint(all)
		return nil
	})
	return text, err
}

// TestRootAnswered: another machine's kernel answers for what it has, at once; a machine
// that is away answers for nothing; and one without a link knows nothing of the others.
func TestRootAnswered(t *testing.T) {
	netnstest.NeedRoot(t)
	ns, other := netnstest.New(t), netnstest.New(t)
	netnstest.Join(t, ns, "up0", other, "up0")
	a, b := oneNode(t, ns, "up0", "192.0.2.1"), oneNode(t, other, "up0", "192.0.2.2")
	node, vips := netip.MustParseAddr("192.0.2.2"), []netip.Addr{netip.MustParseAddr("192.0.2.100"), netip.MustParseAddr("2001:db8::100")}
	ask := func(want ...netip.Addr) {
		t.Helper()
		all := append([]netip.Addr{node}, vips...)
		for end := time.Now().Add(time.Minute); ; { // a busy machine may hear an answer too late
			got, err := a.Answered(all, 500*time.Millisecond)
			if err != nil {
				t.Fatal(err)
			}
			for _, addr := range all {
				if got[addr] && !slices.Contains(want, addr) {
					t.Errorf("%s is answered for", addr)
				}
			}
			missing := slices.DeleteFunc(slices.Clone(want), func(addr netip.Addr) bool { return got[addr] })
			if len(missing) == 0 {
				return
			}
			if time.Now().After(end) {
				t.Errorf("nobody answers for %v", missing)
				return
			}
		}
	}
	ask(node)
	if err := b.Set(vips, false); err != nil {
		t.Fatal(err)
	}
	ask(node, vips[0], vips[1])
	if err := a.Set(vips, false); err != nil { // both have them now
		t.Fatal(err)
	}
	ask(node, vips[0], vips[1])
	other.Do(func() error {
		link, err := netlink.LinkByName("up0")
		if err != nil {
			return err
		}
		all, err := netlink.AddrList(link, netlink.FAMILY_ALL)
		for _, addr := range all {
			err = errors.Join(err, netlink.AddrDel(link, &addr))
		}
		return err
	})
	for end := time.Now().Add(time.Minute); ; { // frames of Set's announcements may still come
		if got, err := a.Answered(vips, 100*time.Millisecond); err == nil && len(got) == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatal("what nobody has is answered for")
		}
	}
	ask()
	other.Do(func() error {
		link, err := netlink.LinkByName("up0")
		if err == nil {
			err = netlink.LinkSetDown(link)
		}
		return err
	})
	if _, err := a.Answered([]netip.Addr{node}, time.Millisecond); err == nil {
		t.Error("a machine without a link says that nobody answers")
	}
}
