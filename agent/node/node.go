// Package node speaks for the machine: it registers the Node object, renews
// the Lease that says the node is alive, and keeps the node's status true.
// The status is written when it changes and every five minutes; the Lease
// every ten seconds. When the Lease cannot be renewed, pods that share their
// volumes with other nodes are ended: see Fence.
package node

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// Config of a Node.
type Config struct {
	Name string       // required
	IPs  []netip.Addr // InternalIPs
	// Addresses are further ones of the node, beside IPs and its name.
	Addresses []v1.NodeAddress
	Client    kubernetes.Interface
	// Heartbeat renews the Lease, apart from the other traffic so that it is
	// never queued behind it; default Client.
	Heartbeat kubernetes.Interface
	Version   string // "v1.37.0": shown as the node's version
	MaxPods   int    // default 110
	// DataDir is where the disk space of pods is counted.
	DataDir string
	// Reserved is kept from pods for the system and the node's own programs.
	// Memory that is not given: 128 MiB or a tenth of it, whatever is less.
	Reserved v1.ResourceList
	// Pressure tells which of the conditions MemoryPressure, DiskPressure and
	// PIDPressure the node is in; nil: in none. It must not block.
	Pressure func(v1.NodeConditionType) bool
	Labels   map[string]string // further labels of the node, which it keeps
	// Registration is what the Node has from its beginning, and others may change.
	Registration Registration
	// Annotations of the node, kept beside those of others.
	Annotations map[string]string
	Port        int32 // of the node's calls; 0: not reported
	// Handlers are the ways in which the node can run pods, as it is now.
	Handlers func() []v1.NodeRuntimeHandler

	// Devices are what the node has, and what pods may have, of the resources of
	// device plugins; nil: none.
	Devices func() (capacity, allocatable v1.ResourceList)

	// VolumesInUse are the attached volumes that must not be detached; nil: none.
	VolumesInUse func() []v1.UniqueVolumeName

	// Conditions are further ones of the node, besides those of a kubelet; nil:
	// none. It must not block.
	Conditions func() []v1.NodeCondition

	// Images lists what the node holds.
	Images func(ctx context.Context) ([]v1.ContainerImage, error)
	// Ready are further reasons not to be ready, asked for at each look:
	// "network" → its fault, "" when all is well. Must not block.
	Ready func() []Fault

	LeaseTime time.Duration // after which the Lease counts as lapsed; default 40 s
	Period    time.Duration // between renewals of the Lease; default a quarter of LeaseTime
	// Fence ends pods when the Lease is not renewed; nil: nothing does.
	Fence Fence
	// Clock is what renewals are measured by, one that goes on while the machine sleeps:
	// CLOCK_BOOTTIME, in nanoseconds. Default: Go's, which does not.
	Clock func() int64
}

// Fence keeps pods from running on without the Lease: *fence.Fence.
type Fence interface {
	// Promises reports whether it can.
	Promises(ctx context.Context) bool
	// Now is its clock.
	Now() int64
	// Held reports whether the newest renewal still counts.
	Held(ctx context.Context) bool
	// Renewed tells of a renewal that was begun at a time of its clock.
	Renewed(ctx context.Context, began int64)
	// End ends these pods, Settle tells the API of those it may hold for running.
	End(ctx context.Context) error
	Settle(ctx context.Context) error
}

// Fault is a reason not to be ready.
type Fault struct{ Reason, Message string }

// statusPeriod is how often an unchanged status is written.
const statusPeriod = 5 * time.Minute

// LeaseNamespace holds the nodes' Leases.
const LeaseNamespace = v1.NamespaceNodeLease

// Node keeps one Node object.
type Node struct {
	cfg     Config
	poke    chan struct{}
	latest  atomic.Pointer[v1.Node] // last seen or written
	changes changes                 // of latest
	renewal atomic.Pointer[renewal] // the last one of the Lease that came through

	mu     sync.Mutex        // guards all below
	labels map[string]string // by SetLabels
}

// New returns a Node; it starts nothing.
func New(cfg Config) *Node {
	if cfg.Heartbeat == nil {
		cfg.Heartbeat = cfg.Client
	}
	if cfg.MaxPods == 0 {
		cfg.MaxPods = 110
	}
	if cfg.LeaseTime == 0 {
		cfg.LeaseTime = 40 * time.Second
	}
	if cfg.Period == 0 {
		cfg.Period = cfg.LeaseTime / 4
	}
	if cfg.Clock == nil {
		begun := time.Now()
		cfg.Clock = func() int64 { return int64(time.Since(begun)) }
	}
	n := &Node{cfg: cfg, poke: make(chan struct{}, 1)}
	n.latest.Store(n.fresh())
	return n
}

// Object is the node's object as last known. It is never nil, and read-only.
func (n *Node) Object() *v1.Node { return n.latest.Load() }

// Recall takes the object from a record, until the API has answered: the labels and
// amounts that pods go by.
func (n *Node) Recall(node *v1.Node) {
	if n.Object().UID == "" {
		n.take(node)
	}
}

// Poke asks for a look at the status now.
func (n *Node) Poke() {
	select {
	case n.poke <- struct{}{}:
	default:
	}
}

// Run registers the node and keeps it until ctx ends.
func (n *Node) Run(ctx context.Context) error {
	delay := 50 * time.Millisecond
	for {
		err := n.register(ctx)
		if err == nil {
			break
		}
		if ctx.Err() != nil {
			return nil
		}
		klog.FromContext(ctx).Info("Node is not registered yet, will retry", "err", err, "after", delay)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(delay):
		}
		delay = min(2*delay, 5*time.Second)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { n.renew(ctx) })
	wg.Go(func() { n.watch(ctx) })
	n.keepStatus(ctx)
	return nil
}

// fresh is the object as this node would make it.
func (n *Node) fresh() *v1.Node {
	labels := map[string]string{
		v1.LabelHostname: n.cfg.Name, v1.LabelOSStable: "linux", v1.LabelArchStable: runtime.GOARCH,
		"beta.kubernetes.io/os": "linux", "beta.kubernetes.io/arch": runtime.GOARCH,
	}
	maps.Copy(labels, n.cfg.Labels)
	n.mu.Lock()
	maps.Copy(labels, n.labels)
	n.mu.Unlock()
	node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.cfg.Name, Labels: labels, Annotations: maps.Clone(n.cfg.Annotations)}}
	capacity := n.capacity()
	node.Status.Capacity, node.Status.Allocatable = capacity, n.allocatable(capacity)
	return node
}

// register makes the object, or puts its labels right.
func (n *Node) register(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, n.cfg.Period)
	defer cancel()
	nodes := n.cfg.Client.CoreV1().Nodes()
	want := n.fresh()
	node, err := nodes.Get(ctx, n.cfg.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		node, err = nodes.Create(ctx, n.cfg.Registration.begin(want), metav1.CreateOptions{})
	}
	if err != nil {
		return fmt.Errorf("register node %s: %w", n.cfg.Name, err)
	}
	if !holds(node.Labels, want.Labels) || !holds(node.Annotations, want.Annotations) {
		node = node.DeepCopy()
		if node.Labels == nil {
			node.Labels = map[string]string{}
		}
		for k, v := range want.Labels {
			node.Labels[k] = v
		}
		for k, v := range want.Annotations {
			metav1.SetMetaDataAnnotation(&node.ObjectMeta, k, v)
		}
		if node, err = nodes.Update(ctx, node, metav1.UpdateOptions{}); err != nil {
			return fmt.Errorf("label node %s: %w", n.cfg.Name, err)
		}
	}
	n.take(node)
	return nil
}

// holds reports whether all of want is in have. Values may be empty.
func holds(have, want map[string]string) bool {
	for k, v := range want {
		if got, ok := have[k]; !ok || got != v {
			return false
		}
	}
	return true
}

// take notes a version of the object. A node without a status yet keeps the
// one computed here, so that admission always has amounts to go by.
func (n *Node) take(node *v1.Node) {
	if len(node.Status.Allocatable) == 0 {
		node = node.DeepCopy()
		node.Status.Capacity = n.capacity()
		node.Status.Allocatable = n.allocatable(node.Status.Capacity)
	}
	n.mu.Lock()
	newer := !older(node, n.latest.Load())
	if newer { // a watch may be behind what was written since
		n.latest.Store(node)
	}
	n.mu.Unlock()
	if newer {
		n.changes.wake()
	}
}

// watch follows the node's own object: users change labels, the leader writes
// conditions and the pod range.
func (n *Node) watch(ctx context.Context) {
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (kruntime.Object, error) {
			o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, n.cfg.Name).String()
			return n.cfg.Client.CoreV1().Nodes().List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = fields.OneTermEqualSelector(metav1.ObjectNameField, n.cfg.Name).String()
			return n.cfg.Client.CoreV1().Nodes().Watch(ctx, o)
		},
	}
	_, informer := cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: cache.ToListWatcherWithWatchListSemantics(lw, n.cfg.Client), ObjectType: &v1.Node{},
		Handler: cache.ResourceEventHandlerFuncs{
			AddFunc:    func(o any) { n.take(o.(*v1.Node)); n.Poke() },
			UpdateFunc: func(_, o any) { n.take(o.(*v1.Node)); n.Poke() },
			DeleteFunc: func(any) {
				if ctx.Err() == nil {
					n.again(ctx)
				}
			},
		},
	})
	informer.RunWithContext(ctx)
}

// again registers a node whose object was deleted under it.
func (n *Node) again(ctx context.Context) {
	klog.FromContext(ctx).Info("Node object was deleted, registering again", "node", n.cfg.Name)
	if err := n.register(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Node was not registered again")
	}
	n.Poke()
}

// spread is by how much of itself a period may be longer, at random, so that
// nodes that were started together do not write together.
const spread = 0.04

// keepStatus looks at the node now and then, and writes what has changed.
func (n *Node) keepStatus(ctx context.Context) {
	look := time.NewTimer(wait.Jitter(n.cfg.Period, spread))
	defer look.Stop()
	var due time.Time // when an unchanged status is written
	for {
		if ok, err := n.writeStatus(ctx, !time.Now().Before(due)); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Info("Node status was not written, will retry", "err", err)
		} else if ok {
			in := wait.Jitter(statusPeriod, spread)
			due = time.Now().Add(in)
			klog.FromContext(ctx).Info("Node status was written, and is again if nothing changes", "in", in)
		}
		select {
		case <-ctx.Done():
			return
		case <-look.C:
			look.Reset(wait.Jitter(n.cfg.Period, spread))
		case <-n.poke:
		}
	}
}

// writeStatus writes the status if it changed, or if asked to.
func (n *Node) writeStatus(ctx context.Context, always bool) (written bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, n.cfg.Period)
	defer cancel()
	now := time.Now()
	done := n.changes.begun()
	defer func() {
		if err == nil && n.Object().UID != "" {
			done()
		}
	}()
	node := n.Object()
	for try := 0; ; try++ {
		next := node.DeepCopy()
		n.status(ctx, next, now)
		if !always && !changed(&node.Status, &next.Status) {
			return false, nil
		}
		got, err := n.cfg.Client.CoreV1().Nodes().UpdateStatus(ctx, next, metav1.UpdateOptions{})
		switch {
		case err == nil:
			n.take(got)
			return true, nil
		case apierrors.IsNotFound(err):
			return false, n.register(ctx)
		case !apierrors.IsConflict(err) || try == 3:
			return false, err
		}
		if node, err = n.cfg.Client.CoreV1().Nodes().Get(ctx, n.cfg.Name, metav1.GetOptions{}); err != nil {
			return false, err
		}
	}
}

// changed compares two statuses but for the times of heartbeats.
func changed(a, b *v1.NodeStatus) bool {
	strip := func(s *v1.NodeStatus) *v1.NodeStatus {
		s = s.DeepCopy()
		for i := range s.Conditions {
			s.Conditions[i].LastHeartbeatTime = metav1.Time{}
			s.Conditions[i].LastTransitionTime = metav1.Time{}
		}
		return s
	}
	return !equality.Semantic.DeepEqual(strip(a), strip(b))
}
