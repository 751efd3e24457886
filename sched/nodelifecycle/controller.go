// Package nodelifecycle notices nodes that have gone silent, says so in their
// status, taints them, and evicts pods from nodes whose NoExecute taints they
// do not tolerate. It never deletes a node and never forces a pod: whether a
// process on an unreachable machine has ended is not for it to claim. What it can
// do is take the Lease from a node that has promised to end pods without it.
package nodelifecycle

import (
	"container/list"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/internal/bynode"
	"github.com/clusterd/clusterd/sched/internal/disrupt"
	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
)

const (
	workers = 4
	// evictionsInFlight bounds concurrent evictions of one node.
	evictionsInFlight = 16
)

// Config is what this loop needs beyond the common environment.
type Config struct {
	// Liveness is optional; see sched.Liveness.
	Liveness Liveness
	// EvictionDelay is how long a node is not ready before it gets the
	// NoExecute taint.
	EvictionDelay time.Duration
}

type controller struct {
	*loop.Controller
	cfg    Config
	client kubernetes.Interface
	clock  clock.PassiveClock
	events record.EventRecorder
	nodes  corelisters.NodeLister
	pods   cache.Indexer

	mu   sync.Mutex // guards below
	seen map[string]*seen
	// heardOf are those of seen that are not silent for long, the one that was heard of
	// longest ago first.
	heardOf *list.List
	census  census
	since   map[string]time.Time // when a node's NoExecute taints were first seen
	// marked holds the transition of Ready for which a node's pods have been
	// marked not ready.
	marked map[string]metav1.Time
	// paces are how fast pods are evicted by zone, as was said last; turns when each lost
	// node of a paced zone may be, granted the nodes that have had theirs.
	paces   map[string]pace
	turns   map[string]*turns
	granted map[string]bool
	// waits are the lost nodes of which was said that their pods are not evicted, at most
	// maxSaid of a zone.
	waits map[string]bool
}

// New returns the loop. It watches Nodes, Leases and Pods.
func New(env loop.Env, cfg Config) (loop.Loop, error) {
	c, err := newController(env, cfg)
	if err != nil {
		return loop.Loop{}, err
	}
	return loop.Loop{Name: "nodelifecycle", Run: c.run}, nil
}

func newController(env loop.Env, cfg Config) (*controller, error) {
	core := env.Informers.Core().V1()
	if err := bynode.Index(core.Pods().Informer()); err != nil {
		return nil, fmt.Errorf("index pods by node: %w", err)
	}
	c := &controller{
		cfg:    cfg,
		client: env.Client,
		clock:  env.Clock,
		events: env.Events.For("node-controller"),
		nodes:  core.Nodes().Lister(),
		pods:   core.Pods().Informer().GetIndexer(),
		seen:   map[string]*seen{},
		census: newCensus(),
		since:  map[string]time.Time{},
		marked: map[string]metav1.Time{},

		heardOf: list.New(), turns: map[string]*turns{}, granted: map[string]bool{}, waits: map[string]bool{},
	}
	c.Controller = loop.New("nodelifecycle", env, workers, c.reconcile)
	loop.Watch(c.Controller, core.Nodes().Informer(), c.onNode)
	loop.Watch(c.Controller, env.Informers.Coordination().V1().Leases().Informer(), c.onLease)
	loop.Watch(c.Controller, core.Pods().Informer(), c.onPod)
	return c, nil
}

func (c *controller) run(ctx context.Context) error {
	if c.cfg.Liveness == nil {
		return c.Run(ctx)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var group errgroup.Group
	err := c.RunReady(ctx, func() {
		group.Go(func() error { c.listen(ctx); return nil })
	})
	cancel()
	return errors.Join(err, group.Wait())
}

func (c *controller) onNode(old, node *corev1.Node) {
	if node == nil {
		c.mu.Lock()
		c.drop(old.Name)
		delete(c.since, old.Name)
		delete(c.marked, old.Name)
		c.found(old)
		delete(c.waits, old.Name)
		c.mu.Unlock()
		return
	}
	if old == nil || beat(old, node) {
		c.heard(node.Name)
	}
	if old == nil || !apiequality.Semantic.DeepEqual(old.Spec, node.Spec) || !sameConditions(old, node) {
		c.Enqueue(loop.Key{Name: node.Name})
	}
	if old == nil || readiness(old) != readiness(node) || zoneOf(old) != zoneOf(node) {
		c.mu.Lock()
		s := c.entry(node.Name)
		s.node, s.zone, s.unknown = true, zoneOf(node), readiness(node) == corev1.ConditionUnknown
		c.count(s)
		c.mu.Unlock()
	}
}

// beat reports whether the agent has written the node's status. Our own writes
// leave the heartbeat time alone.
func beat(old, node *corev1.Node) bool {
	before, after := condition(old, corev1.NodeReady), condition(node, corev1.NodeReady)
	if after == nil || before == nil {
		return after != before && after != nil && after.Status != corev1.ConditionUnknown
	}
	return !before.LastHeartbeatTime.Equal(&after.LastHeartbeatTime) ||
		before.Status == corev1.ConditionUnknown && after.Status != corev1.ConditionUnknown
}

// sameConditions compares all but heartbeat times.
func sameConditions(old, node *corev1.Node) bool {
	return slices.EqualFunc(old.Status.Conditions, node.Status.Conditions, func(a, b corev1.NodeCondition) bool {
		return a.Type == b.Type && a.Status == b.Status && a.Reason == b.Reason
	})
}

func (c *controller) onLease(old, lease *coordinationv1.Lease) {
	if loop.Latest(old, lease).Namespace != corev1.NamespaceNodeLease {
		return
	}
	c.mu.Lock()
	if s := c.entry(loop.Latest(old, lease).Name); lease == nil {
		s.lease = nil
	} else {
		// Any write by any client counts as a renewal here: too late is safe.
		s.lease, s.renewed = lease, c.clock.Now()
	}
	c.mu.Unlock()
	if lease == nil {
		return
	}
	if old == nil || !old.Spec.RenewTime.Equal(lease.Spec.RenewTime) {
		c.heard(lease.Name)
	}
}

// onPod wakes the node of a pod that may have to leave it.
func (c *controller) onPod(old, pod *corev1.Pod) {
	if pod == nil || pod.Spec.NodeName == "" {
		return
	}
	if pod.DeletionTimestamp != nil {
		if pods.SelfFencing(pod) && (old == nil || old.DeletionTimestamp == nil) {
			c.Enqueue(loop.Key{Name: pod.Spec.NodeName}) // it may be waiting for the node's Lease
		}
		return
	}
	if old != nil && old.Spec.NodeName == pod.Spec.NodeName && apiequality.Semantic.DeepEqual(old.Spec.Tolerations, pod.Spec.Tolerations) {
		return
	}
	node, err := c.nodes.Get(pod.Spec.NodeName)
	if err == nil && slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Effect == corev1.TaintEffectNoExecute }) {
		c.Enqueue(loop.Key{Name: node.Name})
	}
}

func (c *controller) enqueueAll() {
	nodes, err := c.nodes.List(labels.Everything())
	if err != nil {
		return
	}
	for _, node := range nodes {
		c.Enqueue(loop.Key{Name: node.Name})
	}
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	if key == zonesKey {
		c.announce()
		return nil
	}
	node, err := c.nodes.Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	now := c.clock.Now()
	c.mu.Lock()
	silent, recheck := c.entry(node.Name).silent(now)
	c.expire(now)
	c.mu.Unlock()
	if recheck > 0 {
		c.EnqueueAfter(key, recheck)
	}
	if silent {
		if node, err = c.silence(ctx, node, now); err != nil {
			return err
		}
	}
	if node, err = c.taint(ctx, key, node, now); err != nil {
		return err
	}
	return errors.Join(c.markPods(ctx, node), c.evict(ctx, key, node, now), c.fence(ctx, key, node, now))
}

// silence sets the conditions of a silent node to Unknown.
func (c *controller) silence(ctx context.Context, node *corev1.Node, now time.Time) (*corev1.Node, error) {
	conditions := unknown(node.Status.Conditions, now)
	if conditions == nil {
		return node, nil
	}
	wasReady := readiness(node)
	updated := node.DeepCopy()
	updated.Status.Conditions = conditions
	// The version makes a status that the agent posts right now win.
	stored, err := c.client.CoreV1().Nodes().UpdateStatus(ctx, updated, metav1.UpdateOptions{})
	if err != nil {
		return nil, fmt.Errorf("mark node unknown: %w", err)
	}
	if wasReady == corev1.ConditionTrue {
		klog.FromContext(ctx).Info("node is unreachable", "node", node.Name)
		c.events.Eventf(node, corev1.EventTypeNormal, "NodeNotReady", "Node %s status is now: NodeNotReady", node.Name)
	}
	return stored, nil
}

// taint brings our taints in line with the conditions.
func (c *controller) taint(ctx context.Context, key loop.Key, node *corev1.Node, now time.Time) (*corev1.Node, error) {
	// A mass failure holds back new NoExecute taints of unreachable nodes. Only
	// a live agent reports NotReady, so that is trusted.
	unreachable := readiness(node) == corev1.ConditionUnknown
	wanted, recheck := taints(node, !unreachable || !c.held(node), c.cfg.EvictionDelay, now)
	switch {
	case !unreachable:
		c.mu.Lock()
		c.found(node)
		c.mu.Unlock()
	case slices.ContainsFunc(wanted, evicts) && !slices.ContainsFunc(node.Spec.Taints, evicts):
		if ok, wait := c.grant(node, now); !ok {
			wanted, _ = taints(node, false, c.cfg.EvictionDelay, now)
			recheck = wait
		}
	}
	if recheck > 0 {
		c.EnqueueAfter(key, recheck)
	}
	if apiequality.Semantic.DeepEqual(wanted, node.Spec.Taints) {
		return node, nil
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion},
		"spec":     map[string]any{"taints": wanted},
	})
	if err != nil {
		return nil, fmt.Errorf("encode taints: %w", err)
	}
	stored, err := c.client.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return nil, fmt.Errorf("set taints: %w", err)
	}
	return stored, nil
}

// evicts reports whether pods leave a lost node by the taint.
func evicts(t corev1.Taint) bool { return t.Effect == corev1.TaintEffectNoExecute && lost(&t) }

// markPods takes the pods of a node that is not ready out of service, once
// for each time the node turns not ready.
func (c *controller) markPods(ctx context.Context, node *corev1.Node) error {
	ready := condition(node, corev1.NodeReady)
	if ready == nil || ready.Status == corev1.ConditionTrue {
		return nil
	}
	c.mu.Lock()
	done := c.marked[node.Name]
	c.mu.Unlock()
	if done.Equal(&ready.LastTransitionTime) {
		return nil
	}
	here, err := bynode.Pods(c.pods, node.Name)
	if err != nil {
		return err
	}
	err = each(here, func(pod *corev1.Pod) error {
		if !pods.Ready(pod) {
			return nil
		}
		condition := *pods.Condition(pod, corev1.PodReady)
		condition.Status, condition.Reason, condition.Message = corev1.ConditionFalse, "NodeNotReady", "Node is not ready"
		condition.LastTransitionTime = metav1.NewTime(c.clock.Now())
		if err := c.patchCondition(ctx, pod, condition); err != nil {
			return fmt.Errorf("mark pod not ready: %w", err)
		}
		c.events.Event(pod, corev1.EventTypeWarning, "NodeNotReady", "Node is not ready")
		return nil
	})
	if err != nil {
		return err
	}
	c.mu.Lock()
	c.marked[node.Name] = ready.LastTransitionTime
	c.mu.Unlock()
	return nil
}

// evict deletes the pods that may not stay on the node, and comes back when
// the next one's time is up.
func (c *controller) evict(ctx context.Context, key loop.Key, node *corev1.Node, now time.Time) error {
	suspended := c.held(node)
	c.mu.Lock()
	first, ok := c.since[node.Name]
	tainted := slices.ContainsFunc(node.Spec.Taints, func(t corev1.Taint) bool { return t.Effect == corev1.TaintEffectNoExecute })
	switch {
	case !tainted:
		delete(c.since, node.Name)
	case !ok:
		first = now
		c.since[node.Name] = now
	}
	c.mu.Unlock()
	if !tainted {
		return nil
	}
	here, err := bynode.Pods(c.pods, node.Name)
	if err != nil {
		return err
	}
	next := time.Duration(0)
	var leaving []*corev1.Pod
	for _, pod := range here {
		if pod.DeletionTimestamp != nil || pods.Finished(pod) {
			continue
		}
		switch what, wait := evictionOf(pod, node.Spec.Taints, first, now, suspended); what {
		case leaves:
			leaving = append(leaving, pod)
		case later:
			if next == 0 || wait < next {
				next = wait
			}
		}
	}
	if next > 0 {
		c.EnqueueAfter(key, next)
	}
	return each(leaving, func(pod *corev1.Pod) error { return c.remove(ctx, pod) })
}

func (c *controller) remove(ctx context.Context, pod *corev1.Pod) error {
	deleted, err := disrupt.Delete(ctx, c.client, pod, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint", c.clock.Now())
	if err != nil {
		return fmt.Errorf("evict pod: %w", err)
	}
	if deleted {
		c.events.Eventf(pod, corev1.EventTypeNormal, "TaintManagerEviction", "Marking for deletion Pod %s/%s", pod.Namespace, pod.Name)
		evictions.Inc()
	}
	return nil
}

func (c *controller) patchCondition(ctx context.Context, pod *corev1.Pod, condition corev1.PodCondition) error {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID},
		"status":   map[string]any{"conditions": []corev1.PodCondition{condition}},
	})
	if err != nil {
		return fmt.Errorf("encode condition: %w", err)
	}
	_, err = c.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // gone, or another of the same name
	}
	return err
}

// each calls f for all pods, some at once, and returns the first error.
func each(list []*corev1.Pod, f func(*corev1.Pod) error) error {
	var group errgroup.Group
	group.SetLimit(evictionsInFlight)
	for _, pod := range list {
		group.Go(func() error { return f(pod) })
	}
	return group.Wait()
}
