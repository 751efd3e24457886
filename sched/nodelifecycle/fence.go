package nodelifecycle

import (
	"context"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/apis/coordination"
	"github.com/clusterd/clusterd/sched/internal/bynode"
	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
)

// leaseTaker is who holds a Lease that was taken from its node.
const leaseTaker = "node-controller"

// mayTake says whether a node's Lease may be taken from it, or after what time it
// may; 0: not as it is. The node has promised to have ended its pods by then,
// counted from before it sent the renewal; here it counts from when that was
// seen, which is later.
func mayTake(lease *coordinationv1.Lease, renewed, now time.Time) (may bool, wait time.Duration) {
	if lease == nil || lease.Spec.LeaseDurationSeconds == nil || !coordination.Promised(lease) || coordination.Taken(lease) {
		return false, 0
	}
	left := renewed.Add(time.Duration(*lease.Spec.LeaseDurationSeconds) * time.Second).Sub(now)
	return left <= 0, max(left, 0)
}

// fence takes the Lease of a node that is silent, if that lets pods go that are on
// their way out and cannot report it. From then on podgc removes them.
func (c *controller) fence(ctx context.Context, key loop.Key, node *corev1.Node, now time.Time) error {
	if readiness(node) == corev1.ConditionTrue {
		return nil
	}
	here, err := bynode.Pods(c.pods, node.Name)
	if err != nil {
		return err
	}
	waiting := 0
	for _, pod := range here {
		if pod.DeletionTimestamp != nil && pods.SelfFencing(pod) && !pods.Finished(pod) {
			waiting++
		}
	}
	if waiting == 0 {
		return nil
	}
	c.mu.Lock()
	s := *c.entry(node.Name)
	c.mu.Unlock()
	may, wait := mayTake(s.lease, s.renewed, now)
	if wait > 0 {
		c.EnqueueAfter(key, wait)
	}
	if !may {
		return nil
	}
	taken := s.lease.DeepCopy()
	coordination.Take(taken, leaseTaker, now)
	// It names the version whose age was measured: a renewal since then, seen or
	// not, makes it fail.
	if _, err := c.client.CoordinationV1().Leases(taken.Namespace).Update(ctx, taken, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("take the lease of node %s: %w", node.Name, err)
	}
	leasesTaken.Inc()
	klog.FromContext(ctx).Info("took the lease of a node that did not renew it", "node", node.Name, "age", now.Sub(s.renewed), "pods", waiting)
	c.events.Eventf(node, corev1.EventTypeWarning, "NodeFenced",
		"Node %s has not renewed its lease for %s and has ended %d pods by itself: they are replaced", node.Name, now.Sub(s.renewed).Round(time.Second), waiting)
	return nil
}
