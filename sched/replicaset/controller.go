// Package replicaset keeps as many pods running as each ReplicaSet, or
// ReplicationController, asks for.
// It decides how many and which; where they run is the scheduler's choice.
package replicaset

import (
	"context"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/podctl"
	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
)

// Kind is the kind this controller is about.
var Kind = appsv1.SchemeGroupVersion.WithKind("ReplicaSet")

const workers = 8

type controller struct {
	*loop.Controller
	clock clock.PassiveClock
	sets  sets
	pods  *podctl.Control
}

// New returns the loop for ReplicaSets. It watches them and Pods.
func New(env loop.Env) (loop.Loop, error) {
	s, err := newReplicaSets(env)
	if err != nil {
		return loop.Loop{}, err
	}
	return newLoop(env, "replicaset", "replicaset-controller", s)
}

// NewForReplicationControllers returns the loop for ReplicationControllers, the
// older form of ReplicaSets. It watches them and Pods.
func NewForReplicationControllers(env loop.Env) (loop.Loop, error) {
	return newLoop(env, "replicationcontroller", "replication-controller", newReplicationControllers(env))
}

func newLoop(env loop.Env, name, component string, s sets) (loop.Loop, error) {
	control, err := podctl.New(env, s.kind(), component)
	if err != nil {
		return loop.Loop{}, err
	}
	c := &controller{clock: env.Clock, sets: s, pods: control}
	c.Controller = loop.New(name, env, workers, c.reconcile)
	s.watch(c.Controller, c.onSet)
	control.Watch(c.Controller, c.wake, c.offer)
	return c.Loop(), nil
}

// onSet is called for each change of a set, as the object that users know.
func (c *controller) onSet(old, now metav1.Object) {
	if old != nil && (now == nil || now.GetUID() != old.GetUID()) {
		c.pods.Pending.Forget(loop.KeyOf(old)) // its pods are no business of a namesake
	}
	if now == nil {
		now = old
	}
	c.Enqueue(loop.KeyOf(now))
}

// A pass looks at all pods of its ReplicaSet. Events of large ones therefore
// gather for a while that grows with their size, so that n pods cost a number
// of passes that does not grow with n.
const (
	atOnce   = 32 // pods up to which nothing gathers
	perPod   = 100 * time.Microsecond
	maxPause = 200 * time.Millisecond
)

// pause is how long the pod events of a ReplicaSet gather.
func pause(replicas int32) time.Duration {
	if replicas <= atOnce {
		return 0
	}
	return min(time.Duration(replicas)*perPod, maxPause)
}

func (c *controller) wake(key loop.Key) {
	rs, err := c.sets.get(key)
	if err != nil {
		c.Enqueue(key)
		return
	}
	if d := pause(max(ptr.Deref(rs.Spec.Replicas, 1), rs.Status.Replicas)); d > 0 {
		c.EnqueueAfter(key, d)
		return
	}
	c.Enqueue(key)
}

// offer wakes every ReplicaSet that could adopt the orphan.
func (c *controller) offer(pod *corev1.Pod) {
	sets, err := c.sets.list(pod.Namespace)
	if err != nil {
		return
	}
	for _, rs := range sets {
		if podctl.Matches(rs.Spec.Selector, pod) {
			c.Enqueue(loop.KeyOf(rs))
		}
	}
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	rs, err := c.sets.get(key)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	mine, wait, err := c.claim(ctx, rs)
	if err != nil {
		return err
	}

	var failed *failure
	var manageErr error
	switch {
	case rs.DeletionTimestamp != nil:
	case wait > 0:
		c.EnqueueAfter(key, wait)
	default:
		failed, manageErr = c.manage(ctx, rs, podctl.Active(mine))
	}

	status, recheck := Status(rs.ReplicaSet, mine, failed, c.clock.Now())
	if wait > 0 { // nothing was tried: what failed before still stands
		status.Conditions = rs.Status.Conditions
	}
	if recheck > 0 {
		c.EnqueueAfter(key, recheck)
	}
	err = c.sets.updateStatus(ctx, rs, status)
	if apierrors.IsNotFound(err) {
		err = nil
	}
	if err != nil {
		err = fmt.Errorf("update status: %w", err)
	}
	return errors.Join(manageErr, err)
}

// claim returns the set's pods, adopted and released as needed, and how long to
// wait if the cache may lack some.
func (c *controller) claim(ctx context.Context, rs *set) ([]*corev1.Pod, time.Duration, error) {
	return c.pods.Claim(ctx, rs.owner, rs.Spec.Selector, pods.Active, func(ctx context.Context) (metav1.Object, error) {
		return c.sets.live(ctx, loop.KeyOf(rs))
	})
}

// manage carries out Decide. The failure, if any, is for the status, the error
// for the queue.
func (c *controller) manage(ctx context.Context, rs *set, mine []*corev1.Pod) (*failure, error) {
	var perNode map[string]int
	if len(mine) > int(ptr.Deref(rs.Spec.Replicas, 1)) {
		perNode = c.perNode(rs, mine)
	}
	d := Decide(rs.ReplicaSet, mine, perNode, c.clock.Now())
	switch {
	case d.Create > 0:
		_, err := podctl.SlowStart(d.Create, func(_, size int) (int, error) {
			return podctl.Parallel(size, func(int) error {
				return c.pods.CreateNamed(ctx, rs.owner, NewPod(rs.owner, c.sets.kind(), &rs.Spec.Template))
			})
		})
		if err == nil || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			return nil, nil // nothing can be created any more, and that is as it should be
		}
		return &failure{reason: "FailedCreate", err: cause(err)}, err
	case len(d.Delete) > 0:
		_, err := podctl.Parallel(len(d.Delete), func(i int) error { return c.pods.Delete(ctx, rs.owner, d.Delete[i]) })
		if err == nil {
			return nil, nil
		}
		return &failure{reason: "FailedDelete", err: err}, err
	}
	return nil, nil
}

// cause returns the server's own words for the condition's message: the count
// that wraps them changes with every pass and would rewrite the status.
func cause(err error) error {
	for {
		next := errors.Unwrap(err)
		if next == nil {
			return err
		}
		err = next
	}
}

// perNode counts active pods by node over the ReplicaSets that share rs's
// controller (a Deployment's old and new ones), or of rs alone.
func (c *controller) perNode(rs *set, mine []*corev1.Pod) map[string]int {
	counts := map[string]int{}
	add := func(list []*corev1.Pod) {
		for _, pod := range list {
			if pods.Active(pod) && pod.Spec.NodeName != "" {
				counts[pod.Spec.NodeName]++
			}
		}
	}
	add(mine)
	for _, sibling := range c.sets.siblings(rs) {
		if list, err := c.pods.Owned(sibling); err == nil {
			add(list)
		}
	}
	return counts
}
