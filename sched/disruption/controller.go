// Package disruption keeps count, in the status of each PodDisruptionBudget, of
// how many of its pods may be evicted now. It evicts no pod and prevents
// nothing itself: the eviction subresource reads the status and decides.
package disruption

import (
	"context"
	"fmt"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	appslisters "k8s.io/client-go/listers/apps/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	policylisters "k8s.io/client-go/listers/policy/v1"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
)

type controller struct {
	*loop.Controller
	client      kubernetes.Interface
	clock       clock.PassiveClock
	budgets     policylisters.PodDisruptionBudgetLister
	pods        corelisters.PodLister
	sets        appslisters.ReplicaSetLister
	deployments appslisters.DeploymentLister
}

// New returns the loop. It watches PodDisruptionBudgets, Pods, ReplicaSets and
// Deployments.
func New(env loop.Env) loop.Loop {
	budgets, core, apps := env.Informers.Policy().V1().PodDisruptionBudgets(), env.Informers.Core().V1(), env.Informers.Apps().V1()
	c := &controller{
		client:      env.Client,
		clock:       env.Clock,
		budgets:     budgets.Lister(),
		pods:        core.Pods().Lister(),
		sets:        apps.ReplicaSets().Lister(),
		deployments: apps.Deployments().Lister(),
	}
	c.Controller = loop.New("disruption", env, 2, c.reconcile)
	loop.Watch(c.Controller, budgets.Informer(), func(_, pdb *policyv1.PodDisruptionBudget) {
		if pdb != nil {
			c.Enqueue(loop.KeyOf(pdb))
		}
	})
	loop.Watch(c.Controller, core.Pods().Informer(), c.onPod)
	loop.Watch(c.Controller, apps.ReplicaSets().Informer(), func(old, rs *appsv1.ReplicaSet) {
		if old != nil && rs != nil && ptr.Equal(old.Spec.Replicas, rs.Spec.Replicas) {
			return
		}
		o := loop.Latest(old, rs)
		c.wake(o.Namespace, o.Spec.Template.Labels)
	})
	loop.Watch(c.Controller, apps.Deployments().Informer(), func(old, d *appsv1.Deployment) {
		if old != nil && d != nil && ptr.Equal(old.Spec.Replicas, d.Spec.Replicas) {
			return
		}
		o := loop.Latest(old, d)
		c.wake(o.Namespace, o.Spec.Template.Labels)
	})
	return c.Loop()
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
	status, recheck := Status(pdb, selected, func() (int32, error) { return c.expected(selected) }, c.clock.Now())
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

// expected sums what the controllers of the pods want, each counted once.
func (c *controller) expected(selected []*corev1.Pod) (n int32, err error) {
	counted := map[types.UID]bool{}
	for _, pod := range selected {
		uid, want, err := c.wanted(pod)
		if err != nil {
			return 0, err
		}
		if !counted[uid] {
			counted[uid] = true
			n += want
		}
	}
	return n, nil
}

// wanted returns the controller that decides how many pods of this kind there
// are (a Deployment before its ReplicaSet), and how many it wants.
func (c *controller) wanted(pod *corev1.Pod) (types.UID, int32, error) {
	ref := metav1.GetControllerOf(pod)
	if ref == nil {
		return "", 0, fmt.Errorf("found no controllers for pod %q", pod.Name)
	}
	if ref.Kind != "ReplicaSet" {
		return "", 0, fmt.Errorf("pod %q is controlled by a %s, whose scale is not known here", pod.Name, ref.Kind)
	}
	rs, err := c.sets.ReplicaSets(pod.Namespace).Get(ref.Name)
	if apierrors.IsNotFound(err) || err == nil && rs.UID != ref.UID {
		return ref.UID, 0, nil // gone; its pods follow
	}
	if err != nil {
		return "", 0, err
	}
	if up := metav1.GetControllerOf(rs); up != nil && up.Kind == "Deployment" {
		d, err := c.deployments.Deployments(pod.Namespace).Get(up.Name)
		if err == nil && d.UID == up.UID {
			return d.UID, ptr.Deref(d.Spec.Replicas, 1), nil
		}
		if err != nil && !apierrors.IsNotFound(err) {
			return "", 0, err
		}
	}
	return rs.UID, ptr.Deref(rs.Spec.Replicas, 1), nil
}
