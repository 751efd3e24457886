package pathprobe

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"
)

var (
	addrA = netip.MustParseAddr("127.0.0.2")
	addrB = netip.MustParseAddr("127.0.0.3")
	addrC = netip.MustParseAddr("127.0.0.4") // no host
)

// start runs a Prober until the test ends.
func start(t *testing.T, port int, own netip.Addr, peers ...Peer) *Prober {
	t.Helper()
	p := New(Config{Port: port, MTU: func(netip.Addr) (int, error) { return 1500, nil }})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { p.Run(ctx) })
	t.Cleanup(func() { cancel(); wg.Wait() })
	p.Set([]netip.Addr{own}, peers)
	return p
}

// freePort is one that is free at the tests' addresses.
func freePort(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port
}

// wait looks at a peer's result until it is as wanted.
func wait(t *testing.T, p *Prober, name, what string, is func(Result) bool) {
	t.Helper()
	var last Result
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		for _, r := range p.Results() {
			if r.Name == name {
				if last = r; is(r) {
					return
				}
			}
		}
	}
	t.Fatalf("waited a minute for %s: %+v, stream: %v", what, last, last.Stream)
}

func TestTwoNodes(t *testing.T) {
	port := freePort(t)
	a := start(t, port, addrA, Peer{Name: "b", Addr: addrB}, Peer{Name: "c", Addr: addrC})
	b := start(t, port, addrB, Peer{Name: "a", Addr: addrA})
	for p, name := range map[*Prober]string{a: "b", b: "a"} {
		wait(t, p, name, "answers, long packets and a stream", func(r Result) bool {
			return r.Sent > r.Lost && r.Silent == 0 && !r.Answered.IsZero() && !r.Heard.IsZero() && r.RTT > 0 &&
				r.MTU == 1500 && r.Carries == 0 && !r.Streamed.IsZero() && r.Stream == nil && r.Damaged == 0
		})
	}
	wait(t, a, "c", "silence", func(r Result) bool {
		return r.Silent >= 2 && r.Lost == r.Sent && r.Answered.IsZero() && r.Heard.IsZero() && r.Stream != nil
	})
	// A stranger is not answered, by neither protocol.
	stranger, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(netip.MustParseAddrPort("127.0.0.9:0")), net.UDPAddrFromAddrPort(netip.AddrPortFrom(addrA, uint16(port))))
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	ping := make([]byte, headerLen)
	message{kind: kindPing, run: 2}.put(ping)
	if _, err := stranger.Write(ping); err != nil {
		t.Fatal(err)
	}
	conn, err := (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP("127.0.0.9")}}).Dial("tcp", netip.AddrPortFrom(addrA, uint16(port)).String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	if n, err := conn.Read(make([]byte, 1)); n > 0 || err == nil || strings.Contains(err.Error(), "timeout") {
		t.Errorf("a stranger's stream: %d bytes, %v", n, err)
	}
	_ = stranger.SetDeadline(time.Now().Add(500 * time.Millisecond))
	if n, err := stranger.Read(make([]byte, 100)); err == nil {
		t.Errorf("a stranger's ping was answered with %d bytes", n)
	}
	// Another address, other peers: what stays is kept.
	a.Set([]netip.Addr{addrC}, []Peer{{Name: "b", Addr: addrB}})
	b.Set([]netip.Addr{addrB}, []Peer{{Name: "a", Addr: addrC}})
	wait(t, b, "a", "answers of the new address", func(r Result) bool { return r.Addr == addrC && !r.Answered.IsZero() && !r.Heard.IsZero() })
	if r := a.Results(); len(r) != 1 || r[0].Since.IsZero() {
		t.Errorf("after the move: %+v", r)
	}
}

func TestDamagedAndForeign(t *testing.T) {
	p := New(Config{})
	p.Set(nil, []Peer{{Name: "b", Addr: addrB}})
	ping := func() []byte {
		b := make([]byte, 100)
		message{kind: kindPing, run: 2}.put(b)
		return b
	}
	if !p.take(ping(), addrB, time.Now()) || p.take(ping(), addrC, time.Now()) {
		t.Error("peers are answered, strangers are not")
	}
	bad := ping()
	bad[90]++
	if p.take(bad, addrB, time.Now()) || p.take([]byte("hello"), addrB, time.Now()) || p.take(nil, addrB, time.Now()) {
		t.Error("what is none of ours was answered")
	}
	answer := ping()
	message{kind: kindAnswer, run: p.run + 4, seq: 1}.put(answer)
	if p.take(answer, addrB, time.Now()) {
		t.Error("an answer was answered")
	}
	if r := p.Results(); r[0].Damaged != 1 || !r[0].Answered.IsZero() || r[0].Heard.IsZero() {
		t.Errorf("%+v", r[0])
	}
}

// TestManyPeers: the rate has a bound.
func TestManyPeers(t *testing.T) {
	port := freePort(t)
	var peers []Peer
	for i := range 250 {
		peers = append(peers, Peer{Name: "n", Addr: netip.AddrFrom4([4]byte{127, 0, 1, byte(i + 1)})})
	}
	began := time.Now()
	p := start(t, port, addrA, peers...)
	for sent := 0; sent == 0; {
		time.Sleep(time.Second)
		p.mu.Lock()
		for _, o := range p.peers {
			sent += int(o.window.next)
		}
		p.mu.Unlock()
		if most := int(time.Since(began)/pingPause) + 2; sent > most || time.Since(began) > time.Minute {
			t.Fatalf("%d pings, at most %d are due", sent, most)
		}
	}
}

// TestRecall: what a former process found is told of the peer and the way that it was
// found of, and no other.
func TestRecall(t *testing.T) {
	p := New(Config{Port: 1})
	was := Peer{"b", addrB, "192.0.2.1 192.0.2.2"}
	told := func() int {
		t.Helper()
		r := p.Results()
		if len(r) != 1 {
			t.Fatalf("%+v", r)
		}
		return r[0].Carries
	}
	for _, now := range []Peer{{"c", was.Addr, was.Way}, {"b", addrC, was.Way}, {"b", was.Addr, "192.0.2.1 192.0.2.3"}} {
		p.Recall([]Found{{was, 1400}})
		p.Set([]netip.Addr{addrA}, nil)
		if p.Set([]netip.Addr{addrA}, []Peer{now}); told() != 0 {
			t.Errorf("%+v: %d bytes were found of another", now, told())
		}
	}
	p.Recall([]Found{{was, 1400}})
	p.Set([]netip.Addr{addrA}, nil)
	if p.Set([]netip.Addr{addrA}, []Peer{was}); told() != 1400 {
		t.Errorf("%d bytes, want what was found", told())
	}
	if p.Set([]netip.Addr{addrA}, []Peer{{was.Name, was.Addr, "another"}}); told() != 0 {
		t.Errorf("%d bytes by another way", told())
	}
	if p.Set([]netip.Addr{addrA}, []Peer{was}); told() != 0 {
		t.Errorf("%d bytes, which were forgotten", told())
	}
}
