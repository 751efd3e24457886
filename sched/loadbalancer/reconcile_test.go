package loadbalancer

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestParsePool(t *testing.T) {
	ranges, err := ParsePool("192.0.2.0/30, 192.0.2.9-192.0.2.10\n192.0.2.20 fd00::/126 nonsense 192.0.2.9-192.0.2.1")
	var got []string
	for _, r := range ranges {
		got = append(got, fmt.Sprintf("%s-%s", r.First, r.Last))
	}
	want := []string{"192.0.2.1-192.0.2.2", "192.0.2.9-192.0.2.10", "192.0.2.20-192.0.2.20", "fd00::-fd00::3"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	if err == nil || !strings.Contains(err.Error(), `"nonsense"`) || !strings.Contains(err.Error(), `"192.0.2.9-192.0.2.1"`) {
		t.Errorf("what cannot be read is not reported: %v", err)
	}
}

func TestDecide(t *testing.T) {
	age := 0
	service := func(name string, has, asks string, families ...corev1.IPFamily) *corev1.Service {
		age++
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.NewTime(time.Unix(int64(age), 0))}}
		s.Spec.Type, s.Spec.LoadBalancerIP, s.Spec.IPFamilies = corev1.ServiceTypeLoadBalancer, asks, families
		if has != "" {
			setIngress(s, strings.Split(has, ","))
		}
		return s
	}
	tests := []struct {
		name, pool string
		services   []*corev1.Service
		want       []string
	}{
		{"no pool", "", []*corev1.Service{service("a", "", "")}, []string{"a []: the cluster's pool has no free IPv4 address"}},
		{"in turn", "10.0.0.1-10.0.0.2", []*corev1.Service{service("a", "", ""), service("b", "", ""), service("c", "", "")}, []string{"a [10.0.0.1]: ", "b [10.0.0.2]: ", "c []: the cluster's pool has no free IPv4 address"}},
		{"what one has stays, also against an older one", "10.0.0.1-10.0.0.2", []*corev1.Service{service("a", "", ""), service("b", "10.0.0.1", "")}, []string{"a [10.0.0.2]: ", "b [10.0.0.1]: "}},
		{"the pool moved", "10.0.0.8", []*corev1.Service{service("a", "10.0.0.1", "")}, []string{"a [10.0.0.8]: "}},
		{"asked for", "10.0.0.1-10.0.0.9", []*corev1.Service{service("a", "", "10.0.0.5"), service("b", "", "10.0.0.5"), service("c", "", "10.1.0.1"), service("d", "10.0.0.1", "10.0.0.7")},
			[]string{"a [10.0.0.5]: ", "b []: spec.loadBalancerIP 10.0.0.5 belongs to another Service", "c []: spec.loadBalancerIP 10.1.0.1 is not in the cluster's pool", "d [10.0.0.7]: "}},
		{"both families", "10.0.0.1 fd00::1", []*corev1.Service{service("a", "", "", corev1.IPv4Protocol, corev1.IPv6Protocol)}, []string{"a [10.0.0.1 fd00::1]: "}},
		{"nodes have some of the pool", "192.0.2.1-192.0.2.2", []*corev1.Service{service("a", "192.0.2.1", ""), service("b", "", "192.0.2.1"), service("c", "", "")},
			[]string{"a [192.0.2.2]: ", "b []: spec.loadBalancerIP 192.0.2.1 is the address of the node n1", "c []: the cluster's pool has no free IPv4 address"}},
		{"one address, two Services", "10.0.0.1-10.0.0.2", []*corev1.Service{service("a", "10.0.0.1", ""), service("b", "10.0.0.1", "")}, []string{"a [10.0.0.1]: ", "b [10.0.0.2]: "}},
	}
	nodes := nodesAddresses([]*corev1.Node{{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Status: corev1.NodeStatus{Addresses: []corev1.NodeAddress{
		{Type: corev1.NodeHostName, Address: "n1"}, {Type: corev1.NodeInternalIP, Address: "192.0.2.1"}, {Type: corev1.NodeInternalIP, Address: "fd00::e"},
	}}}})
	for _, tt := range tests {
		pool, err := ParsePool(tt.pool)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, d := range Decide(tt.services, nil, nodes, pool) {
			got = append(got, fmt.Sprintf("%s %v: %s", d.Service.Name, d.IPs, d.Fault))
		}
		if !slices.Equal(got, tt.want) {
			t.Errorf("%s:\n got %q\nwant %q", tt.name, got, tt.want)
		}
	}
}
