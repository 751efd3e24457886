package service

import (
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/watches"
	"github.com/clusterd/clusterd/netsetup/lb"
	"github.com/clusterd/clusterd/netsetup/nft"
)

// sickTables does not let dynamic sets be read while sick.
type sickTables struct {
	nft.FakeTables
	sick bool
}

func (s *sickTables) Elements(table string, set nft.Set) (nft.Elements, error) {
	if s.sick {
		return nil, errors.New("no buffer space available")
	}
	return s.FakeTables.Elements(table, set)
}

// sweeps notes what DeleteOthers was given.
type sweeps struct {
	err    error
	asked  int
	served map[lb.Frontend][]netip.AddrPort
	ranges []netip.Prefix
}

func (*sweeps) Delete([]lb.Flow) (uint, error) { return 0, nil }

func (s *sweeps) DeleteOthers(serving map[lb.Frontend][]netip.AddrPort, ranges []netip.Prefix) (uint, error) {
	s.asked++
	s.served, s.ranges = serving, ranges
	return 0, s.err
}

// The bug: an endpoint that went while this program did not run stayed the
// endpoint of the clients that the kernel had noted for it, and of flows of UDP,
// for as long as they went on asking.
func TestEndpointGoneWhileDown(t *testing.T) {
	web := &v1.Service{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "d"}, Spec: v1.ServiceSpec{
		Type: v1.ServiceTypeClusterIP, ClusterIP: "10.96.0.9", ClusterIPs: []string{"10.96.0.9"}, IPFamilies: []v1.IPFamily{v1.IPv4Protocol},
		Ports:           []v1.ServicePort{{Name: "http", Port: 80, Protocol: v1.ProtocolTCP}, {Name: "log", Port: 514, Protocol: v1.ProtocolUDP}},
		SessionAffinity: v1.ServiceAffinityClientIP,
	}}
	services := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	nodes := cache.NewIndexer(cache.MetaNamespaceKeyFunc, nil)
	index := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{watches.ByService: func(any) ([]string, error) { return []string{"d/web"}, nil }})
	if err := services.Add(web); err != nil {
		t.Fatal(err)
	}
	endpoints := func(list ...string) {
		t.Helper()
		for _, s := range []*discoveryv1.EndpointSlice{slice("http", 8080, list...), slice("log", 5140, list...)} {
			if s.Name = *s.Ports[0].Name; s.Name == "log" {
				s.Ports[0].Protocol = ptr.To(v1.ProtocolUDP)
			}
			if err := index.Update(s); err != nil {
				t.Fatal(err)
			}
		}
	}
	kernel, flows := &sickTables{}, &sweeps{}
	start := func() *Proxy {
		t.Helper()
		w, err := watches.New(fake.NewClientset())
		if err != nil {
			t.Fatal(err)
		}
		p, err := New(Config{
			NodeName: "n1", Services: w.Services, Slices: w.Slices, Nodes: w.Nodes, Balancer: lb.New(kernel, slog.New(slog.DiscardHandler)), Flows: flows,
			ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}, Logger: slog.New(slog.DiscardHandler),
		})
		if err != nil {
			t.Fatal(err)
		}
		p.services, p.nodes = corelisters.NewServiceLister(services), corelisters.NewNodeLister(nodes)
		p.everything()
		if err := p.sync(index); err != nil {
			t.Fatal(err)
		}
		return p
	}
	lives, dead := "10.0.1.1 n1 ready", "10.0.2.1 n2 ready"
	endpoints(lives, dead)
	start()

	// What the kernel notes of three clients, then of a frontend that is no more.
	tcp, _ := protocol(v1.ProtocolTCP)
	table := lb.Compile(lb.Base{Ranges: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}}, nil)
	key := func(client byte, port uint16) string {
		return nft.Key(netip.AddrFrom4([4]byte{192, 0, 2, client}), netip.MustParseAddr("10.96.0.9"), tcp, port)
	}
	to := func(addr string) string { return nft.Key(netip.MustParseAddr(addr), uint16(8080)) }
	note := func(key, data string) {
		t.Helper()
		var c nft.Change
		c.Put("affinity4", key, data)
		if err := kernel.Commit(table, c); err != nil {
			t.Fatal(err)
		}
	}
	note(key(1, 80), to("10.0.1.1"))
	note(key(2, 80), to("10.0.2.1"))
	note(key(3, 80), to("10.0.2.1"))
	note(key(4, 81), to("10.0.1.1"))
	remembered := func() nft.Elements {
		t.Helper()
		e, err := kernel.FakeTables.Elements(lb.TableName, nft.Set{Name: "affinity4"})
		if err != nil {
			t.Fatal(err)
		}
		return e
	}

	endpoints(lives) // while no process runs
	kernel.sick, flows.err, flows.asked = true, errors.New("dump interrupted"), 0
	p := start()
	if len(remembered()) != 4 || flows.asked != 1 {
		t.Fatalf("%d clients are remembered by a kernel that could not be asked, flows were looked at %d times", len(remembered()), flows.asked)
	}
	// The next tick tries again, until it was done once.
	kernel.sick, flows.err = false, nil
	p.tidy(nil)
	want := nft.Elements{key(1, 80): to("10.0.1.1")}
	if got := remembered(); !maps.Equal(got, want) {
		t.Errorf("remembered: %x, want %x", got, want)
	}
	for f, addrs := range flows.served {
		if len(addrs) != 1 || addrs[0].Addr().String() != "10.0.1.1" {
			t.Errorf("connections to %s may go on to %v, want 10.0.1.1 alone", f, addrs)
		}
	}
	if len(flows.served) != 2 || len(flows.ranges) != 1 {
		t.Errorf("flows of %v within %v", flows.served, flows.ranges)
	}
	p.tidy(nil)
	if flows.asked != 2 {
		t.Errorf("flows were looked at %d times, want twice", flows.asked)
	}

	// The same for one that goes while the process runs and the kernel is busy.
	kernel.sick = true
	endpoints(dead)
	p.touch(types.NamespacedName{Namespace: "d", Name: "web"})
	if err := p.sync(index); err != nil {
		t.Fatal(err)
	}
	kernel.sick = false
	p.tidy(nil)
	if got := remembered(); len(got) > 0 {
		t.Errorf("remembered after the last endpoint went: %x", got)
	}
}
