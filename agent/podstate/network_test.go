package podstate

import (
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
)

func TestBandwidth(t *testing.T) {
	for _, tt := range []struct {
		in, out         string
		host            bool
		wantIn, wantOut uint64
		fault           string
	}{
		{in: "10M", out: "1500k", wantIn: 10_000_000, wantOut: 1_500_000},
		{in: "1k", wantIn: 1_000},
		{out: "1P", wantOut: 1_000_000_000_000_000},
		{out: "1Mi", wantOut: 1 << 20},
		{in: "999", fault: `annotation kubernetes.io/ingress-bandwidth: "999": must be bits a second from 1k to 1P`},
		{out: "2P", fault: `annotation kubernetes.io/egress-bandwidth: "2P"`},
		{out: "-1M", fault: `annotation kubernetes.io/egress-bandwidth: "-1M"`},
		{out: "10 Mbit", fault: `annotation kubernetes.io/egress-bandwidth: "10 Mbit"`},
		{in: "10M", out: "fast", host: true},
		{out: "1e-2000000000", fault: `annotation kubernetes.io/egress-bandwidth: "1e-2000000000"`},
	} {
		pod := &v1.Pod{}
		pod.Spec.HostNetwork = tt.host
		pod.Annotations = map[string]string{}
		if tt.in != "" {
			pod.Annotations[AnnotationIngressBandwidth] = tt.in
		}
		if tt.out != "" {
			pod.Annotations[AnnotationEgressBandwidth] = tt.out
		}
		in, out, err := Bandwidth(pod)
		if in != tt.wantIn || out != tt.wantOut || (err == nil) != (tt.fault == "") || err != nil && !strings.Contains(err.Error(), tt.fault) {
			t.Errorf("%q %q: got %d, %d, %v", tt.in, tt.out, in, out, err)
		}
	}
}
