package service

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/netsetup/lb"
)

// slice holds endpoints written "ADDRESS NODE STATE [zone=Z] [for=NODE]", STATE
// ready, unready, ending or ended.
func slice(port string, number int32, endpoints ...string) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &port, Port: &number}}}
	for _, text := range endpoints {
		w := strings.Fields(text)
		ready, ending := w[2] == "ready", strings.HasPrefix(w[2], "end")
		e := discoveryv1.Endpoint{Addresses: []string{w[0]}, NodeName: &w[1], Conditions: discoveryv1.EndpointConditions{
			Ready: &ready, Serving: ptr.To(ready || w[2] == "ending"), Terminating: &ending,
		}}
		for _, hint := range w[3:] {
			if e.Hints == nil {
				e.Hints = &discoveryv1.EndpointHints{}
			}
			if zone, ok := strings.CutPrefix(hint, "zone="); ok {
				e.Hints.ForZones = append(e.Hints.ForZones, discoveryv1.ForZone{Name: zone})
			}
			if node, ok := strings.CutPrefix(hint, "for="); ok {
				e.Hints.ForNodes = append(e.Hints.ForNodes, discoveryv1.ForNode{Name: node})
			}
		}
		s.Endpoints = append(s.Endpoints, e)
	}
	return s
}

func texts(list []lb.Endpoint) string {
	var out []string
	for _, e := range list {
		text := e.Addr.String()
		if e.Own {
			text += "!"
		}
		out = append(out, text)
	}
	return strings.Join(out, " ")
}

func TestTranslate(t *testing.T) {
	near, far := "10.0.1.1 n1 ready", "10.0.2.1 n2 ready"
	tests := []struct {
		name   string
		change func(*v1.Service)
		ends   []string
		want   []string // FRONTEND = ENDPOINTS | near ENDPOINTS
	}{
		{"cluster address", nil, []string{far, near}, []string{"tcp 10.96.0.9:80 = 10.0.1.1:8080! 10.0.2.1:8080"}},
		{"one is not ready", nil, []string{far, "10.0.1.1 n1 unready"}, []string{"tcp 10.96.0.9:80 = 10.0.2.1:8080"}},
		{"one ends while another is ready", nil, []string{far, "10.0.1.1 n1 ending"}, []string{"tcp 10.96.0.9:80 = 10.0.2.1:8080"}},
		{"all end", nil, []string{"10.0.2.1 n2 ending", "10.0.1.1 n1 ended"}, []string{"tcp 10.96.0.9:80 = 10.0.2.1:8080"}},
		{"none", nil, nil, []string{"tcp 10.96.0.9:80 = "}},
		{"headless", func(s *v1.Service) { s.Spec.ClusterIP, s.Spec.ClusterIPs = "None", []string{"None"} }, []string{near}, nil},
		{"another program's", func(s *v1.Service) { s.Labels = map[string]string{labelProxyName: "x"} }, []string{near}, nil},
		{"near ones alone", func(s *v1.Service) { s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyLocal) }, []string{near, far}, []string{"tcp 10.96.0.9:80 = 10.0.1.1:8080!"}},
		{"near ones alone, and there is none", func(s *v1.Service) { s.Spec.InternalTrafficPolicy = ptr.To(v1.ServiceInternalTrafficPolicyLocal) }, []string{far}, []string{"tcp 10.96.0.9:80 = silence"}},
		{"hints for the zone", nil, []string{near + " zone=b", far + " zone=a"}, []string{"tcp 10.96.0.9:80 = 10.0.2.1:8080"}},
		{"hints for the node", nil, []string{near + " zone=b for=n1", far + " zone=a for=n2"}, []string{"tcp 10.96.0.9:80 = 10.0.1.1:8080!"}},
		{"one without a hint", nil, []string{near, far + " zone=a"}, []string{"tcp 10.96.0.9:80 = 10.0.1.1:8080! 10.0.2.1:8080"}},
		{"hints for other zones alone", nil, []string{near + " zone=b", far + " zone=c"}, []string{"tcp 10.96.0.9:80 = 10.0.1.1:8080! 10.0.2.1:8080"}},
		{"node port and outer address", func(s *v1.Service) {
			s.Spec.Type, s.Spec.Ports[0].NodePort, s.Spec.ExternalIPs = v1.ServiceTypeNodePort, 30080, []string{"192.0.2.9"}
			s.Spec.ExternalTrafficPolicy = v1.ServiceExternalTrafficPolicyLocal
		}, []string{near, far}, []string{
			"tcp 0.0.0.0:30080 = 10.0.1.1:8080! 10.0.2.1:8080 | near 10.0.1.1:8080!",
			"tcp 10.96.0.9:80 = 10.0.1.1:8080! 10.0.2.1:8080",
			"tcp 192.0.2.9:80 = 10.0.1.1:8080! 10.0.2.1:8080 | near 10.0.1.1:8080!",
		}},
		{"an outer address of the Services' range", func(s *v1.Service) { s.Spec.ExternalIPs = []string{"10.96.0.10", "192.0.2.9"} }, []string{near}, []string{
			"tcp 10.96.0.9:80 = 10.0.1.1:8080!", "tcp 192.0.2.9:80 = 10.0.1.1:8080!",
		}},
		{"a balancer's address of the Services' range", func(s *v1.Service) {
			s.Spec.Type, s.Status.LoadBalancer.Ingress = v1.ServiceTypeLoadBalancer, []v1.LoadBalancerIngress{{IP: "10.96.0.10"}}
		}, []string{near}, []string{"tcp 10.96.0.9:80 = 10.0.1.1:8080!"}},
	}
	for _, tt := range tests {
		s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: v1.ServiceSpec{
			Type: v1.ServiceTypeClusterIP, ClusterIP: "10.96.0.9", ClusterIPs: []string{"10.96.0.9"}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
			Ports: []v1.ServicePort{{Name: "http", Port: 80, Protocol: v1.ProtocolTCP}},
		}}
		if tt.change != nil {
			tt.change(s)
		}
		all := []*discoveryv1.EndpointSlice{slice("http", 8080, tt.ends...), slice("other", 9090, near)}
		var got []string
		for f, c := range translate(s, all, view{node: "n1", zone: "a", ranges: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}}) {
			text := fmt.Sprintf("%s = %s", f, texts(c.backend.Endpoints))
			if c.backend.Silent {
				text += "silence"
			}
			if c.backend.Local {
				text += " | near " + texts(c.backend.Near)
			}
			got = append(got, text)
		}
		slices.Sort(got)
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s:\n got %q\nwant %q", tt.name, got, tt.want)
		}
	}
}

// The bug: the API lets " 192.0.2.0/24 " pass, and what nodes could not read of the ranges
// they left out: the Service was open to everybody.
func TestSources(t *testing.T) {
	for _, tt := range []struct{ in, want []string }{
		{nil, nil},
		{[]string{"192.0.2.0/24"}, []string{"192.0.2.0/24"}},
		{[]string{" 192.0.2.7/24 ", "\tfd00::/64"}, []string{"192.0.2.0/24", "fd00::/64"}},
		{[]string{"192.0.2.0/024"}, []string{"3fff::/128"}},
		{[]string{"192.0.2.0/024", "198.51.100.0/24"}, []string{"198.51.100.0/24"}},
	} {
		var got []string
		for _, p := range sources(&v1.Service{Spec: v1.ServiceSpec{LoadBalancerSourceRanges: tt.in}}) {
			got = append(got, p.String())
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%q: %q, want %q", tt.in, got, tt.want)
		}
	}
}

// The bug: ports of slices that somebody else writes were taken by their name alone: those
// of UDP answered for TCP.
func TestProtocolOfEndpoints(t *testing.T) {
	udp := slice("", 5353, "10.0.1.1 n1 ready")
	udp.Ports[0].Protocol = ptr.To(v1.ProtocolUDP)
	both := []*discoveryv1.EndpointSlice{udp, slice("", 8080, "10.0.1.1 n1 ready")} // the second says none: TCP
	for proto, want := range map[v1.Protocol]string{v1.ProtocolUDP: "10.0.1.1:5353", v1.ProtocolTCP: "10.0.1.1:8080", "": "10.0.1.1:8080"} {
		got := endpointsOf(both, &v1.ServicePort{Protocol: proto}, true)
		if len(got) != 1 || got[0].addr.String() != want {
			t.Errorf("%q: %v, want %s", proto, got, want)
		}
	}
	if got := endpointsOf(both, &v1.ServicePort{Protocol: v1.ProtocolSCTP}, true); len(got) > 0 {
		t.Errorf("SCTP: %v, want none", got)
	}
}

func TestMoved(t *testing.T) {
	a, b := netip.MustParseAddrPort("10.0.0.1:80"), netip.MustParseAddrPort("10.0.0.2:80")
	of := func(known []netip.AddrPort, used ...netip.AddrPort) claim {
		c := claim{known: known}
		for _, u := range used {
			c.backend.Endpoints = append(c.backend.Endpoints, lb.Endpoint{Addr: u})
		}
		return c
	}
	both := []netip.AddrPort{a, b}
	tcp, _ := protocol(v1.ProtocolTCP)
	udp, _ := protocol(v1.ProtocolUDP)
	for name, tt := range map[string]struct {
		datagrams bool
		was, now  claim
		gone      int
		flows     int
	}{
		"TCP: one ends, its connections go on": {false, of(both, a, b), of(both, b), 1, 0},
		"TCP: it is gone":                      {false, of(both, b), of(both[1:], b), 0, 1},
		"UDP: one ends":                        {true, of(both, a, b), of(both, b), 1, 1},
		"UDP: the first comes":                 {true, of(nil), of(both[:1], a), 0, 1},
		"UDP: another comes":                   {true, of(both[:1], a), of(both, a, b), 0, 0},
	} {
		f := lb.Frontend{Addr: netip.MustParseAddr("10.96.0.1"), Proto: tcp, Port: 80}
		if tt.datagrams {
			f.Proto = udp
		}
		gone, flows := moved(f, tt.was, true, &tt.now)
		if len(gone) != tt.gone || len(flows) != tt.flows {
			t.Errorf("%s: gone %v, flows %v", name, gone, flows)
		}
	}
}

func TestElect(t *testing.T) {
	node := func(name string, ready v1.ConditionStatus) *v1.Node {
		return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: v1.NodeStatus{Conditions: []v1.NodeCondition{{Type: v1.NodeReady, Status: ready}}}}
	}
	nodes := []*v1.Node{node("a", "True"), node("b", "True"), node("c", "True")}
	holds := map[string]int{}
	moved := 0
	for i := range 200 {
		addr := netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})
		has, second := elect(addr, nodes, nil)
		holds[has]++
		next, _ := elect(addr, electable([]*v1.Node{nodes[2], node("b", "Unknown"), nodes[0]}, false), nil)
		if has != "b" && next != has {
			moved++
		}
		if has == "b" && next != second {
			t.Errorf("%s: without %s it goes to %s, not to its standby %s", addr, has, next, second)
		}
		if next == "b" || next == "" {
			t.Fatalf("%s went to %q", addr, next)
		}
	}
	if len(holds) != 3 || moved > 0 {
		t.Errorf("addresses by node: %v; %d of living nodes moved", holds, moved)
	}
	if got, _ := elect(netip.MustParseAddr("192.0.2.1"), nodes, map[string]bool{"c": true}); got != "c" {
		t.Errorf("only c has an endpoint, %q was elected", got)
	}
	nodes[2].Labels = map[string]string{v1.LabelNodeExcludeBalancers: ""}
	if got, _ := elect(netip.MustParseAddr("192.0.2.1"), electable(nodes, true), map[string]bool{"c": true}); got != "" {
		t.Errorf("an excluded node was elected: %q", got)
	}
}

// TestMovingEndpoint: an address that is in two slices for a moment is as good as the
// better of both says, in whatever order they are read.
func TestMovingEndpoint(t *testing.T) {
	make := func(ready bool) *discoveryv1.EndpointSlice {
		s := slice("http", 8080)
		s.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{"10.42.0.7"}, Conditions: discoveryv1.EndpointConditions{Ready: &ready}}}
		return s
	}
	for _, first := range []bool{true, false} {
		got := endpointsOf([]*discoveryv1.EndpointSlice{make(first), make(!first)}, &v1.ServicePort{Name: "http"}, true)
		if len(got) != 1 || !got[0].ready {
			t.Errorf("first ready %t: %+v", first, got)
		}
	}
}
