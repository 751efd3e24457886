package service

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/names"
)

func balanced(name, clusterIP, ip, reason string) *v1.Service {
	s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: name}, Spec: v1.ServiceSpec{
		Type: v1.ServiceTypeLoadBalancer, ClusterIP: clusterIP, ClusterIPs: []string{clusterIP}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
		Ports: []v1.ServicePort{{Port: 80, Protocol: v1.ProtocolTCP}},
	}}
	s.Status.LoadBalancer.Ingress = []v1.LoadBalancerIngress{{IP: ip}}
	if reason != "" {
		s.Status.Conditions = []metav1.Condition{{Type: names.LoadBalancerAddress, Reason: reason}}
	}
	return s
}

// The bug: a Service whose status had a node's address took the node off the network: its
// other ports were refused on every node, and another node announced the address.
func TestAnnounced(t *testing.T) {
	b := newBench(t)
	b.put(node("n1", "192.0.2.1"),
		balanced("a-nodes", "10.96.0.20", "192.0.2.2", ""), balanced("elsewhere", "10.96.0.21", "192.0.2.101", core.ReasonOtherProgram),
		balanced("pool", "10.96.0.22", "192.0.2.102", core.ReasonAddressGiven), balanced("inside", "10.96.0.23", "10.96.0.10", ""),
		balanced("before", "10.96.0.24", "192.0.2.103", ""))
	look := func(what, announced string, virtual map[string]bool) {
		t.Helper()
		if got := fmt.Sprint(b.announced.addrs); got != announced {
			t.Errorf("%s: announced are %s, want %s", what, got, announced)
		}
		for addr, want := range virtual {
			if got := b.balancer.at(addr).Virtual; got != want {
				t.Errorf("%s: %s is virtual: %t, want %t", what, addr, got, want)
			}
		}
	}
	look("before the node is known", "[192.0.2.2 192.0.2.102 192.0.2.103]", map[string]bool{"192.0.2.2": true, "192.0.2.101": false, "192.0.2.102": true, "192.0.2.103": true})
	late := node("n2", "192.0.2.2")
	late.Status.Conditions = nil // not ready: n1 is elected for all
	b.put(late)
	look("with the node", "[192.0.2.102 192.0.2.103]", map[string]bool{"192.0.2.2": false, "192.0.2.102": true})
	if err := b.nodes.Delete(late); err != nil {
		t.Fatal(err)
	}
	b.put()
	look("without it again", "[192.0.2.2 192.0.2.102 192.0.2.103]", map[string]bool{"192.0.2.2": true})
}

// The bug: a node that was cut off from the API held its addresses against those that
// were elected in its place. It renews them while no other has them, and takes none.
func TestNotFresh(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.announced.renewed = make(chan struct{})
		fresh := true
		b.cfg.Fresh = func() bool { return fresh }
		b.put(node("n1", "192.0.2.1"), balanced("pool", "10.96.0.22", "192.0.2.102", core.ReasonAddressGiven))
		if len(b.announced.addrs) != 1 {
			t.Fatalf("announced are %v", b.announced.addrs)
		}
		fresh = false
		set := b.announced.set
		b.put(balanced("more", "10.96.0.23", "192.0.2.103", core.ReasonAddressGiven))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { b.loop(ctx, b.index); close(ended) }()
		<-b.announced.renewed
		<-b.announced.renewed
		cancel()
		<-ended
		if b.announced.set != set {
			t.Errorf("addresses were set %d times by what may be old", b.announced.set-set)
		}
	})
}
