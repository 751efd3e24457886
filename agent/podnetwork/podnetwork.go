// Package podnetwork gives pods their network: it watches the cluster's Node
// objects and translates their pod ranges into the values of netsetup.
//
// Each pod of its own network gets a pinned namespace and an address of the
// node's range; each other node's range gets a route through that node's
// internal address, or a tunnel to it where a router is between; packets that leave the cluster are hidden behind the
// node's address.
package podnetwork

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/agent/users"
	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/apis/paths"
	"github.com/clusterd/clusterd/netsetup/antispoof"
	"github.com/clusterd/clusterd/netsetup/lb"
	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/netsetup/overlay"
	"github.com/clusterd/clusterd/netsetup/pathprobe"
	"github.com/clusterd/clusterd/netsetup/podnet"
	"github.com/clusterd/clusterd/netsetup/sysctl"
)

// Config of a Network.
type Config struct {
	NodeName string // required
	// NodeIPs are the addresses of pods of the host's network; required.
	NodeIPs []netip.Addr
	// Client speaks for the node; nil: there is no API, PodCIDR is the node's
	// range and there are no other nodes.
	Client  kubernetes.Interface
	PodCIDR netip.Prefix
	// Nodes is the watch of all nodes. Its owner runs it. Default: one of Client.
	Nodes cache.SharedIndexInformer
	// Dir keeps ipam.json and the pinned namespaces; required.
	Dir    string
	Bridge string // interface name; default "clusterd0"
	MTU    int    // of pods' interfaces; 0: the kernel's default
	// PodCIDRs are all the cluster's pod ranges: what stays inside them is not
	// masqueraded. The nodes' own ranges are always added.
	PodCIDRs []netip.Prefix
	// Ready is how many networks are kept ready for pods to come, so that a
	// pod's start does not wait for its own; default 0. Fewer are kept where
	// addresses are scarce.
	Ready int
	// Encrypt sends pods' packets to other nodes through WireGuard, and nothing in
	// clear; it needs a Client. KeyAge is after what time the node makes itself
	// another key; 0: it keeps the one it has. KeyDir is where that lies; default:
	// Dir. A directory in memory is right, too: the node makes another key after a boot.
	Encrypt bool
	KeyAge  time.Duration
	KeyDir  string
	// Blocked is called when pods get no network since it cannot be encrypted: a
	// reason for an event, and why. It must not block. Default: none.
	Blocked func(reason, why string)
	// Guard holds a pod back until nothing passes to and from its addresses that
	// must not; nil: there are no such rules.
	Guard Guard
	// Repaired is called when another program's change of this node's rules was
	// undone: the table, and what had changed. It must not block. Default: none.
	Repaired func(table, what string)
	Logger   *slog.Logger // for netsetup; default slog.Default()
}

// Guard makes the rules for pods' addresses: *netpol.Manager.
type Guard interface {
	// Guard returns when the rules for the pod are in force. It may block for
	// some seconds, and may be called again.
	Guard(ctx context.Context, uid string, addrs []netip.Addr) error
	// Release is called when the pod has its addresses no more.
	Release(uid string)
}

// Network connects pods over netsetup, as agent/pod asks for it.
type Network struct {
	cfg    Config
	spaces *netns.Dir
	links  *podnet.Network
	routes *overlay.Mesh
	tables *nft.Tables
	// filter keeps the rules of the nodes and of the published ports.
	filter *nft.Keeper
	// frames holds what each pod's port may send: nothing that bears another's
	// address gets past it.
	frames *antispoof.Guard
	// probes measures the ways to the other nodes.
	probes *pathprobe.Prober
	// looking is taken before portMu and mu: for reading while a network is made or given
	// away, for writing while all are swept. What Live was given is called with it.
	looking sync.RWMutex
	taken   chan struct{} // holds one: a pod has asked for a network, see ready.go

	// lengths are those in the file of what ways carry; of apply alone.
	lengths []length

	flows  *lb.Conntrack
	portMu sync.Mutex // guards ports, rules, own, misled, and the file of the ports
	ports  map[string]podsPorts
	rules  nft.Ruleset // of the nodes, without the ports
	own    []netip.Prefix
	misled []lb.Flow // not forgotten yet, see flowsOf

	mu      sync.Mutex // guards all below
	cidrs   []netip.Prefix
	pools   pools           // nil: the node has no range yet
	live    func() []string // given by Live before there were pools
	fault   string          // why there are no pools
	onReady []func()
	ready   []readyNet
	names   map[string]string // of the pods' networks by UID, see loadNames

	readyNodes map[string]bool // by name; replaced as a whole
	keys       nodeKeys        // replaced as a whole
	blocked    string          // why what is there is not to be used; "": it is
}

// New binds a Network to the present network namespace. It changes nothing
// yet.
func New(cfg Config) (*Network, error) {
	if cfg.Bridge == "" {
		cfg.Bridge = "clusterd0"
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Repaired == nil {
		cfg.Repaired = func(string, string) {}
	}
	if cfg.Blocked == nil {
		cfg.Blocked = func(string, string) {}
	}
	if cfg.Encrypt && cfg.Client == nil {
		return nil, errors.New("pod network: to encrypt it takes a Client, that nodes tell each other their keys")
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("pod network: %w", err)
	}
	n := &Network{cfg: cfg, taken: make(chan struct{}, 1), fault: "the node has no pod range yet"}
	var err error
	if n.ports, err = loadPorts(cfg.Dir); err != nil {
		return nil, fmt.Errorf("pod network: %w", err)
	}
	if n.spaces, err = netns.Open(filepath.Join(cfg.Dir, "netns")); err != nil {
		return nil, fmt.Errorf("pod network: %w", err)
	}
	if n.names, err = loadNames(cfg.Dir, n.spaces); err != nil {
		return nil, fmt.Errorf("pod network: %w", err)
	}
	if n.links, err = podnet.Open(podnet.Config{Logger: cfg.Logger}); err != nil {
		return nil, fmt.Errorf("pod network: %w", err)
	}
	if n.tables, err = nft.OpenTables(); err != nil {
		n.links.Close()
		return nil, fmt.Errorf("pod network: %w", err)
	}
	if n.flows, err = lb.OpenConntrack(); err != nil {
		n.links.Close()
		_ = n.tables.Close()
		return nil, fmt.Errorf("pod network: %w", err)
	}
	n.probes = pathprobe.New(pathprobe.Config{Port: paths.Port, Logger: cfg.Logger})
	n.probes.Recall(n.recallLengths())
	n.filter = nft.NewKeeper(nft.KeeperConfig{Kernel: n.tables, Logger: cfg.Logger, Repaired: cfg.Repaired})
	n.routes, err = overlay.OpenMesh(overlay.MeshConfig{
		Config: overlay.Config{Logger: cfg.Logger}, Kernel: n.tables, Repaired: cfg.Repaired, Encrypt: cfg.Encrypt, Inside: []string{cfg.Bridge},
	})
	if err != nil {
		n.links.Close()
		n.flows.Close()
		_ = n.tables.Close()
		return nil, fmt.Errorf("pod network: %w", err)
	}
	n.frames = antispoof.New(antispoof.Config{
		Kernel: n.tables, Groups: []uint32{podnet.PortGroup, podnet.DoomedGroup}, Logger: cfg.Logger, Repaired: cfg.Repaired,
	})
	return n, nil
}

// retry is the longest time between two attempts to set what the kernel
// refused.
const retry = 30 * time.Second

// Run watches the nodes and keeps bridge, routes and rules in step until ctx
// ends. Pods keep their network when it returns.
func (n *Network) Run(ctx context.Context) error {
	defer n.close()
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { n.frames.Run(ctx) })
	wg.Go(func() { n.probes.Run(ctx) })
	wg.Go(func() { n.routes.Run(ctx) })
	wg.Go(func() { n.filter.Run(ctx) })
	if n.cfg.Ready > 0 {
		wg.Go(func() { n.keepReady(ctx) })
	}
	if n.cfg.Client == nil {
		self := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.cfg.NodeName}, Spec: v1.NodeSpec{PodCIDR: n.cfg.PodCIDR.String()}}
		n.keep(ctx, nil, func() ([]*v1.Node, error) { return []*v1.Node{self}, nil })
		return nil
	}
	informer := n.cfg.Nodes
	if informer == nil {
		informer = coreinformers.NewNodeInformer(n.cfg.Client, 0, cache.Indexers{})
		wg.Go(func() { informer.RunWithContext(ctx) })
	}
	changed := make(chan struct{}, 1)
	poke := func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	handle, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { poke() }, DeleteFunc: func(any) { poke() },
		UpdateFunc: func(old, now any) {
			if sameNet(old.(*v1.Node), now.(*v1.Node)) {
				return
			}
			poke()
		},
	})
	if err != nil {
		return fmt.Errorf("node watch: %w", err)
	}
	select {
	case <-handle.HasSyncedChecker().Done():
	case <-ctx.Done():
		return nil
	}
	lister := corelisters.NewNodeLister(informer.GetIndexer())
	n.keep(ctx, changed, func() ([]*v1.Node, error) { return lister.List(labels.Everything()) })
	return nil
}

// checkEvery is how often the kernel is brought to what the nodes say without
// a change: an administrator may have flushed rules, a program turned a switch.
const checkEvery = time.Minute

// keep brings the kernel to what the nodes say, at once, after each change and
// now and then, until ctx ends.
func (n *Network) keep(ctx context.Context, changed <-chan struct{}, list func() ([]*v1.Node, error)) {
	delay := 100 * time.Millisecond
	for {
		nodes, err := list()
		if err == nil {
			err = n.apply(ctx, nodes)
		}
		again := time.After(checkEvery)
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Pod network is not as it should be, will retry", "after", delay)
			again = time.After(delay)
			delay = min(2*delay, retry)
		} else {
			delay = 100 * time.Millisecond
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-again:
		}
	}
}

// sameNet reports whether nothing changed that the network depends on.
func sameNet(a, b *v1.Node) bool {
	return slices.Equal(rangesOf(a), rangesOf(b)) && slices.Equal(internalIPs(a), internalIPs(b)) && core.NodeReady(a) == core.NodeReady(b) &&
		a.Annotations[names.WireGuard] == b.Annotations[names.WireGuard]
}

// apply brings the kernel to what the nodes say.
func (n *Network) apply(ctx context.Context, nodes []*v1.Node) error {
	keys := keysOf(n.cfg.NodeName, nodes)
	if !n.cfg.Encrypt {
		keys = keys.inClear()
	}
	p := makePlan(n.cfg.NodeName, n.cfg.PodCIDRs, nodes, keys)
	if len(p.own) == 0 {
		return nil // the range will come with another change
	}
	probed := makeProbed(n.cfg.NodeName, nodes, n.cfg.Encrypt)
	n.probes.Set(probed.own, probed.peers)
	measured := n.probes.Results()
	between := overlay.Nodes{Own: p.own, Others: bounded(p.others, measured), Within: p.within}
	unpublished, err := n.guardClear(ctx, nodes, &between)
	if err != nil {
		return err
	}
	if err := n.open(p.own); err != nil {
		n.mu.Lock()
		n.fault = err.Error()
		n.mu.Unlock()
		return err
	}
	// Other programs turn it on again, Docker among them.
	if err := sysctl.SetPresent(sysctl.Bridge()); err != nil {
		return fmt.Errorf("kernel switches: %w", err)
	}
	if err := n.setRules(p.rules, p.own); err != nil {
		return err
	}
	err = errors.Join(n.routes.Set(ctx, between), unpublished)
	n.keepLengths(measured)
	n.mu.Lock()
	n.readyNodes, n.keys = probed.ready, keys
	n.mu.Unlock()
	if err != nil {
		return fmt.Errorf("routes to nodes: %w", err)
	}
	return nil
}

// open makes bridge and address pools for the node's ranges.
func (n *Network) open(cidrs []netip.Prefix) error {
	n.mu.Lock()
	had := n.cidrs
	n.mu.Unlock()
	if slices.Equal(had, cidrs) {
		return nil
	}
	if err := setSwitches(cidrs); err != nil {
		return fmt.Errorf("kernel switches: %w", err)
	}
	n.looking.Lock()
	defer n.looking.Unlock()
	n.dropReady()
	if err := n.dropOrphans(); err != nil {
		return err
	}
	// Before the bridge, so that no port of it is ever without its rules.
	if err := n.setKnownFrames(); err != nil {
		return err
	}
	bridge := podnet.Bridge{Name: n.cfg.Bridge, MTU: n.cfg.MTU}
	for _, cidr := range cidrs {
		bridge.Addrs = append(bridge.Addrs, netip.PrefixFrom(gatewayOf(cidr), cidr.Bits()))
	}
	if err := n.links.EnsureBridge(bridge); err != nil {
		return fmt.Errorf("bridge: %w", err)
	}
	pools, err := openPools(n.cfg.Dir, cidrs)
	if err != nil {
		return fmt.Errorf("addresses: %w", err)
	}
	n.mu.Lock()
	n.cidrs, n.pools, n.fault = cidrs, pools, ""
	live := n.live
	n.live = nil
	hooks := n.onReady
	n.mu.Unlock()
	if live != nil {
		if err := pools.reconcile(live()); err != nil {
			return fmt.Errorf("addresses of pods that are no more: %w", err)
		}
	}
	for _, fn := range hooks {
		fn()
	}
	n.tellTaken() // the first ones are made
	return nil
}

// setSwitches makes the machine a router of the ranges' families.
func setSwitches(cidrs []netip.Prefix) error {
	errs := []error{sysctl.Set(sysctl.Router())}
	if slices.ContainsFunc(cidrs, func(p netip.Prefix) bool { return p.Addr().Is6() }) {
		errs = append(errs, sysctl.KeepRouters(), sysctl.Set(sysctl.Router6()))
	}
	return errors.Join(errs...)
}

// Ready reports whether pods can get a network, and why not.
func (n *Network) Ready() (bool, string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.pools != nil && n.blocked == "", cmp.Or(n.blocked, n.fault)
}

// OnReady asks for a call when the network gets ready. Call it before Run; fn
// must not block.
func (n *Network) OnReady(fn func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.onReady = append(n.onReady, fn)
}

// Attach makes the pod's namespace and address, or finds them.
func (n *Network) Attach(ctx context.Context, uid string, hostNetwork bool) (string, []netip.Addr, error) {
	if hostNetwork {
		return "", n.cfg.NodeIPs, nil
	}
	path, addrs, err := n.attachOwn(uid)
	return n.guarded(ctx, uid, path, addrs, err)
}

// guarded waits for the rules of a pod that is connected.
func (n *Network) guarded(ctx context.Context, uid, path string, addrs []netip.Addr, err error) (string, []netip.Addr, error) {
	if err == nil && n.cfg.Guard != nil {
		err = n.cfg.Guard.Guard(ctx, uid, addrs)
	}
	if err != nil {
		return "", nil, err // what is connected is found by the next try
	}
	return path, addrs, nil
}

// laid are the pools of the node's addresses, once the network stands.
func (n *Network) laid() (pools, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.pools == nil {
		return nil, fmt.Errorf("%w: %s", podstate.ErrNetworkNotReady, n.fault)
	}
	return n.pools, nil
}

func (n *Network) attachOwn(uid string) (string, []netip.Addr, error) {
	pools, err := n.laid()
	if err != nil {
		return "", nil, err
	}
	if path, addrs, ok := n.takeReady(uid); ok {
		return path, bare(addrs), nil
	}
	return n.attach(uid, pools, n.spaces.Create)
}

// AttachUsers is Attach for a pod with a user namespace, which owns the pod's
// network namespace: one that is there already is of a former try, with ids
// that may be another pod's by now, and is replaced.
func (n *Network) AttachUsers(ctx context.Context, uid string, ids users.Range) (string, []netip.Addr, error) {
	pools, err := n.laid()
	if err != nil {
		return "", nil, err
	}
	path, addrs, err := n.attach(uid, pools, func(name string) (string, error) {
		if err := n.spaces.Delete(name); err != nil {
			return "", err
		}
		return n.spaces.CreateOwned(name, ids.First, ids.Count)
	})
	return n.guarded(ctx, uid, path, addrs, err)
}

// Users opens the user namespace of a pod that AttachUsers has connected.
func (n *Network) Users(uid string) (*os.File, error) {
	n.mu.Lock()
	name := n.names[uid]
	n.mu.Unlock()
	if name == "" {
		return nil, fmt.Errorf("pod %s has no network", uid)
	}
	return netns.Owner(n.spaces.Path(name))
}

// attach gives the pod its addresses, and a namespace that create makes or finds.
func (n *Network) attach(uid string, pools pools, create func(name string) (path string, err error)) (string, []netip.Addr, error) {
	n.looking.RLock()
	defer n.looking.RUnlock()
	addrs, err := pools.allocate(uid)
	if err != nil {
		return "", nil, fmt.Errorf("address for the pod: %w", err)
	}
	name := networkName(addrs)
	n.setName(uid, name)
	if err := n.connect(addrs, create); err != nil {
		err = errors.Join(fmt.Errorf("connect the pod: %w", err), pools.release(uid))
		n.setName(uid, "")
		return "", nil, err
	}
	return n.spaces.Path(name), bare(addrs), nil
}

// Limit bounds what the pod receives and sends, in bits a second.
func (n *Network) Limit(_ context.Context, uid string, in, out uint64) error {
	n.mu.Lock()
	name := n.names[uid]
	n.mu.Unlock()
	if name == "" {
		return fmt.Errorf("pod %s has no network", uid)
	}
	return n.links.Limit(podnet.Limits{NetNS: n.spaces.Path(name), HostIf: podnet.HostIf(name), In: in, Out: out})
}

// Detach gives namespace and address back. What is not there is fine.
func (n *Network) Detach(_ context.Context, uid string) error {
	n.mu.Lock()
	pools, name := n.pools, n.names[uid]
	n.mu.Unlock()
	err := n.unpublish(func(u string) bool { return u != uid })
	if name != "" {
		err = errors.Join(err, n.disconnect(name))
	}
	if err == nil && pools != nil {
		err = pools.release(uid)
	}
	if err == nil {
		n.setName(uid, "")
		if n.cfg.Guard != nil {
			n.cfg.Guard.Release(uid)
		}
	}
	return err
}

// Live removes the network of every pod that live does not name. A pod that comes
// meanwhile gets its network before live is called, which names it then, or after all
// is done: in between its address would be released and given to another one.
func (n *Network) Live(ctx context.Context, live func() []string) error {
	n.looking.Lock()
	defer n.looking.Unlock()
	uids := live()
	keep := map[string]bool{}
	for _, u := range uids {
		keep[u] = true
	}
	err := n.sweep(ctx, keep)
	errs := []error{err, n.unpublish(func(uid string) bool { return keep[uid] })}
	n.mu.Lock()
	pools := n.pools
	if pools == nil {
		n.live = live
	}
	n.mu.Unlock()
	if pools != nil {
		errs = append(errs, pools.reconcile(uids))
	}
	return errors.Join(errs...)
}

// Dial connects to a TCP port on the loopback of the pod.
func (n *Network) Dial(ctx context.Context, uid string, hostNetwork bool, port int32) (net.Conn, error) {
	var conn net.Conn
	dial := func() error {
		var err4, err6 error
		var d net.Dialer
		p := strconv.Itoa(int(port))
		if conn, err4 = d.DialContext(ctx, "tcp4", net.JoinHostPort("127.0.0.1", p)); err4 == nil {
			return nil
		}
		if conn, err6 = d.DialContext(ctx, "tcp6", net.JoinHostPort("::1", p)); err6 == nil {
			return nil
		}
		return err4
	}
	if hostNetwork {
		return conn, dial()
	}
	n.mu.Lock()
	name := n.names[uid]
	n.mu.Unlock()
	if name == "" {
		return nil, fmt.Errorf("pod %s has no network", uid)
	}
	err := netns.Do(n.spaces.Path(name), dial)
	return conn, err
}
