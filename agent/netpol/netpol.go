// Package netpol keeps this node's packet filter in step with the cluster's
// NetworkPolicies: it watches policies, pods and namespaces and translates them
// into the values of netsetup/policy. Pods and namespaces are watched from the first
// policy on: a cluster without one spares each node the changes of all pods.
//
// A pod that starts is known by the address that the node has given it, before
// the API hears of it: its container does not start until the rules are in
// force.
package netpol

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	networkinglisters "k8s.io/client-go/listers/networking/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/netsetup/policy"
)

// Enforcer holds the rules: *policy.Enforcer.
type Enforcer interface {
	Set([]policy.Group) error
	Run(ctx context.Context)
}

// Config of a Manager. All fields but Logger are required.
type Config struct {
	NodeName string
	Client   kubernetes.Interface
	Enforcer Enforcer
	// Static reports whether the pod of that UID comes from the node itself, not
	// from the API. Such a pod starts while the API cannot be read: no policy
	// can be known to select it. Default: no pod does.
	Static func(uid types.UID) bool
	// Attached reports whether the pod of that UID has its addresses still. Until it
	// has not, its policies stay in force, also when the API has it no more
	// (deleted by force) or says that it has ended. Default: no pod has.
	Attached func(uid types.UID) bool
	// Running are the pods that run on this node, with their addresses and as the
	// API last said of them, also those that it has no more. Without a policy no pods
	// are watched: of one that is deleted by force before the first policy comes, only
	// who runs it knows the labels. Default: there are none.
	Running func() []*v1.Pod
	// Fault is called when rules could not be put into force, with the NAMESPACE/NAME of
	// the policies that changed since they last were (none: only pods or namespaces
	// did), and with a nil error when all are in force again. It must not block.
	// Default: none.
	Fault  func(changed []string, err error)
	Logger *slog.Logger // default slog.Default()
}

// Manager translates. Safe for concurrent use.
type Manager struct {
	cfg        Config
	policies   networkinglisters.NetworkPolicyLister
	pods       corelisters.PodLister
	namespaces corelisters.NamespaceLister
	// subjects watches pods and namespaces. Each change of any pod goes to each
	// node that does, so none does until there is a policy.
	rules, subjects informers.SharedInformerFactory
	synced          chan struct{} // closed when all that matters has been read once
	wake            chan struct{}
	// held are this node's pods that run, as they were last seen, also while there is
	// no policy. Run's alone. In memory: a pod that the API has no more when clusterd
	// starts is none of them.
	held map[types.UID]*v1.Pod
	// inForce are the policies whose rules are, with their generations; failing: the
	// last try to put rules into force failed. Run's alone.
	inForce map[string]string
	failing bool

	mu       sync.Mutex                 // guards all below
	starting map[types.UID][]netip.Addr // until Release
	waiting  int                        // calls of Guard that wait for the rules
	version  uint64                     // of what is to be translated
	applied  uint64                     // the version that is in force
	changed  chan struct{}              // closed and replaced when applied grows
	fault    error                      // of the last try
}

// Times of Guard.
const (
	syncTimeout   = 10 * time.Second // for the first lists
	staticTimeout = time.Second      // the same, for a pod that needs no API
	knownTimeout  = 3 * time.Second  // for a pod that the API may not have
	forceTimeout  = 10 * time.Second // for rules to get into force
)

// batch is how long changes are gathered that no pod waits for.
const batch = 20 * time.Millisecond

func none(types.UID) bool { return false }

// New watches nothing yet.
func New(cfg Config) (*Manager, error) {
	if cfg.NodeName == "" || cfg.Client == nil || cfg.Enforcer == nil {
		return nil, errors.New("netpol: NodeName, Client and Enforcer are required")
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Static == nil {
		cfg.Static = none
	}
	if cfg.Attached == nil {
		cfg.Attached = none
	}
	if cfg.Running == nil {
		cfg.Running = func() []*v1.Pod { return nil }
	}
	if cfg.Fault == nil {
		cfg.Fault = func([]string, error) {}
	}
	rules := informers.NewSharedInformerFactoryWithOptions(cfg.Client, 0, informers.WithTransform(trim))
	f := informers.NewSharedInformerFactoryWithOptions(cfg.Client, 0, informers.WithTransform(trim))
	m := &Manager{
		cfg: cfg, rules: rules, subjects: f, synced: make(chan struct{}), wake: make(chan struct{}, 1), changed: make(chan struct{}), starting: map[types.UID][]netip.Addr{}, held: map[types.UID]*v1.Pod{},
		policies: rules.Networking().V1().NetworkPolicies().Lister(), pods: f.Core().V1().Pods().Lister(), namespaces: f.Core().V1().Namespaces().Lister(),
	}
	for _, w := range []struct {
		informer cache.SharedIndexInformer
		same     func(old, now any) bool
	}{
		{rules.Networking().V1().NetworkPolicies().Informer(), func(old, now any) bool {
			return old.(*networkingv1.NetworkPolicy).Generation == now.(*networkingv1.NetworkPolicy).Generation
		}},
		{f.Core().V1().Pods().Informer(), func(old, now any) bool { return sameSubject(old.(*v1.Pod), now.(*v1.Pod)) }},
		{f.Core().V1().Namespaces().Informer(), func(old, now any) bool {
			return labels.Equals(old.(*v1.Namespace).Labels, now.(*v1.Namespace).Labels)
		}},
	} {
		_, err := w.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: func(any) { m.touch() }, DeleteFunc: func(any) { m.touch() },
			UpdateFunc: func(old, now any) {
				if !w.same(old, now) {
					m.touch()
				}
			},
		})
		if err != nil {
			return nil, fmt.Errorf("netpol: %w", err)
		}
	}
	return m, nil
}

// Informers are the watches by kind. Those of pods and namespaces run from the first
// policy on.
func (m *Manager) Informers() map[string]cache.SharedIndexInformer {
	return map[string]cache.SharedIndexInformer{
		"NetworkPolicy": m.rules.Networking().V1().NetworkPolicies().Informer(),
		"Pod":           m.subjects.Core().V1().Pods().Informer(),
		"Namespace":     m.subjects.Core().V1().Namespaces().Informer(),
	}
}

// trim drops what no policy looks at: every node knows every pod.
func trim(obj any) (any, error) {
	switch o := obj.(type) {
	case *v1.Pod:
		slim := &v1.Pod{ObjectMeta: o.ObjectMeta, Spec: v1.PodSpec{NodeName: o.Spec.NodeName, HostNetwork: o.Spec.HostNetwork}, Status: v1.PodStatus{Phase: o.Status.Phase, PodIPs: o.Status.PodIPs}}
		slim.ManagedFields, slim.OwnerReferences = nil, nil
		slim.Annotations = nil
		if uid, ok := o.Annotations[v1.MirrorPodAnnotationKey]; ok {
			slim.Annotations = map[string]string{v1.MirrorPodAnnotationKey: uid}
		}
		for _, c := range slices.Concat(o.Spec.Containers, o.Spec.InitContainers) {
			if len(c.Ports) > 0 {
				slim.Spec.Containers = append(slim.Spec.Containers, v1.Container{Name: c.Name, Ports: c.Ports})
			}
		}
		return slim, nil
	case *v1.Namespace:
		o.ManagedFields, o.Annotations = nil, nil
	case *networkingv1.NetworkPolicy:
		o.ManagedFields, o.Annotations = nil, nil
	}
	return obj, nil
}

// touch notes that something changed.
func (m *Manager) touch() {
	m.mu.Lock()
	m.version++
	m.mu.Unlock()
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// Run keeps the rules in step until ctx ends. They stay in force when it
// returns.
func (m *Manager) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { m.cfg.Enforcer.Run(ctx) })
	defer m.subjects.Shutdown()
	defer m.rules.Shutdown()
	if !start(ctx, m.rules) {
		return nil
	}
	reading := false // subjects
	known := false
	delay := time.Second
	for {
		if list, err := m.policies.List(labels.Everything()); err == nil && len(list) > 0 && !reading {
			if reading = start(ctx, m.subjects); !reading {
				return nil
			}
		}
		if !known {
			known = true
			close(m.synced)
		}
		var again <-chan time.Time
		if err := m.apply(reading); errors.Is(err, errUnread) {
			continue
		} else if err != nil {
			m.cfg.Logger.Error("network policies are not in force as they should be, will retry", "after", delay, "err", err)
			again = time.After(delay)
			delay = min(2*delay, 30*time.Second)
		} else {
			delay = time.Second
		}
		select {
		case <-ctx.Done():
			return nil
		case <-again:
		case <-m.wake:
			if !m.awaited() {
				select {
				case <-ctx.Done():
					return nil
				case <-time.After(batch):
				}
				select {
				case <-m.wake: // of those that came meanwhile
				default:
				}
			}
		}
	}
}

// start starts the watches and returns when they have been read once; false: ctx
// has ended.
func start(ctx context.Context, f informers.SharedInformerFactory) bool {
	f.StartWithContext(ctx)
	for _, ok := range f.WaitForCacheSync(ctx.Done()) {
		if !ok {
			return false
		}
	}
	return true
}

// awaited says whether a pod waits to start.
func (m *Manager) awaited() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.waiting > 0
}

// count counts the pods that wait, by one more or less.
func (m *Manager) count(by int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.waiting += by
}

// generations are the policies, each with what a change of it alters.
func generations(list []*networkingv1.NetworkPolicy) map[string]string {
	out := make(map[string]string, len(list))
	for _, p := range list {
		out[describe(p)] = fmt.Sprintf("%s %d", p.UID, p.Generation)
	}
	return out
}

// differ are the keys whose values are not the same in both, sorted.
func differ(a, b map[string]string) (out []string) {
	for key, v := range a {
		if w, ok := b[key]; !ok || v != w {
			out = append(out, key)
		}
	}
	for key := range b {
		if _, ok := a[key]; !ok {
			out = append(out, key)
		}
	}
	slices.Sort(out)
	return out
}

// report tells what came of a try to put these policies into force.
func (m *Manager) report(policies []*networkingv1.NetworkPolicy, err error) {
	now := generations(policies)
	if err == nil {
		if m.inForce = now; m.failing {
			m.cfg.Fault(nil, nil)
		}
	} else {
		m.cfg.Fault(differ(m.inForce, now), err)
	}
	m.failing = err != nil
}

// errUnread is returned when there are policies and what they select was not read.
var errUnread = errors.New("pods and namespaces have not been read yet")

// apply translates what is known now and puts it into force; reading: pods and
// namespaces are watched.
func (m *Manager) apply(reading bool) error {
	m.mu.Lock()
	version, starting := m.version, maps.Clone(m.starting)
	m.mu.Unlock()
	c, err := m.now(starting)
	if err == nil && len(c.policies) > 0 && !reading {
		return errUnread
	}
	if err == nil {
		err = m.cfg.Enforcer.Set(translate(c))
	}
	m.report(c.policies, err)
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fault = err; err == nil {
		m.applied = version
	}
	close(m.changed)
	m.changed = make(chan struct{})
	return err
}

func (m *Manager) now(starting map[types.UID][]netip.Addr) (cluster, error) {
	c := cluster{node: m.cfg.NodeName, starting: starting, namespaces: map[string]labels.Set{}}
	var err error
	if c.policies, err = m.policies.List(labels.Everything()); err != nil {
		return c, err
	}
	pods, err := m.pods.List(labels.Everything()) // none before the first policy
	if err != nil {
		return c, err
	}
	if pods = m.hold(pods); len(c.policies) == 0 {
		return c, nil
	}
	c.pods = pods
	namespaces, err := m.namespaces.List(labels.Everything())
	for _, n := range namespaces {
		c.namespaces[n.Name] = n.Labels
	}
	return c, err
}

// hold puts pods of this node that have their addresses still into the list, as they
// were when they ran, in the place of what the API says of them now.
func (m *Manager) hold(pods []*v1.Pod) []*v1.Pod {
	for uid := range m.held {
		if !m.cfg.Attached(uid) {
			delete(m.held, uid)
		}
	}
	for _, p := range m.cfg.Running() {
		if m.held[p.UID] == nil && !p.Spec.HostNetwork && len(p.Status.PodIPs) > 0 && m.cfg.Attached(p.UID) {
			slim, _ := trim(p)
			own := slim.(*v1.Pod)
			own.Status.Phase = v1.PodRunning // whoever says that it has ended
			m.held[p.UID] = own
		}
	}
	seen := map[types.UID]bool{}
	for i, p := range pods {
		if p.Spec.NodeName != m.cfg.NodeName || p.Spec.HostNetwork {
			continue
		}
		uid := localUID(p)
		seen[uid] = true
		switch {
		case !core.Finished(p):
			if len(p.Status.PodIPs) > 0 && m.cfg.Attached(uid) {
				m.held[uid] = p
			}
		case m.held[uid] != nil:
			pods[i] = m.held[uid]
		}
	}
	for uid, p := range m.held {
		if !seen[uid] {
			pods = append(pods, p)
		}
	}
	return pods
}

// Guard makes the rules for a pod that is about to start, with the addresses
// that it will have, and returns when they are in force. While the policies
// have never been read, static pods alone may start; the rules follow once the
// API answers.
func (m *Manager) Guard(ctx context.Context, uid string, addrs []netip.Addr) error {
	m.mu.Lock()
	m.starting[types.UID(uid)] = addrs
	m.version++
	m.mu.Unlock()
	timeout := syncTimeout
	static := m.cfg.Static(types.UID(uid))
	if static {
		timeout = staticTimeout
	}
	if err := wait(ctx, m.synced, timeout); err != nil {
		if static && ctx.Err() == nil {
			m.cfg.Logger.Warn("a static pod starts before the network policies could be read", "uid", uid)
			return nil
		}
		return fmt.Errorf("network policies have not been read yet: %w", err)
	}
	if list, err := m.policies.List(labels.Everything()); err == nil && len(list) == 0 {
		return nil // one that comes now is a change as any other
	}
	if err := m.awaitPod(ctx, types.UID(uid)); err != nil && !static {
		return fmt.Errorf("network policies cannot be applied: %w", err)
	}
	m.count(1)
	defer m.count(-1)
	m.touch()
	m.mu.Lock()
	version := m.version
	m.mu.Unlock()
	deadline := time.NewTimer(forceTimeout)
	defer deadline.Stop()
	for {
		m.mu.Lock()
		applied, changed, fault := m.applied, m.changed, m.fault
		m.mu.Unlock()
		if applied >= version {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-deadline.C:
			return fmt.Errorf("network policies for the pod are not in force after %s: %w", forceTimeout, cmpErr(fault, errors.New("the packet filter is busy")))
		}
	}
}

func cmpErr(err, instead error) error {
	if err != nil {
		return err
	}
	return instead
}

// awaitPod waits until the watch has the pod: without its labels no policy can be
// known to select it. One that never comes is a static pod that the API does not
// have, or the watch lags behind.
func (m *Manager) awaitPod(ctx context.Context, uid types.UID) error {
	limit := time.NewTimer(knownTimeout)
	defer limit.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		pods, err := m.pods.List(labels.Everything())
		if err != nil || slices.ContainsFunc(pods, func(p *v1.Pod) bool { return localUID(p) == uid && p.Spec.NodeName == m.cfg.NodeName }) {
			return err
		}
		select {
		case <-tick.C:
		case <-limit.C:
			return fmt.Errorf("the watch of pods has not shown this one for %s: it lags behind, or the server does not answer", knownTimeout)
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Release forgets the addresses of a pod whose network is taken away.
func (m *Manager) Release(uid string) {
	m.mu.Lock()
	delete(m.starting, types.UID(uid))
	m.mu.Unlock()
	m.touch() // what is held of it goes
}

func wait(ctx context.Context, done <-chan struct{}, timeout time.Duration) error {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	select {
	case <-done:
		return nil
	case <-timer.C:
		return fmt.Errorf("nothing came within %s", timeout)
	case <-ctx.Done():
		return ctx.Err()
	}
}
