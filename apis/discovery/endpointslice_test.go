package discovery

import (
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func newSlice(edit func(*discoveryv1.EndpointSlice)) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "web", Namespace: "hello", ResourceVersion: "7", Generation: 1},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}}},
		Ports:       []discoveryv1.EndpointPort{{Port: ptr.To[int32](80)}},
	}
	edit(s)
	defaultEndpointSlice(s)
	return s
}

func TestValidateEndpointSlice(t *testing.T) {
	address := func(addressType discoveryv1.AddressType, address string) func(*discoveryv1.EndpointSlice) {
		return func(s *discoveryv1.EndpointSlice) {
			s.AddressType, s.Endpoints[0].Addresses = addressType, []string{address}
		}
	}
	const at = "endpoints[0].addresses[0]: Invalid value: "
	tests := []struct {
		name string
		edit func(*discoveryv1.EndpointSlice)
		want []string
	}{
		{"sound", func(*discoveryv1.EndpointSlice) {}, nil},
		{"IPv6", address("IPv6", "fd00::1"), nil},
		{"name", address("FQDN", "web.example.com"), nil},
		{"type", address("IPX", "fd00::1"), []string{`addressType: Unsupported value: "IPX": supported values: "FQDN", "IPv4", "IPv6"`}},
		{"other family", address("IPv4", "fd00::1"), []string{at + `"fd00::1": must be an IPv4 address`}},
		{"mapped", address("IPv6", "::ffff:10.0.0.1"), []string{at + `"::ffff:10.0.0.1": must not be an IPv4-mapped IPv6 address`}},
		{"no address", address("IPv4", "10.0.0"), []string{at + `"10.0.0": must be a valid IP address`}},
		{"loopback", address("IPv4", "127.0.0.1"), []string{at + `"127.0.0.1": may not be in the loopback range`}},
		{"metadata service", address("IPv4", "169.254.169.254"), []string{at + `"169.254.169.254": may not be in the link-local range`}},
		{"empty endpoint", func(s *discoveryv1.EndpointSlice) { s.Endpoints[0].Addresses = nil }, []string{"endpoints[0].addresses: Required value: must contain at least 1 address"}},
		{"too many", func(s *discoveryv1.EndpointSlice) { s.Endpoints = make([]discoveryv1.Endpoint, maxEndpoints+1) }, []string{"endpoints: Too many: 1001: must have at most 1000 items"}},
		{"hints", func(s *discoveryv1.EndpointSlice) {
			s.Endpoints[0].Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "eu-1a"}, {Name: "eu_1b"}}, ForNodes: []discoveryv1.ForNode{{Name: "n1.example.com"}}}
		}, nil},
		{"hints twice", func(s *discoveryv1.EndpointSlice) {
			s.Endpoints[0].Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "a"}, {Name: "a"}}, ForNodes: []discoveryv1.ForNode{{Name: "n"}, {Name: "n"}}}
		}, []string{`endpoints[0].hints.forZones[1].name: Duplicate value: "a"`, `endpoints[0].hints.forNodes[1].name: Duplicate value: "n"`}},
		{"hints of bad names", func(s *discoveryv1.EndpointSlice) {
			s.Endpoints[0].Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "a/b"}}, ForNodes: []discoveryv1.ForNode{{Name: "N_1"}}}
		}, []string{`endpoints[0].hints.forZones[0].name: Invalid value: "a/b"`, `endpoints[0].hints.forNodes[0].name: Invalid value: "N_1"`}},
		{"too many hints", func(s *discoveryv1.EndpointSlice) {
			s.Endpoints[0].Hints = &discoveryv1.EndpointHints{ForZones: make([]discoveryv1.ForZone, 9), ForNodes: make([]discoveryv1.ForNode, 9)}
		}, []string{`endpoints[0].hints.forZones: Too many: 9: must have at most 8 items`, `endpoints[0].hints.forNodes: Too many: 9: must have at most 8 items`}},
		{"port names", func(s *discoveryv1.EndpointSlice) {
			s.Ports = []discoveryv1.EndpointPort{{}, {Name: ptr.To("")}, {Name: ptr.To("A_")}}
		}, []string{`ports[1].name: Duplicate value: ""`, `ports[2].name: Invalid value: "A_": `}},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			checktest.Faults(t, validateEndpointSlice(newSlice(test.edit)), test.want...)
		})
	}
}

func TestEndpointSliceUpdate(t *testing.T) {
	kind := EndpointSlice()
	old := newSlice(func(*discoveryv1.EndpointSlice) {})
	s := newSlice(func(s *discoveryv1.EndpointSlice) { s.Annotations = map[string]string{"a": "b"} })
	kind.PrepareUpdate(s, old)
	if s.Generation != 1 {
		t.Errorf("an annotation made generation %d", s.Generation)
	}
	s = newSlice(func(s *discoveryv1.EndpointSlice) {
		s.AddressType, s.Endpoints[0].Addresses = discoveryv1.AddressTypeIPv6, []string{"fd00::1"}
	})
	kind.PrepareUpdate(s, old)
	if s.Generation != 2 {
		t.Errorf("new endpoints made generation %d, want 2", s.Generation)
	}
	checktest.Faults(t, kind.ValidateUpdate(s, old), `addressType: Invalid value: "IPv6": field is immutable`)
}
