// Package ephemeralvolume makes the claims of pods' generic ephemeral volumes.
// They belong to their pods, and the garbage collector takes them away.
package ephemeralvolume

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/component-helpers/storage/ephemeral"

	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/internal/volumes"
	"github.com/clusterd/clusterd/sched/loop"
)

type controller struct {
	*loop.Controller
	client kubernetes.Interface
	events record.EventRecorder
	pods   corelisters.PodLister
	claims corelisters.PersistentVolumeClaimLister
}

// New returns the loop. It watches Pods and PersistentVolumeClaims.
func New(env loop.Env) loop.Loop {
	core := env.Informers.Core().V1()
	c := &controller{client: env.Client, events: env.Events.For("ephemeral-volume"), pods: core.Pods().Lister(), claims: core.PersistentVolumeClaims().Lister()}
	c.Controller = loop.New("ephemeralvolume", env, 2, c.reconcile)
	loop.Watch(c.Controller, core.Pods().Informer(), func(old, pod *corev1.Pod) {
		if old != nil && pod != nil && old.UID == pod.UID {
			return // volumes do not change
		}
		if pod != nil && hasEphemeral(pod) {
			c.Enqueue(loop.KeyOf(pod))
		}
	})
	loop.Watch(c.Controller, core.PersistentVolumeClaims().Informer(), func(old, claim *corev1.PersistentVolumeClaim) {
		if owner := metav1.GetControllerOf(loop.Latest(old, claim)); claim == nil && owner != nil && owner.Kind == "Pod" {
			c.Enqueue(loop.Key{Namespace: old.Namespace, Name: owner.Name})
		}
	})
	return c.Loop()
}

func hasEphemeral(pod *corev1.Pod) bool {
	for _, use := range volumes.UsesOf(pod) {
		if use.Ephemeral {
			return true
		}
	}
	return false
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	pod, err := c.pods.Pods(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if !pods.Active(pod) {
		return nil
	}
	var errs []error
	for i := range pod.Spec.Volumes {
		if v := &pod.Spec.Volumes[i]; v.Ephemeral != nil && v.Ephemeral.VolumeClaimTemplate != nil {
			errs = append(errs, c.ensure(ctx, pod, v))
		}
	}
	return errors.Join(errs...)
}

// ensure makes the claim of one volume. One of the name that is not the pod's
// is never used in its place.
func (c *controller) ensure(ctx context.Context, pod *corev1.Pod, v *corev1.Volume) error {
	want := newClaim(pod, v)
	have, err := c.claims.PersistentVolumeClaims(pod.Namespace).Get(want.Name)
	if apierrors.IsNotFound(err) {
		_, err = c.client.CoreV1().PersistentVolumeClaims(pod.Namespace).Create(ctx, want, metav1.CreateOptions{})
		if err == nil || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			return nil
		}
		c.events.Eventf(pod, corev1.EventTypeWarning, "VolumeClaimFailed", "Creating claim %s for volume %s failed: %v", want.Name, v.Name, err)
		return fmt.Errorf("create claim %s: %w", want.Name, err)
	}
	if err != nil {
		return err
	}
	if err := ephemeral.VolumeIsForPod(pod, have); err != nil {
		c.events.Event(pod, corev1.EventTypeWarning, "VolumeClaimFailed", err.Error())
		return err
	}
	return nil
}

func newClaim(pod *corev1.Pod, v *corev1.Volume) *corev1.PersistentVolumeClaim {
	template := v.Ephemeral.VolumeClaimTemplate.DeepCopy()
	return &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{
			Name: ephemeral.VolumeClaimName(pod, v), Namespace: pod.Namespace,
			Labels: template.Labels, Annotations: template.Annotations,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(pod, corev1.SchemeGroupVersion.WithKind("Pod"))},
		},
		Spec: template.Spec,
	}
}
