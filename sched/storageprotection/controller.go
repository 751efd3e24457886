// Package storageprotection keeps claims that pods use, and volumes that are
// bound, from vanishing: deleted ones stay Terminating until their last user
// has ended. The API server puts the finalizers on, this loop takes them off.
package storageprotection

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"

	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/internal/volumes"
	"github.com/clusterd/clusterd/sched/loop"
)

// The finalizers, by the names that kubectl describe shows.
const (
	ClaimFinalizer  = "kubernetes.io/pvc-protection"
	VolumeFinalizer = "kubernetes.io/pv-protection"
)

// controller has claims and volumes in one queue: keys with a namespace are
// claims, those without are volumes.
type controller struct {
	*loop.Controller
	client  kubernetes.Interface
	claims  corelisters.PersistentVolumeClaimLister
	volumes corelisters.PersistentVolumeLister
	pods    corelisters.PodLister
}

// New returns the loop. It watches PersistentVolumeClaims, PersistentVolumes
// and Pods.
func New(env loop.Env) loop.Loop {
	core := env.Informers.Core().V1()
	c := &controller{
		client: env.Client, claims: core.PersistentVolumeClaims().Lister(),
		volumes: core.PersistentVolumes().Lister(), pods: core.Pods().Lister(),
	}
	c.Controller = loop.New("storageprotection", env, 2, c.reconcile)
	loop.Watch(c.Controller, core.PersistentVolumeClaims().Informer(), func(_, claim *corev1.PersistentVolumeClaim) {
		if claim != nil && claim.DeletionTimestamp != nil {
			c.Enqueue(loop.KeyOf(claim))
		}
	})
	loop.Watch(c.Controller, core.PersistentVolumes().Informer(), func(_, v *corev1.PersistentVolume) {
		if v != nil && v.DeletionTimestamp != nil {
			c.Enqueue(loop.Key{Name: v.Name})
		}
	})
	loop.Watch(c.Controller, core.Pods().Informer(), func(old, pod *corev1.Pod) {
		if pod != nil && !pods.Finished(pod) && (old == nil || old.UID == pod.UID) {
			return // it still uses what it used
		}
		for _, use := range volumes.UsesOf(loop.Latest(pod, old)) {
			c.Enqueue(loop.Key{Namespace: loop.Latest(pod, old).Namespace, Name: use.Claim})
		}
	})
	return c.Loop()
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	if key.Namespace == "" {
		return c.reconcileVolume(ctx, key.Name)
	}
	claim, err := c.claims.PersistentVolumeClaims(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if claim.DeletionTimestamp == nil || !slices.Contains(claim.Finalizers, ClaimFinalizer) {
		return nil
	}
	known, err := c.pods.Pods(claim.Namespace).List(labels.Everything())
	if err != nil {
		return err
	}
	if slices.ContainsFunc(known, func(pod *corev1.Pod) bool { return uses(pod, claim) }) {
		return nil // its end wakes us
	}
	// The cache may not show a pod yet that was made before the deletion.
	live, err := c.client.CoreV1().Pods(claim.Namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list the pods that may use the claim: %w", err)
	}
	if slices.ContainsFunc(live.Items, func(pod corev1.Pod) bool { return uses(&pod, claim) }) {
		return nil // the cache will show it, and its end
	}
	updated := claim.DeepCopy()
	updated.Finalizers = without(updated.Finalizers, ClaimFinalizer)
	if _, err := c.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Update(ctx, updated, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("take finalizer off claim: %w", err)
	}
	return nil
}

// uses reports whether the pod may have the claim's volume mounted: it has a
// node, and has not ended. One without a node will get none while the claim is
// being deleted.
func uses(pod *corev1.Pod, claim *corev1.PersistentVolumeClaim) bool {
	if pod.Spec.NodeName == "" || pods.Finished(pod) {
		return false
	}
	return slices.ContainsFunc(volumes.UsesOf(pod), func(use volumes.Use) bool {
		return use.Claim == claim.Name && (!use.Ephemeral || metav1.IsControlledBy(claim, pod))
	})
}

func (c *controller) reconcileVolume(ctx context.Context, name string) error {
	v, err := c.volumes.Get(name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if v.DeletionTimestamp == nil || v.Status.Phase == corev1.VolumeBound || !slices.Contains(v.Finalizers, VolumeFinalizer) {
		return nil
	}
	updated := v.DeepCopy()
	updated.Finalizers = without(updated.Finalizers, VolumeFinalizer)
	if _, err := c.client.CoreV1().PersistentVolumes().Update(ctx, updated, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("take finalizer off volume: %w", err)
	}
	return nil
}

func without(list []string, what string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return s == what })
}
