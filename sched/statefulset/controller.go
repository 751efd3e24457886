// Package statefulset keeps pods that have a name, a place in an order and
// storage of their own. It decides which pods there are and of which revision;
// where they run is the scheduler's choice.
package statefulset

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	appslisters "k8s.io/client-go/listers/apps/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/history"
	"github.com/clusterd/clusterd/sched/internal/podctl"
	"github.com/clusterd/clusterd/sched/loop"
)

// Kind is the kind this controller is about.
var Kind = appsv1.SchemeGroupVersion.WithKind("StatefulSet")

const (
	name    = "statefulset"
	workers = 8
)

// errClaimGoing is returned while an ordinal's former claim is being deleted:
// its pod waits for a new one.
var errClaimGoing = errors.New("is being deleted, the pod waits until it is gone")

type controller struct {
	*loop.Controller
	client  kubernetes.Interface
	clock   clock.PassiveClock
	lister  appslisters.StatefulSetLister
	claims  corelisters.PersistentVolumeClaimLister
	pods    *podctl.Control
	history *history.Keeper
}

// New returns the loop. It watches StatefulSets, Pods, claims that go and
// ControllerRevisions.
func New(env loop.Env) (loop.Loop, error) {
	informer := env.Informers.Apps().V1().StatefulSets()
	control, err := podctl.New(env, Kind, "statefulset-controller")
	if err != nil {
		return loop.Loop{}, err
	}
	keeper, err := history.NewKeeper(env, Kind)
	if err != nil {
		return loop.Loop{}, err
	}
	claims := env.Informers.Core().V1().PersistentVolumeClaims()
	c := &controller{client: env.Client, clock: env.Clock, lister: informer.Lister(), claims: claims.Lister(), pods: control, history: keeper}
	c.Controller = loop.New(name, env, workers, c.reconcile)
	loop.Watch(c.Controller, informer.Informer(), func(old, set *appsv1.StatefulSet) {
		if old != nil && (set == nil || set.UID != old.UID) {
			control.Pending.Forget(loop.KeyOf(old))
		}
		c.Enqueue(loop.KeyOf(loop.Latest(old, set)))
	})
	control.Watch(c.Controller, c.Enqueue, c.offer)
	loop.Watch(c.Controller, claims.Informer(), func(old, claim *corev1.PersistentVolumeClaim) {
		if claim == nil || old != nil && old.UID != claim.UID {
			c.claimGone(old)
		}
	})
	keeper.Watch(c.Controller, env, c.Enqueue)
	return c.Loop(), nil
}

// offer wakes every set that could adopt the orphan.
func (c *controller) offer(pod *corev1.Pod) {
	sets, err := c.lister.StatefulSets(pod.Namespace).List(labels.Everything())
	if err != nil {
		return
	}
	for _, set := range sets {
		if ordinalOf(set, pod.Name) >= 0 && podctl.Matches(set.Spec.Selector, pod) {
			c.Enqueue(loop.KeyOf(set))
		}
	}
}

// claimGone wakes the set whose claim it was: a pod may wait for another.
func (c *controller) claimGone(claim *corev1.PersistentVolumeClaim) {
	sets, err := c.lister.StatefulSets(claim.Namespace).List(labels.Everything())
	if err != nil {
		return
	}
	for _, set := range sets {
		if claimed(set, claim.Name) {
			c.Enqueue(loop.KeyOf(set))
		}
	}
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	set, err := c.lister.StatefulSets(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	live := func(ctx context.Context) (metav1.Object, error) {
		return c.client.AppsV1().StatefulSets(set.Namespace).Get(ctx, set.Name, metav1.GetOptions{})
	}
	mayAdopt := func(pod *corev1.Pod) bool { return ordinalOf(set, pod.Name) >= 0 }
	mine, wait, err := c.pods.Claim(ctx, set, set.Spec.Selector, mayAdopt, live)
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
	current := update
	for _, r := range revisions {
		if r.Name == set.Status.CurrentRevision {
			current = r
		}
	}

	plan := Decide(Input{Set: set, Pods: mine, Current: current.Name, Update: update.Name, Now: c.clock.Now()})
	var failed error
	if wait > 0 {
		c.EnqueueAfter(key, wait)
	} else {
		failed = c.execute(ctx, set, plan, current, update)
	}
	if plan.Recheck > 0 {
		c.EnqueueAfter(key, plan.Recheck)
	}
	return errors.Join(failed, c.updateStatus(ctx, set, plan.Status), c.truncate(ctx, set, &plan.Status, mine, revisions))
}

// execute carries the plan out: deletions, then creations.
func (c *controller) execute(ctx context.Context, set *appsv1.StatefulSet, plan Plan, current, update *appsv1.ControllerRevision) error {
	if err := c.followRetention(ctx, set); err != nil {
		return err
	}
	for _, pod := range plan.Fix {
		if err := c.fix(ctx, set, pod); err != nil {
			return err
		}
	}
	start, end := span(set)
	_, deleted := podctl.Parallel(len(plan.Delete), func(i int) error {
		pod := plan.Delete[i]
		if n := ordinalOf(set, pod.Name); n < start || n >= end {
			if err := c.ownClaims(ctx, set, n, pod); err != nil {
				return err
			}
		}
		return c.pods.Delete(ctx, set, pod)
	})
	_, created := podctl.SlowStart(len(plan.Create), func(begin, size int) (int, error) {
		return podctl.Parallel(size, func(i int) error {
			return c.create(ctx, set, plan.Create[begin+i], current, update)
		})
	})
	if apierrors.HasStatusCause(created, corev1.NamespaceTerminatingCause) {
		created = nil
	}
	return errors.Join(deleted, created, c.remakeClaims(ctx, set, plan.Claims))
}

func (c *controller) create(ctx context.Context, set *appsv1.StatefulSet, what Create, current, update *appsv1.ControllerRevision) error {
	template := &set.Spec.Template
	if what.Revision != update.Name {
		var err error
		if template, err = history.Template(current); err != nil {
			return err
		}
	}
	if err := c.ensureClaims(ctx, set, what.Ordinal); err != nil {
		return err
	}
	return c.pods.Create(ctx, set, newPod(set, template, what.Ordinal, what.Revision))
}

// fix writes the labels of a pod's identity.
func (c *controller) fix(ctx context.Context, set *appsv1.StatefulSet, pod *corev1.Pod) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": pod.UID, "labels": identity(set, ordinalOf(set, pod.Name)),
	}})
	if err != nil {
		return fmt.Errorf("encode labels: %w", err)
	}
	if err := c.pods.Patch(ctx, set, pod.Name, patch); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("label pod %s: %w", pod.Name, err)
	}
	return nil
}

// followRetention brings the claims in line after the set's spec changed, the
// retention policy among it.
func (c *controller) followRetention(ctx context.Context, set *appsv1.StatefulSet) error {
	if set.Status.ObservedGeneration == set.Generation || set.Status.ObservedGeneration == 0 || len(set.Spec.VolumeClaimTemplates) == 0 {
		return nil
	}
	// One list: a set may want more pods than there will ever be.
	list, err := c.client.CoreV1().PersistentVolumeClaims(set.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list claims: %w", err)
	}
	for i := range list.Items {
		name := list.Items[i].Name
		if !claimed(set, name) {
			continue
		}
		if err := c.ownClaim(ctx, set, name, nil); err != nil && !errors.Is(err, errClaimGoing) && !apierrors.IsNotFound(err) {
			return err
		}
	}
	return nil
}

// truncate deletes revisions that no pod is of, beyond the history limit.
func (c *controller) truncate(ctx context.Context, set *appsv1.StatefulSet, status *appsv1.StatefulSetStatus, mine []*corev1.Pod, revisions []*appsv1.ControllerRevision) error {
	used := map[string]bool{status.CurrentRevision: true, status.UpdateRevision: true}
	for _, pod := range mine {
		used[pod.Labels[history.HashLabel]] = true
	}
	return c.history.Truncate(ctx, history.Surplus(revisions, int(ptr.Deref(set.Spec.RevisionHistoryLimit, 10)), func(r *appsv1.ControllerRevision) bool {
		return used[r.Name]
	}))
}

func (c *controller) updateStatus(ctx context.Context, set *appsv1.StatefulSet, status appsv1.StatefulSetStatus) error {
	if apiequality.Semantic.DeepEqual(set.Status, status) {
		return nil
	}
	updated := set.DeepCopy()
	updated.Status = status
	_, err := c.client.AppsV1().StatefulSets(set.Namespace).UpdateStatus(ctx, updated, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("update status: %w", err)
	}
	return nil
}
