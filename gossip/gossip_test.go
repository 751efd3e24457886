package gossip

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/clusterd/clusterd/leaktest"
)

// memberlist's Shutdown does not wait for a probe that is under way; it ends by
// itself within a few seconds.
func TestMain(m *testing.M) {
	leaktest.Main(m, goleak.IgnoreAnyFunction("github.com/hashicorp/memberlist.(*Memberlist).probeNode"))
}

// node is a running Members on loopback, its streams over plain TCP.
type node struct {
	*Members
	addr   netip.AddrPort
	stop   func()
	barred *sync.Map // ids that are not admitted
}

func start(t *testing.T, id, name string, addr netip.AddrPort, seeds ...netip.AddrPort) *node {
	t.Helper()
	return startProbing(t, 200*time.Millisecond, id, name, addr, seeds...)
}

func startProbing(t *testing.T, probe time.Duration, id, name string, addr netip.AddrPort, seeds ...netip.AddrPort) *node {
	t.Helper()
	return startWith(t, probe, testKeys(7), id, name, addr, seeds...)
}

func startWith(t *testing.T, probe time.Duration, keys [][]byte, id, name string, addr netip.AddrPort, seeds ...netip.AddrPort) *node {
	t.Helper()
	return startLogging(t, slog.DiscardHandler, probe, keys, id, name, addr, seeds...)
}

func startLogging(t *testing.T, log slog.Handler, probe time.Duration, keys [][]byte, id, name string, addr netip.AddrPort, seeds ...netip.AddrPort) *node {
	t.Helper()
	if !addr.IsValid() {
		addr = netip.MustParseAddrPort("127.0.0.1:0")
	}
	var ln net.Listener
	// The UDP port of the same number must be free too, and a port of before may be
	// another program's for a moment.
	for deadline := time.Now().Add(60 * time.Second); ln == nil; {
		l, err := net.Listen("tcp", addr.String())
		if err == nil {
			a := l.Addr().(*net.TCPAddr).AddrPort()
			var u *net.UDPConn
			if u, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(a)); err == nil {
				u.Close()
				ln, addr = l, a
				break
			}
			l.Close()
		}
		if time.Now().After(deadline) {
			t.Fatalf("no port free for both TCP and UDP: %v", err)
		}
		time.Sleep(10 * time.Millisecond)
	}
	barred := &sync.Map{}
	m, err := New(Config{
		Meta:  Meta{ID: id, Name: name, Version: "test"},
		Addr:  addr,
		Keys:  keys,
		Seeds: func() []netip.AddrPort { return seeds },
		Admits: func(m Meta) bool {
			_, id := barred.Load(m.ID)
			_, name := barred.Load(m.ID + " as " + m.Name)
			return !id && !name
		},
		Logger: slog.New(log),
		Probe:  probe,
		Stream: Stream{Listener: ln, Dial: func(ctx context.Context, a netip.AddrPort) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", a.String())
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	stopped := false
	n := &node{Members: m, addr: addr, barred: barred}
	n.stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
	t.Cleanup(n.stop)
	return n
}

// wait blocks until want holds of the member id as n sees it.
func (n *node) wait(t *testing.T, id string, want ...State) Member {
	t.Helper()
	deadline := time.After(60 * time.Second)
	for {
		changed := n.Changed()
		mem, ok := n.Get(id)
		if ok {
			for _, w := range want {
				if mem.State == w {
					return mem
				}
			}
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("%s sees %s as %q, want one of %v", n.cfg.Meta.Name, id, mem.State, want)
		}
	}
}

// waitAt blocks until the member id is alive at addr as n sees it.
func (n *node) waitAt(t *testing.T, id string, addr netip.AddrPort) {
	t.Helper()
	deadline := time.After(60 * time.Second)
	for {
		changed := n.Changed()
		mem := n.wait(t, id, Alive)
		if mem.Addr == addr {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatalf("%s sees %s at %s, not at %s", n.cfg.Meta.Name, id, mem.Addr, addr)
		}
	}
}

// lines counts what is logged.
type lines struct{ all, warnings atomic.Int64 }

func (*lines) Enabled(context.Context, slog.Level) bool { return true }
func (l *lines) WithAttrs([]slog.Attr) slog.Handler     { return l }
func (l *lines) WithGroup(string) slog.Handler          { return l }
func (l *lines) Handle(_ context.Context, r slog.Record) error {
	l.all.Add(1)
	if r.Level >= slog.LevelWarn {
		l.warnings.Add(1)
	}
	return nil
}

// TestStrangersDoNotFillTheLog: packets of somebody without the key are a few lines,
// however many they are.
func TestStrangersDoNotFillTheLog(t *testing.T) {
	var got lines
	n := startLogging(t, &got, 200*time.Millisecond, testKeys(7), "id-a", "n1", netip.AddrPort{})
	c, err := net.Dial("udp", n.addr.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	rng := rand.NewChaCha8([32]byte{})
	deadline := time.Now().Add(60 * time.Second)
	for got.all.Load() < 1000 { // some are lost on a busy machine
		if time.Now().After(deadline) {
			t.Fatalf("%d lines of packets", got.all.Load())
		}
		b := make([]byte, 1+rng.Uint64()%200)
		_, _ = rng.Read(b)
		if _, err := c.Write(b); err != nil && !errors.Is(err, syscall.ECONNREFUSED) { // it may not listen yet
			t.Fatal(err)
		}
	}
	if n := got.warnings.Load(); n == 0 || n > 10 {
		t.Errorf("%d warnings", n)
	}
}

func TestMultiMembersMeetDieAndReturn(t *testing.T) {
	none := netip.AddrPort{}
	a := start(t, "id-a", "n1", none)
	b := start(t, "id-b", "n2", none, a.addr)
	c := start(t, "id-c", "n3", none, a.addr)
	for _, n := range []*node{a, b, c} {
		for _, id := range []string{"id-a", "id-b", "id-c"} {
			n.wait(t, id, Alive)
		}
	}
	got, ok := a.ByName("n3")
	if !ok || got.ID != "id-c" || got.Addr != c.addr || got.Version != "test" {
		t.Fatalf("ByName(n3) = %+v, %v", got, ok)
	}

	c.stop()
	a.wait(t, "id-c", Dead)
	b.wait(t, "id-c", Dead)

	// It comes back on another port, knowing only itself: the others find it
	// by nothing but its own seeds, and know it by its key.
	c2 := start(t, "id-c", "n3", none, b.addr)
	a.waitAt(t, "id-c", c2.addr)
}

func TestMultiDeadMemberIsSoughtAgain(t *testing.T) {
	a := start(t, "id-a", "n1", netip.AddrPort{})
	b := start(t, "id-b", "n2", netip.AddrPort{}, a.addr)
	a.wait(t, "id-b", Alive)
	addr := b.addr
	b.stop()
	a.wait(t, "id-b", Dead)
	// b returns on its old address with no seeds at all: a must find it.
	start(t, "id-b", "n2", addr)
	a.wait(t, "id-b", Alive)
}

// A member that is back at another address before it was missed is accepted as
// soon as it was missed at the old one, not at the next full exchange (30 s).
func TestMultiQuickMoveIsBelievedSoon(t *testing.T) {
	none := netip.AddrPort{}
	a := startProbing(t, time.Second, "id-a", "n1", none)
	b := startProbing(t, time.Second, "id-b", "n2", none, a.addr)
	c := startProbing(t, time.Second, "id-c", "n3", none, a.addr)
	for _, n := range []*node{a, c} {
		n.wait(t, "id-b", Alive)
	}
	b.stop()
	began := time.Now()
	moved := startProbing(t, time.Second, "id-b", "n2", none, a.addr)
	for _, n := range []*node{a, c} {
		n.waitAt(t, "id-b", moved.addr)
	}
	t.Logf("accepted after %s", time.Since(began).Round(time.Millisecond))
}

// A removed member still has the key and goes on talking; no member that
// knows of the removal lists it again.
func TestMultiRemovedMemberStaysForgotten(t *testing.T) {
	none := netip.AddrPort{}
	a := start(t, "id-a", "n1", none)
	b := start(t, "id-b", "n2", none, a.addr)
	a.wait(t, "id-b", Alive)
	a.barred.Store("id-b", true)
	a.Forget("id-b")
	b.stop()
	again := start(t, "id-b", "n2", b.addr, a.addr)
	again.wait(t, "id-a", Alive)
	// What a hears after that of b, it hears before it meets c through b.
	c := start(t, "id-c", "n3", none, again.addr)
	a.wait(t, "id-c", Alive)
	c.wait(t, "id-b", Alive)
	if m, ok := a.Get("id-b"); ok {
		t.Errorf("a lists the removed member: %+v", m)
	}
}

func TestMultiLeave(t *testing.T) {
	a := start(t, "id-a", "n1", netip.AddrPort{})
	b := start(t, "id-b", "n2", netip.AddrPort{}, a.addr)
	a.wait(t, "id-b", Alive)
	b.wait(t, "id-a", Alive)
	if err := b.Leave(60 * time.Second); err != nil {
		t.Fatal(err)
	}
	a.wait(t, "id-b", Left)
	a.Forget("id-b")
	if _, ok := a.Get("id-b"); ok {
		t.Fatal("a forgotten member is still there")
	}
}

// TestMultiStopUnderSilence: peers that take connections and say nothing (a
// frozen machine) must not hold up the end of Run.
func TestMultiStopUnderSilence(t *testing.T) {
	var seeds []netip.AddrPort
	heard := make(chan net.Conn, 100)
	for range 12 {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		seeds = append(seeds, ln.Addr().(*net.TCPAddr).AddrPort())
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				c, err := ln.Accept()
				if err != nil {
					return
				}
				heard <- c
			}
		}()
		t.Cleanup(func() { ln.Close(); <-done })
	}
	a := start(t, "id-a", "n1", netip.AddrPort{}, seeds...)
	c := <-heard // it is in the middle of asking
	defer c.Close()
	began := time.Now()
	a.stop()
	// memberlist waits 10 s for each of them.
	if took := time.Since(began); took > 60*time.Second {
		t.Fatalf("the end took %s", took)
	}
}

func TestNewRefuses(t *testing.T) {
	good := Config{Meta: Meta{ID: "i", Name: "n"}, Addr: netip.MustParseAddrPort("127.0.0.1:1"), Keys: [][]byte{make([]byte, 32)}}
	for name, spoil := range map[string]func(*Config){
		"no id":     func(c *Config) { c.Meta.ID = "" },
		"no name":   func(c *Config) { c.Meta.Name = "" },
		"no port":   func(c *Config) { c.Addr = netip.MustParseAddrPort("127.0.0.1:0") },
		"short key": func(c *Config) { c.Keys = [][]byte{make([]byte, 32), make([]byte, 16)} },
		"no key":    func(c *Config) { c.Keys = nil },
		"long name": func(c *Config) { c.Meta.Name = string(bytes.Repeat([]byte{'x'}, 600)) },
	} {
		c := good
		spoil(&c)
		if _, err := New(c); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	if _, err := New(good); err != nil {
		t.Errorf("good config: %v", err)
	}
}

func FuzzMeta(f *testing.F) {
	f.Add([]byte(`{"n":"n1","v":"1"}`))
	f.Add([]byte(`{}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := decodeMeta(b)
		if err == nil && m.Name == "" {
			t.Fatal("a meta without a name was accepted")
		}
	})
}

// TestMultiBorrowedName: a node under another node's name is not listed,
// however often it says so, and is once it may be called so.
func TestMultiBorrowedName(t *testing.T) {
	a := start(t, "id-a", "n1", netip.AddrPort{})
	a.barred.Store("id-ghost as n2", true)
	b := start(t, "id-b", "n2", netip.AddrPort{}, a.addr)
	b.barred.Store("id-ghost as n2", true)
	a.wait(t, "id-b", Alive)
	ghost := start(t, "id-ghost", "n2", netip.AddrPort{}, a.addr)
	ghost.wait(t, "id-a", Alive) // it has said who it is
	if mem, ok := a.ByName("n2"); !ok || mem.ID != "id-b" {
		t.Errorf("n2 is %+v", mem)
	}
	if mem, ok := a.Get("id-ghost"); ok {
		t.Errorf("the ghost is listed: %+v", mem)
	}
	a.barred.Delete("id-ghost as n2")
	a.wait(t, "id-ghost", Alive)
	// And it goes when it may not be here any more.
	a.barred.Store("id-ghost as n2", true)
	deadline := time.After(60 * time.Second)
	for {
		changed := a.Changed()
		if _, ok := a.Get("id-ghost"); !ok {
			return
		}
		select {
		case <-changed:
		case <-deadline:
			t.Fatal("the ghost stays")
		}
	}
}
