package service

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
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
		fresh := uint64(1)
		b.cfg.Fresh = func() uint64 { return fresh }
		b.put(node("n1", "192.0.2.1"), balanced("pool", "10.96.0.22", "192.0.2.102", core.ReasonAddressGiven))
		if len(b.announced.addrs) != 1 {
			t.Fatalf("announced are %v", b.announced.addrs)
		}
		fresh = 0
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

// The bug: a node that was cut off took its addresses back as soon as its lease was
// renewed, by watches that still showed the time before.
func TestBackBeforeItsWatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.announced.renewed = make(chan struct{}, 1)
		var fresh atomic.Uint64
		fresh.Store(1)
		b.cfg.Fresh = fresh.Load
		var asked atomic.Int64
		current := make(chan bool)
		b.cfg.Current = func(ctx context.Context) error {
			asked.Add(1)
			select {
			case ok := <-current:
				if !ok {
					return errors.New("the watch of Services is behind")
				}
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		b.put(node("n1", "192.0.2.1"), balanced("pool", "10.96.0.22", "192.0.2.102", core.ReasonAddressGiven))
		set := b.announced.set
		if set == 0 {
			t.Fatal("nothing is announced: the test shows nothing")
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		fresh.Store(2) // it was not in between
		wg.Go(func() { b.loop(ctx, b.index) })
		wg.Go(func() { b.keepCurrent(ctx) })
		defer wg.Wait()
		defer cancel()
		<-b.announced.renewed
		current <- false
		<-b.announced.renewed
		synctest.Wait()
		if b.announced.set != set || asked.Load() != 2 {
			t.Errorf("set %d times more by what may be old; asked %d times, want 2", b.announced.set-set, asked.Load())
		}
		current <- true
		synctest.Wait()
		if b.announced.set != set+1 {
			t.Errorf("set %d times more, want 1", b.announced.set-set)
		}
	})
}

// Addresses stay without this process where no other node can take them over.
func TestAlone(t *testing.T) {
	for name, tt := range map[string]struct {
		server bool
		others []metav1.Object
		want   bool
	}{
		"the only server and node":  {true, nil, true},
		"servers are elsewhere":     {false, nil, false},
		"there is another node":     {true, []metav1.Object{node("n2", "192.0.2.2")}, false},
		"another that is not ready": {true, []metav1.Object{&v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n3"}}}, false},
	} {
		b := newBench(t)
		b.cfg.Server = tt.server
		b.put(append(tt.others, node("n1", "192.0.2.1"), balanced("pool", "10.96.0.22", "192.0.2.102", core.ReasonAddressGiven))...)
		if b.announced.set == 0 || b.announced.alone != tt.want {
			t.Errorf("%s: set %d times, alone: %t", name, b.announced.set, b.announced.alone)
		}
		// The bug: its own addresses went away for a moment after a restart, until it was Ready.
		waits := node("n1", "192.0.2.1")
		waits.Status.Conditions[0].Status = v1.ConditionUnknown
		b.put(waits)
		if has := slices.Contains(b.announced.addrs, netip.MustParseAddr("192.0.2.102")); has != tt.want {
			t.Errorf("%s: announced are %v by a node that is not Ready", name, b.announced.addrs)
		}
	}
}

// The bug: a node of another network was elected for an address, whose neighbours never
// ask it.
func TestElectNeighbours(t *testing.T) {
	in := func(name, networks string) *v1.Node {
		n := node(name, "192.0.2.1")
		n.Annotations = map[string]string{names.AnnounceNetworks: networks}
		return n
	}
	a, b, c := in("a", "192.0.2.0/24,2001:db8:1::/64"), in("b", "198.51.100.0/24,2001:db8:2::/64"), in("c", "")
	for addr, want := range map[string]string{
		"192.0.2.100": "a", "198.51.100.7": "b", "2001:db8:1::7": "a", "2001:db8:2::7": "b", "198.51.100.8": "b", "192.0.2.101": "a",
	} {
		if got, _ := elect(netip.MustParseAddr(addr), []*v1.Node{a, b, c}, nil); got != want {
			t.Errorf("%s: %s is elected, want %s", addr, got, want)
		}
	}
	near := map[string]bool{"b": true, "c": true}
	if got, _ := elect(netip.MustParseAddr("192.0.2.100"), []*v1.Node{a, b, c}, near); got == "" || got == "a" {
		t.Errorf("%q is elected, of those with endpoints none is a neighbour", got)
	}
	// A node of a version before elects among all; so do the others, while it is there.
	old := node("old", "192.0.2.9")
	elected := map[string]bool{}
	for i := range 64 {
		best, _ := elect(netip.AddrFrom4([4]byte{192, 0, 2, byte(i)}), []*v1.Node{a, b, c, old}, nil)
		elected[best] = true
	}
	if len(elected) != 4 {
		t.Errorf("elected are %v, want all four", elected)
	}
}
