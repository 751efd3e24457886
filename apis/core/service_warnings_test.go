package core

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

func TestServiceWarnings(t *testing.T) {
	for name, test := range map[string]struct {
		spec corev1.ServiceSpec
		want []string // a part of each
	}{
		"nothing": {corev1.ServiceSpec{Type: "ClusterIP", ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1"}, SessionAffinity: "ClientIP", ExternalIPs: []string{"192.0.2.1"}}, nil},
		"headless": {corev1.ServiceSpec{Type: "ClusterIP", ClusterIP: "None", ClusterIPs: []string{"None"}, SessionAffinity: "ClientIP", ExternalIPs: []string{"192.0.2.1"}, LoadBalancerIP: "192.0.2.2"},
			[]string{"spec.loadBalancerIP is ignored", "spec.externalIPs is ignored", "spec.SessionAffinity is ignored"}},
		"a name elsewhere": {corev1.ServiceSpec{Type: "ExternalName", ExternalName: "a.b", ExternalIPs: []string{"192.0.2.1"}}, []string{`spec.externalIPs is ignored when spec.type is "ExternalName"`}},
		"addresses with zeros": {corev1.ServiceSpec{Type: "LoadBalancer", ClusterIP: "10.96.0.1", ExternalIPs: []string{"192.0.2.01"}, LoadBalancerSourceRanges: []string{"192.0.2.1/24"}, SessionAffinity: "None"},
			[]string{"spec.externalIPs[0]", "spec.loadBalancerSourceRanges[0]"}},
	} {
		got := serviceWarnings(&corev1.Service{Spec: test.spec})
		ok := len(got) == len(test.want)
		for i := range test.want {
			ok = ok && strings.Contains(got[i], test.want[i])
		}
		if !ok {
			t.Errorf("%s: %q, want %q", name, got, test.want)
		}
	}
}
