// Package daemonset keeps one pod on every node that a DaemonSet is for. The
// scheduler binds these pods like all others; each of them fits one node only.
package daemonset

import (
	"context"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	appslisters "k8s.io/client-go/listers/apps/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/history"
	"github.com/clusterd/clusterd/sched/internal/podctl"
	"github.com/clusterd/clusterd/sched/loop"
)

// Kind is the kind this controller is about.
var Kind = appsv1.SchemeGroupVersion.WithKind("DaemonSet")

const (
	name    = "daemonset"
	workers = 4
	// Pods that ended are replaced at these intervals, per set and node.
	firstBackoff = time.Second
	maxBackoff   = 15 * time.Minute
)

type controller struct {
	*loop.Controller
	client  kubernetes.Interface
	clock   clock.PassiveClock
	lister  appslisters.DaemonSetLister
	nodes   corelisters.NodeLister
	pods    *podctl.Control
	history *history.Keeper
	backoff *flowcontrol.Backoff
}

// New returns the loop. It watches DaemonSets, Nodes, Pods and
// ControllerRevisions.
func New(env loop.Env) (loop.Loop, error) {
	informer := env.Informers.Apps().V1().DaemonSets()
	nodes := env.Informers.Core().V1().Nodes()
	control, err := podctl.New(env, Kind, "daemonset-controller")
	if err != nil {
		return loop.Loop{}, err
	}
	keeper, err := history.NewKeeper(env, Kind)
	if err != nil {
		return loop.Loop{}, err
	}
	c := &controller{
		client: env.Client, clock: env.Clock, lister: informer.Lister(), nodes: nodes.Lister(), pods: control, history: keeper,
		backoff: flowcontrol.NewBackOff(firstBackoff, maxBackoff),
	}
	c.backoff.Clock = env.Clock
	c.Controller = loop.New(name, env, workers, c.reconcile)
	loop.Watch(c.Controller, informer.Informer(), func(old, set *appsv1.DaemonSet) {
		if old != nil && (set == nil || set.UID != old.UID) {
			control.Pending.Forget(loop.KeyOf(old))
		}
		c.Enqueue(loop.KeyOf(loop.Latest(old, set)))
	})
	loop.Watch(c.Controller, nodes.Informer(), c.onNode)
	control.Watch(c.Controller, c.Enqueue, c.offer)
	keeper.Watch(c.Controller, env, c.Enqueue)
	return c.Loop(), nil
}

// onNode wakes all sets when something changed that decides whether their pods
// belong on the node. Heartbeats do not.
func (c *controller) onNode(old, node *corev1.Node) {
	if old != nil && node != nil && apiequality.Semantic.DeepEqual(old.Labels, node.Labels) && apiequality.Semantic.DeepEqual(old.Spec.Taints, node.Spec.Taints) {
		return
	}
	sets, err := c.lister.List(labels.Everything())
	if err != nil {
		return
	}
	for _, set := range sets {
		c.Enqueue(loop.KeyOf(set))
	}
}

// offer wakes every set that could adopt the orphan.
func (c *controller) offer(pod *corev1.Pod) {
	sets, err := c.lister.DaemonSets(pod.Namespace).List(labels.Everything())
	if err != nil {
		return
	}
	for _, set := range sets {
		if podctl.Matches(set.Spec.Selector, pod) {
			c.Enqueue(loop.KeyOf(set))
		}
	}
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	set, err := c.lister.DaemonSets(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if s := set.Spec.Selector; s == nil || len(s.MatchLabels)+len(s.MatchExpressions) == 0 {
		c.pods.Events.Event(set, corev1.EventTypeWarning, "SelectingAll", "This daemon set is selecting all pods. A non-empty selector is required.")
		return nil
	}
	live := func(ctx context.Context) (metav1.Object, error) {
		return c.client.AppsV1().DaemonSets(set.Namespace).Get(ctx, set.Name, metav1.GetOptions{})
	}
	mine, wait, err := c.pods.Claim(ctx, set, set.Spec.Selector, func(pod *corev1.Pod) bool { return nodeOf(pod) != "" }, live)
	if err != nil {
		return err
	}
	revisions, update, err := c.history.Sync(ctx, history.Owner{
		Owner: set, Selector: set.Spec.Selector, Template: &set.Spec.Template, Collisions: set.Status.CollisionCount, Live: live,
	})
	var collision *history.ErrCollision
	if errors.As(err, &collision) {
		status := *set.Status.DeepCopy()
		status.CollisionCount = ptr.To(ptr.Deref(status.CollisionCount, 0) + 1)
		return c.updateStatus(ctx, set, status) // the change of status wakes us
	}
	if err != nil || update == nil {
		return err
	}
	nodes, err := c.nodes.List(labels.Everything())
	if err != nil {
		return err
	}
	hash := update.Labels[history.HashLabel]
	plan := Decide(Input{Set: set, Pods: mine, Nodes: nodes, Hash: hash, Now: c.clock.Now()})

	var failed error
	if wait > 0 {
		c.EnqueueAfter(key, wait)
	} else {
		failed = c.execute(ctx, set, plan, hash)
	}
	if plan.Recheck > 0 {
		c.EnqueueAfter(key, plan.Recheck)
	}
	return errors.Join(failed, c.updateStatus(ctx, set, plan.Status), c.truncate(ctx, set, hash, mine, revisions))
}

// execute carries the plan out.
func (c *controller) execute(ctx context.Context, set *appsv1.DaemonSet, plan Plan, hash string) error {
	remove := plan.Delete
	for _, pod := range plan.Ended {
		id := string(set.UID) + "/" + nodeOf(pod)
		if c.backoff.IsInBackOffSinceUpdate(id, c.clock.Now()) {
			c.EnqueueAfter(loop.KeyOf(set), c.backoff.Get(id))
			continue
		}
		c.backoff.Next(id, c.clock.Now())
		reason, what := "FailedDaemonPod", "failed"
		if pod.Status.Phase == corev1.PodSucceeded {
			reason, what = "SucceededDaemonPod", "succeeded"
		}
		c.pods.Events.Eventf(set, corev1.EventTypeWarning, reason, "Found %s daemon pod %s/%s on node %s, will try to kill it", what, pod.Namespace, pod.Name, nodeOf(pod))
		remove = append(remove, pod)
	}
	c.backoff.GC()
	_, deleted := podctl.Parallel(len(remove), func(i int) error { return c.pods.Delete(ctx, set, remove[i]) })
	_, created := podctl.SlowStart(len(plan.Create), func(begin, size int) (int, error) {
		return podctl.Parallel(size, func(i int) error { return c.pods.CreateNamed(ctx, set, newPod(set, plan.Create[begin+i], hash)) })
	})
	if apierrors.HasStatusCause(created, corev1.NamespaceTerminatingCause) {
		created = nil
	}
	return errors.Join(deleted, created)
}

// truncate deletes revisions that no pod is of, beyond the history limit.
func (c *controller) truncate(ctx context.Context, set *appsv1.DaemonSet, hash string, mine []*corev1.Pod, revisions []*appsv1.ControllerRevision) error {
	used := map[string]bool{hash: true}
	for _, pod := range mine {
		used[pod.Labels[history.HashLabel]] = true
	}
	return c.history.Truncate(ctx, history.Surplus(revisions, int(ptr.Deref(set.Spec.RevisionHistoryLimit, 10)), func(r *appsv1.ControllerRevision) bool {
		return used[r.Labels[history.HashLabel]]
	}))
}

func (c *controller) updateStatus(ctx context.Context, set *appsv1.DaemonSet, status appsv1.DaemonSetStatus) error {
	if apiequality.Semantic.DeepEqual(set.Status, status) {
		return nil
	}
	updated := set.DeepCopy()
	updated.Status = status
	_, err := c.client.AppsV1().DaemonSets(set.Namespace).UpdateStatus(ctx, updated, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("update status: %w", err)
	}
	return nil
}
