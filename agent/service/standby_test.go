package service

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/names"
)

// segment is the neighbours of a node: which addresses they answer for.
type segment struct {
	told
	mu      sync.Mutex
	answers map[netip.Addr]bool
	asked   int
	toldOf  []netip.Addr
}

func (s *segment) Answered(addrs []netip.Addr, within time.Duration) (map[netip.Addr]bool, error) {
	s.mu.Lock()
	s.asked++
	out := map[netip.Addr]bool{}
	for _, a := range addrs {
		out[a] = s.answers[a]
	}
	s.mu.Unlock()
	if slices.ContainsFunc(addrs, func(a netip.Addr) bool { return !out[a] }) {
		time.Sleep(within)
	}
	return out, nil
}

func (s *segment) Tell(addrs []netip.Addr) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.toldOf = append(s.toldOf, addrs...)
	return nil
}

func (s *segment) set(addr netip.Addr, answers bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers[addr] = answers
}

// TestStandby: an address is taken over within a second of its node's silence, unless
// another answers for it or the node never answered; and is given back when it is
// answered for, or when the takeover ends.
func TestStandby(t *testing.T) {
	peer, vip, other := netip.MustParseAddr("192.0.2.2"), netip.MustParseAddr("192.0.2.100"), netip.MustParseAddr("192.0.2.101")
	type world struct {
		*segment
		d     *standby
		known bool
	}
	inBubble := func(name string, fn func(t *testing.T, w *world)) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := &world{segment: &segment{answers: map[netip.Addr]bool{peer: true, vip: true}}, known: true}
				w.d = newStandby(w.segment, slog.New(slog.DiscardHandler), func() bool { return w.known }, func() {})
				ctx, cancel := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				wg.Go(func() { w.d.run(ctx) })
				defer wg.Wait()
				defer cancel()
				w.d.set(nil, map[netip.Addr][]netip.Addr{peer: {vip}})
				fn(t, w)
			})
		})
	}
	held := func(t *testing.T, w *world, after time.Duration, want ...netip.Addr) {
		t.Helper()
		time.Sleep(after)
		synctest.Wait()
		w.d.mu.Lock()
		takeovers := w.d.takeovers
		w.d.mu.Unlock()
		if got := w.d.set(nil, takeovers); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s later it holds %v, want %v", after, got, want)
		}
	}
	inBubble("the node is gone", func(t *testing.T, w *world) {
		held(t, w, 3*time.Second)
		w.set(peer, false)
		w.set(vip, false)
		held(t, w, 300*time.Millisecond) // one lost answer, or two, are none
		held(t, w, 500*time.Millisecond, vip)
		held(t, w, 3*time.Second, vip)
		w.set(peer, true) // it boots: its address is not there yet
		held(t, w, 3*time.Second, vip)
		w.set(vip, true)
		held(t, w, 2*time.Second, vip) // until it has seen that both answer
		held(t, w, time.Second)
	})
	inBubble("another is elected", func(t *testing.T, w *world) {
		held(t, w, time.Second)
		w.set(peer, false)
		w.set(vip, false)
		held(t, w, time.Second, vip)
		if got := w.d.set([]netip.Addr{vip}, nil); len(got) != 0 {
			t.Errorf("beside what it is elected for it holds %v", got)
		}
		if got := w.d.set(nil, map[netip.Addr][]netip.Addr{peer: {vip}}); len(got) != 0 {
			t.Errorf("from a takeover before it holds %v", got)
		}
	})
	inBubble("another answers for it", func(t *testing.T, w *world) {
		held(t, w, time.Second)
		w.set(peer, false)
		held(t, w, 3*time.Second)
	})
	inBubble("it never answered", func(t *testing.T, w *world) {
		w.set(peer, false)
		w.set(vip, false)
		held(t, w, 5*time.Second)
	})
	inBubble("this node may be the lost one", func(t *testing.T, w *world) {
		held(t, w, time.Second)
		w.known = false
		w.set(peer, false)
		w.set(vip, false)
		held(t, w, 5*time.Second)
	})
	inBubble("own addresses", func(t *testing.T, w *world) {
		w.set(vip, false)
		w.d.set([]netip.Addr{vip, other}, nil)
		time.Sleep(3 * time.Second)
		if len(w.toldOf) != 0 {
			t.Errorf("told of %v", w.toldOf)
		}
		w.set(vip, true) // a standby has taken it over
		time.Sleep(1500 * time.Millisecond)
		synctest.Wait()
		before := len(w.toldOf)
		w.set(vip, false) // and has given it back
		time.Sleep(3 * time.Second)
		synctest.Wait()
		if before == 0 || len(w.toldOf) != before+1 || slices.Contains(w.toldOf, other) {
			t.Errorf("told of %v, %d of them while another answered", w.toldOf, before)
		}
		w.d.set(nil, nil)
		asked := w.asked
		time.Sleep(time.Minute)
		if w.asked > asked+1 {
			t.Errorf("%d questions with nothing to ask for", w.asked-asked)
		}
	})
}

// TestTakeovers: the standby of an address is the node that is elected without the elected
// one, if both are in one network; and what it has taken over is announced.
func TestTakeovers(t *testing.T) {
	b := newBench(t)
	nodes := []*v1.Node{node("n1", "192.0.2.1"), node("n2", "192.0.2.2"), node("n3", "198.51.100.3")}
	for i, network := range []string{"192.0.2.0/24", "192.0.2.0/24", "198.51.100.0/24"} {
		nodes[i].Annotations = map[string]string{names.AnnounceNetworks: network}
		b.put(nodes[i])
	}
	var mine, theirs netip.Addr
	for i := range 50 {
		addr := netip.AddrFrom4([4]byte{192, 0, 2, byte(100 + i)})
		switch best, _ := elect(addr, nodes, nil); best {
		case "n1":
			mine = addr
		case "n2":
			theirs = addr
		}
		if mine.IsValid() && theirs.IsValid() {
			break
		}
	}
	b.put(balanced("mine", "10.96.0.20", mine.String(), core.ReasonAddressGiven), balanced("theirs", "10.96.0.21", theirs.String(), core.ReasonAddressGiven),
		balanced("far", "10.96.0.22", "198.51.100.77", core.ReasonAddressGiven))
	n2 := netip.MustParseAddr("192.0.2.2")
	if got := fmt.Sprint(b.standby.takeovers); got != fmt.Sprint(map[netip.Addr][]netip.Addr{n2: {theirs}}) {
		t.Errorf("takeovers are %s", got)
	}
	if got := fmt.Sprint(b.announced.addrs); got != fmt.Sprintf("[%s]", mine) {
		t.Errorf("announced are %s", got)
	}
	b.standby.hold(theirs, true)
	b.put()
	want := []netip.Addr{mine, theirs}
	slices.SortFunc(want, netip.Addr.Compare)
	if got := fmt.Sprint(b.announced.addrs); got != fmt.Sprint(want) {
		t.Errorf("announced are %s, want %v", got, want)
	}
	nodes[1].Status.Conditions = nil // the API knows now: n1 is elected
	b.put(nodes[1])
	if got := fmt.Sprint(b.announced.addrs); got != fmt.Sprint(want) || len(b.standby.takeovers) != 0 {
		t.Errorf("announced are %s, takeovers %v", got, b.standby.takeovers)
	}
}
