package dns

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/net/ipv4"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

var stranger = netip.MustParseAddr("203.0.113.9")

// manyEndpointsOf is a headless Service with that many endpoints, whose host names are
// e-0 and so on, in slices of a hundred.
func manyEndpointsOf(name string, n int) (*v1.Service, []*discoveryv1.EndpointSlice) {
	httpOf := discoveryv1.EndpointPort{Name: ptr.To("http"), Protocol: ptr.To(v1.ProtocolTCP), Port: ptr.To[int32](8080)}
	var list []discoveryv1.Endpoint
	for i := range n {
		list = append(list, at(fmt.Sprintf("10.244.%d.%d", i/250, i%250), fmt.Sprintf("e-%d", i), true))
	}
	var slices_ []*discoveryv1.EndpointSlice
	for part := range slices.Chunk(list, 100) {
		slices_ = append(slices_, slice("prod", fmt.Sprintf("%s-%d", name, len(slices_)), name, httpOf, part...))
	}
	return service("prod", name, "None", v1.ServicePort{Name: "http", Protocol: v1.ProtocolTCP, Port: 80}), slices_
}

// serveTest serves s on a free port of addr by sockets, and is where.
func serveTest(t *testing.T, s *Server, addr netip.Addr) netip.AddrPort {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var udp []*net.UDPConn
	var tcp *net.TCPListener
	var err error
	for tries := 0; tries == 0 || errors.Is(err, unix.EADDRINUSE) && tries < 100; tries++ { // another's port of TCP
		udp, tcp, err = listen(ctx, netip.AddrPortFrom(addr, 0))
	}
	if errors.Is(err, unix.EADDRNOTAVAIL) || errors.Is(err, unix.EAFNOSUPPORT) {
		cancel()
		t.Skipf("this machine has no %s: %v", addr, err)
	}
	if err != nil {
		cancel()
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- s.serveSockets(ctx, addr, udp, tcp) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	return udp[0].LocalAddr().(*net.UDPAddr).AddrPort()
}

// fullSocket has room for no datagram more.
type fullSocket struct {
	batches
	room int
}

func (f *fullSocket) WriteBatch(ms []ipv4.Message, flags int) (int, error) {
	if flags&unix.MSG_DONTWAIT == 0 {
		return 0, errors.New("the reader of the socket would wait")
	}
	n := min(f.room, len(ms))
	if f.room -= n; n == 0 {
		return 0, unix.EAGAIN
	}
	return n, nil
}

// The bug: answers to pods that are not there any more filled the socket, and who reads
// its questions waited until they were given up.
func TestNoRoomForAnswers(t *testing.T) {
	f := &fullSocket{room: 5}
	writeAll(f, make([]ipv4.Message, batch))
	if f.room != 0 {
		t.Errorf("room for %d answers is left", f.room)
	}
}

// Refusals are counted as CoreDNS counts them.
func TestRefusalsAreCounted(t *testing.T) {
	s := newTestServer(t)
	b, err := new(dns.Msg).SetQuestion("web.prod.svc.cluster.local.", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	never := func(func() []byte) { t.Error("it is looked into") }
	s.packet(t.Context(), b, stranger, nil, never)
	s.packet(t.Context(), b[:headerSize+3], loopback, nil, never)
	c := &fakeStream{r: bytes.NewReader(append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...))}
	s.stream(t.Context(), c, stranger)
	for labels, want := range map[[2]string]float64{{"REFUSED", droppedZone}: 2, {"FORMERR", droppedZone}: 1} {
		if got := testutil.ToFloat64(s.metrics.responses.WithLabelValues(serverLabel, labels[1], "", labels[0], "")); got != want {
			t.Errorf("%s: %v are counted, want %v", labels[0], got, want)
		}
	}
	if got := testutil.ToFloat64(s.metrics.requests.WithLabelValues(serverLabel, droppedZone, "", "tcp", "1", "A")); got != 1 {
		t.Errorf("%v questions by TCP are counted", got)
	}
}

// TestThousandEndpoints: a headless Service with more endpoints than a datagram holds is
// answered in part, and says so; by TCP all come. Which come first differs.
func TestThousandEndpoints(t *testing.T) {
	const n = 1500
	s := newTestServer(t)
	svc, list := manyEndpointsOf("many", n)
	if err := s.zone.catalog.services.Add(svc); err != nil {
		t.Fatal(err)
	}
	for _, o := range list {
		if err := s.zone.catalog.slices.Add(o); err != nil {
			t.Fatal(err)
		}
	}
	at := serveTest(t, s, loopback).String()
	const name = "many.prod.svc.cluster.local."
	get := func(network string, kind uint16, name string, size uint16) *dns.Msg {
		t.Helper()
		c := dns.Client{Net: network, Timeout: 30 * time.Second, UDPSize: dns.MaxMsgSize}
		req := new(dns.Msg).SetQuestion(name, kind)
		if size > 0 {
			req.SetEdns0(size, false)
		}
		m, _, err := c.Exchange(req, at)
		if err != nil {
			t.Fatalf("%s %s %s, EDNS %d: %v", network, name, dns.TypeToString[kind], size, err)
		}
		m.Compress = true
		return m
	}
	firsts := map[string]bool{}
	for range 20 {
		for size, room := range map[uint16]int{0: 512, 100: 512, 900: 900, 1232: 1232, 65535: 1232} {
			m := get("udp", dns.TypeA, name, size)
			most := (room - m.Len() + 16*len(m.Answer)) / 16
			if !m.Truncated || len(m.Answer) != most || m.Len() > room {
				t.Errorf("EDNS %d: truncated %v, %d of %d addresses in %d bytes", size, m.Truncated, len(m.Answer), most, m.Len())
			}
			seen := map[string]bool{}
			for _, rr := range m.Answer {
				seen[rr.String()] = true
			}
			if len(seen) != len(m.Answer) {
				t.Error("an address comes twice")
			}
			firsts[m.Answer[0].String()] = true
		}
	}
	if len(firsts) < 20 {
		t.Errorf("of 100 answers %d begin differently", len(firsts))
	}
	if m := get("tcp", dns.TypeA, name, 0); m.Truncated || len(m.Answer) != n {
		t.Errorf("TCP: truncated %v, %d addresses", m.Truncated, len(m.Answer))
	}
	if m := get("udp", dns.TypeA, "e-1400.many.prod.svc.cluster.local.", 0); data(m) != "10.244.5.150" {
		t.Error(m)
	}
	// Targets have no addresses beside them where there is no room.
	if m := get("udp", dns.TypeSRV, "_http._tcp."+name, 1232); !m.Truncated || len(m.Answer) == 0 || m.Len() > 1232 {
		t.Errorf("SRV: truncated %v, %d records in %d bytes", m.Truncated, len(m.Answer), m.Len())
	}
	if m := get("tcp", dns.TypeSRV, "_http._tcp."+name, 0); len(m.Answer) < 1000 {
		t.Errorf("SRV by TCP: %d records", len(m.Answer))
	}
	// One of them goes: the next answer is without it, though the others are remembered.
	gone := list[3].DeepCopy()
	gone.Endpoints = gone.Endpoints[1:]
	if err := s.zone.catalog.slices.Update(gone); err != nil {
		t.Fatal(err)
	}
	if m := get("udp", dns.TypeA, "e-300.many.prod.svc.cluster.local.", 0); m.Rcode != dns.RcodeNameError {
		t.Error(m)
	}
	if m := get("tcp", dns.TypeA, name, 0); len(m.Answer) != n-1 {
		t.Errorf("%d addresses", len(m.Answer))
	}
}

// TestDeletedUnderLoad: after the event of a Service's end no answer has it, however
// many are asking.
func TestDeletedUnderLoad(t *testing.T) {
	s := newTestServer(t)
	const name = "web.prod.svc.cluster.local."
	at := serveTest(t, s, loopback).String()
	var phase atomic.Int64 // of four: it is there, it goes, it is gone, it comes
	var asked, checked atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			c := dns.Client{Timeout: 30 * time.Second}
			conn, err := c.Dial(at)
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			for ctx.Err() == nil {
				before := phase.Load()
				m, _, err := c.ExchangeWithConn(new(dns.Msg).SetQuestion(name, dns.TypeA), conn)
				after := phase.Load()
				if err != nil {
					t.Error(err)
					return
				}
				asked.Add(1)
				if before != after || before%2 == 1 {
					continue // around an event either is right
				}
				checked.Add(1)
				if gone := before%4 == 2; gone != (m.Rcode == dns.RcodeNameError) || !gone && data(m) != "10.96.0.5" {
					t.Errorf("in phase %d: %v", before, m)
					return
				}
			}
		})
	}
	web := s.zone.catalog.service("prod", "web")
	end := time.Now().Add(time.Minute)
	some := func() { // answers in this phase
		for seen := asked.Load(); asked.Load() < seen+12 && !t.Failed() && time.Now().Before(end); {
			runtime.Gosched()
		}
	}
	for phase.Load() < 800 && !t.Failed() && time.Now().Before(end) {
		some()
		phase.Add(1)
		if err := s.zone.catalog.services.Delete(web); err != nil {
			t.Fatal(err)
		}
		phase.Add(1)
		some()
		phase.Add(1)
		if err := s.zone.catalog.services.Add(web); err != nil {
			t.Fatal(err)
		}
		phase.Add(1)
	}
	cancel()
	wg.Wait()
	t.Logf("%d answers, %d of them between two events, %d events", asked.Load(), checked.Load(), phase.Load()/2)
	if checked.Load() == 0 {
		t.Error("nothing was looked at")
	}
}

// TestSixAlone serves names at an IPv6 address, which is all that some clusters have.
func TestSixAlone(t *testing.T) {
	s := newTestServer(t)
	at := serveTest(t, s, netip.IPv6Loopback()).String()
	for _, network := range []string{"udp", "tcp"} {
		c := dns.Client{Net: network, Timeout: 30 * time.Second}
		for _, tt := range []struct {
			name string
			kind uint16
			want string
		}{
			{"dual.prod.svc.cluster.local.", dns.TypeAAAA, "fd00::7"},
			{"7.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.D.F.ip6.ARPA.", dns.TypePTR, "dual.prod.svc.cluster.local."},
		} {
			m, _, err := c.Exchange(new(dns.Msg).SetQuestion(tt.name, tt.kind), at)
			if err != nil || data(m) != tt.want {
				t.Errorf("%s %s: %v %v", network, tt.name, m, err)
			}
		}
	}
}

// TestLetters: the question comes back in the letters in which it was asked (some
// resolvers check that), whichever way it is answered.
func TestLetters(t *testing.T) {
	o := newOutside(t, say("www.example.com. 60 IN A 192.0.2.1"))
	s := newTestServer(t, o.addr)
	for _, name := range []string{"wEb.PROD.sVc.cluster.LOCAL.", "NoSuch.prod.svc.CLUSTER.local.", "WWW.example.COM.", "www.EXAMPLE.com.", "aLiAs.prod.svc.cluster.local.", "DB.prod.svc.cluster.LOCAL."} {
		for _, kind := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeSRV} {
			if m := s.ask(t, name, kind); m.Question[0].Name != name {
				t.Errorf("%s: %s", name, m.Question[0].Name)
			}
		}
	}
}

// TestLongNames: 255 bytes are a name, inside and outside; 256 are none.
func TestLongNames(t *testing.T) {
	label := strings.Repeat("a", 63) + "."
	o := newOutside(t, func(w dns.ResponseWriter, r *dns.Msg) { say(r.Question[0].Name+" 60 IN A 192.0.2.1")(w, r) })
	s := newTestServer(t, o.addr)
	outside := label + label + label + strings.Repeat("b", 61) + "."
	for range 2 {
		if m := s.ask(t, outside, dns.TypeA, func(m *dns.Msg) { m.SetEdns0(1232, false) }); data(m) != "192.0.2.1" {
			t.Error(m)
		}
	}
	inside := label + label + label
	inside += strings.Repeat("b", 254-len(inside)-len("svc.cluster.local.")-1) + ".svc.cluster.local."
	if m := s.ask(t, inside, dns.TypeA); m.Rcode != dns.RcodeNameError || len(m.Ns) != 1 {
		t.Error(m)
	}
	b, err := new(dns.Msg).SetQuestion(inside, dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	long := slices.Insert(b, headerSize, 1, 'x') // of 257 bytes
	out := s.packet(t.Context(), long, loopback, nil, func(func() []byte) { t.Error("it is asked outside") })
	if len(out) < headerSize || out[3]&0xf != dns.RcodeFormatError {
		t.Errorf("257 bytes: % x", out)
	}
}

// TestAliasesOutside: an alias that leads to another, past the bound, or to what is not
// there.
func TestAliasesOutside(t *testing.T) {
	o := newOutside(t, say("example.com. 900 IN SOA ns.example.com. root.example.com. 1 2 3 4 60"))
	s := newTestServer(t, o.addr)
	add := func(name, target string) {
		err := s.zone.catalog.services.Add(&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: name}, Spec: v1.ServiceSpec{Type: v1.ServiceTypeExternalName, ExternalName: target}})
		if err != nil {
			t.Fatal(err)
		}
	}
	for i := range 12 {
		add(fmt.Sprintf("hop-%d", i), fmt.Sprintf("hop-%d.prod.svc.cluster.local", i+1))
	}
	add("hop-12", "web.prod.svc.cluster.local")
	add("a", "b.prod.svc.cluster.local")
	add("b", "a.prod.svc.cluster.local")
	add("gone", "no.example.com")
	add("missing", "nosuch.prod.svc.cluster.local")
	for name, want := range map[string]int{
		"hop-0": dns.RcodeServerFailure, "a": dns.RcodeServerFailure, "gone": dns.RcodeNameError, "missing": dns.RcodeNameError, "hop-6": dns.RcodeSuccess,
	} {
		if m := s.ask(t, name+".prod.svc.cluster.local.", dns.TypeA); m.Rcode != want {
			t.Errorf("%s: %v", name, m)
		}
	}
	if n := o.asked.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
}

// TestHugeText: 60 KB come by TCP, and what is too long for UDP says so.
func TestHugeText(t *testing.T) {
	var records []string
	for i := range 230 {
		records = append(records, fmt.Sprintf(`txt.example.com. 60 IN TXT "%d%s"`, i, strings.Repeat("x", 250)))
	}
	o := newOutside(t, func(w dns.ResponseWriter, r *dns.Msg) {
		if w.RemoteAddr().Network() == "udp" {
			m := new(dns.Msg).SetReply(r)
			m.Truncated = true
			_ = w.WriteMsg(m)
			return
		}
		say(records...)(w, r)
	})
	s := newTestServer(t, o.addr)
	at := serveTest(t, s, loopback).String()
	for network, want := range map[string]int{"udp": 0, "tcp": len(records)} {
		c := dns.Client{Net: network, Timeout: 30 * time.Second}
		m, _, err := c.Exchange(new(dns.Msg).SetQuestion("txt.example.com.", dns.TypeTXT), at)
		if err != nil || m.Truncated != (network == "udp") || network == "tcp" && len(m.Answer) != want {
			t.Errorf("%s: %v, %d records", network, err, len(m.Answer))
		}
	}
}

// TestStrangers: who is not of the cluster is refused, and does not make the node list
// its addresses each time.
func TestStrangers(t *testing.T) {
	s := newTestServer(t)
	lists := 0
	s.own.list = func() ([]net.Addr, error) {
		lists++
		return net.InterfaceAddrs()
	}
	b, err := new(dns.Msg).SetQuestion("web.prod.svc.cluster.local.", dns.TypeA).Pack()
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	for range 1000 {
		out := s.packet(t.Context(), b, stranger, nil, func(func() []byte) { t.Fatal("it is looked into") })
		if out[3]&0xf != dns.RcodeRefused || len(out) > len(b) {
			t.Fatalf("% x", out)
		}
	}
	if most := 1 + int(time.Since(began)/localAddressesFor); lists == 0 || lists > most {
		t.Errorf("the node's addresses were listed %d times, want 1 to %d", lists, most)
	}
	if !s.own.has(loopback) {
		t.Error("127.0.0.1 is no address of the node's")
	}
}

// TestBursts: as many datagrams as fit the socket at once, of several clients, are each
// answered to whoever asked; the odd ones among them too.
func TestBursts(t *testing.T) {
	s := newTestServer(t)
	at := serveTest(t, s, loopback)
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(at))
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			_ = c.SetReadBuffer(1 << 20)
			for round := range 20 {
				for i := range 40 {
					req := new(dns.Msg).SetQuestion([]string{"web.prod.svc.cluster.local.", "www.example.com.", "_http._tcp.web.prod.svc.cluster.local."}[i%3], dns.TypeSRV)
					req.Id = uint16(round*40 + i)
					b, err := req.Pack()
					if err != nil {
						t.Error(err)
						return
					}
					if i%10 == 9 {
						b = b[:14] // the name is cut off: FORMERR
					}
					if _, err := c.Write(b); err != nil {
						t.Error(err)
						return
					}
				}
				seen := map[uint16]bool{}
				buf := make([]byte, 4096)
				for len(seen) < 40 {
					_ = c.SetReadDeadline(time.Now().Add(time.Minute))
					n, err := c.Read(buf)
					if err != nil || n < headerSize {
						t.Errorf("round %d: %d of 40 answers: %v", round, len(seen), err)
						return
					}
					id := binary.BigEndian.Uint16(buf)
					want := []byte{dns.RcodeSuccess, dns.RcodeServerFailure, dns.RcodeSuccess}[int(id)%40%3]
					if int(id)%40%10 == 9 {
						want = dns.RcodeFormatError
					}
					if seen[id] || int(id)/40 != round || buf[3]&0xf != want {
						t.Errorf("round %d: answer %d has code %d, want %d, again: %v", round, id, buf[3]&0xf, want, seen[id])
						return
					}
					seen[id] = true
				}
			}
		})
	}
	wg.Wait()
}

// TestSlowStreams: who opens more connections than he may, and sends nothing, keeps
// nobody else from asking.
func TestSlowStreams(t *testing.T) {
	s := newTestServer(t)
	at := serveTest(t, s, loopback).String()
	var held []net.Conn
	for range maxStreamsPerClient + 8 {
		c, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		held = append(held, c)
	}
	// Those past the bound are closed at once.
	for _, c := range held[maxStreamsPerClient:] {
		_ = c.SetReadDeadline(time.Now().Add(time.Minute))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("a connection too many: %v", err)
		}
	}
	var d net.Dialer
	d.LocalAddr = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}
	c := dns.Client{Net: "tcp", Timeout: 30 * time.Second, Dialer: &d}
	if m, _, err := c.Exchange(new(dns.Msg).SetQuestion("web.prod.svc.cluster.local.", dns.TypeA), at); err != nil || data(m) != "10.96.0.5" {
		t.Errorf("another client: %v %v", m, err)
	}
	u := dns.Client{Timeout: 30 * time.Second}
	if m, _, err := u.Exchange(new(dns.Msg).SetQuestion("web.prod.svc.cluster.local.", dns.TypeA), at); err != nil || data(m) != "10.96.0.5" {
		t.Errorf("by UDP: %v %v", m, err)
	}
}

// TestManyWait: servers outside are silent, and eight clients ask for twenty names each.
// Those past the bounds fail, none goes without an answer, and the cluster's names are
// answered all the while.
func TestManyWait(t *testing.T) {
	o := newOutside(t, say("www.example.com. 60 IN A 192.0.2.1"))
	o.quiet.Store(true)
	s := newTestServer(t, o.addr)
	s.forward.times = usual
	const clients, each, most, mostEach = 8, 20, 64, 12
	s.clients = newLimiter(most, mostEach)
	at := serveTest(t, s, loopback)
	var conns [clients]*net.UDPConn
	for i := range conns {
		c, err := net.DialUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, byte(10+i))}, net.UDPAddrFromAddrPort(at))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns[i] = c
	}
	c := dns.Client{Timeout: 30 * time.Second}
	count := func() (waited, refused float64) {
		return testutil.ToFloat64(s.metrics.misses), testutil.ToFloat64(s.metrics.rejects)
	}
	end := time.Now().Add(time.Minute)
	for round := 0; ; round++ {
		waitedBefore, refusedBefore := count()
		for i, c := range conns {
			for n := range each {
				req := new(dns.Msg).SetQuestion(fmt.Sprintf("n-%d.c-%d.r-%d.example.", n, i, round), dns.TypeA)
				req.Id = uint16(n)
				b, err := req.Pack()
				if err != nil {
					t.Fatal(err)
				}
				if _, err := c.Write(b); err != nil {
					t.Fatal(err)
				}
			}
		}
		var waited, refused float64
		for waited+refused < clients*each {
			if time.Now().After(end) {
				t.Fatalf("%v questions wait and %v were refused, of %d", waited, refused, clients*each)
			}
			<-time.After(time.Millisecond)
			waited, refused = count()
			waited, refused = waited-waitedBefore, refused-refusedBefore
		}
		if m, _, err := c.Exchange(new(dns.Msg).SetQuestion("web.prod.svc.cluster.local.", dns.TypeA), at.String()); err != nil || data(m) != "10.96.0.5" {
			t.Errorf("a name of the cluster: %v %v", m, err)
		}
		for _, c := range conns {
			buf := make([]byte, 4096)
			for i := range each {
				_ = c.SetReadDeadline(time.Now().Add(time.Minute))
				if n, err := c.Read(buf); err != nil || n < headerSize || buf[3]&0xf != dns.RcodeServerFailure {
					t.Fatalf("answer %d of %d: % x: %v", i, each, buf[:n], err)
				}
			}
		}
		if refused > clients*each-most {
			t.Fatalf("%v questions were refused for their number, and %d may wait", refused, most)
		}
		if refused == clients*each-most {
			break
		}
		// A busy machine was so late that the first had ended before the last came.
		if t.Logf("round %d: %v questions were refused", round, refused); time.Now().After(end) {
			t.Fatal("the bound was never reached")
		}
	}
	o.quiet.Store(false)
	for end := time.Now().Add(time.Minute); ; {
		m, _, err := c.Exchange(new(dns.Msg).SetQuestion("www.example.com.", dns.TypeA), at.String())
		if err == nil && data(m) == "192.0.2.1" {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("the server outside is back: %v %v", m, err)
		}
	}
}
