package dns

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/lru"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/watches"
)

// newTestCatalog is a catalog without watches.
func newTestCatalog(synced bool, objs ...any) *catalog {
	c := &catalog{
		services:   cache.NewIndexer(cache.MetaNamespaceKeyFunc, serviceIndexers),
		slices:     cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{byAddress: sliceIndexers[byAddress], watches.ByService: watches.ServiceOf}),
		namespaces: cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{}),
		synced:     func() bool { return synced },
		large:      lru.New(largeServices),
	}
	for _, o := range objs {
		switch o.(type) {
		case *v1.Service:
			_ = c.services.Add(o)
		case *discoveryv1.EndpointSlice:
			_ = c.slices.Add(o)
		case *v1.Namespace:
			_ = c.namespaces.Add(o)
		}
	}
	return c
}

func service(namespace, name, ip string, ports ...v1.ServicePort) *v1.Service {
	return &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Spec: v1.ServiceSpec{Type: v1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip}, Ports: ports}}
}

func slice(namespace, name, service string, port discoveryv1.EndpointPort, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		Endpoints:  endpoints, Ports: []discoveryv1.EndpointPort{port},
	}
}

func at(addr, hostname string, ready bool) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{Addresses: []string{addr}, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(ready)}}
	if hostname != "" {
		e.Hostname = ptr.To(hostname)
	}
	return e
}

func testZone() *zone {
	http := v1.ServicePort{Name: "http", Protocol: v1.ProtocolTCP, Port: 80}
	httpOf := discoveryv1.EndpointPort{Name: ptr.To("http"), Protocol: ptr.To(v1.ProtocolTCP), Port: ptr.To[int32](8080)}
	dual := service("prod", "dual", "10.96.0.7")
	dual.Spec.ClusterIPs = append(dual.Spec.ClusterIPs, "fd00::7")
	alias := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "prod", Name: "alias"}, Spec: v1.ServiceSpec{Type: v1.ServiceTypeExternalName, ExternalName: "db.example.com"}}
	address := alias.DeepCopy()
	address.Name, address.Spec.ExternalName = "address", "192.0.2.9"
	patient := service("prod", "patient", "None")
	patient.Spec.PublishNotReadyAddresses = true
	ranges := []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("10.244.0.0/16")}
	return newZone("cluster.local", []netip.Addr{netip.MustParseAddr("10.96.0.10")}, func() []netip.Prefix { return ranges },
		newTestCatalog(true,
			&v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "prod"}}, &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "empty"}},
			service("prod", "web", "10.96.0.5", http, v1.ServicePort{Name: "dns", Protocol: v1.ProtocolUDP, Port: 53}),
			slice("prod", "web-1", "web", httpOf, at("10.244.1.9", "", true)),
			dual, alias, address,
			service("prod", "db", "None", http),
			slice("prod", "db-1", "db", httpOf, at("10.244.1.2", "db-0", true), at("10.244.1.3", "", true), at("10.244.1.4", "db-2", false)),
			slice("prod", "db-2", "db", httpOf, at("10.244.1.3", "", true)),
			service("prod", "none", "None", http),
			patient, slice("prod", "patient-1", "patient", httpOf, at("10.244.1.6", "", false)),
		),
	)
}

// The bug: of an endpoint that two slices name, one for each port, one port was lost, and
// which one differed from node to node.
func TestPortsOfSeveralSlices(t *testing.T) {
	port := func(name string, n int32) discoveryv1.EndpointPort {
		return discoveryv1.EndpointPort{Name: ptr.To(name), Protocol: ptr.To(v1.ProtocolTCP), Port: ptr.To(n)}
	}
	for _, more := range []int{0, 2 * manyEndpoints} {
		s := newTestServer(t)
		svc, list := manyEndpointsOf("both", more)
		list = append(list,
			slice("prod", "both-http", "both", port("http", 8080), at("10.244.200.1", "", true), at("10.244.200.1", "", true)),
			slice("prod", "both-metrics", "both", port("metrics", 9090), at("10.244.200.1", "", true), at("10.244.200.1", "named", true)))
		if err := s.zone.catalog.services.Add(svc); err != nil {
			t.Fatal(err)
		}
		for _, o := range list {
			if err := s.zone.catalog.slices.Add(o); err != nil {
				t.Fatal(err)
			}
		}
		for range 20 { // the index's order is another each time
			s.zone.catalog.large.Clear()
			all := s.zone.catalog.endpoints(svc)
			found := map[string]int{}
			for _, e := range all {
				if e.addr.String() == "10.244.200.1" {
					for _, p := range slices.Concat(e.ports...) {
						found[e.name+" "+*p.Name]++
					}
				}
			}
			want := map[string]int{"10-244-200-1 http": 1, "10-244-200-1 metrics": 1, "named metrics": 1}
			if !cmp.Equal(found, want) {
				t.Fatalf("beside %d others: %v, want %v", more, found, want)
			}
			if n := len(addrsOf(all)); n != more+1 {
				t.Fatalf("beside %d others: %d addresses", more, n)
			}
		}
		for name, want := range map[string]string{
			"_metrics._tcp.both.prod.svc.cluster.local.": "9090", "_http._tcp.both.prod.svc.cluster.local.": "8080",
		} {
			m := s.ask(t, name, dns.TypeSRV, func(m *dns.Msg) { m.SetEdns0(1232, false) })
			if m.Truncated || more > 0 {
				continue // of many ports each answer has some
			}
			if !strings.Contains(data(m), want+" 10-244-200-1.both.prod.svc.cluster.local.") {
				t.Errorf("%s: %v", name, m)
			}
		}
	}
}

// The bug: endpoints that several slices name cost the square of their slices' ports, for
// each question, as what was read of few addresses was not remembered.
func TestPortsOfManySlices(t *testing.T) {
	const many, each = 200, 100
	c := newTestCatalog(true)
	svc := service("prod", "ports", "None")
	var all []discoveryv1.Endpoint
	for i := range manyEndpoints - 1 {
		all = append(all, at(fmt.Sprintf("10.244.3.%d", i), "", true))
	}
	for i := range many {
		s := slice("prod", fmt.Sprint("ports-", i), "ports", discoveryv1.EndpointPort{}, all...)
		s.Ports = nil
		for j := range each {
			s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: ptr.To(fmt.Sprintf("p-%d-%d", i, j)), Protocol: ptr.To(v1.ProtocolTCP), Port: ptr.To(int32(i*each + j))})
		}
		if err := c.slices.Add(s); err != nil {
			t.Fatal(err)
		}
	}
	list := c.endpoints(svc)
	if len(list) != len(all) {
		t.Fatalf("%d endpoints, want %d", len(list), len(all))
	}
	pairs := 0
	for _, e := range list {
		for _, ports := range e.ports {
			pairs += len(ports)
		}
	}
	if pairs != maxPairs {
		t.Errorf("questions look at %d ports, want %d", pairs, maxPairs)
	}
	if again := c.endpoints(svc); &again[0] != &list[0] {
		t.Error("what was read of few addresses in many slices is not remembered")
	}
}

// The bug: the ranges that ServiceCIDRs add were unknown, so that names of their addresses
// were asked for outside.
func TestFurtherRanges(t *testing.T) {
	o := newOutside(t, say("10.in-addr.arpa. 900 IN SOA ns.example.com. root.example.com. 1 2 3 4 60"))
	s := newTestServer(t, o.addr)
	ranges := s.zone.ranges()
	s.zone.ranges = func() []netip.Prefix { return ranges }
	ask := func(asked int32) {
		t.Helper()
		if m := s.ask(t, "9.8.97.10.in-addr.arpa.", dns.TypePTR); m.Rcode != dns.RcodeNameError || o.asked.Load() != asked {
			t.Errorf("asked %d times, want %d: %v", o.asked.Load(), asked, m)
		}
	}
	ask(1)
	ranges = append(slices.Clone(ranges), netip.MustParsePrefix("10.97.0.0/16"))
	ask(1)
	if !s.mayAsk(netip.MustParseAddr("10.97.0.1")) {
		t.Error("a client of that range is refused")
	}
}

// TestZone asks for every kind of name.
func TestZone(t *testing.T) {
	z := testZone()
	const nodata, nxdomain = "NODATA", "NXDOMAIN"
	for _, tt := range []struct {
		name string
		kind uint16
		want string // records' data, in order, joined by a comma
	}{
		{"web.prod.svc.cluster.local.", dns.TypeA, "10.96.0.5"},
		{"WEB.Prod.svc.cluster.LOCAL.", dns.TypeA, "10.96.0.5"},
		{"web.prod.svc.cluster.local.", dns.TypeAAAA, nodata},
		{"web.prod.svc.cluster.local.", dns.TypeMX, nodata},
		{"dual.prod.svc.cluster.local.", dns.TypeAAAA, "fd00::7"},
		{"dual.prod.svc.cluster.local.", dns.TypeANY, "10.96.0.7,fd00::7"},
		{"nosuch.prod.svc.cluster.local.", dns.TypeA, nxdomain},
		{"web.nosuch.svc.cluster.local.", dns.TypeA, nxdomain},
		{"a.web.prod.svc.cluster.local.", dns.TypeA, nxdomain},
		{"prod.svc.cluster.local.", dns.TypeA, nodata},
		{"nosuch.svc.cluster.local.", dns.TypeA, nxdomain},
		{"svc.cluster.local.", dns.TypeA, nodata},
		{"www.example.com.cluster.local.", dns.TypeA, nxdomain},
		{"kubernetes.default.svc.cluster.local.prod.svc.cluster.local.", dns.TypeA, nxdomain},
		// Headless: the ready ones, each once.
		{"db.prod.svc.cluster.local.", dns.TypeA, "10.244.1.2,10.244.1.3"},
		{"db-0.db.prod.svc.cluster.local.", dns.TypeA, "10.244.1.2"},
		{"10-244-1-3.db.prod.svc.cluster.local.", dns.TypeA, "10.244.1.3"},
		{"db-2.db.prod.svc.cluster.local.", dns.TypeA, nxdomain},
		{"none.prod.svc.cluster.local.", dns.TypeA, nodata},
		{"patient.prod.svc.cluster.local.", dns.TypeA, "10.244.1.6"},
		// Ports.
		{"_http._tcp.web.prod.svc.cluster.local.", dns.TypeSRV, "0 100 80 web.prod.svc.cluster.local."},
		{"_http._tcp.web.prod.svc.cluster.local.", dns.TypeA, nodata},
		{"_http._udp.web.prod.svc.cluster.local.", dns.TypeSRV, nxdomain},
		{"_nosuch._tcp.web.prod.svc.cluster.local.", dns.TypeSRV, nxdomain},
		{"_tcp.web.prod.svc.cluster.local.", dns.TypeSRV, nodata},
		{"_sctp.web.prod.svc.cluster.local.", dns.TypeSRV, nxdomain},
		{"http._tcp.web.prod.svc.cluster.local.", dns.TypeSRV, nxdomain},
		{"web.prod.svc.cluster.local.", dns.TypeSRV, "0 100 53 web.prod.svc.cluster.local.,0 100 80 web.prod.svc.cluster.local."},
		{"_http._tcp.db.prod.svc.cluster.local.", dns.TypeSRV, "0 50 8080 10-244-1-3.db.prod.svc.cluster.local.,0 50 8080 db-0.db.prod.svc.cluster.local."},
		{"_http._tcp.none.prod.svc.cluster.local.", dns.TypeSRV, nodata},
		// Pods, by their address.
		{"10-244-1-2.prod.pod.cluster.local.", dns.TypeA, "10.244.1.2"},
		{"fd00-0-0-0-0-0-0-7.prod.pod.cluster.local.", dns.TypeAAAA, "fd00::7"},
		{"10-244-1-2.nosuch.pod.cluster.local.", dns.TypeA, nxdomain},
		{"web.prod.pod.cluster.local.", dns.TypeA, nxdomain},
		{"prod.pod.cluster.local.", dns.TypeA, nodata},
		// Who has an address.
		{"5.0.96.10.in-addr.arpa.", dns.TypePTR, "web.prod.svc.cluster.local."},
		{"7.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.d.f.ip6.arpa.", dns.TypePTR, "dual.prod.svc.cluster.local."},
		{"2.1.244.10.in-addr.arpa.", dns.TypePTR, "db-0.db.prod.svc.cluster.local."},
		{"9.1.244.10.in-addr.arpa.", dns.TypePTR, "10-244-1-9.web.prod.svc.cluster.local."},
		{"99.1.244.10.in-addr.arpa.", dns.TypePTR, nxdomain},
		{"5.0.96.10.in-addr.arpa.", dns.TypeTXT, nodata},
		// Aliases.
		{"alias.prod.svc.cluster.local.", dns.TypeCNAME, "db.example.com."},
		{"a.alias.prod.svc.cluster.local.", dns.TypeA, nxdomain},
		{"address.prod.svc.cluster.local.", dns.TypeA, "192.0.2.9"},
		{"address.prod.svc.cluster.local.", dns.TypeAAAA, nodata},
		// The zone itself.
		{"cluster.local.", dns.TypeNS, "ns.dns.cluster.local."},
		{"cluster.local.", dns.TypeSOA, "ns.dns.cluster.local. hostmaster.cluster.local. 1 7200 1800 86400 5"},
		{"cluster.local.", dns.TypeA, nodata},
		{"ns.dns.cluster.local.", dns.TypeA, "10.96.0.10"},
		{"dns-version.cluster.local.", dns.TypeTXT, `"1.1.0"`},
	} {
		req := new(dns.Msg).SetQuestion(tt.name, tt.kind)
		a, ours := z.answer(dns.CanonicalName(tt.name), askedBy(req.Question[0], false))
		if !ours {
			t.Errorf("%s: not the cluster's", tt.name)
			continue
		}
		m := a.message(req, z)
		var data []string
		for _, rr := range m.Answer {
			if rr.Header().Name != tt.name || rr.Header().Ttl != ttl {
				t.Errorf("%s: %s", tt.name, rr)
			}
			data = append(data, strings.TrimPrefix(rr.String(), rr.Header().String()))
		}
		slices.Sort(data)
		got := strings.Join(data, ",")
		switch {
		case m.Rcode == dns.RcodeNameError:
			got = nxdomain
		case m.Rcode == dns.RcodeSuccess && got == "":
			got = nodata
		}
		if d := cmp.Diff(tt.want, got); d != "" {
			t.Errorf("%s %s:\n%s", tt.name, dns.TypeToString[tt.kind], d)
		}
		if (got == nodata || got == nxdomain) != (len(m.Ns) == 1 && m.Ns[0].Header().Rrtype == dns.TypeSOA) {
			t.Errorf("%s %s: authority %v", tt.name, dns.TypeToString[tt.kind], m.Ns)
		}
		if !m.Authoritative || !m.RecursionAvailable {
			t.Errorf("%s: flags %+v", tt.name, m.MsgHdr)
		}
	}
	for _, name := range []string{"example.com.", "local.", "xcluster.local.", "1.2.0.192.in-addr.arpa.", "arpa.", ".", "1.0.10.in-addr.arpa."} {
		if a, ours := z.answer(name, askedBy(dns.Question{Name: name, Qtype: dns.TypeA, Qclass: dns.ClassINET}, false)); ours {
			t.Errorf("%s: %+v", name, a)
		}
	}
}

// TestBeforeTheFirstList: a name that is not known yet is not one that does not
// exist.
func TestBeforeTheFirstList(t *testing.T) {
	z := testZone()
	z.catalog = newTestCatalog(false)
	for _, name := range []string{"web.prod.svc.cluster.local.", "5.0.96.10.in-addr.arpa."} {
		a, ours := z.answer(name, askedBy(dns.Question{Name: name, Qtype: dns.TypeA, Qclass: dns.ClassINET}, false))
		if !ours || a.rcode != dns.RcodeServerFailure {
			t.Errorf("%s: %v %+v", name, ours, a)
		}
	}
}

func TestReverse(t *testing.T) {
	for _, text := range []string{"10.96.0.5", "fd00::7", "2001:db8:1:2:3:4:5:6"} {
		name, err := dns.ReverseAddr(text)
		if err != nil {
			t.Fatal(err)
		}
		if a, ok := reverse(name); !ok || a != netip.MustParseAddr(text) {
			t.Errorf("%s: %v %v", name, a, ok)
		}
	}
	for _, name := range []string{"256.0.0.10.in-addr.arpa.", "a.0.0.10.in-addr.arpa.", "05.0.96.10.in-addr.arpa.", "0.0.10.in-addr.arpa.", "10.in-addr.arpa.", "1.ip6.arpa.", strings.Repeat("gg.", 16) + "ip6.arpa.", strings.Repeat("1.", 31) + "11.ip6.arpa."} {
		if a, ok := reverse(name); ok {
			t.Errorf("%s: %v", name, a)
		}
	}
}
