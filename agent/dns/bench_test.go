package dns

import (
	"fmt"
	"testing"

	"github.com/miekg/dns"
)

// BenchmarkPacket is what an answer takes beside the kernel; `make bench-dns` measures
// the whole.
func BenchmarkPacket(b *testing.B) {
	o := newOutside(b, say("www.example.com. 3600 IN A 192.0.2.8"))
	s := newTestServer(b, o.addr)
	s.ask(b, "www.example.com.", dns.TypeA)
	svc, list := manyEndpointsOf("many", 1000)
	if err := s.zone.catalog.services.Add(svc); err != nil {
		b.Fatal(err)
	}
	for _, o := range list {
		if err := s.zone.catalog.slices.Add(o); err != nil {
			b.Fatal(err)
		}
	}
	for _, tt := range []struct {
		what, name string
		kind       uint16
	}{
		{"remembered", "www.example.com.", dns.TypeA},
		{"service", "web.prod.svc.cluster.local.", dns.TypeA},
		{"no data", "web.prod.svc.cluster.local.", dns.TypeAAAA},
		{"search domain", "www.example.com.prod.svc.cluster.local.", dns.TypeA},
		{"service, SRV", "_http._tcp.web.prod.svc.cluster.local.", dns.TypeSRV},
		{"1000 endpoints", "many.prod.svc.cluster.local.", dns.TypeA},
		{"1000 endpoints, SRV", "_http._tcp.many.prod.svc.cluster.local.", dns.TypeSRV},
		{"one of 1000 endpoints", "e-999.many.prod.svc.cluster.local.", dns.TypeA},
	} {
		for _, edns := range []bool{false, true} {
			b.Run(fmt.Sprintf("%s/edns=%v", tt.what, edns), func(b *testing.B) {
				m := new(dns.Msg).SetQuestion(tt.name, tt.kind)
				if edns {
					m.SetEdns0(1232, false)
				}
				q, err := m.Pack()
				if err != nil {
					b.Fatal(err)
				}
				out := make([]byte, 0, udpPayload)
				b.ReportAllocs()
				for b.Loop() {
					if s.packet(b.Context(), q, loopback, out, func(func() []byte) { b.Fatal("it is asked outside") }) == nil {
						b.Fatal("no answer")
					}
				}
			})
		}
	}
}
