// Package disruption keeps count, in the status of each PodDisruptionBudget, of
// how many of its pods may be evicted now. It evicts no pod and prevents
// nothing itself: the eviction subresource reads the status and decides.
package disruption

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	appslisters "k8s.io/client-go/listers/apps/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	policylisters "k8s.io/client-go/listers/policy/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/internal/scales"
	"github.com/clusterd/clusterd/sched/loop"
)

type controller struct {
	*loop.Controller
	stale       *loop.Controller // of pods that were not deleted after all
	client      kubernetes.Interface
	clock       clock.PassiveClock
	budgets     policylisters.PodDisruptionBudgetLister
	pods        corelisters.PodLister
	sets        appslisters.ReplicaSetLister
	deployments appslisters.DeploymentLister
	stateful    appslisters.StatefulSetLister
	rcs         corelisters.ReplicationControllerLister
	// scale tells how many pods an owner of any other kind wants.
	scale func(ctx context.Context, namespace string, owner *metav1.OwnerReference) (int32, error)
}

// askAgain is how long the scale of an owner counts that is not watched.
const askAgain = time.Minute

// New returns the loop. It watches PodDisruptionBudgets, Pods, ReplicaSets,
// Deployments, StatefulSets and ReplicationControllers.
func New(env loop.Env) loop.Loop {
	budgets, core, apps := env.Informers.Policy().V1().PodDisruptionBudgets(), env.Informers.Core().V1(), env.Informers.Apps().V1()
	c := &controller{
		client:      env.Client,
		clock:       env.Clock,
		budgets:     budgets.Lister(),
		pods:        core.Pods().Lister(),
		sets:        apps.ReplicaSets().Lister(),
		deployments: apps.Deployments().Lister(),
		stateful:    apps.StatefulSets().Lister(),
		rcs:         core.ReplicationControllers().Lister(),
	}
	others := scales.New(env.Client)
	c.scale = func(ctx context.Context, namespace string, owner *metav1.OwnerReference) (int32, error) {
		found, _, err := others.Get(ctx, namespace, owner.APIVersion, owner.Kind, owner.Name)
		if err != nil {
			return 0, err
		}
		return found.Spec.Replicas, nil
	}
	c.Controller = loop.New("disruption", env, 2, c.reconcile)
	loop.Watch(c.Controller, budgets.Informer(), func(_, pdb *policyv1.PodDisruptionBudget) {
		if pdb != nil {
			c.Enqueue(loop.KeyOf(pdb))
		}
	})
	loop.Watch(c.Controller, core.Pods().Informer(), c.onPod)
	watchReplicas(c, apps.ReplicaSets().Informer(), func(o *appsv1.ReplicaSet) (*int32, map[string]string) { return o.Spec.Replicas, o.Spec.Template.Labels })
	watchReplicas(c, apps.Deployments().Informer(), func(o *appsv1.Deployment) (*int32, map[string]string) { return o.Spec.Replicas, o.Spec.Template.Labels })
	watchReplicas(c, apps.StatefulSets().Informer(), func(o *appsv1.StatefulSet) (*int32, map[string]string) {
		return o.Spec.Replicas, o.Spec.Template.Labels
	})
	watchReplicas(c, core.ReplicationControllers().Informer(), func(o *corev1.ReplicationController) (*int32, map[string]string) {
		if o.Spec.Template == nil {
			return o.Spec.Replicas, nil
		}
		return o.Spec.Replicas, o.Spec.Template.Labels
	})
	c.stale = loop.New("disruption-stale", env, 1, c.reset)
	loop.Watch(c.stale, core.Pods().Informer(), func(_, pod *corev1.Pod) {
		if pod != nil && pods.Condition(pod, corev1.DisruptionTarget) != nil {
			c.stale.Enqueue(loop.KeyOf(pod))
		}
	})
	return loop.Loop{Name: c.Loop().Name, Run: func(ctx context.Context) error {
		group, ctx := errgroup.WithContext(ctx)
		group.Go(func() error { return c.Run(ctx) })
		group.Go(func() error { return c.stale.Run(ctx) })
		return group.Wait()
	}}
}

// watchReplicas wakes the budgets of the pods that an owner makes when the owner
// comes, goes, or wants another number.
func watchReplicas[T any, P interface {
	*T
	metav1.Object
}](c *controller, informer cache.SharedIndexInformer, of func(P) (replicas *int32, labels map[string]string)) {
	loop.Watch(c.Controller, informer, func(old, now *T) {
		replicas, labels := of(loop.Latest(old, now))
		if old != nil && now != nil {
			if before, _ := of(old); ptr.Equal(before, replicas) {
				return
			}
		}
		c.wake(P(loop.Latest(old, now)).GetNamespace(), labels)
	})
}

func (c *controller) onPod(old, pod *corev1.Pod) {
	if old != nil && pod != nil && pods.Ready(old) == pods.Ready(pod) && pods.Active(old) == pods.Active(pod) &&
		apiequality.Semantic.DeepEqual(old.Labels, pod.Labels) && apiequality.Semantic.DeepEqual(old.OwnerReferences, pod.OwnerReferences) {
		return
	}
	for _, o := range []*corev1.Pod{old, pod} {
		if o != nil {
			c.wake(o.Namespace, o.Labels)
		}
	}
}

// wake enqueues the budgets that select pods with these labels.
func (c *controller) wake(namespace string, of map[string]string) {
	all, err := c.budgets.PodDisruptionBudgets(namespace).List(labels.Everything())
	if err != nil {
		return
	}
	for _, pdb := range all {
		if selector, err := metav1.LabelSelectorAsSelector(pdb.Spec.Selector); err == nil && selector.Matches(labels.Set(of)) {
			c.Enqueue(loop.KeyOf(pdb))
		}
	}
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	pdb, err := c.budgets.PodDisruptionBudgets(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	selector, err := metav1.LabelSelectorAsSelector(pdb.Spec.Selector)
	if err != nil {
		return fmt.Errorf("selector: %w", err)
	}
	selected, err := c.pods.Pods(key.Namespace).List(selector)
	if err != nil {
		return err
	}
	asked := false
	status, recheck := Status(pdb, selected, func() (n int32, err error) {
		n, asked, err = c.expected(ctx, selected)
		return n, err
	}, c.clock.Now())
	if asked && recheck == 0 {
		recheck = askAgain
	}
	if recheck > 0 {
		c.EnqueueAfter(key, recheck)
	}
	if apiequality.Semantic.DeepEqual(status, pdb.Status) {
		return nil
	}
	updated := pdb.DeepCopy()
	updated.Status = status
	// The version protects what the eviction subresource notes meanwhile.
	_, err = c.client.PolicyV1().PodDisruptionBudgets(key.Namespace).UpdateStatus(ctx, updated, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("update status: %w", err)
	}
	return nil
}

// expected sums what the controllers of the pods want, each counted once. Pods
// without a controller count for nothing: how many of them there should be is known
// to their maker alone. asked: an owner that is not watched was asked.
func (c *controller) expected(ctx context.Context, selected []*corev1.Pod) (n int32, asked bool, err error) {
	counted := map[types.UID]bool{}
	for _, pod := range selected {
		ref := metav1.GetControllerOf(pod)
		if ref == nil || counted[ref.UID] {
			continue
		}
		counted[ref.UID] = true
		asked = asked || !watched(ref)
		uid, want, err := c.wanted(ctx, pod.Namespace, ref)
		if err != nil {
			return 0, asked, fmt.Errorf("controller of pod %q: %w", pod.Name, err)
		}
		if uid == ref.UID || !counted[uid] {
			counted[uid] = true
			n += want
		}
	}
	return n, asked, nil
}

func kindOf(ref *metav1.OwnerReference) schema.GroupKind {
	return schema.FromAPIVersionAndKind(ref.APIVersion, ref.Kind).GroupKind()
}

var (
	replicaSet            = appsv1.SchemeGroupVersion.WithKind("ReplicaSet").GroupKind()
	deployment            = appsv1.SchemeGroupVersion.WithKind("Deployment").GroupKind()
	statefulSet           = appsv1.SchemeGroupVersion.WithKind("StatefulSet").GroupKind()
	replicationController = corev1.SchemeGroupVersion.WithKind("ReplicationController").GroupKind()
)

// watched: changes of the owner wake its pods' budgets.
func watched(ref *metav1.OwnerReference) bool {
	switch kindOf(ref) {
	case replicaSet, statefulSet, replicationController:
		return true
	}
	return false
}

// wanted returns the controller that decides how many pods of this kind there
// are (a Deployment before its ReplicaSet), and how many it wants. One that is
// gone wants none; its pods follow.
func (c *controller) wanted(ctx context.Context, namespace string, ref *metav1.OwnerReference) (types.UID, int32, error) {
	switch kindOf(ref) {
	case replicaSet:
		rs, err := owner(c.sets.ReplicaSets(namespace).Get, ref)
		if rs == nil {
			return ref.UID, 0, err
		}
		if up := metav1.GetControllerOf(rs); up != nil && kindOf(up) == deployment {
			d, err := owner(c.deployments.Deployments(namespace).Get, up)
			if d != nil {
				return d.UID, ptr.Deref(d.Spec.Replicas, 1), nil
			}
			if err != nil {
				return "", 0, err
			}
		}
		return rs.UID, ptr.Deref(rs.Spec.Replicas, 1), nil
	case statefulSet:
		set, err := owner(c.stateful.StatefulSets(namespace).Get, ref)
		if set == nil {
			return ref.UID, 0, err
		}
		return set.UID, ptr.Deref(set.Spec.Replicas, 1), nil
	case replicationController:
		rc, err := owner(c.rcs.ReplicationControllers(namespace).Get, ref)
		if rc == nil {
			return ref.UID, 0, err
		}
		return rc.UID, ptr.Deref(rc.Spec.Replicas, 1), nil
	}
	n, err := c.scale(ctx, namespace, ref)
	if err != nil {
		return "", 0, fmt.Errorf("scale of %s %q: %w", ref.Kind, ref.Name, err)
	}
	return ref.UID, n, nil
}

// owner looks up the object of a reference; nil: it is gone, or another has its name.
func owner[T any, P interface {
	*T
	metav1.Object
}](get func(name string) (P, error), ref *metav1.OwnerReference) (P, error) {
	o, err := get(ref.Name)
	if apierrors.IsNotFound(err) || err == nil && o.GetUID() != ref.UID {
		return nil, nil
	}
	return o, err
}
