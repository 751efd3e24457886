package dns

import (
	"bytes"
	"encoding/binary"
	"io"
	"math"
	"net"
	runtimemetrics "runtime/metrics"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus/testutil"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// fuzzServer has names of every kind, and remembers answers from outside.
func fuzzServer(t testing.TB) *Server {
	s := newTestServer(t)
	loop := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "loop"}, Spec: v1.ServiceSpec{Type: v1.ServiceTypeExternalName, ExternalName: "loop.prod.svc.cluster.local"}}
	many, manySlices := manyEndpointsOf("many", 300)
	for _, o := range []*v1.Service{loop, many} {
		if err := s.zone.catalog.services.Add(o); err != nil {
			t.Fatal(err)
		}
	}
	for _, o := range manySlices {
		if err := s.zone.catalog.slices.Add(o); err != nil {
			t.Fatal(err)
		}
	}
	start := time.Now()
	s.forward.cache.now = func() time.Time { return start }
	remember(t, s, dns.RcodeSuccess, dns.TypeA, "www.example.com.", "www.example.com. 3600 IN CNAME web.example.com.", "web.example.com. 60 IN A 192.0.2.1", "web.example.com. 60 IN A 192.0.2.2")
	remember(t, s, dns.RcodeSuccess, dns.TypeAAAA, "www.example.com.", "www.example.com. 3600 IN AAAA 2001:db8::1", "www.example.com. 60 IN AAAA 2001:db8::2")
	remember(t, s, dns.RcodeNameError, dns.TypeA, "no.example.com.", "example.com. 900 IN SOA ns.example.com. root.example.com. 1 2 3 4 60")
	remember(t, s, dns.RcodeSuccess, dns.TypeTXT, "big.example.com.", `big.example.com. 60 IN TXT "`+strings.Repeat(strings.Repeat("x", 250)+`" "`, 4)+`"`)
	remember(t, s, dns.RcodeServerFailure, dns.TypeA, "broken.example.com.")
	remember(t, s, dns.RcodeSuccess, dns.TypeA, "db.example.com.", "db.example.com. 60 IN A 192.0.2.9")
	// Of addresses that are the cluster's: their names were asked for outside before.
	remember(t, s, dns.RcodeSuccess, dns.TypePTR, "5.0.96.10.in-addr.arpa.", "5.0.96.10.in-addr.arpa. 60 IN PTR other.example.com.")
	remember(t, s, dns.RcodeNameError, dns.TypePTR, "7.2.0.192.in-addr.arpa.", "192.in-addr.arpa. 900 IN SOA ns.example.com. root.example.com. 1 2 3 4 60")
	host := slice("prod", "db-host", "db", discoveryv1.EndpointPort{Name: ptr.To("http"), Protocol: ptr.To(v1.ProtocolTCP), Port: ptr.To[int32](8080)}, at("192.0.2.7", "", true))
	if err := s.zone.catalog.slices.Add(host); err != nil {
		t.Fatal(err)
	}
	s.forward.cache.now = func() time.Time { return start.Add(3 * time.Second) } // and it stays so
	return s
}

// record is a record; one without data has the type's header alone.
func record(t testing.TB, text string) dns.RR {
	t.Helper()
	if owner, ok := strings.CutSuffix(text, " IN A"); ok {
		return &dns.A{Hdr: dns.RR_Header{Name: strings.Fields(owner)[0], Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}}
	}
	rr, err := dns.NewRR(text)
	if err != nil {
		t.Fatal(err)
	}
	return rr
}

// The bug: plain questions for the name of an address were answered by what a server
// outside had said before the address was an endpoint's.
func TestNameOfAnEndpoint(t *testing.T) {
	s := fuzzServer(t)
	for _, change := range []func(*dns.Msg){func(*dns.Msg) {}, func(m *dns.Msg) { m.SetEdns0(1232, false) }} {
		if m := s.ask(t, "7.2.0.192.in-addr.arpa.", dns.TypePTR, change); data(m) != "192-0-2-7.db.prod.svc.cluster.local." {
			t.Error(m)
		}
	}
}

// The bug: of two addresses of which one has no data the other's bytes were exchanged
// with what followed.
func TestAddressWithoutData(t *testing.T) {
	s := newTestServer(t)
	remember(t, s, dns.RcodeSuccess, dns.TypeA, "www.example.com.", "www.example.com. 60 IN A", "www.example.com. 60 IN A 192.0.2.2")
	for range 64 { // which is first is chance
		m := s.ask(t, "www.example.com.", dns.TypeA)
		if len(m.Answer) != 2 || !strings.Contains(data(m), "192.0.2.2") || m.Answer[1].Header().Name != "www.example.com." {
			t.Fatal(m)
		}
	}
}

// remember is what an upstream said.
func remember(t testing.TB, s *Server, rcode int, kind uint16, name string, records ...string) {
	t.Helper()
	m := new(dns.Msg).SetQuestion(name, kind)
	m.Response, m.Rcode = true, rcode
	for _, text := range records {
		rr := record(t, text)
		if rr.Header().Rrtype == dns.TypeSOA {
			m.Ns = append(m.Ns, rr)
		} else {
			m.Answer = append(m.Answer, rr)
		}
	}
	s.forward.cache.put(key{name: name, kind: kind}, m)
}

// questions are ordinary and odd ones.
func questions(t testing.TB) [][]byte {
	long := strings.Repeat(strings.Repeat("a", 61)+".", 3)
	var out [][]byte
	for _, name := range []string{
		"web.prod.svc.cluster.local.", "WEB.prod.SVC.cluster.LOCAL.", "dual.prod.svc.cluster.local.", "db.prod.svc.cluster.local.", "db-0.db.prod.svc.cluster.local.", "none.prod.svc.cluster.local.",
		"many.prod.svc.cluster.local.", "_http._tcp.many.prod.svc.cluster.local.", "_http._tcp.db.prod.svc.cluster.local.", "alias.prod.svc.cluster.local.", "loop.prod.svc.cluster.local.", "address.prod.svc.cluster.local.",
		"nosuch.prod.svc.cluster.local.", "www.example.com.prod.svc.cluster.local.", "10-244-1-2.prod.pod.cluster.local.", "prod.svc.cluster.local.", "cluster.local.", "ns.dns.cluster.local.", "dns-version.cluster.local.",
		"xcluster.local.", `a\.b.prod.svc.cluster.local.`, `a\.cluster.local.`, `\000.prod.svc.cluster.local.`, "5.0.96.10.in-addr.arpa.", "7.2.0.192.in-addr.arpa.", "7.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.d.f.ip6.arpa.",
		"www.example.com.", "WwW.eXample.com.", "no.example.com.", "big.example.com.", "broken.example.com.", "unknown.example.com.", "1" + loopDomain, ".",
		long + "prod.svc.cluster.local.", long + strings.Repeat("b", 61) + ".local.",
	} {
		for _, kind := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeSRV, dns.TypePTR, dns.TypeTXT, dns.TypeANY, dns.TypeAXFR} {
			for _, change := range []func(*dns.Msg){
				func(*dns.Msg) {},
				func(m *dns.Msg) { m.SetEdns0(4096, true) },
				func(m *dns.Msg) { m.SetEdns0(1, false); m.RecursionDesired, m.AuthenticatedData = false, true },
			} {
				m := new(dns.Msg).SetQuestion(name, kind)
				change(m)
				b, err := m.Pack()
				if err != nil {
					t.Fatalf("%s: %v", name, err)
				}
				out = append(out, b)
			}
		}
	}
	odd := func(change func(*dns.Msg)) {
		m := new(dns.Msg).SetQuestion("web.prod.svc.cluster.local.", dns.TypeA)
		change(m)
		b, err := m.Pack()
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, b)
	}
	odd(func(m *dns.Msg) { m.Response = true })
	odd(func(m *dns.Msg) { m.Truncated = true })
	odd(func(m *dns.Msg) { m.CheckingDisabled, m.Zero = true, true })
	odd(func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate })
	odd(func(m *dns.Msg) { m.Opcode = dns.OpcodeNotify })
	odd(func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) })
	odd(func(m *dns.Msg) { m.Question = nil })
	odd(func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS })
	odd(func(m *dns.Msg) { m.SetEdns0(1232, false); m.IsEdns0().SetVersion(3) })
	odd(func(m *dns.Msg) { m.SetEdns0(1232, false); m.Extra = append(m.Extra, m.Extra[0]) })
	odd(func(m *dns.Msg) {
		m.SetEdns0(1232, false)
		m.IsEdns0().Option = []dns.EDNS0{&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0123456789abcdef"}}
	})
	out = append(out, nil, []byte{0, 1}, make([]byte, headerSize),
		[]byte{0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0xc0, 0x0c, 0, 1, 0, 1},       // a name that is where it points
		[]byte{0, 1, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0}, // as many of everything as can be said
		[]byte{0, 1, 0x28, 0, 0, 1, 0, 0, 0, 0, 0, 0, 3, 'w', 'w'})               // an update that ends too early
	return out
}

func allocated() uint64 {
	s := []runtimemetrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	runtimemetrics.Read(s)
	return s[0].Value.Uint64()
}

// checkReply says what is wrong with a reply to b.
func checkReply(t *testing.T, s *Server, b, reply []byte, stream bool) {
	t.Helper()
	fail := func(format string, args ...any) {
		t.Helper()
		t.Errorf(format, args...)
		t.Fatalf("question % x\nreply % x", b, reply)
	}
	if len(reply) < headerSize || !bytes.Equal(reply[:2], b[:2]) || reply[2]&flagResponse == 0 {
		fail("it is no reply to that")
	}
	if b[2]&0x78 != reply[2]&0x78 {
		fail("another operation is answered")
	}
	limit := dns.MinMsgSize
	req := new(dns.Msg)
	readable := req.Unpack(b) == nil
	if readable {
		if opt := req.IsEdns0(); opt != nil {
			limit = int(max(dns.MinMsgSize, min(opt.UDPSize(), udpPayload)))
		}
	}
	if stream {
		limit = dns.MaxMsgSize
	}
	if len(reply) > limit {
		fail("%d bytes, %d were asked for", len(reply), limit)
	}
	m := new(dns.Msg)
	if err := m.Unpack(reply); err != nil {
		fail("the reply cannot be read: %v", err)
	}
	// Which code it has to be is RFC 1035's and, for EDNS, 6891's.
	var want []int
	switch {
	case !readable:
		want = []int{dns.RcodeFormatError}
	case req.Opcode != dns.OpcodeQuery:
		want = []int{dns.RcodeNotImplemented}
	case len(req.Question) != 1 || optCount(req) > 1:
		want = []int{dns.RcodeFormatError}
	case req.Question[0].Qclass != dns.ClassINET:
		want = []int{dns.RcodeRefused, dns.RcodeFormatError}
	case req.IsEdns0() != nil && req.IsEdns0().Version() != 0:
		want = []int{dns.RcodeBadVers, dns.RcodeRefused, dns.RcodeFormatError}
	}
	if want != nil && !slices.Contains(want, m.Rcode) {
		fail("the code is %s", dns.RcodeToString[m.Rcode])
	}
	if want != nil && len(m.Answer)+len(m.Ns) > 0 {
		fail("a refusal has records")
	}
	if len(m.Question) > 1 || len(m.Question) == 1 && (!readable || len(req.Question) == 0 || m.Question[0] != req.Question[0]) {
		fail("the question is not repeated as it was")
	}
	if readable && len(req.Question) == 1 && len(m.Question) == 0 {
		fail("the question is not repeated")
	}
	if (m.IsEdns0() != nil) != (readable && req.IsEdns0() != nil) {
		fail("EDNS: %v", m.IsEdns0())
	}
	if optCount(m) > 1 {
		fail("several OPT records")
	}
	// Nobody is answered for an answer: two servers would go on for ever.
	if again := s.packet(t.Context(), reply, loopback, nil, func(func() []byte) { t.Fatal("an answer is looked into") }); again != nil {
		fail("the answer is answered with % x", again)
	}
}

// FuzzPacket sends arbitrary datagrams through all that a datagram goes through.
func FuzzPacket(f *testing.F) {
	for _, q := range questions(f) {
		f.Add(q)
	}
	s := fuzzServer(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		b = b[:min(len(b), longestInput)]
		began, before := time.Now(), allocated()
		out := make([]byte, 0, udpPayload)
		later := 0
		reply := s.packet(t.Context(), b, loopback, out, func(fn func() []byte) {
			later++
			if late := fn(); late != nil {
				checkReply(t, s, b, late, false)
			}
		})
		// A thousand times as long as it takes; four times what reading 4 KiB of records takes.
		if took, took2 := time.Since(began), allocated()-before; took > 20*time.Second || took2 > 4<<20 {
			t.Errorf("it took %s and %d bytes", took, took2)
		}
		if later > 1 || later == 1 && reply != nil {
			t.Fatal("two replies")
		}
		if got := testutil.ToFloat64(s.metrics.panics); got != 0 {
			t.Fatal("a panic")
		}
		deaf := len(b) < headerSize || b[2]&flagResponse != 0
		if deaf != (reply == nil && later == 0) {
			t.Fatalf("a reply: % x, later %d", reply, later)
		}
		if reply != nil {
			checkReply(t, s, b, reply, false)
		}
	})
}

// FuzzPlain compares what is answered on the wire with what miekg/dns makes of the same
// question.
func FuzzPlain(f *testing.F) {
	for _, q := range questions(f) {
		f.Add(q)
	}
	s := fuzzServer(f)
	f.Fuzz(func(t *testing.T, b []byte) { comparePlain(t, s, b) })
}

// comparePlain reports whether b is plain.
func comparePlain(t *testing.T, s *Server, b []byte) bool {
	t.Helper()
	now := time.Now()
	got, ok := s.plainAnswer(make([]byte, 0, udpPayload), b, loopback, now)
	if !ok {
		return false
	}
	q, refusal := s.read(b, loopback, false)
	if q == nil {
		t.Fatalf("% x is plain and refused: %v", b, refusal)
	}
	m, done := s.immediate(q)
	if !done {
		t.Fatalf("% x is plain and has to be asked", b)
	}
	want := s.pack(q, m, nil, now)
	var a, w dns.Msg
	if err := a.Unpack(got); err != nil {
		t.Fatalf("% x: %v", got, err)
	}
	if err := w.Unpack(want); err != nil {
		t.Fatalf("% x: %v", want, err)
	}
	// Addresses change places; if not all have room each may be any.
	for _, m := range []*dns.Msg{&a, &w} {
		for _, rr := range m.Answer {
			switch rr := rr.(type) {
			case *dns.A:
				if m.Truncated {
					rr.A = net.IPv4zero
				}
			case *dns.AAAA:
				if m.Truncated {
					rr.AAAA = net.IPv6zero
				}
			}
		}
		slices.SortStableFunc(m.Answer, func(x, y dns.RR) int {
			if x.Header().Rrtype != y.Header().Rrtype {
				return 0
			}
			return strings.Compare(x.String(), y.String())
		})
	}
	// The letters of a record's owner may be the question's or the server's outside.
	if !strings.EqualFold(a.String(), w.String()) {
		t.Fatalf("% x:\non the wire %s\nunpacked %s", b, &a, &w)
	}
	if len(got) > len(want)+optSize {
		t.Fatalf("%d bytes, miekg/dns takes %d", len(got), len(want))
	}
	return true
}

// TestPlain: the questions of every day are plain, and answered as others are.
func TestPlain(t *testing.T) {
	s := fuzzServer(t)
	plain := 0
	for _, q := range questions(t) {
		if comparePlain(t, s, q) {
			plain++
		}
	}
	t.Logf("%d of %d questions are plain", plain, len(questions(t)))
	for _, name := range []string{"web.prod.svc.cluster.local.", "WWW.example.com.", "no.example.com.", "many.prod.svc.cluster.local.", "www.example.com.prod.svc.cluster.local."} {
		for _, size := range []uint16{0, 1232} {
			m := new(dns.Msg).SetQuestion(name, dns.TypeA)
			if size > 0 {
				m.SetEdns0(size, false)
			}
			b, err := m.Pack()
			if err != nil {
				t.Fatal(err)
			}
			if !comparePlain(t, s, b) {
				t.Errorf("%s, EDNS %d: it is not plain", name, size)
			}
		}
	}
	if q, _ := new(dns.Msg).SetQuestion("web.prod.svc.cluster.local.", dns.TypeA).Pack(); s.mayAsk(loopback) {
		if _, ok := s.plainAnswer(nil, q, stranger, time.Now()); ok {
			t.Error("a stranger is answered")
		}
	}
}

// fakeStream is a connection whose client has sent all it will.
type fakeStream struct {
	net.Conn
	r *bytes.Reader
	w bytes.Buffer
}

func (c *fakeStream) Read(b []byte) (int, error)       { return c.r.Read(b) }
func (c *fakeStream) Write(b []byte) (int, error)      { return c.w.Write(b) }
func (c *fakeStream) SetReadDeadline(time.Time) error  { return nil }
func (c *fakeStream) SetWriteDeadline(time.Time) error { return nil }

// FuzzStream sends arbitrary bytes through all that a TCP connection goes through.
func FuzzStream(f *testing.F) {
	var all []byte
	for _, q := range questions(f) {
		one := append(binary.BigEndian.AppendUint16(nil, uint16(len(q))), q...)
		f.Add(one)
		if all = append(all, one...); len(all) > 4000 {
			f.Add(slices.Clone(all))
			all = nil
		}
	}
	f.Add([]byte{0xff, 0xff, 0})
	s := fuzzServer(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		c := &fakeStream{r: bytes.NewReader(b)}
		began, before := time.Now(), allocated()
		s.stream(t.Context(), c, loopback)
		// 64 KiB of records for each question, and what reading them takes.
		if took, took2 := time.Since(began), allocated()-before; took > 30*time.Second || took2 > uint64(len(b))*400+maxStreamQueries*(1<<20) {
			t.Errorf("%d bytes took %s and %d bytes", len(b), took, took2)
		}
		if got := testutil.ToFloat64(s.metrics.panics); got != 0 {
			t.Fatal("a panic")
		}
		in, out := bytes.NewReader(b), bytes.NewReader(c.w.Bytes())
		n := 0
		for ; out.Len() > 0; n++ {
			q, reply := frame(in), frame(out)
			if q == nil || reply == nil {
				t.Fatalf("answer %d is to nothing", n)
			}
			checkReply(t, s, q, reply, true)
		}
		if n > maxStreamQueries {
			t.Fatalf("%d answers", n)
		}
	})
}

// frame is a message of a stream; nil: there is none that is whole.
func frame(r *bytes.Reader) []byte {
	var length uint16
	if binary.Read(r, binary.BigEndian, &length) != nil {
		return nil
	}
	b := make([]byte, length)
	if _, err := io.ReadFull(r, b); err != nil {
		return nil
	}
	return b
}

// FuzzUpstream has a server outside say arbitrary things to a question: what is taken
// for an answer can be sent to whoever asks, in each way, at any time.
func FuzzUpstream(f *testing.F) {
	name := "www.example.com."
	req := new(dns.Msg).SetQuestion(name, dns.TypeA)
	for _, records := range [][]string{
		{"www.example.com. 60 IN A 192.0.2.1", "www.example.com. 60 IN A 192.0.2.2"},
		{"www.example.com. 60 IN CNAME a.example.com.", "a.example.com. 4294967295 IN A 192.0.2.2"},
		{`www.example.com. 0 IN TXT "` + strings.Repeat("x", 255) + `"`, "b.example.com. 60 IN A 192.0.2.2", "c.example.com. 60 IN AAAA 2001:db8::1"},
		{"b.example.com. 60 IN A 192.0.2.2", "c.example.com. 60 IN A 192.0.2.3"},
		{"www.example.com. 60 IN A", "www.example.com. 60 IN A 192.0.2.2"},
	} {
		m := new(dns.Msg).SetReply(req)
		for _, text := range records {
			rr := record(f, text)
			m.Answer = append(m.Answer, rr)
		}
		b, err := m.SetEdns0(1232, true).Pack()
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	s := newTestServer(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		m := new(dns.Msg)
		if m.Unpack(b) != nil {
			return
		}
		if req.Id = m.Id; !isReply(req, m) {
			return
		}
		m, err := clean(m)
		if err != nil {
			return
		}
		s.forward.cache = newAnswerCache(2, 2)
		s.forward.cache.put(key{name: name, kind: dns.TypeA}, m)
		for _, age := range []time.Duration{0, 2 * time.Second, math.MaxInt32 * time.Second} {
			s.forward.cache.now = func() time.Time { return time.Now().Add(age) }
			for _, size := range []uint16{0, 700, 4096} {
				q := new(dns.Msg).SetQuestion("wWw.example.com.", dns.TypeA)
				if size > 0 {
					q.SetEdns0(size, false)
				}
				b, err := q.Pack()
				if err != nil {
					t.Fatal(err)
				}
				reply := s.packet(t.Context(), b, loopback, make([]byte, 0, udpPayload), func(later func() []byte) { checkReply(t, s, b, later(), false) })
				if reply != nil {
					checkReply(t, s, b, reply, false)
				}
			}
		}
		if got := testutil.ToFloat64(s.metrics.panics); got != 0 {
			t.Fatal("a panic")
		}
	})
}
