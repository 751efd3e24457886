package kubeservice

import (
	"net/netip"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func node(name, ip string, port int32, ready corev1.ConditionStatus, change ...func(*corev1.Node)) *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{
		Addresses:  []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: ip}},
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: ready}},
	}}
	n.Status.DaemonEndpoints.KubeletEndpoint.Port = port
	for _, fn := range change {
		fn(n)
	}
	return n
}

func server1(n *corev1.Node) { n.Labels = map[string]string{labelServer: ""} }

func TestDecide(t *testing.T) {
	tests := []struct {
		name  string
		nodes []*corev1.Node
		want  []string // NAME ADDRESS...
	}{
		{"no server yet", nil, nil},
		{"all live", []*corev1.Node{node("b", "192.0.2.2", 7443, "True"), node("a", "192.0.2.1", 7443, "True")}, []string{"kubernetes 192.0.2.1 192.0.2.2"}},
		{"one is dead, one is not ready", []*corev1.Node{node("a", "192.0.2.1", 7443, "False"), node("b", "192.0.2.2", 7443, "Unknown")}, []string{"kubernetes 192.0.2.1"}},
		{"one has not published itself", []*corev1.Node{node("a", "192.0.2.1", 7443, "True"), node("b", "", 7443, "True"), node("c", "192.0.2.3", 0, "True")}, []string{"kubernetes 192.0.2.1"}},
		{"different ports", []*corev1.Node{node("a", "192.0.2.1", 7443, "True"), node("b", "192.0.2.2", 7444, "True")}, []string{"kubernetes 192.0.2.1", "kubernetes-7444 192.0.2.2"}},
		{"some are servers", []*corev1.Node{node("a", "192.0.2.1", 7443, "True", server1), node("b", "192.0.2.2", 7443, "True")}, []string{"kubernetes 192.0.2.1"}},
		{"the server is dead", []*corev1.Node{node("a", "192.0.2.1", 7443, "Unknown", server1), node("b", "192.0.2.2", 7443, "True")}, nil},
		{"IPv6", []*corev1.Node{node("a", "fd00::1", 7443, "True")}, []string{"kubernetes fd00::1"}},
	}
	for _, tt := range tests {
		var got []string
		for _, s := range Decide(tt.nodes) {
			text := s.Name
			for _, e := range s.Endpoints {
				text += " " + e.Addresses[0]
			}
			got = append(got, text)
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s: got %q, want %q", tt.name, got, tt.want)
		}
	}
}

func TestFix(t *testing.T) {
	s := newService(netip.MustParseAddr("10.96.0.1"))
	if fix(s) != nil {
		t.Error("a sound Service is altered")
	}
	for name, harm := range map[string]func(*corev1.Service){
		"selector": func(s *corev1.Service) { s.Spec.Selector = map[string]string{"a": "b"} },
		"port":     func(s *corev1.Service) { s.Spec.Ports[0].Port = 444 },
		"name":     func(s *corev1.Service) { s.Spec.Ports[0].Name = "tls" },
	} {
		bad := s.DeepCopy()
		harm(bad)
		if good := fix(bad); good == nil || fix(good) != nil {
			t.Errorf("%s: not corrected: %+v", name, good)
		}
	}
}
