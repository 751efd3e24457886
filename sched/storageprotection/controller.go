// Package storageprotection keeps claims that pods use, volumes that are
// bound, and VolumeAttributesClasses that claims or volumes have, from vanishing:
// deleted ones stay Terminating until their last user has ended. The API server puts the finalizers on, this loop takes them off.
package storageprotection

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	storagelisters "k8s.io/client-go/listers/storage/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/internal/volumes"
	"github.com/clusterd/clusterd/sched/loop"
)

// The finalizers, by the names that kubectl describe shows.
const (
	ClaimFinalizer  = "kubernetes.io/pvc-protection"
	VolumeFinalizer = "kubernetes.io/pv-protection"
	ClassFinalizer  = "kubernetes.io/vac-protection"
)

// classes is the namespace, which no namespace can be called, of the keys of classes.
const classes = "/classes"

// controller has claims, volumes and classes in one queue: keys with a namespace are
// claims, those without are volumes, those with the namespace classes are classes.
type controller struct {
	*loop.Controller
	client  kubernetes.Interface
	claims  corelisters.PersistentVolumeClaimLister
	volumes corelisters.PersistentVolumeLister
	classes storagelisters.VolumeAttributesClassLister
	pods    corelisters.PodLister
}

// New returns the loop. It watches PersistentVolumeClaims, PersistentVolumes,
// VolumeAttributesClasses and Pods.
func New(env loop.Env) loop.Loop {
	core := env.Informers.Core().V1()
	c := &controller{
		client: env.Client, claims: core.PersistentVolumeClaims().Lister(),
		volumes: core.PersistentVolumes().Lister(), pods: core.Pods().Lister(),
	}
	vacs := env.Informers.Storage().V1().VolumeAttributesClasses()
	c.classes = vacs.Lister()
	c.Controller = loop.New("storageprotection", env, 2, c.reconcile)
	loop.Watch(c.Controller, core.PersistentVolumeClaims().Informer(), func(old, claim *corev1.PersistentVolumeClaim) {
		c.enqueueClasses(classesOfClaim(old))
		if claim != nil && claim.DeletionTimestamp != nil {
			c.Enqueue(loop.KeyOf(claim))
		}
	})
	loop.Watch(c.Controller, core.PersistentVolumes().Informer(), func(old, v *corev1.PersistentVolume) {
		c.enqueueClasses(classesOfVolume(old))
		if v != nil && v.DeletionTimestamp != nil {
			c.Enqueue(loop.Key{Name: v.Name})
		}
	})
	loop.Watch(c.Controller, vacs.Informer(), func(_, class *storagev1.VolumeAttributesClass) {
		if class != nil && class.DeletionTimestamp != nil {
			c.Enqueue(loop.Key{Namespace: classes, Name: class.Name})
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
	switch key.Namespace {
	case "":
		return c.reconcileVolume(ctx, key.Name)
	case classes:
		return c.reconcileClass(ctx, key.Name)
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

// enqueueClasses has those looked at that something had before it changed or went.
func (c *controller) enqueueClasses(names []string) {
	for _, name := range names {
		// Most are not being deleted: their deletion wakes us.
		if class, err := c.classes.Get(name); err == nil && class.DeletionTimestamp != nil {
			c.Enqueue(loop.Key{Namespace: classes, Name: name})
		}
	}
}

// classesOfClaim are the classes that a claim asks for, has, or is getting.
func classesOfClaim(claim *corev1.PersistentVolumeClaim) []string {
	if claim == nil {
		return nil
	}
	names := []string{ptr.Deref(claim.Spec.VolumeAttributesClassName, ""), ptr.Deref(claim.Status.CurrentVolumeAttributesClassName, "")}
	if s := claim.Status.ModifyVolumeStatus; s != nil {
		names = append(names, s.TargetVolumeAttributesClassName)
	}
	return without(names, "")
}

func classesOfVolume(v *corev1.PersistentVolume) []string {
	if v == nil {
		return nil
	}
	return without([]string{ptr.Deref(v.Spec.VolumeAttributesClassName, "")}, "")
}

func (c *controller) reconcileClass(ctx context.Context, name string) error {
	class, err := c.classes.Get(name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if class.DeletionTimestamp == nil || !slices.Contains(class.Finalizers, ClassFinalizer) {
		return nil
	}
	known, err := c.claims.List(labels.Everything())
	if err != nil {
		return err
	}
	if slices.ContainsFunc(known, func(claim *corev1.PersistentVolumeClaim) bool { return slices.Contains(classesOfClaim(claim), name) }) {
		return nil // that it goes or changes wakes us
	}
	bound, err := c.volumes.List(labels.Everything())
	if err != nil {
		return err
	}
	if slices.ContainsFunc(bound, func(v *corev1.PersistentVolume) bool { return slices.Contains(classesOfVolume(v), name) }) {
		return nil
	}
	// The caches may not show yet what was made before the deletion.
	liveClaims, err := c.client.CoreV1().PersistentVolumeClaims(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list the claims that may have the class: %w", err)
	}
	liveVolumes, err := c.client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return fmt.Errorf("list the volumes that may have the class: %w", err)
	}
	if slices.ContainsFunc(liveClaims.Items, func(claim corev1.PersistentVolumeClaim) bool { return slices.Contains(classesOfClaim(&claim), name) }) ||
		slices.ContainsFunc(liveVolumes.Items, func(v corev1.PersistentVolume) bool { return slices.Contains(classesOfVolume(&v), name) }) {
		return nil // the cache will show it, and its end
	}
	updated := class.DeepCopy()
	updated.Finalizers = without(updated.Finalizers, ClassFinalizer)
	if _, err := c.client.StorageV1().VolumeAttributesClasses().Update(ctx, updated, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("take finalizer off VolumeAttributesClass: %w", err)
	}
	return nil
}

func without(list []string, what string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(s string) bool { return s == what })
}
