package dns

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"

	"github.com/clusterd/clusterd/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

var loopback = netip.MustParseAddr("127.0.0.1")

// Times of a forwarder: those outside of tests, and some that a busy machine does not reach.
var (
	usual   = times{attemptTimeout, askTimeout, staleTimeout, downTimeout}
	patient = times{30 * time.Second, 90 * time.Second, time.Minute, 30 * time.Second}
)

// newTestServer answers testZone's names and asks the upstreams.
func newTestServer(t testing.TB, upstreams ...string) *Server {
	t.Helper()
	m := newMetrics()
	s := &Server{cfg: Config{Addrs: []netip.Addr{netip.MustParseAddr("10.96.0.10")}}, zone: testZone(), metrics: m, forward: newForwarder(m), clients: newLimiter(maxForwards, maxForwardsPerClient)}
	t.Cleanup(s.forward.close)
	s.forward.times = patient
	s.forward.set(map[string][]string{".": upstreams})
	return s
}

// ask is one question by UDP, as it goes over the wire.
func (s *Server) ask(t testing.TB, name string, kind uint16, change ...func(*dns.Msg)) *dns.Msg {
	t.Helper()
	req := new(dns.Msg).SetQuestion(name, kind)
	for _, fn := range change {
		fn(req)
	}
	b, err := req.Pack()
	if err != nil {
		t.Fatal(err)
	}
	wire := s.packet(t.Context(), b, loopback, nil, func(later func() []byte) { b = later() })
	if wire == nil {
		wire = b
	}
	out := new(dns.Msg)
	if err := out.Unpack(wire); err != nil {
		t.Fatal(err)
	}
	if out.Id != req.Id || !out.Response {
		t.Fatalf("%s: the answer is %+v", name, out.MsgHdr)
	}
	return out
}

// outside is a name server for tests.
type outside struct {
	addr  string
	asked atomic.Int32
	tcp   atomic.Int32
	quiet atomic.Bool // it hears and says nothing
}

func newOutside(t testing.TB, handle func(w dns.ResponseWriter, r *dns.Msg)) *outside {
	t.Helper()
	o := &outside{}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	o.addr = ln.Addr().String()
	pc, err := net.ListenPacket("udp", o.addr)
	if err != nil {
		t.Fatal(err)
	}
	h := dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
		o.asked.Add(1)
		if w.RemoteAddr().Network() == "tcp" {
			o.tcp.Add(1)
		}
		if !o.quiet.Load() {
			handle(w, r)
		}
	})
	for _, srv := range []*dns.Server{{Listener: ln, Handler: h}, {PacketConn: pc, Handler: h}} {
		started, ended := make(chan struct{}), make(chan struct{})
		srv.NotifyStartedFunc = func() { close(started) }
		go func() { defer close(ended); _ = srv.ActivateAndServe() }()
		<-started
		t.Cleanup(func() { _ = srv.Shutdown(); <-ended })
	}
	return o
}

func say(records ...string) func(dns.ResponseWriter, *dns.Msg) {
	return func(w dns.ResponseWriter, r *dns.Msg) {
		m := new(dns.Msg).SetReply(r)
		for _, text := range records {
			rr, err := dns.NewRR(text)
			if err != nil {
				panic(err)
			}
			if rr.Header().Rrtype == dns.TypeSOA {
				m.Rcode, m.Ns = dns.RcodeNameError, append(m.Ns, rr)
			} else {
				m.Answer = append(m.Answer, rr)
			}
		}
		_ = w.WriteMsg(m)
	}
}

func data(m *dns.Msg) string {
	var out []string
	for _, rr := range m.Answer {
		out = append(out, strings.TrimPrefix(rr.String(), rr.Header().String()))
	}
	return strings.Join(out, ",")
}

func TestForwardAndRemember(t *testing.T) {
	o := newOutside(t, say("www.example.com. 60 IN A 192.0.2.1"))
	s := newTestServer(t, o.addr)
	began := time.Now()
	s.forward.cache.now = func() time.Time { return began }
	for range 3 {
		if m := s.ask(t, "wWw.example.com.", dns.TypeA); data(m) != "192.0.2.1" || m.Authoritative || m.Question[0].Name != "wWw.example.com." {
			t.Fatal(m)
		}
	}
	if n := o.asked.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
	s.forward.cache.now = func() time.Time { return began.Add(40 * time.Second) }
	if m := s.ask(t, "www.example.com.", dns.TypeA); m.Answer[0].Header().Ttl > 20 {
		t.Errorf("the time left is %d s", m.Answer[0].Header().Ttl)
	}
	s.forward.cache.now = func() time.Time { return began.Add(61 * time.Second) }
	s.ask(t, "www.example.com.", dns.TypeA)
	if n := o.asked.Load(); n != 2 {
		t.Errorf("asked %d times", n)
	}
	for name, want := range map[string]int{"coredns_dns_responses_total": 1, "coredns_dns_request_size_bytes": 1, "coredns_cache_entries": 2, "coredns_dns_do_requests_total": 0} {
		if n := testutil.CollectAndCount(s.metrics, name); n != want {
			t.Errorf("%s has %d series, want %d", name, n, want)
		}
	}
}

func TestDenialIsRemembered(t *testing.T) {
	o := newOutside(t, say("example.com. 900 IN SOA ns.example.com. root.example.com. 1 2 3 4 60"))
	s := newTestServer(t, o.addr)
	for range 3 {
		if m := s.ask(t, "no.example.com.", dns.TypeA); m.Rcode != dns.RcodeNameError || len(m.Ns) != 1 {
			t.Fatal(m)
		}
	}
	if n := o.asked.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
}

// TestFloodOfDenials: names that do not exist, more than are remembered, drive out no
// answer.
func TestFloodOfDenials(t *testing.T) {
	o := newOutside(t, say("www.example.com. 3600 IN A 192.0.2.1"))
	s := newTestServer(t, o.addr)
	s.ask(t, "www.example.com.", dns.TypeA)
	for i := range 2 * (foundSize + deniedSize) {
		name := fmt.Sprintf("n-%d.example.com.", i)
		m := new(dns.Msg).SetQuestion(name, dns.TypeA)
		m.Response, m.Rcode = true, dns.RcodeNameError
		s.forward.cache.put(key{name: name, kind: dns.TypeA}, m)
	}
	s.ask(t, "www.example.com.", dns.TypeA)
	if n := o.asked.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
	if n := s.forward.cache.denied.Len(); n != deniedSize {
		t.Errorf("%d denials are remembered", n)
	}
	// What was denied is there again, and the other way round: the last word counts.
	k := key{name: "n-1.example.com.", kind: dns.TypeA}
	for _, rcode := range []int{dns.RcodeNameError, dns.RcodeSuccess, dns.RcodeNameError} {
		m := new(dns.Msg).SetQuestion(k.name, dns.TypeA)
		if m.Response, m.Rcode = true, rcode; rcode == dns.RcodeSuccess {
			rr, err := dns.NewRR(k.name + " 60 IN A 192.0.2.1")
			if err != nil {
				t.Fatal(err)
			}
			m.Answer = []dns.RR{rr}
		}
		s.forward.cache.put(k, m)
		if _, r := s.forward.cache.get(k, false); r == nil || r.msg.Rcode != rcode {
			t.Errorf("%s is not remembered", dns.RcodeToString[rcode])
		}
	}
}

func TestUpstreamDies(t *testing.T) {
	var s *Server
	for tries := 1; ; tries++ {
		o := newOutside(t, say("www.example.com. 5 IN A 192.0.2.1"))
		s = newTestServer(t, o.addr)
		s.ask(t, "www.example.com.", dns.TypeA)
		s.forward.times = usual
		o.quiet.Store(true)
		s.forward.cache.now = func() time.Time { return time.Now().Add(time.Minute) }
		began := time.Now()
		if m := s.ask(t, "www.example.com.", dns.TypeA); data(m) != "192.0.2.1" || m.Answer[0].Header().Ttl != staleTTL {
			t.Fatal(m)
		}
		took := time.Since(began)
		if took < askTimeout {
			break
		}
		if tries == 3 { // a busy machine may be late, not each time
			t.Fatalf("an old answer took %s", took)
		}
	}
	if m := s.ask(t, "new.example.com.", dns.TypeA); m.Rcode != dns.RcodeServerFailure {
		t.Error(m)
	}
	if got := testutil.ToFloat64(s.metrics.stale); got != 1 {
		t.Errorf("%v stale answers are counted", got)
	}
	s.forward.cache.now = func() time.Time { return time.Now().Add(2 * staleFor) }
	if fresh, r := s.forward.cache.get(key{name: "www.example.com.", kind: dns.TypeA}, true); fresh || r != nil {
		t.Error("an answer is kept for ever")
	}
}

func TestNextUpstream(t *testing.T) {
	refuses := newOutside(t, func(w dns.ResponseWriter, r *dns.Msg) { _ = w.WriteMsg(new(dns.Msg).SetRcode(r, dns.RcodeRefused)) })
	answers := newOutside(t, say("www.example.com. 5 IN A 192.0.2.1"))
	closed, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	s := newTestServer(t, closed.LocalAddr().String(), refuses.addr, answers.addr)
	if m := s.ask(t, "www.example.com.", dns.TypeA); data(m) != "192.0.2.1" {
		t.Error(m)
	}
	if refuses.asked.Load() == 0 {
		t.Error("the order of resolv.conf is not kept")
	}
}

// TestLies: answers to other questions, forged numbers and rubbish are waited
// out.
func TestLies(t *testing.T) {
	o := newOutside(t, func(w dns.ResponseWriter, r *dns.Msg) {
		other := new(dns.Msg).SetReply(r)
		other.Question = []dns.Question{{Name: "bank.example.com.", Qtype: dns.TypeA, Qclass: dns.ClassINET}}
		_ = w.WriteMsg(other)
		forged := new(dns.Msg).SetReply(r)
		forged.Id++
		_ = w.WriteMsg(forged)
		_, _ = w.Write([]byte("rubbish"))
		say("www.example.com. 5 IN A 192.0.2.1")(w, r)
	})
	s := newTestServer(t, o.addr)
	if m := s.ask(t, "www.example.com.", dns.TypeA); data(m) != "192.0.2.1" {
		t.Error(m)
	}
}

func TestLargeAnswers(t *testing.T) {
	var records []string
	for i := range 200 {
		records = append(records, fmt.Sprintf("big.example.com. 60 IN A 10.1.%d.%d", i/250, i%250))
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
	m := s.ask(t, "big.example.com.", dns.TypeA)
	m.Compress = true
	if !m.Truncated || m.Len() > dns.MinMsgSize {
		t.Errorf("without EDNS0: truncated %v, %d bytes", m.Truncated, m.Len())
	}
	if o.tcp.Load() != 1 {
		t.Errorf("asked by TCP %d times", o.tcp.Load())
	}
	m = s.ask(t, "big.example.com.", dns.TypeA, func(m *dns.Msg) { m.SetEdns0(4096, false) })
	m.Compress = true
	if !m.Truncated || m.Len() > udpPayload || m.Len() <= dns.MinMsgSize || m.IsEdns0() == nil {
		t.Errorf("with EDNS0: truncated %v, %d bytes, %v", m.Truncated, m.Len(), m.IsEdns0())
	}
}

func TestAliasOutside(t *testing.T) {
	o := newOutside(t, say("db.example.com. 60 IN CNAME db1.example.com.", "db1.example.com. 60 IN A 192.0.2.7"))
	s := newTestServer(t, o.addr)
	for range 2 { // asked, then remembered
		if m := s.ask(t, "alias.prod.svc.cluster.local.", dns.TypeA); data(m) != "db.example.com.,db1.example.com.,192.0.2.7" {
			t.Fatal(m)
		}
	}
	if n := o.asked.Load(); n != 1 {
		t.Errorf("asked %d times", n)
	}
	// One that leads to itself ends.
	loop := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "loop"}, Spec: v1.ServiceSpec{Type: v1.ServiceTypeExternalName, ExternalName: "loop.prod.svc.cluster.local"}}
	if err := s.zone.catalog.services.Add(loop); err != nil {
		t.Fatal(err)
	}
	if m := s.ask(t, "loop.prod.svc.cluster.local.", dns.TypeA); m.Rcode != dns.RcodeServerFailure {
		t.Error(m)
	}
}

func TestRefusals(t *testing.T) {
	s := newTestServer(t)
	for name, tt := range map[string]struct {
		change func(*dns.Msg)
		want   int
	}{
		"two questions": {func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) }, dns.RcodeFormatError},
		"no question":   {func(m *dns.Msg) { m.Question = nil }, dns.RcodeFormatError},
		"an update":     {func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate }, dns.RcodeNotImplemented},
		"chaos":         {func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }, dns.RcodeRefused},
		"a transfer":    {func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeAXFR }, dns.RcodeRefused},
		"EDNS 1":        {func(m *dns.Msg) { m.SetEdns0(1232, false); m.IsEdns0().SetVersion(1) }, dns.RcodeBadVers},
		"nobody to ask": {func(*dns.Msg) {}, dns.RcodeServerFailure},
	} {
		if m := s.ask(t, "example.com.", dns.TypeA, tt.change); m.Rcode != tt.want {
			t.Errorf("%s: %s", name, dns.RcodeToString[m.Rcode])
		}
	}
	if q, m := s.accept(new(dns.Msg).SetQuestion("example.com.", dns.TypeA), netip.MustParseAddr("203.0.113.9"), false); q != nil || m.Rcode != dns.RcodeRefused {
		t.Error("the whole world is answered")
	}
	if q, m := s.accept(&dns.Msg{MsgHdr: dns.MsgHdr{Response: true}}, loopback, false); q != nil || m != nil {
		t.Error("an answer is answered")
	}
}

func TestLoop(t *testing.T) {
	var s *Server
	itself := newOutside(t, func(w dns.ResponseWriter, r *dns.Msg) {
		b, _ := r.Pack()
		now := s.packet(context.Background(), b, loopback, nil, func(later func() []byte) { _, _ = w.Write(later()) })
		if now != nil {
			_, _ = w.Write(now)
		}
	})
	s = newTestServer(t)
	for _, u := range s.forward.set(map[string][]string{".": {itself.addr}}) {
		s.forward.probe(t.Context(), u)
	}
	before := itself.asked.Load()
	if m := s.ask(t, "example.com.", dns.TypeA); m.Rcode != dns.RcodeServerFailure {
		t.Error(m)
	}
	if itself.asked.Load() != before {
		t.Error("it asks itself")
	}
	own := []netip.AddrPort{netip.MustParseAddrPort("10.96.0.10:53")}
	got := plan(routes{}, []string{"10.96.0.10", "192.0.2.1", "nonsense", "192.0.2.1"}, own)["."]
	if !slices.Equal(got, []string{"192.0.2.1:53"}) {
		t.Error(got)
	}
}

// TestUpstreamsThatDoNotAnswerAreBounded: once all servers are known to be silent
// a new name fails long before its client gives up, and is answered again as
// soon as one of them does.
func TestUpstreamsThatDoNotAnswerAreBounded(t *testing.T) {
	one := newOutside(t, say("www.example.com. 60 IN A 192.0.2.8"))
	two := newOutside(t, say("www.example.com. 60 IN A 192.0.2.8"))
	s := newTestServer(t)
	for _, u := range s.forward.set(map[string][]string{".": {one.addr, two.addr}}) {
		u.failed = time.Now()
	}
	one.quiet.Store(true)
	two.quiet.Store(true)
	s.forward.times = usual
	for tries := 1; ; tries++ {
		began := time.Now()
		if m := s.ask(t, fmt.Sprintf("www-%d.example.com.", tries), dns.TypeA); m.Rcode != dns.RcodeServerFailure {
			t.Fatal(m)
		}
		// It is half a second. Without the bound four questions are waited for, which
		// end after 4.5 s; the middle leaves a busy machine room on both sides.
		took := time.Since(began)
		if took < 3*time.Second {
			break
		}
		if tries == 5 { // such a machine may be late, not each time
			t.Fatalf("a name took %s with servers that are down", took)
		}
	}
	one.quiet.Store(false)
	two.quiet.Store(false)
	for end := time.Now().Add(time.Minute); ; {
		m := s.ask(t, "www.example.com.", dns.TypeA)
		if data(m) == "192.0.2.8" {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("servers that came back are not heard: %v", m)
		}
	}
}

func TestFloodIsBounded(t *testing.T) {
	c := newLimiter(3, 2)
	a, b := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	got := []bool{c.acquire(a), c.acquire(a), c.acquire(a), c.acquire(b), c.acquire(b)}
	if !slices.Equal(got, []bool{true, true, false, true, false}) {
		t.Error(got)
	}
	c.release(a)
	if !c.acquire(b) || len(c.active) != 2 {
		t.Error("a place is not given back")
	}
	s := newTestServer(t, "192.0.2.1:53")
	s.clients = newLimiter(0, 0)
	if m := s.ask(t, "example.com.", dns.TypeA); m.Rcode != dns.RcodeServerFailure || testutil.ToFloat64(s.metrics.rejects) != 1 {
		t.Error(m)
	}
	if m := s.ask(t, "web.prod.svc.cluster.local.", dns.TypeA); data(m) != "10.96.0.5" {
		t.Error("the cluster's own names are not answered during a flood")
	}
}

func TestSettings(t *testing.T) {
	r, err := parseSettings(map[string]string{"stubDomains": `{"acme.example": ["192.0.2.53:5353"]}`, "upstreamNameservers": `["192.0.2.1"]`})
	if err != nil {
		t.Fatal(err)
	}
	p := plan(*r, []string{"198.51.100.1"}, nil)
	if !slices.Equal(p["."], []string{"192.0.2.1:53"}) || !slices.Equal(p["acme.example"], []string{"192.0.2.53:5353"}) {
		t.Error(p)
	}
	for _, bad := range []map[string]string{
		{"stubDomains": `["acme"]`}, {"stubDomains": `{"acme": []}`}, {"stubDomains": `{"": ["192.0.2.1"]}`}, {"stubDomains": `{"a": ["ns.example"]}`}, {"upstreamNameservers": `{}`}, {"upstreamNameservers": `["x"]`},
	} {
		if _, err := parseSettings(bad); err == nil {
			t.Errorf("%v passes", bad)
		}
	}
	stub := newOutside(t, say("www.acme.example. 60 IN A 192.0.2.8"))
	s := newTestServer(t)
	s.forward.set(map[string][]string{".": nil, "acme.example": {stub.addr}})
	if m := s.ask(t, "www.acme.example.", dns.TypeA); data(m) != "192.0.2.8" {
		t.Error(m)
	}
	if m := s.ask(t, "www.example.", dns.TypeA); m.Rcode != dns.RcodeServerFailure {
		t.Error(m)
	}
}

// TestServer runs the whole: watches, sockets, a change of the cluster, of the
// settings, and the end of it.
func TestServer(t *testing.T) {
	web := service("prod", "web", "10.96.0.5")
	client := fake.NewClientset(web, &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "prod"}})
	ctx, cancel := context.WithCancel(t.Context())
	services := coreinformers.NewServiceInformer(client, "", 0, cache.Indexers{})
	free, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := free.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	free.Close()
	stub := newOutside(t, say("www.acme.example. 60 IN A 192.0.2.8"))
	s, err := New(Config{Addrs: []netip.Addr{loopback}, Port: port, Client: client, Settings: client, Services: services, Upstreams: func() ([]string, error) { return nil, nil }})
	if err != nil {
		t.Fatal(err)
	}
	prometheus.NewPedanticRegistry().MustRegister(s.Metrics())
	ended := make(chan error, 2)
	go func() { services.RunWithContext(ctx); ended <- nil }()
	go func() { ended <- s.Run(ctx) }()
	addr := netip.AddrPortFrom(loopback, port).String()
	get := func(network, name string) string {
		c := dns.Client{Net: network, Timeout: time.Second}
		m, _, err := c.Exchange(new(dns.Msg).SetQuestion(name, dns.TypeA), addr)
		if err != nil {
			return err.Error()
		}
		return data(m)
	}
	wait := func(name, want string) {
		t.Helper()
		deadline := time.Now().Add(60 * time.Second)
		for _, network := range []string{"udp", "tcp"} {
			for got := get(network, name); got != want; got = get(network, name) {
				if time.Now().After(deadline) {
					t.Fatalf("%s %s: %q, want %q", network, name, got, want)
				}
				time.Sleep(5 * time.Millisecond)
			}
		}
	}
	wait("web.prod.svc.cluster.local.", "10.96.0.5")
	if !s.Serving() {
		t.Error("it says that it does not serve")
	}
	if _, err := client.CoreV1().Services("prod").Create(ctx, service("prod", "new", "10.96.0.6"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	wait("new.prod.svc.cluster.local.", "10.96.0.6")
	cm := &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: SettingsName}, Data: map[string]string{"stubDomains": fmt.Sprintf(`{"acme.example": [%q]}`, stub.addr)}}
	if _, err := client.CoreV1().ConfigMaps("kube-system").Create(ctx, cm, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	wait("www.acme.example.", "192.0.2.8")
	cancel()
	for range 2 {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
}
