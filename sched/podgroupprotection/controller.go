// Package podgroupprotection keeps PodGroups that pods name from vanishing: a
// deleted one stays until its last pod has ended. The API server puts the
// finalizer on, this loop takes it off.
package podgroupprotection

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	schedulinglisters "k8s.io/client-go/listers/scheduling/v1beta1"

	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
)

// Finalizer is the one of PodGroups, by the name that kubectl describe shows.
const Finalizer = "scheduling.k8s.io/podgroup-protection"

type controller struct {
	*loop.Controller
	client kubernetes.Interface
	groups schedulinglisters.PodGroupLister
	pods   corelisters.PodLister
}

// New returns the loop. It watches PodGroups and Pods.
func New(env loop.Env) loop.Loop {
	groups, all := env.Informers.Scheduling().V1beta1().PodGroups(), env.Informers.Core().V1().Pods()
	c := &controller{client: env.Client, groups: groups.Lister(), pods: all.Lister()}
	c.Controller = loop.New("podgroupprotection", env, 1, c.reconcile)
	loop.Watch(c.Controller, groups.Informer(), func(_, g *schedulingv1beta1.PodGroup) {
		if g != nil && g.DeletionTimestamp != nil {
			c.Enqueue(loop.KeyOf(g))
		}
	})
	loop.Watch(c.Controller, all.Informer(), func(old, pod *corev1.Pod) {
		if old != nil && (pod == nil || pod.UID != old.UID || pods.Finished(pod)) {
			if name := groupOf(old); name != "" {
				c.Enqueue(loop.Key{Namespace: old.Namespace, Name: name})
			}
		}
	})
	return c.Loop()
}

// groupOf is the name of a pod's group; "": it has none.
func groupOf(pod *corev1.Pod) string {
	if g := pod.Spec.SchedulingGroup; g != nil && g.PodGroupName != nil {
		return *g.PodGroupName
	}
	return ""
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	group, err := c.groups.PodGroups(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if group.DeletionTimestamp == nil || !slices.Contains(group.Finalizers, Finalizer) {
		return nil
	}
	known, err := c.pods.Pods(key.Namespace).List(labels.Everything())
	if err != nil {
		return err
	}
	if slices.ContainsFunc(known, func(pod *corev1.Pod) bool { return uses(pod, key.Name) }) {
		return nil // its end wakes us
	}
	// The cache may not show a pod yet that was made before the deletion.
	live, err := c.client.CoreV1().Pods(key.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list the pods that may name the group: %w", err)
	}
	if slices.ContainsFunc(live.Items, func(pod corev1.Pod) bool { return uses(&pod, key.Name) }) {
		return nil // the cache will show it, and its end
	}
	updated := group.DeepCopy()
	updated.Finalizers = slices.DeleteFunc(updated.Finalizers, func(f string) bool { return f == Finalizer })
	if _, err := c.client.SchedulingV1beta1().PodGroups(key.Namespace).Update(ctx, updated, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("take finalizer off pod group: %w", err)
	}
	return nil
}

func uses(pod *corev1.Pod, group string) bool { return groupOf(pod) == group && !pods.Finished(pod) }
