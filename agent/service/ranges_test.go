package service

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	networkinginformers "k8s.io/client-go/informers/networking/v1"
	"k8s.io/client-go/kubernetes/fake"
	corelisters "k8s.io/client-go/listers/core/v1"
	networkinglisters "k8s.io/client-go/listers/networking/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/clusterd/clusterd/agent/watches"
	"github.com/clusterd/clusterd/netsetup/lb"
)

// bases notes what was set.
type bases struct {
	Balancer
	base lb.Base
	put  map[lb.Frontend]lb.Backend
}

func (b *bases) SetBase(base lb.Base) error { b.base = base; return nil }
func (b *bases) Remembers() bool            { return false }

func (b *bases) Update(changed map[lb.Frontend]*lb.Backend) error {
	for f, to := range changed {
		if to == nil {
			delete(b.put, f)
		} else {
			b.put[f] = *to
		}
	}
	return nil
}

// at is what is behind the first frontend with that address.
func (b *bases) at(addr string) lb.Backend {
	for f, to := range b.put {
		if f.Addr.String() == addr {
			return to
		}
	}
	return lb.Backend{}
}

// told notes what is announced.
type told struct {
	addrs   []netip.Addr
	alone   bool
	set     int
	renewed chan struct{}
}

func (t *told) Answered([]netip.Addr, time.Duration) (map[netip.Addr]bool, error) { return nil, nil }

func (t *told) Tell([]netip.Addr) error { return nil }

func (t *told) Renew() error { t.renewed <- struct{}{}; return nil }

func (t *told) Set(addrs []netip.Addr, alone bool) error {
	t.set++
	t.addrs, t.alone = slices.Clone(addrs), alone
	return nil
}

// bench is a Proxy on watches that a test fills.
type bench struct {
	*Proxy
	t                             *testing.T
	services, nodes, cidrs, index cache.Indexer
	balancer                      *bases
	announced                     *told
	ways, ranges                  []netip.Prefix
	allWays                       bool
}

func newBench(t *testing.T) *bench {
	t.Helper()
	w, err := watches.New(fake.NewClientset())
	if err != nil {
		t.Fatal(err)
	}
	plain := func() cache.Indexer { return cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{}) }
	b := &bench{
		t: t, services: cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc}),
		nodes: plain(), cidrs: plain(), index: cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{watches.ByService: watches.ServiceOf}),
		balancer: &bases{put: map[lb.Frontend]lb.Backend{}}, announced: &told{},
	}
	if b.Proxy, err = New(Config{
		NodeName: "n1", Services: w.Services, Slices: w.Slices, Nodes: w.Nodes, Balancer: b.balancer, Flows: &sweeps{}, Announcer: b.announced,
		ServiceCIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}, Logger: slog.New(slog.DiscardHandler),
		Ways: func(ranges []netip.Prefix, all bool) error {
			b.ways, b.allWays = slices.Clone(ranges), all
			return nil
		},
		Ranges: func(ranges []netip.Prefix) { b.ranges = slices.Clone(ranges) },
	}); err != nil {
		t.Fatal(err)
	}
	b.Proxy.services, b.Proxy.nodes = corelisters.NewServiceLister(b.services), corelisters.NewNodeLister(b.nodes)
	b.Proxy.cidrs = networkinglisters.NewServiceCIDRLister(b.cidrs)
	b.shown.Store(1)
	b.everything()
	return b
}

// put changes what a watch shows, as its handlers would.
func (b *bench) put(objects ...metav1.Object) {
	b.t.Helper()
	for _, o := range objects {
		var err error
		switch o := o.(type) {
		case *v1.Service:
			err = b.services.Update(o)
			b.onService(o)
		case *v1.Node:
			err = b.nodes.Update(o)
			b.onNode(o)
		case *networkingv1.ServiceCIDR:
			err = b.cidrs.Update(o)
		}
		if err != nil {
			b.t.Fatal(err)
		}
	}
	if err := b.sync(b.index); err != nil {
		b.t.Fatal(err)
	}
}

func node(name, addr string) *v1.Node {
	return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: v1.NodeStatus{
		Addresses:  []v1.NodeAddress{{Type: v1.NodeHostName, Address: name}, {Type: v1.NodeInternalIP, Address: addr}},
		Conditions: []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue}},
	}}
}

func serviceCIDR(name, cidr, reason string) *networkingv1.ServiceCIDR {
	c := metav1.Condition{Type: networkingv1.ServiceCIDRConditionReady, Status: metav1.ConditionFalse, Reason: reason}
	if reason == "" {
		c.Status = metav1.ConditionTrue
	}
	return &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{cidr}}, Status: networkingv1.ServiceCIDRStatus{Conditions: []metav1.Condition{c}}}
}

// The bug: the ranges that ServiceCIDRs add had no route, and what had no Service there
// was not refused but went to the world.
func TestFurtherRanges(t *testing.T) {
	b := newBench(t)
	b.put(node("n1", "192.0.2.1"), node("n2", "10.98.0.2"))
	look := func(want ...string) {
		t.Helper()
		var all []netip.Prefix
		for _, w := range append([]string{"10.96.0.0/16"}, want...) {
			all = append(all, netip.MustParsePrefix(w))
		}
		if !slices.Equal(b.balancer.base.Ranges, all) || !slices.Equal(b.ways, all) || !slices.Equal(b.ranges, all) {
			t.Errorf("ranges %v, ways %v, others know of %v, want %v", b.balancer.base.Ranges, b.ways, b.ranges, all)
		}
	}
	look()
	b.put(serviceCIDR("kubernetes", "10.96.0.0/16", ""), serviceCIDR("more", "10.97.0.0/16", ""))
	look("10.97.0.0/16")
	b.put(serviceCIDR("a-nodes", "10.98.0.0/16", ""), serviceCIDR("pods", "10.244.0.0/16", "Overlap"))
	look("10.97.0.0/16")
	b.put(serviceCIDR("more", "10.97.0.0/16", networkingv1.ServiceCIDRReasonTerminating))
	look("10.97.0.0/16") // Services have addresses of it still
	b.put(serviceCIDR("more", "10.97.0.0/16", "NotReady"))
	look()
}

// The bug: while ServiceCIDRs were not known yet, a process that began took away the
// routes to their ranges, which a former one had set.
func TestRangesNotKnownYet(t *testing.T) {
	b := newBench(t)
	b.cfg.CIDRs = networkinginformers.NewServiceCIDRInformer(fake.NewClientset(), 0, cache.Indexers{})
	b.ensureWays()
	if b.ways != nil {
		t.Errorf("before the first look there are ways to %v", b.ways)
	}
	b.put(node("n1", "192.0.2.1"))
	if b.allWays || len(b.ways) != 1 {
		t.Errorf("ways to %v, all: %t, before ServiceCIDRs are known", b.ways, b.allWays)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { b.cfg.CIDRs.RunWithContext(ctx); close(ended) }()
	defer func() { cancel(); <-ended }()
	if !cache.WaitForCacheSync(ctx.Done(), b.cfg.CIDRs.HasSynced) {
		t.Fatal("ServiceCIDRs were not read")
	}
	b.everything()
	b.put()
	if !b.allWays {
		t.Error("ways to ranges that have ended stay")
	}
}
