package podnetwork

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/netnstest"
	"github.com/clusterd/clusterd/netsetup/podnet"
)

var seed = flag.Uint64("seed", 1, "what is random is drawn from it")

// readyNode is a Network in a network namespace of its own.
type readyNode struct {
	*Network
	t  *testing.T
	ns *netnstest.NS
}

func newReadyNode(t *testing.T, ns *netnstest.NS, dir, cidrs string, ready int) readyNode {
	t.Helper()
	n := readyNode{t: t, ns: ns}
	var ranges []netip.Prefix
	for cidr := range strings.SplitSeq(cidrs, ",") {
		ranges = append(ranges, netip.MustParsePrefix(cidr))
	}
	ns.Do(func() (err error) {
		n.Network, err = New(Config{
			NodeName: "n1", NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, PodCIDR: ranges[0],
			Dir: dir, Ready: ready, Logger: slog.New(slog.DiscardHandler),
		})
		if err == nil {
			err = n.open(ranges)
		}
		return err
	})
	return n
}

// keep runs keepReady until the returned function is called.
func (n readyNode) keep() (stop func()) {
	ctx, cancel := context.WithCancel(n.t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { n.keepReady(ctx) })
	return func() { cancel(); wg.Wait() }
}

func (n readyNode) eventually(what string, holds func() bool) {
	n.t.Helper()
	for end := time.Now().Add(2 * time.Minute); !holds(); <-time.After(5 * time.Millisecond) {
		if time.Now().After(end) {
			n.t.Fatalf("%s did not come in two minutes", what)
		}
	}
}

// waiting names the namespaces that there are and no pod has.
func (n readyNode) waiting() []string {
	n.t.Helper()
	pinned, err := n.spaces.List()
	if err != nil {
		n.t.Fatal(err)
	}
	given := n.allocated()
	return slices.DeleteFunc(pinned, func(name string) bool {
		for _, addr := range given {
			if addr == name {
				return true
			}
		}
		return false
	})
}

// interfaces are the node's ends of pods' interfaces.
func (n readyNode) interfaces() map[string]bool {
	n.t.Helper()
	out := map[string]bool{}
	n.ns.Do(func() error {
		links, err := netlink.LinkList()
		for errors.Is(err, netlink.ErrDumpInterrupted) { // something came or went meanwhile
			links, err = netlink.LinkList()
		}
		for _, l := range links {
			if l.Type() == "veth" {
				out[l.Attrs().Name] = true
			}
		}
		return err
	})
	return out
}

// allocated is what the file says.
func (n readyNode) allocated() map[string]string {
	n.t.Helper()
	var ipam struct{ Allocated map[string]string }
	b, err := os.ReadFile(filepath.Join(n.cfg.Dir, "ipam.json"))
	if os.IsNotExist(err) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(b, &ipam)
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return ipam.Allocated
}

func namespaceOf(t *testing.T, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

// TestRootReady: a pod gets a network that was ready, it is the pod's alone, and
// nothing of the ready ones is left at the end.
func TestRootReady(t *testing.T) {
	netnstest.NeedRoot(t)
	n := newReadyNode(t, netnstest.New(t), t.TempDir(), "10.42.1.0/24", 3)
	stop := n.keep()
	n.eventually("three ready networks", func() bool { return len(n.waiting()) == 3 })
	if got := n.allocated(); len(got) > 0 {
		t.Errorf("addresses of no pod are on record: %v", got)
	}
	waited := map[uint64]bool{}
	for _, name := range n.waiting() {
		waited[namespaceOf(t, n.spaces.Path(name))] = true
	}
	path, ips, err := n.Attach(t.Context(), "uid-a", false)
	if err != nil {
		t.Fatal(err)
	}
	if !waited[namespaceOf(t, path)] {
		t.Error("the pod's namespace is not one of those that were ready")
	}
	if n.allocated()["uid-a"] != ips[0].String() {
		t.Errorf("on record: %v, want uid-a at %v", n.allocated(), ips)
	}
	if err := netns.Do(path, func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		addrs, err := netlink.AddrList(link, netlink.FAMILY_V4)
		if len(addrs) != 1 || addrs[0].IP.String() != ips[0].String() {
			t.Errorf("addresses inside: %v, want %v", addrs, ips)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
	if again, ips2, err := n.Attach(t.Context(), "uid-a", false); err != nil || again != path || ips2[0] != ips[0] {
		t.Errorf("attached again: %s %v %v", again, ips2, err)
	}
	if err := n.Limit(t.Context(), "uid-a", 8_000_000, 16_000_000); err != nil {
		t.Error(err)
	}
	if err := netns.Do(path, func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		qdiscs, err := netlink.QdiscList(link)
		if !slices.ContainsFunc(qdiscs, func(q netlink.Qdisc) bool { tbf, ok := q.(*netlink.Tbf); return ok && tbf.Rate == 2_000_000 }) {
			t.Errorf("what the pod sends is bounded by %v", qdiscs)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
	if err := n.Limit(t.Context(), "uid-nobody", 8_000_000, 0); err == nil {
		t.Error("a pod without a network was limited")
	}
	n.eventually("another in its place", func() bool { return len(n.waiting()) == 3 })

	// A burst drains them; the others are made at once, all different.
	seen := map[netip.Addr]bool{ips[0]: true}
	for _, uid := range []string{"b", "c", "d", "e", "f"} {
		_, ips, err := n.Attach(t.Context(), uid, false)
		if err != nil || seen[ips[0]] {
			t.Fatalf("%s: %v %v, given out so far: %v", uid, ips, err, seen)
		}
		seen[ips[0]] = true
	}
	for _, uid := range []string{"b", "c", "d", "e", "f"} {
		if err := n.Detach(t.Context(), uid); err != nil {
			t.Error(err)
		}
	}
	n.eventually("three again", func() bool { return len(n.waiting()) == 3 })
	if err := n.Live(t.Context(), func() []string { return []string{"uid-a"} }); err != nil {
		t.Error(err)
	}
	n.eventually("the pod's interface and three after a sweep", func() bool {
		got := n.interfaces()
		return got[podnet.HostIf(ips[0].String())] && len(got) == 4
	})
	stop()
	if got := n.waiting(); len(got) > 0 {
		t.Errorf("namespaces stay ready after the end: %v", got)
	}
	if err := n.Detach(t.Context(), "uid-a"); err != nil {
		t.Error(err)
	}
	n.eventually("no interface", func() bool { return len(n.interfaces()) == 0 })
	if got := n.allocated(); len(got) > 0 {
		t.Errorf("addresses left: %v", got)
	}
	n.close()
}

// TestRootReadyAfterKill: what a killed process kept ready is gone before its
// successor gives out the first address.
func TestRootReadyAfterKill(t *testing.T) {
	netnstest.NeedRoot(t)
	ns, dir := netnstest.New(t), t.TempDir()
	killed := newReadyNode(t, ns, dir, "10.42.1.0/24", 2)
	for range 2 {
		if err := killed.makeReady(); err != nil {
			t.Fatal(err)
		}
	}
	killed.close()
	n := newReadyNode(t, ns, dir, "10.42.1.0/24", 0)
	defer n.close()
	if got := n.waiting(); len(got) > 0 {
		t.Errorf("namespaces of the killed process: %v", got)
	}
	path, ips, err := n.Attach(t.Context(), "a", false) // the same address: its old interface may still be there
	if err != nil || path == "" || len(ips) != 1 {
		t.Fatal(path, ips, err)
	}
	if err := n.Live(t.Context(), func() []string { return []string{"a"} }); err != nil {
		t.Error(err)
	}
	n.eventually("the pod's interface alone", func() bool {
		got := n.interfaces()
		return len(got) == 1 && got[podnet.HostIf(ips[0].String())]
	})
	if err := n.Detach(t.Context(), "a"); err != nil {
		t.Error(err)
	}
}

// TestRootReadyFewAddresses: where addresses are scarce pods get them all.
func TestRootReadyFewAddresses(t *testing.T) {
	netnstest.NeedRoot(t)
	n := newReadyNode(t, netnstest.New(t), t.TempDir(), "10.42.1.0/29", 8)
	defer n.close()
	stop := n.keep()
	defer stop()
	for _, uid := range []string{"a", "b", "c", "d", "e"} { // all there are
		if _, _, err := n.Attach(t.Context(), uid, false); err != nil {
			t.Fatal(uid, err)
		}
	}
	n.eventually("no network that is kept ready", func() bool { return len(n.waiting()) == 0 })
	for _, uid := range []string{"a", "b", "c", "d", "e"} {
		if err := n.Detach(t.Context(), uid); err != nil {
			t.Error(err)
		}
	}
}

// TestRootAddressesExhausted: a pod for which there is no address is refused with the
// range's name and nothing is left of it, however often that is tried and whatever
// goes wrong beside; it gets one as soon as another pod's has rested.
func TestRootAddressesExhausted(t *testing.T) {
	netnstest.NeedRoot(t)
	rnd := rand.New(rand.NewPCG(*seed, 0))
	t.Logf("seed %d", *seed)
	n := newReadyNode(t, netnstest.New(t), t.TempDir(), "10.42.1.0/29", 4)
	defer n.close()
	stop := n.keep()
	defer stop()
	const usable = 5
	has := map[string]bool{}
	refused := 0
	for i := range 60 {
		uid := fmt.Sprint("pod-", rnd.IntN(3*usable))
		if has[uid] && rnd.IntN(4) == 0 {
			if err := n.Detach(t.Context(), uid); err != nil {
				t.Fatalf("seed %d, step %d: %v", *seed, i, err)
			}
			delete(has, uid)
			continue
		}
		_, _, err := n.Attach(t.Context(), uid, false)
		switch {
		case err == nil:
			has[uid] = true
		case !strings.Contains(err.Error(), "no address free in 10.42.1.0/29: 5 usable, "):
			t.Errorf("seed %d, step %d: %v", *seed, i, err)
		default:
			refused++
		}
		if len(has) > usable {
			t.Fatalf("seed %d, step %d: %d pods have an address of %d", *seed, i, len(has), usable)
		}
	}
	if refused == 0 {
		t.Errorf("seed %d: no pod was refused", *seed)
	}
	n.eventually("an address for each of as many pods as there are", func() bool {
		for i := range 3 * usable {
			if uid := fmt.Sprint("pod-", i); len(has) < usable && !has[uid] {
				if _, _, err := n.Attach(t.Context(), uid, false); err == nil {
					has[uid] = true
				}
			}
		}
		return len(has) == usable
	})
	n.eventually("no network without a pod", func() bool { return len(n.waiting()) == 0 })
	if got := n.allocated(); len(got) != usable {
		t.Errorf("seed %d: on record %v", *seed, got)
	}
	for uid := range has {
		if err := n.Detach(t.Context(), uid); err != nil {
			t.Error(err)
		}
	}
	stop()
	if err := n.Live(t.Context(), func() []string { return nil }); err != nil {
		t.Error(err)
	}
	ready := map[string]bool{}
	for _, name := range n.readyNames() {
		ready[podnet.HostIf(name)] = true
	}
	n.eventually("no interface but those that are ready", func() bool {
		for name := range n.interfaces() {
			if !ready[name] {
				return false
			}
		}
		return true
	})
	if got := n.allocated(); len(got) > 0 {
		t.Errorf("seed %d: addresses of no pod are on record: %v", *seed, got)
	}
}
