package core

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func TestValidateEndpoints(t *testing.T) {
	address := func(ip string) func(*corev1.EndpointSubset) {
		return func(s *corev1.EndpointSubset) { s.Addresses[0].IP = ip }
	}
	tests := []struct {
		name string
		edit func(*corev1.EndpointSubset)
		want []string
	}{
		{"sound", func(*corev1.EndpointSubset) {}, nil},
		{"no ports", func(s *corev1.EndpointSubset) { s.Ports = nil }, nil},
		{"IPv6", address("fd00::1"), nil},
		{"empty", func(s *corev1.EndpointSubset) { s.Addresses = nil }, []string{"subsets[0]: Required value: must specify `addresses` or `notReadyAddresses`"}},
		{"not ready only", func(s *corev1.EndpointSubset) { s.Addresses, s.NotReadyAddresses = nil, s.Addresses }, nil},
		{"no address", address("10.0.0"), []string{`subsets[0].addresses[0].ip: Invalid value: "10.0.0": must be a valid IP address`}},
		{"zone", address("fe80::1%eth0"), []string{`subsets[0].addresses[0].ip: Invalid value: "fe80::1%eth0": must be a valid IP address`}},
		{"mapped", address("::ffff:10.0.0.1"), []string{`subsets[0].addresses[0].ip: Invalid value: "::ffff:10.0.0.1": must not be an IPv4-mapped`}},
		{"loopback", address("127.0.0.1"), []string{`subsets[0].addresses[0].ip: Invalid value: "127.0.0.1": may not be in the loopback range`}},
		{"metadata service", address("169.254.169.254"), []string{`subsets[0].addresses[0].ip: Invalid value: "169.254.169.254": may not be in the link-local range`}},
		{"hostname", func(s *corev1.EndpointSubset) { s.Addresses[0].Hostname = "a.b" }, []string{`subsets[0].addresses[0].hostname: Invalid value: "a.b"`}},
		{"port", func(s *corev1.EndpointSubset) { s.Ports[0].Port = 0 }, []string{"subsets[0].ports[0].port: Invalid value: 0"}},
		{"protocol", func(s *corev1.EndpointSubset) { s.Ports[0].Protocol = "ICMP" }, []string{`subsets[0].ports[0].protocol: Unsupported value: "ICMP"`}},
		{"names", func(s *corev1.EndpointSubset) {
			s.Ports = []corev1.EndpointPort{{Port: 1}, {Port: 2, Name: "a"}, {Port: 3, Name: "a"}}
		}, []string{"subsets[0].ports[0].name: Required value"}}, // one name may be of two protocols
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			e := &corev1.Endpoints{
				ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "hello"},
				Subsets:    []corev1.EndpointSubset{{Addresses: []corev1.EndpointAddress{{IP: "10.0.0.1"}}, Ports: []corev1.EndpointPort{{Port: 80}}}},
			}
			test.edit(&e.Subsets[0])
			defaultEndpoints(e)
			checktest.Faults(t, Endpoints().Validate(e), test.want...)
		})
	}
}

func TestEndpointsText(t *testing.T) {
	a := func(ips ...string) (out []corev1.EndpointAddress) {
		for _, ip := range ips {
			out = append(out, corev1.EndpointAddress{IP: ip})
		}
		return out
	}
	ports := []corev1.EndpointPort{{Port: 80}, {Port: 443}}
	for want, subsets := range map[string][]corev1.EndpointSubset{
		"<none>":       {{NotReadyAddresses: a("10.0.0.1"), Ports: ports}},
		"10.0.0.1":     {{Addresses: a("10.0.0.1")}},
		"[fd00::1]:80": {{Addresses: a("fd00::1"), Ports: ports[:1]}},
		"10.0.0.1:80,10.0.0.1:443,10.0.0.2:80 + 1 more...": {{Addresses: a("10.0.0.1", "10.0.0.2"), Ports: ports}},
	} {
		if got := endpointsText(&corev1.Endpoints{Subsets: subsets}); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
