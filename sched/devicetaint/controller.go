// Package devicetaint evicts pods whose devices have a taint with the effect
// NoExecute that their claims do not tolerate, and says in the status of
// DeviceTaintRules what came of them. It keeps no device from being allocated:
// that is the scheduler's.
package devicetaint

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	resourcelisters "k8s.io/client-go/listers/resource/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/internal/devices"
	"github.com/clusterd/clusterd/sched/internal/disrupt"
	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
)

const (
	// byPool finds slices, and claims with devices, of a driver's pool.
	byPool = "clusterd-device-pool"
	// statusPause is the shortest time between two writes of a rule's condition for
	// one generation of it.
	statusPause = 10 * time.Second
)

type controller struct {
	client kubernetes.Interface
	clock  clock.PassiveClock
	events record.EventRecorder
	pods   corelisters.PodLister
	claims resourcelisters.ResourceClaimLister
	rules  resourcelisters.DeviceTaintRuleLister

	slicesByPool, claimsByPool cache.Indexer

	// evicting reconciles claims, statuses the status of rules.
	evicting, statuses *loop.Controller

	// began stands for the time of taints that have none: they were stored by an
	// earlier version of the server.
	began time.Time

	mu      sync.Mutex
	evicted map[types.UID]sets.Set[types.UID] // pods, by the rule for which they went
}

// New returns the loop. It watches Pods, ResourceClaims, ResourceSlices and
// DeviceTaintRules.
func New(env loop.Env) (loop.Loop, error) {
	core, resources := env.Informers.Core().V1(), env.Informers.Resource().V1()
	claimInformer, sliceInformer, ruleInformer := resources.ResourceClaims().Informer(), resources.ResourceSlices().Informer(), resources.DeviceTaintRules().Informer()
	if err := errors.Join(claimInformer.AddIndexers(cache.Indexers{byPool: poolsOfClaim}), sliceInformer.AddIndexers(cache.Indexers{byPool: poolOfSlice})); err != nil {
		return loop.Loop{}, fmt.Errorf("index claims and slices by their pools: %w", err)
	}
	c := &controller{
		client: env.Client, clock: env.Clock, events: env.Events.For("device-taint-eviction"), pods: core.Pods().Lister(),
		claims: resources.ResourceClaims().Lister(), rules: resources.DeviceTaintRules().Lister(),
		slicesByPool: sliceInformer.GetIndexer(), claimsByPool: claimInformer.GetIndexer(),
		began: env.Clock.Now(), evicted: map[types.UID]sets.Set[types.UID]{},
	}
	c.evicting = loop.New("devicetaint", env, 4, c.reconcileClaim)
	c.statuses = loop.New("devicetaint-rules", env, 1, c.reconcileRule)
	loop.Watch(c.evicting, claimInformer, c.onClaim)
	loop.Watch(c.evicting, core.Pods().Informer(), c.onPod)
	loop.Watch(c.evicting, sliceInformer, c.onSlice)
	loop.Watch(c.evicting, ruleInformer, func(old, rule *resourcev1.DeviceTaintRule) {
		if old == nil || rule == nil || !apiequality.Semantic.DeepEqual(old.Spec, rule.Spec) {
			c.enqueueSelected(old)
			c.enqueueSelected(rule)
		}
	})
	loop.Watch(c.statuses, ruleInformer, c.onRule)
	return loop.Loop{Name: "devicetaint", Run: c.run}, nil
}

func (c *controller) run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	ready := make(chan struct{}) // evicting enqueues for statuses
	group.Go(func() error { return c.statuses.RunReady(ctx, func() { close(ready) }) })
	select {
	case <-ready:
		group.Go(func() error { return c.evicting.Run(ctx) })
	case <-ctx.Done():
	}
	return group.Wait()
}

// poolKey is how the indexes name a pool: no driver's name has a slash.
func poolKey(driver, pool string) string { return driver + "/" + pool }

func poolOfSlice(obj any) ([]string, error) {
	if slice, ok := obj.(*resourcev1.ResourceSlice); ok {
		return []string{poolKey(slice.Spec.Driver, slice.Spec.Pool.Name)}, nil
	}
	return nil, nil
}

func poolsOfClaim(obj any) ([]string, error) {
	claim, ok := obj.(*resourcev1.ResourceClaim)
	if !ok || claim.Status.Allocation == nil {
		return nil, nil
	}
	out := sets.New[string]()
	for i := range claim.Status.Allocation.Devices.Results {
		r := &claim.Status.Allocation.Devices.Results[i]
		out.Insert(poolKey(r.Driver, r.Pool))
	}
	return out.UnsortedList(), nil
}

func (c *controller) onClaim(old, claim *resourcev1.ResourceClaim) {
	c.enqueueRules(old)
	if claim != nil && claim.Status.Allocation != nil {
		c.evicting.Enqueue(loop.KeyOf(claim))
	}
}

// onPod looks at the claims of a pod that got its node, or goes.
func (c *controller) onPod(old, pod *corev1.Pod) {
	p := loop.Latest(old, pod)
	if len(p.Spec.ResourceClaims) == 0 && p.Status.ExtendedResourceClaimStatus == nil ||
		old != nil && pod != nil && old.UID == pod.UID && old.Spec.NodeName == pod.Spec.NodeName && pods.Active(old) == pods.Active(pod) {
		return
	}
	for name := range resourceclaim.PodClaims(p) {
		c.evicting.Enqueue(loop.Key{Namespace: p.Namespace, Name: name})
	}
}

func (c *controller) onSlice(old, slice *resourcev1.ResourceSlice) {
	if old != nil && slice != nil && apiequality.Semantic.DeepEqual(old.Spec, slice.Spec) {
		return
	}
	s := loop.Latest(old, slice)
	found, err := c.claimsByPool.ByIndex(byPool, poolKey(s.Spec.Driver, s.Spec.Pool.Name))
	if err != nil {
		return // the index exists: New made it
	}
	for _, obj := range found {
		if claim, ok := obj.(*resourcev1.ResourceClaim); ok {
			c.evicting.Enqueue(loop.KeyOf(claim))
		}
	}
}

func (c *controller) onRule(old, rule *resourcev1.DeviceTaintRule) {
	if rule == nil || old != nil && old.UID != rule.UID {
		c.mu.Lock()
		delete(c.evicted, old.UID)
		c.mu.Unlock()
	}
	if rule != nil && (old == nil || old.UID != rule.UID || old.Generation != rule.Generation) {
		c.statuses.Enqueue(loop.KeyOf(rule))
	}
}

// enqueueSelected has the claims looked at that have devices which the rule
// selects.
func (c *controller) enqueueSelected(rule *resourcev1.DeviceTaintRule) {
	if rule == nil {
		return
	}
	all, err := c.claims.List(labels.Everything())
	if err != nil {
		return
	}
	for _, claim := range all {
		if selected(rule, claim) > 0 {
			c.evicting.Enqueue(loop.KeyOf(claim))
		}
	}
}

// selected counts the claim's devices that the rule selects.
func selected(rule *resourcev1.DeviceTaintRule, claim *resourcev1.ResourceClaim) (n int) {
	if claim.Status.Allocation == nil {
		return 0
	}
	for i := range claim.Status.Allocation.Devices.Results {
		if devices.Selects(rule.Spec.DeviceSelector, devices.Of(&claim.Status.Allocation.Devices.Results[i])) {
			n++
		}
	}
	return n
}

// enqueueRules has the status of those rules with NoExecute written again that
// select a device of the claim.
func (c *controller) enqueueRules(claim *resourcev1.ResourceClaim) {
	if claim == nil || claim.Status.Allocation == nil {
		return
	}
	rules, err := c.rules.List(labels.Everything())
	if err != nil {
		return
	}
	for _, rule := range rules {
		if rule.Spec.Taint.Effect == resourcev1.DeviceTaintEffectNoExecute && selected(rule, claim) > 0 {
			c.statuses.Enqueue(loop.KeyOf(rule))
		}
	}
}

// published finds the device as its driver publishes it now, in the newest
// generation of its pool; nil: it does not.
func (c *controller) published(id devices.ID) *resourcev1.Device {
	found, err := c.slicesByPool.ByIndex(byPool, poolKey(id.Driver, id.Pool))
	if err != nil {
		return nil // the index exists: New made it
	}
	var out *resourcev1.Device
	newest := int64(-1)
	for _, obj := range found {
		slice, ok := obj.(*resourcev1.ResourceSlice)
		if !ok || slice.Spec.Pool.Generation < newest {
			continue
		}
		if slice.Spec.Pool.Generation > newest {
			newest, out = slice.Spec.Pool.Generation, nil
		}
		for i := range slice.Spec.Devices {
			if slice.Spec.Devices[i].Name == id.Device {
				out = &slice.Spec.Devices[i]
			}
		}
	}
	return out
}

// users are the pods that use the claim on a node and are not on their way out.
func (c *controller) users(claim *resourcev1.ResourceClaim) (out []*corev1.Pod) {
	for _, user := range claim.Status.ReservedFor {
		if user.APIGroup != "" || user.Resource != "pods" {
			continue
		}
		pod, err := c.pods.Pods(claim.Namespace).Get(user.Name)
		if err == nil && pod.UID == user.UID && pod.Spec.NodeName != "" && pods.Active(pod) {
			out = append(out, pod)
		}
	}
	return out
}

// reconcileClaim evicts the claim's pods if it is time, or comes back when it is.
func (c *controller) reconcileClaim(ctx context.Context, key loop.Key) error {
	claim, err := c.claims.ResourceClaims(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	c.enqueueRules(claim)
	users := c.users(claim)
	if len(users) == 0 {
		return nil
	}
	rules, err := c.rules.List(labels.Everything())
	if err != nil {
		return err
	}
	v := decide(claim, taintsOf(claim, c.published, rules), c.began)
	if len(v.taints) == 0 {
		return nil
	}
	if left := v.when.Sub(c.clock.Now()); left > 0 {
		c.evicting.EnqueueAfter(key, left)
		return nil
	}
	var errs []error
	for _, pod := range users {
		errs = append(errs, c.evict(ctx, pod, claim, &v))
	}
	return errors.Join(errs...)
}

func (c *controller) evict(ctx context.Context, pod *corev1.Pod, claim *resourcev1.ResourceClaim, v *verdict) error {
	message := fmt.Sprintf("ResourceClaim %s does not tolerate %s", claim.Name, v.reasons())
	deleted, err := disrupt.Delete(ctx, c.client, pod, "DeletionByDeviceTaintManager", "Device Taint manager: deleting due to NoExecute taint: "+message, c.clock.Now())
	if err != nil {
		return fmt.Errorf("evict pod %s from its devices: %w", pod.Name, err)
	}
	if !deleted {
		return nil
	}
	evictions.Inc()
	klog.FromContext(ctx).Info("pod evicted from its devices", "pod", klog.KObj(pod), "claim", claim.Name, "taints", v.reasons())
	c.events.Eventf(pod, corev1.EventTypeNormal, "DeviceTaintManagerEviction", "Marking for deletion: %s", message)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, t := range v.taints {
		if t.rule == nil {
			continue
		}
		if c.evicted[t.rule.UID] == nil {
			c.evicted[t.rule.UID] = sets.New[types.UID]()
		}
		c.evicted[t.rule.UID].Insert(pod.UID)
	}
	return nil
}

// reconcileRule writes the rule's condition.
func (c *controller) reconcileRule(ctx context.Context, key loop.Key) error {
	rule, err := c.rules.Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	var old metav1.Condition
	for _, have := range rule.Status.Conditions {
		if have.Type == resourcev1.DeviceTaintConditionEvictionInProgress {
			old = have
		}
	}
	now := c.clock.Now()
	if old.ObservedGeneration == rule.Generation && rule.Spec.Taint.Effect != resourcev1.DeviceTaintEffectNoExecute {
		return nil // it is found out once
	}
	if left := old.LastTransitionTime.Add(statusPause).Sub(now); old.ObservedGeneration == rule.Generation && left > 0 {
		c.statuses.EnqueueAfter(key, left)
		return nil
	}
	e, err := c.effectsOf(rule)
	if err != nil {
		return err
	}
	condition := conditionOf(rule, e)
	condition.LastTransitionTime = old.LastTransitionTime
	if condition == old {
		return nil
	}
	// The time is that of the last change of anything: it bounds how often this is
	// written.
	condition.LastTransitionTime = metav1.NewTime(now)
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": rule.UID},
		"status":   map[string]any{"conditions": []metav1.Condition{condition}},
	})
	if err != nil {
		return fmt.Errorf("encode the condition of DeviceTaintRule %s: %w", rule.Name, err)
	}
	_, err = c.client.ResourceV1().DeviceTaintRules().Patch(ctx, rule.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("write the condition of DeviceTaintRule %s: %w", rule.Name, err)
	}
	return nil
}

// effectsOf finds out what the rule does, or would do with the effect NoExecute.
func (c *controller) effectsOf(rule *resourcev1.DeviceTaintRule) (e effects, err error) {
	c.mu.Lock()
	e.evicted = c.evicted[rule.UID].Len()
	c.mu.Unlock()
	if rule.Spec.Taint.Effect == resourcev1.DeviceTaintEffectNoSchedule {
		return e, nil
	}
	as := rule.DeepCopy()
	as.Spec.Taint.Effect = resourcev1.DeviceTaintEffectNoExecute
	all, err := c.claims.List(labels.Everything())
	if err != nil {
		return e, err
	}
	leaving, namespaces := sets.New[types.UID](), sets.New[string]()
	for _, claim := range all {
		n := selected(as, claim)
		e.allocated += n
		if n == 0 {
			continue
		}
		v := decide(claim, taintsOf(claim, c.published, []*resourcev1.DeviceTaintRule{as}), c.began)
		if !v.by(as.UID) {
			continue
		}
		for _, pod := range c.users(claim) {
			leaving.Insert(pod.UID)
			namespaces.Insert(pod.Namespace)
		}
	}
	e.pods, e.namespaces = leaving.Len(), namespaces.Len()
	seen := sets.New[devices.ID]()
	for _, obj := range c.slicesByPool.List() {
		slice, ok := obj.(*resourcev1.ResourceSlice)
		if !ok {
			continue
		}
		for i := range slice.Spec.Devices {
			id := devices.ID{Driver: slice.Spec.Driver, Pool: slice.Spec.Pool.Name, Device: slice.Spec.Devices[i].Name}
			if devices.Selects(as.Spec.DeviceSelector, id) && !seen.Has(id) && c.published(id) != nil {
				seen.Insert(id)
			}
		}
	}
	e.published = seen.Len()
	return e, nil
}
