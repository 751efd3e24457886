package main

import (
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	networkinginformers "k8s.io/client-go/informers/networking/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/clusterd/clusterd/agent/node"
	"github.com/clusterd/clusterd/agent/service"
	"github.com/clusterd/clusterd/agent/watches"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/netsetup/announce"
	"github.com/clusterd/clusterd/netsetup/lb"
	"github.com/clusterd/clusterd/netsetup/nft"
)

// podBridge is the interface of this node's pods.
const podBridge = "clusterd0"

// clusterRanges are the cluster's ranges of pods and Services, as this node knows them.
// Safe for concurrent use.
type clusterRanges struct {
	pods []netip.Prefix
	all  atomic.Pointer[[]netip.Prefix]
}

func newClusterRanges(cfg Config) *clusterRanges {
	r := &clusterRanges{pods: cfg.podRanges()}
	r.setServices(cfg.serviceRanges())
	return r
}

func (r *clusterRanges) setServices(services []netip.Prefix) {
	all := slices.Concat(r.pods, services)
	r.all.Store(&all)
}

func (r *clusterRanges) get() []netip.Prefix { return *r.all.Load() }

// newServiceProxy opens what makes Services answer on this node. reader reads what of
// the cluster's network only some parts of a node may. closing gives
// the sockets back; the rules stay. repaired is called when others' changes of
// the rules were undone, fresh as service.Config says, and so is server. known is given the ranges of Services.
func newServiceProxy(cfg Config, log *slog.Logger, seen *watches.Watches, reader kubernetes.Interface, known *clusterRanges, repaired func(table, what string), fresh func() uint64, server bool) (_ *service.Proxy, closing func(), err error) {
	var undo []func()
	closing = func() {
		for i := len(undo) - 1; i >= 0; i-- {
			undo[i]()
		}
	}
	defer func() {
		if err != nil {
			closing()
			err = fmt.Errorf("open the rules for Services: %w", err)
		}
	}()
	tables, err := nft.OpenTables()
	if err != nil {
		return nil, nil, err
	}
	undo = append(undo, func() { _ = tables.Close() })
	flows, err := lb.OpenConntrack()
	if err != nil {
		return nil, nil, err
	}
	undo = append(undo, flows.Close)
	ranges := cfg.serviceRanges()
	ways, err := lb.OpenWays(podBridge)
	if err != nil {
		return nil, nil, err
	}
	undo = append(undo, ways.Close)
	// Others take over when the lease has run out, or sooner where this node seems dead.
	lifetime := min(30*time.Second, node.RenewDeadline(cfg.NodeLeaseDuration.Duration))
	announcer, err := announce.Open(announce.Config{Node: cfg.addr().Addr(), File: nodedir.Dir(cfg.Data).Path("announced.json"), Lifetime: lifetime, Logger: log})
	if err != nil {
		return nil, nil, err
	}
	undo = append(undo, announcer.Close)
	balancer := lb.New(tables, log)
	balancer.Repaired = repaired
	proxy, err := service.New(service.Config{
		NodeName: cfg.Name, Services: seen.Services, Slices: seen.Slices, Nodes: seen.Nodes,
		CIDRs:    networkinginformers.NewServiceCIDRInformer(reader, 0, cache.Indexers{}),
		Balancer: balancer, Flows: flows, Announcer: announcer, Lifetime: lifetime, Fresh: fresh, Current: seen.Current, Server: server,
		PodCIDRs: cfg.podRanges(), ServiceCIDRs: ranges, Ways: ways.Ensure, Ranges: known.setServices, Logger: log,
	})
	return proxy, closing, err
}

// removeServices takes back what a service proxy with that data directory left in
// the kernel.
func removeServices(dir nodedir.Dir, nodeAddr string) error {
	tables, err := nft.OpenTables()
	if err != nil {
		return err
	}
	defer func() { _ = tables.Close() }()
	if err := lb.New(tables, nil).CleanUp(); err != nil {
		return err
	}
	addr, _ := netip.ParseAddr(nodeAddr) // only needed where something is announced
	announcer, err := announce.Open(announce.Config{Node: addr, File: dir.Path("announced.json")})
	if err != nil {
		return err
	}
	defer announcer.Close()
	return announcer.Set(nil, false)
}
