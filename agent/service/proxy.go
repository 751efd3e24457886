package service

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	networkinglisters "k8s.io/client-go/listers/networking/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/clusterd/clusterd/agent/watches"
	"github.com/clusterd/clusterd/netsetup/lb"
	"github.com/clusterd/clusterd/slack"
)

// Balancer spreads connections: *lb.Balancer.
type Balancer interface {
	SetBase(lb.Base) error
	Update(map[lb.Frontend]*lb.Backend) error
	Forget() error
	Remembers() bool
	Run(ctx context.Context)
}

// Flows forgets tracked connections: *lb.Conntrack.
type Flows interface {
	Delete([]lb.Flow) (uint, error)
	DeleteOthers(serving map[lb.Frontend][]netip.AddrPort, ranges []netip.Prefix) (uint, error)
}

// Announcer makes addresses the node's: *announce.Announcer.
type Announcer interface {
	// Set has exactly these be the node's, for Config.Lifetime or, alone, until they are
	// not any more.
	Set(addrs []netip.Addr, alone bool) error
	// Renew has those that were set stay, but for those of another machine's.
	Renew() error
	// Answered returns those for which another machine of the segment answers within a
	// time, as soon as all are answered for.
	Answered(addrs []netip.Addr, within time.Duration) (map[netip.Addr]bool, error)
	// Tell has the neighbours learn again that those that were set are the node's.
	Tell(addrs []netip.Addr) error
}

// Config of a Proxy. All fields are required unless they say otherwise.
type Config struct {
	NodeName string
	// Services, Slices and Nodes are the watches of all of them, as package watches
	// makes them. Their owner runs them.
	Services, Slices, Nodes cache.SharedIndexInformer
	// CIDRs is the watch of ServiceCIDRs, which the Proxy runs. It is waited for a
	// moment alone: servers of a version before do not let nodes read them. Optional.
	CIDRs cache.SharedIndexInformer

	Balancer Balancer
	Flows    Flows
	// Announcer, for addresses of load balancers; nil: they are announced by
	// something else.
	Announcer Announcer
	// Lifetime is how long the addresses stay that the Announcer sets; they are set
	// again in time. Default 30 s.
	Lifetime time.Duration
	// Server: the node's clusterd is a server of the cluster. Where it is its only node,
	// no other is elected while it does not run.
	Server bool
	// Fresh is not zero while the cluster takes this node for alive: else others may have
	// taken its addresses over. It is another number each time that this was not so
	// before. Default: always one.
	Fresh func() uint64
	// Current returns nil when Services, Slices and Nodes hold what the API had when it was
	// called. It is called for each number of Fresh, as watches come back later than that: no
	// address is announced by the past. Default: they do.
	Current func(ctx context.Context) error
	// PodCIDRs are the pods' ranges, ServiceCIDRs those of cluster addresses that the
	// cluster was begun with; CIDRs has those beside them.
	PodCIDRs, ServiceCIDRs []netip.Prefix
	// Ways is called when it may be that packets to the ranges of cluster addresses
	// have no way out of the node's own programs. all: there are no other ranges, those
	// that a former process knew of have ended. Optional.
	Ways func(ranges []netip.Prefix, all bool) error
	// Ranges is called with the ranges of cluster addresses when they are known, and
	// after each change. Optional.
	Ranges func([]netip.Prefix)
	Logger *slog.Logger // default slog.Default()
}

// Proxy keeps this node's rules for Services in step with the API.
type Proxy struct {
	cfg     Config
	health  *healthServers
	standby *standby // nil: nothing is announced

	services corelisters.ServiceLister
	slices   discoverylisters.EndpointSliceLister
	nodes    corelisters.NodeLister
	cidrs    networkinglisters.ServiceCIDRLister // nil: there is no watch

	mu    sync.Mutex // guards dirty and all
	dirty map[types.NamespacedName]bool
	every bool // all are to be looked at
	wake  chan struct{}

	shown atomic.Uint64 // the number of Fresh for which the watches were found current
	check chan uint64   // those for which they are to be looked at

	// Owned by Run's loop.
	claims    map[lb.Frontend][]owned
	frontends map[types.NamespacedName][]lb.Frontend
	current   map[lb.Frontend]claim // who won, as passed to the Balancer
	at        view
	// begun: the rules were in force once. forget and sweep: clients remembered, and
	// connections tracked, that lead to endpoints which are gone are to be looked for.
	begun, forget, sweep bool
	looked               bool                  // at has been read
	untidy               string                // the last error of tidy
	unused               map[netip.Prefix]bool // ranges that were warned of
}

// owned is a claim with who makes it.
type owned struct {
	claim
	by  types.NamespacedName
	svc *v1.Service
}

// New puts a Proxy together; it starts nothing.
func New(cfg Config) (*Proxy, error) {
	if cfg.NodeName == "" || cfg.Services == nil || cfg.Slices == nil || cfg.Nodes == nil || cfg.Balancer == nil || cfg.Flows == nil {
		return nil, errors.New("service proxy: NodeName, Services, Slices, Nodes, Balancer and Flows are required")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Fresh == nil {
		cfg.Fresh = func() uint64 { return 1 }
	}
	if cfg.Current == nil {
		cfg.Current = func(context.Context) error { return nil }
	}
	if cfg.Lifetime == 0 {
		cfg.Lifetime = 30 * time.Second
	}
	p := &Proxy{
		cfg: cfg, health: newHealthServers(cfg.Logger), dirty: map[types.NamespacedName]bool{}, wake: make(chan struct{}, 1), check: make(chan uint64, 1),
		claims: map[lb.Frontend][]owned{}, frontends: map[types.NamespacedName][]lb.Frontend{}, current: map[lb.Frontend]claim{},
		at: view{ranges: cfg.ServiceCIDRs},
	}
	if cfg.Announcer != nil {
		p.standby = newStandby(cfg.Announcer, cfg.Logger, p.known, p.poke)
	}
	return p, nil
}

// CIDRs is the watch of ServiceCIDRs; nil: there is none.
func (p *Proxy) CIDRs() cache.SharedIndexInformer { return p.cfg.CIDRs }

// cidrsTimeout is how long the start waits for the ranges of ServiceCIDRs, so that
// those are not taken for refused ones meanwhile.
const cidrsTimeout = 3 * time.Second

// Run keeps the rules until ctx ends; then they stay.
func (p *Proxy) Run(ctx context.Context) error {
	index := p.cfg.Slices
	p.services, p.slices = corelisters.NewServiceLister(p.cfg.Services.GetIndexer()), discoverylisters.NewEndpointSliceLister(index.GetIndexer())
	p.nodes = corelisters.NewNodeLister(p.cfg.Nodes.GetIndexer())
	var handles []cache.ResourceEventHandlerRegistration
	for informer, handler := range map[cache.SharedIndexInformer]func(any){
		p.cfg.Services: p.onService,
		index:          p.onSlice,
		p.cfg.Nodes:    p.onNode,
		p.cfg.CIDRs:    func(any) { p.poke() },
	} {
		if informer == nil {
			continue
		}
		h, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: handler, UpdateFunc: func(old, now any) { handler(old); handler(now) }, DeleteFunc: handler,
		})
		if err != nil {
			return fmt.Errorf("service proxy: %w", err)
		}
		if informer != p.cfg.CIDRs {
			handles = append(handles, h)
		}
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	if p.cfg.CIDRs != nil {
		p.cidrs = networkinglisters.NewServiceCIDRLister(p.cfg.CIDRs.GetIndexer())
		wg.Go(func() { p.cfg.CIDRs.RunWithContext(ctx) })
	}
	defer p.health.close()
	// Nothing is changed before all is known: what a former process left in the
	// kernel serves until then.
	if !p.wait(ctx, handles) {
		return nil
	}
	if p.cidrs != nil {
		limit, stop := context.WithTimeout(ctx, cidrsTimeout)
		cache.WaitForCacheSync(limit.Done(), p.cfg.CIDRs.HasSynced)
		stop()
	}
	p.everything()
	wg.Go(func() { p.cfg.Balancer.Run(ctx) })
	wg.Go(func() { p.keepCurrent(ctx) })
	if p.standby != nil {
		wg.Go(func() { p.standby.run(ctx) })
	}
	p.loop(ctx, index.GetIndexer())
	return nil
}

// wait returns when all watches have been read once, false: ctx has ended. What is
// announced stays announced meanwhile, as the API may be away for long.
func (p *Proxy) wait(ctx context.Context, handles []cache.ResourceEventHandlerRegistration) bool {
	again := slack.NewTicker(p.tick())
	defer again.Stop()
	for _, h := range handles {
		for synced := false; !synced; {
			select {
			case <-h.HasSyncedChecker().Done():
				synced = true
			case <-again.C:
				p.renew()
			case <-ctx.Done():
				return false
			}
		}
	}
	return true
}

// tick is how often is looked at what others may have changed, and what is announced is
// set again.
func (p *Proxy) tick() time.Duration { return min(5*time.Second, p.cfg.Lifetime/3) }

func (p *Proxy) loop(ctx context.Context, index cache.Indexer) {
	again := slack.NewTicker(p.tick())
	defer again.Stop()
	delay := 50 * time.Millisecond
	var retry <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.wake:
		case <-retry:
			retry = nil
		case <-again.C:
			p.ensureWays()
			if !p.announce(index) {
				p.renew()
			}
			p.tidy(nil)
			continue
		}
		if err := p.sync(index); err != nil {
			p.cfg.Logger.Error("Services are not as they should be, will retry", "after", delay, "err", err)
			retry = time.After(delay)
			delay = min(2*delay, 10*time.Second)
			continue
		}
		delay = 50 * time.Millisecond
	}
}

func (p *Proxy) ensureWays() {
	if p.cfg.Ways == nil || !p.looked {
		return
	}
	if err := p.cfg.Ways(p.at.ranges, p.cfg.CIDRs == nil || p.cfg.CIDRs.HasSynced()); err != nil {
		p.cfg.Logger.Warn("the route to Services is not as it should be", "err", err)
	}
}

func (p *Proxy) onService(obj any) {
	if s, ok := undead(obj).(*v1.Service); ok {
		p.touch(types.NamespacedName{Namespace: s.Namespace, Name: s.Name})
	}
}

func (p *Proxy) onSlice(obj any) {
	if s, ok := undead(obj).(*discoveryv1.EndpointSlice); ok {
		p.touch(types.NamespacedName{Namespace: s.Namespace, Name: s.Labels[discoveryv1.LabelServiceName]})
	}
}

// onNode: this node's zone decides about hints, and all nodes' health about who
// announces addresses.
func (p *Proxy) onNode(obj any) {
	n, ok := undead(obj).(*v1.Node)
	if !ok {
		return
	}
	if n.Name == p.cfg.NodeName {
		p.mu.Lock()
		zone := p.at.zone
		p.mu.Unlock()
		if n.Labels[v1.LabelTopologyZone] != zone {
			p.everything()
			return
		}
	}
	p.poke()
}

func undead(obj any) any {
	if t, ok := obj.(cache.DeletedFinalStateUnknown); ok {
		return t.Obj
	}
	return obj
}

func (p *Proxy) touch(key types.NamespacedName) {
	p.mu.Lock()
	p.dirty[key] = true
	p.mu.Unlock()
	p.poke()
}

func (p *Proxy) everything() {
	p.mu.Lock()
	p.every = true
	p.mu.Unlock()
	p.poke()
}

func (p *Proxy) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// sync brings the kernel to what the touched Services say.
func (p *Proxy) sync(index cache.Indexer) error {
	p.mu.Lock()
	dirty, every := p.dirty, p.every
	p.dirty, p.every = map[types.NamespacedName]bool{}, false
	p.mu.Unlock()
	all, err := p.services.List(labels.Everything())
	if err == nil {
		every, err = p.look(all, dirty, every)
	}
	if err != nil {
		return p.again(dirty, every, err)
	}
	if every {
		for _, s := range all {
			dirty[types.NamespacedName{Namespace: s.Namespace, Name: s.Name}] = true
		}
		for key := range p.frontends {
			dirty[key] = true
		}
	}
	if err := p.apply(dirty, every, index); err != nil {
		return p.again(dirty, every, err)
	}
	p.announce(index)
	return nil
}

// again notes what a sync that failed was to look at, and returns why.
func (p *Proxy) again(dirty map[types.NamespacedName]bool, every bool, why error) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for key := range dirty {
		p.dirty[key] = true
	}
	p.every = p.every || every
	return why
}

// look brings p.at up to date. It reports whether all Services are to be looked at, as
// every says or because of what changed.
func (p *Proxy) look(services []*v1.Service, dirty map[types.NamespacedName]bool, every bool) (bool, error) {
	nodes, err := p.nodes.List(labels.Everything())
	if err != nil {
		return every, err
	}
	now := view{node: p.cfg.NodeName, zone: p.at.zone, nodes: map[netip.Addr]bool{}}
	for _, n := range nodes {
		if n.Name == now.node {
			now.zone = n.Labels[v1.LabelTopologyZone]
		}
		for _, a := range addressesOf(n) {
			now.nodes[a] = true
		}
	}
	for _, s := range services {
		if slices.ContainsFunc(balancerAddresses(s), func(a netip.Addr) bool { return now.nodes[a] != p.at.nodes[a] }) {
			dirty[types.NamespacedName{Namespace: s.Namespace, Name: s.Name}] = true
		}
	}
	if now.ranges, err = p.ranges(nodes); err != nil {
		return every, err
	}
	changed := !slices.Equal(now.ranges, p.at.ranges)
	if p.cfg.Ranges != nil && (changed || !p.looked) {
		p.cfg.Ranges(now.ranges)
	}
	every = every || changed
	p.mu.Lock()
	p.at, p.looked = now, true
	p.mu.Unlock()
	return every, nil
}

// ranges are those of cluster addresses, now. One that a node's address is in would
// cut nodes off: it is left out.
func (p *Proxy) ranges(nodes []*v1.Node) ([]netip.Prefix, error) {
	out := slices.Clone(p.cfg.ServiceCIDRs)
	if p.cidrs == nil {
		return out, nil
	}
	all, err := p.cidrs.List(labels.Everything())
	if err != nil {
		return nil, err
	}
	more, unused := furtherRanges(all, out, nodes)
	for r, node := range unused {
		if !p.unused[r] {
			p.cfg.Logger.Error("a ServiceCIDR is not served: a node's address is in it; delete it and choose another range", "range", r, "node", node)
		}
	}
	p.unused = map[netip.Prefix]bool{}
	for r := range unused {
		p.unused[r] = true
	}
	return append(out, more...), nil
}

func (p *Proxy) apply(dirty map[types.NamespacedName]bool, every bool, index cache.Indexer) error {
	touched := map[lb.Frontend]bool{}
	for key := range dirty {
		p.claim(key, index, touched)
	}
	changed := map[lb.Frontend]*lb.Backend{}
	next := map[lb.Frontend]*claim{}
	for f := range touched {
		winner := p.winner(f)
		next[f] = winner
		if winner != nil {
			changed[f] = &winner.backend
		} else {
			changed[f] = nil
		}
	}
	if every {
		p.ensureWays()
		if err := p.cfg.Balancer.Update(changed); err != nil {
			return err
		}
		if err := p.cfg.Balancer.SetBase(lb.Base{Inside: p.cfg.PodCIDRs, Ranges: p.at.ranges}); err != nil {
			return err
		}
	} else if len(changed) > 0 {
		if err := p.cfg.Balancer.Update(changed); err != nil {
			return err
		}
	}
	var flows []lb.Flow
	var gone []netip.AddrPort
	for f, now := range next {
		was, had := p.current[f]
		if now == nil {
			delete(p.current, f)
		} else {
			p.current[f] = *now
		}
		lost, fl := moved(f, was, had, now)
		flows, gone = append(flows, fl...), append(gone, lost...)
	}
	if !p.begun { // what ended before this process began is known to no one
		p.begun, p.forget, p.sweep = true, true, true
	}
	p.forget = p.forget || len(gone) > 0
	p.tidy(flows)
	return nil
}

// claim notes what one Service wants now, and which frontends that touches.
func (p *Proxy) claim(key types.NamespacedName, index cache.Indexer, touched map[lb.Frontend]bool) {
	for _, f := range p.frontends[key] {
		touched[f] = true
		p.claims[f] = slices.DeleteFunc(p.claims[f], func(o owned) bool { return o.by == key })
		if len(p.claims[f]) == 0 {
			delete(p.claims, f)
		}
	}
	delete(p.frontends, key)
	s, err := p.services.Services(key.Namespace).Get(key.Name)
	if err != nil {
		p.health.set(key, 0, 0)
		return
	}
	all := slicesOf(index, key)
	for f, c := range translate(s, all, p.at) {
		p.claims[f] = append(p.claims[f], owned{c, key, s})
		p.frontends[key] = append(p.frontends[key], f)
		touched[f] = true
	}
	p.health.set(key, s.Spec.HealthCheckNodePort, nearOf(s, all, p.at))
}

func slicesOf(index cache.Indexer, key types.NamespacedName) (out []*discoveryv1.EndpointSlice) {
	objs, _ := index.ByIndex(watches.ByService, key.String())
	for _, o := range objs {
		out = append(out, o.(*discoveryv1.EndpointSlice))
	}
	return out
}

// nearOf counts the endpoints on this node that may be given connections.
func nearOf(s *v1.Service, all []*discoveryv1.EndpointSlice, at view) int {
	seen := map[netip.Addr]bool{}
	for i := range s.Spec.Ports {
		for _, four := range []bool{true, false} {
			for _, e := range endpointsOf(all, &s.Spec.Ports[i], four) {
				if e.node == at.node && e.ready {
					seen[e.addr.Addr()] = true
				}
			}
		}
	}
	return len(seen)
}

// winner is the claim of the oldest Service that wants the frontend.
func (p *Proxy) winner(f lb.Frontend) *claim {
	all := p.claims[f]
	if len(all) == 0 {
		return nil
	}
	best := slices.MinFunc(all, func(a, b owned) int { return older(a.svc, b.svc) })
	if len(all) > 1 {
		p.cfg.Logger.Warn("several Services want one address and port; the oldest has it", "address", f, "service", best.by)
	}
	return &best.claim
}
