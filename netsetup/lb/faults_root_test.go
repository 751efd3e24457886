package lb

import (
	"encoding/binary"
	"flag"
	"math/rand/v2"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/nft"
)

var seed = flag.Uint64("seed", 1, "what is random is drawn from it")

// TestRootFlapping: a thousand endpoints come and go, 50 changes a second. Every
// connection meanwhile is answered, and at the end the kernel has what it would have
// been given at once.
func TestRootFlapping(t *testing.T) {
	w := newWorld(t)
	rnd := rand.New(rand.NewPCG(*seed, 0))
	t.Logf("seed %d", *seed)
	const count, changes = 1000, 250
	// All of them are a's: it answers by each address of the range.
	all := netip.MustParsePrefix("10.44.0.0/16")
	dst := &net.IPNet{IP: all.Addr().AsSlice(), Mask: net.CIDRMask(all.Bits(), 32)}
	w.a.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: dst, Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST})
	})
	w.node.Do(func() error {
		link, err := netlink.LinkByName("to-a")
		if err != nil {
			return err
		}
		return netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: dst, Gw: net.IPv4(10, 42, 1, 2), Flags: int(netlink.FLAG_ONLINK)})
	})
	in := make([]bool, count)
	backend := func() *Backend {
		b := &Backend{Endpoints: ends("10.42.1.3:80")} // b stays
		for i, there := range in {
			if there {
				b.Endpoints = append(b.Endpoints, Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 44, byte(i >> 8), byte(i)}), 80)})
			}
		}
		return b
	}
	f := front(tcp, "10.43.0.9:80")
	for i := range in {
		in[i] = rnd.IntN(2) == 0
	}
	w.update(f, backend())

	stop, answers := make(chan struct{}), map[string]int{}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
			answers[w.ask(w.client, "tcp", "10.43.0.9:80")]++
		}
	})
	tick := time.NewTicker(time.Second / 50)
	defer tick.Stop()
	var longest, sum time.Duration
	for range changes {
		<-tick.C
		for range 1 + rnd.IntN(5) {
			i := rnd.IntN(count)
			in[i] = !in[i]
		}
		began := time.Now()
		w.update(f, backend())
		took := time.Since(began)
		longest, sum = max(longest, took), sum+took
	}
	close(stop)
	wg.Wait()
	total := 0
	for answer, n := range answers {
		total += n
		if !strings.HasPrefix(answer, "a ") && !strings.HasPrefix(answer, "b ") {
			t.Errorf("seed %d: %d connections while endpoints came and went: %s", *seed, n, answer)
		}
	}
	t.Logf("%d changes took %s each, %s at most; %d connections were answered meanwhile", changes, sum/changes, longest, total)
	if err := w.lb.Check(true); err != nil { // clears chains away that nothing uses any more
		t.Fatal(err)
	}
	want := Compile(base, w.lb.frontends)
	have, err := w.tables.Read(want, true)
	if c := nft.Diff(have, want); err != nil || !have.Whole || !c.Empty() {
		t.Errorf("seed %d: the kernel has something else at the end: %v %+v", *seed, err, c)
	}
}

// TestRootConntrackFull: when the kernel's table of connections is full of flows that
// nobody answers, connections that are there go on, and new ones are answered: the
// kernel gives up the unanswered.
func TestRootConntrackFull(t *testing.T) {
	w := newWorld(t)
	f := front(tcp, "10.43.0.9:80")
	var l net.Listener
	w.a.Do(func() (err error) { l, err = net.Listen("tcp", ":81"); return err })
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				b := make([]byte, 1)
				for {
					if _, err := c.Read(b); err != nil {
						return
					}
					if _, err := c.Write(b); err != nil {
						return
					}
				}
			}()
		}
	}()
	w.update(f, &Backend{Endpoints: ends("10.42.1.2:80")})
	w.update(front(tcp, "10.43.0.9:81"), &Backend{Endpoints: ends("10.42.1.2:81")})
	var old net.Conn
	w.client.Do(func() (err error) { old, err = net.DialTimeout("tcp", "10.43.0.9:81", 30*time.Second); return err })
	defer old.Close()
	echo := func(when string) {
		t.Helper()
		_ = old.SetDeadline(time.Now().Add(30 * time.Second))
		if _, err := old.Write([]byte("x")); err != nil {
			t.Errorf("%s: the connection that was there: %v", when, err)
			return
		}
		if _, err := old.Read(make([]byte, 1)); err != nil {
			t.Errorf("%s: the connection that was there: %v", when, err)
		}
	}
	echo("before")
	room := func() (used, most int) {
		w.node.Do(func() (err error) {
			used, most, err = Tracked()
			return err
		})
		return used, most
	}
	_, most := room()
	if most > 1<<20 {
		t.Skipf("the kernel has room for %d connections: too many to fill", most)
	}
	// Each packet is one flow: raw ones, since a socket has few ports.
	var raw int
	w.client.Do(func() (err error) {
		raw, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		return err
	})
	defer unix.Close(raw)
	rnd := rand.New(rand.NewPCG(*seed, 0))
	t.Logf("seed %d, room for %d", *seed, most)
	packet := make([]byte, 28)
	packet[0], packet[8], packet[9] = 0x45, 64, unix.IPPROTO_UDP
	copy(packet[12:], netip.MustParseAddr(clientAddr).AsSlice())
	copy(packet[16:], []byte{10, 42, 1, 2})
	binary.BigEndian.PutUint16(packet[24:], 8)
	to := &unix.SockaddrInet4{Addr: [4]byte{10, 42, 1, 2}}
	for end := time.Now().Add(2 * time.Minute); ; {
		for range 20_000 {
			binary.BigEndian.PutUint32(packet[20:], rnd.Uint32())
			if err := unix.Sendto(raw, packet, 0, to); err != nil && err != unix.ENOBUFS && err != unix.EPERM {
				t.Fatal(err)
			}
		}
		used, _ := room()
		if used >= most*99/100 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("the table has %d of %d after two minutes", used, most)
		}
	}
	echo("while it is full")
	for i := range 20 {
		for range 1000 { // it stays full
			binary.BigEndian.PutUint32(packet[20:], rnd.Uint32())
			_ = unix.Sendto(raw, packet, 0, to)
		}
		if got := w.ask(w.client, "tcp", "10.43.0.9:80"); got != "a 10.42.1.1" {
			t.Fatalf("seed %d: connection %d while the table is full: %q", *seed, i, got)
		}
	}
	used, _ := room()
	if used < most*9/10 {
		t.Errorf("the table has %d of %d at the end: it was not full", used, most)
	}
	echo("at the end")
	t.Logf("used %d of %d", used, most)
}
