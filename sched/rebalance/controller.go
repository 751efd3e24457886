// Package rebalance moves pods to better nodes, slowly: now and then it evicts a
// few, within their PodDisruptionBudgets, whose controllers make new ones. Which
// node is better is the scheduler's to say. It is off unless an interval is set.
package rebalance

import (
	"cmp"
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
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

	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/scheduler"
)

// Planner says which pods would be better elsewhere: the scheduler.
type Planner interface {
	// Moves returns at most most of them. It is called from one goroutine; it may
	// block while the scheduler decides.
	Moves(may func(*corev1.Pod) bool, most int) []scheduler.Move
}

type controller struct {
	client  kubernetes.Interface
	clock   clock.WithTicker
	events  record.EventRecorder
	pods    corelisters.PodLister
	synced  cache.InformerSynced
	every   time.Duration
	settled time.Duration
	planner Planner
	// moved says when a pod of a controller was moved last.
	moved map[types.UID]time.Time
}

// New returns the loop, which looks for moves at the interval, for the first time
// one interval after its start. Pods may be moved that have been ready for settled,
// 0: ten minutes.
func New(env loop.Env, planner Planner, every, settled time.Duration) loop.Loop {
	core := env.Informers.Core().V1().Pods()
	c := &controller{
		client: env.Client, clock: env.Clock, events: env.Events.For("rebalancer"), pods: core.Lister(), synced: core.Informer().HasSynced,
		every: every, settled: cmp.Or(settled, defaultSettled), planner: planner, moved: map[types.UID]time.Time{},
	}
	return loop.Loop{Name: "rebalance", Run: c.run}
}

func (c *controller) run(ctx context.Context) error {
	if !cache.WaitForCacheSync(ctx.Done(), c.synced) {
		return nil
	}
	ticker := c.clock.NewTicker(c.every)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
			c.pass(ctx)
		}
	}
}

// pass evicts what the planner says. A fault is logged: the next pass plans again.
func (c *controller) pass(ctx context.Context) {
	all, err := c.pods.List(labels.Everything())
	if err != nil {
		return
	}
	for _, pod := range all {
		if waiting(pod) {
			return
		}
	}
	now := c.clock.Now()
	rested(c.moved, now)
	// The planner's pods are as they were when the scheduler last looked at them: it
	// keeps no conditions.
	may := map[types.UID]bool{}
	for _, pod := range all {
		if movable(pod, c.settled, now) {
			_, rests := c.moved[metav1.GetControllerOf(pod).UID]
			may[pod.UID] = !rests
		}
	}
	moves := c.planner.Moves(func(pod *corev1.Pod) bool { return may[pod.UID] }, most)
	for _, m := range moves {
		owner := metav1.GetControllerOf(m.Pod).UID
		if _, rests := c.moved[owner]; rests {
			continue // an earlier one of this pass was its
		}
		if err := c.evict(ctx, m); err != nil {
			if ctx.Err() == nil {
				klog.FromContext(ctx).Info("pod was not moved", "pod", klog.KObj(m.Pod), "from", m.From, "why", m.Why, "err", err)
			}
			continue
		}
		c.moved[owner] = now
	}
}

func (c *controller) evict(ctx context.Context, m scheduler.Move) error {
	err := c.client.PolicyV1().Evictions(m.Pod.Namespace).Evict(ctx, &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Namespace: m.Pod.Namespace, Name: m.Pod.Name},
		DeleteOptions: metav1.NewPreconditionDeleteOptions(string(m.Pod.UID)),
	})
	switch {
	case err == nil:
		evictions.WithLabelValues(m.Kind, "evicted").Inc()
		c.events.Eventf(m.Pod, corev1.EventTypeNormal, "Rebalanced", "Evicted from node %s for rebalancing: %s", m.From, m.Why)
		klog.FromContext(ctx).Info("pod evicted for balance", "pod", klog.KObj(m.Pod), "from", m.From, "to", m.To, "kind", m.Kind, "why", m.Why)
		return nil
	case apierrors.IsTooManyRequests(err):
		evictions.WithLabelValues(m.Kind, "budget").Inc()
		return fmt.Errorf("its budget: %w", err)
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		return fmt.Errorf("it is gone: %w", err)
	}
	evictions.WithLabelValues(m.Kind, "error").Inc()
	return err
}
