// Package persistentvolume binds claims to volumes and releases volumes whose
// claims are gone. It makes and deletes no storage: provisioners do, and are
// asked by an annotation on the claim and the deletion of the volume's object.
package persistentvolume

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	storagelisters "k8s.io/client-go/listers/storage/v1"
	"k8s.io/client-go/tools/record"
	helper "k8s.io/component-helpers/storage/volume"

	"github.com/clusterd/clusterd/apis/storage"
	"github.com/clusterd/clusterd/sched/internal/volumes"
	"github.com/clusterd/clusterd/sched/loop"
)

const (
	name    = "persistentvolume-binder"
	workers = 4
)

// controller has claims and volumes in one queue: keys with a namespace are
// claims, those without are volumes.
type controller struct {
	*loop.Controller
	client  kubernetes.Interface
	events  record.EventRecorder
	claims  corelisters.PersistentVolumeClaimLister
	volumes corelisters.PersistentVolumeLister
	classes storagelisters.StorageClassLister
}

// New returns the loop. It watches PersistentVolumes, PersistentVolumeClaims
// and StorageClasses.
func New(env loop.Env) loop.Loop {
	core := env.Informers.Core().V1()
	classes := env.Informers.Storage().V1().StorageClasses()
	c := &controller{
		client: env.Client, events: env.Events.For("persistentvolume-controller"),
		claims: core.PersistentVolumeClaims().Lister(), volumes: core.PersistentVolumes().Lister(), classes: classes.Lister(),
	}
	c.Controller = loop.New(name, env, workers, c.reconcile)
	loop.Watch(c.Controller, core.PersistentVolumeClaims().Informer(), func(old, claim *corev1.PersistentVolumeClaim) {
		now := loop.Latest(old, claim)
		c.Enqueue(loop.KeyOf(now))
		if volume := now.Spec.VolumeName; volume != "" {
			c.Enqueue(loop.Key{Name: volume})
		}
		if claim == nil {
			c.releasing(old)
		}
	})
	loop.Watch(c.Controller, core.PersistentVolumes().Informer(), func(old, v *corev1.PersistentVolume) {
		now := loop.Latest(old, v)
		c.Enqueue(loop.Key{Name: now.Name})
		if ref := now.Spec.ClaimRef; ref != nil {
			c.Enqueue(loop.Key{Namespace: ref.Namespace, Name: ref.Name})
			return
		}
		if v != nil && v.Status.Phase == corev1.VolumeAvailable {
			c.wakePending(func(*corev1.PersistentVolumeClaim) bool { return true })
		}
	})
	loop.Watch(c.Controller, classes.Informer(), func(old, class *storagev1.StorageClass) {
		name := loop.Latest(old, class).Name
		c.wakePending(func(claim *corev1.PersistentVolumeClaim) bool {
			return helper.GetPersistentVolumeClaimClass(claim) == name || !helper.PersistentVolumeClaimHasClass(claim) // it may be the default one
		})
	})
	return c.Loop()
}

// wakePending looks again at claims without a volume.
func (c *controller) wakePending(which func(*corev1.PersistentVolumeClaim) bool) {
	all, err := c.claims.List(labels.Everything())
	if err != nil {
		return
	}
	for _, claim := range all {
		if claim.Status.Phase != corev1.ClaimBound && which(claim) {
			c.Enqueue(loop.KeyOf(claim))
		}
	}
}

// releasing looks at the volumes that a deleted claim had or was to get.
func (c *controller) releasing(claim *corev1.PersistentVolumeClaim) {
	all, err := c.volumes.List(labels.Everything())
	if err != nil {
		return
	}
	for _, v := range all {
		if helper.IsVolumeBoundToClaim(v, claim) {
			c.Enqueue(loop.Key{Name: v.Name})
		}
	}
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	if key.Namespace == "" {
		return c.reconcileVolume(ctx, key.Name)
	}
	return c.reconcileClaim(ctx, key)
}

func (c *controller) reconcileClaim(ctx context.Context, key loop.Key) error {
	claim, err := c.claims.PersistentVolumeClaims(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	all, err := c.volumes.List(labels.Everything())
	if err != nil {
		return err
	}
	in := claimInput{claim: claim, volumes: all}
	if name := helper.GetPersistentVolumeClaimClass(claim); name != "" {
		if in.class, err = c.classes.Get(name); err != nil && !apierrors.IsNotFound(err) {
			return err
		} else if err != nil {
			in.class = nil
		}
	}
	if !helper.PersistentVolumeClaimHasClass(claim) {
		if in.fallback, err = c.defaultClass(); err != nil {
			return err
		}
	}
	plan := decideClaim(in)
	if plan.note != nil && (plan.phase != claim.Status.Phase || plan.phase == corev1.ClaimPending) {
		c.events.Event(claim, plan.note.kind, plan.note.reason, plan.note.message)
	}
	if plan.phase == corev1.ClaimLost {
		return c.writeClaimStatus(ctx, claim, plan.phase, nil)
	}
	if plan.bind != nil {
		return c.bind(ctx, claim, plan.bind)
	}
	if plan.setClass != "" {
		updated := claim.DeepCopy()
		updated.Spec.StorageClassName = &plan.setClass
		if _, err := c.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Update(ctx, updated, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("give the claim the default class %s: %w", plan.setClass, err)
		}
		return nil
	}
	if plan.provisioner != "" && claim.Annotations[volumes.Provisioner] != plan.provisioner {
		updated := claim.DeepCopy()
		metav1.SetMetaDataAnnotation(&updated.ObjectMeta, volumes.Provisioner, plan.provisioner)
		metav1.SetMetaDataAnnotation(&updated.ObjectMeta, volumes.BetaProvisioner, plan.provisioner)
		if _, err := c.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Update(ctx, updated, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("ask provisioner %s: %w", plan.provisioner, err)
		}
		return nil
	}
	return c.writeClaimStatus(ctx, claim, plan.phase, nil)
}

// defaultClass is the class for claims that name none.
func (c *controller) defaultClass() (*storagev1.StorageClass, error) {
	all, err := c.classes.List(labels.Everything())
	if err != nil {
		return nil, err
	}
	list := make([]storagev1.StorageClass, len(all))
	for i, class := range all {
		list[i] = *class
	}
	return storage.Default(list), nil
}

// bind ties both ends, the volume first: once it names the claim no other
// claim gets it. Each write names the version it was decided on, and a bind that was
// interrupted is finished by the next pass.
func (c *controller) bind(ctx context.Context, claim *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) error {
	bound, dirty, err := helper.GetBindVolumeToClaim(v, claim)
	if err != nil {
		return err
	}
	api := c.client.CoreV1()
	if dirty {
		if bound, err = api.PersistentVolumes().Update(ctx, bound, metav1.UpdateOptions{}); err != nil {
			return fmt.Errorf("bind volume %s: %w", v.Name, err)
		}
	}
	if err := c.writeVolumeStatus(ctx, bound, corev1.VolumeBound, "", ""); err != nil {
		return err
	}
	updated := claim.DeepCopy()
	if updated.Spec.VolumeName == "" {
		updated.Spec.VolumeName = v.Name
		metav1.SetMetaDataAnnotation(&updated.ObjectMeta, volumes.BoundByController, "yes")
	}
	metav1.SetMetaDataAnnotation(&updated.ObjectMeta, volumes.BindCompleted, "yes")
	if resizer := resizerOf(claim, v); resizer != "" && claim.Annotations[volumes.Resizer] != resizer {
		metav1.SetMetaDataAnnotation(&updated.ObjectMeta, volumes.Resizer, resizer)
		c.events.Eventf(claim, corev1.EventTypeNormal, "ExternalExpanding", "waiting for an external controller to expand this PVC: that of driver %s", resizer)
	}
	if updated.Spec.VolumeName != claim.Spec.VolumeName || !apiequality.Semantic.DeepEqual(updated.Annotations, claim.Annotations) {
		if updated, err = api.PersistentVolumeClaims(claim.Namespace).Update(ctx, updated, metav1.UpdateOptions{}); err != nil {
			return fmt.Errorf("bind claim to volume %s: %w", v.Name, err)
		}
	}
	return c.writeClaimStatus(ctx, updated, corev1.ClaimBound, v)
}

// writeClaimStatus writes the phase, and what the claim has of its volume. A
// bound claim's capacity is left to the resizer.
func (c *controller) writeClaimStatus(ctx context.Context, claim *corev1.PersistentVolumeClaim, phase corev1.PersistentVolumeClaimPhase, v *corev1.PersistentVolume) error {
	updated := claim.DeepCopy()
	status := &updated.Status
	was := status.Phase
	status.Phase = phase
	if v == nil {
		status.AccessModes, status.Capacity = nil, nil
	} else {
		status.AccessModes = v.Spec.AccessModes
		if was != corev1.ClaimBound || status.Capacity == nil {
			status.Capacity = corev1.ResourceList{corev1.ResourceStorage: v.Spec.Capacity[corev1.ResourceStorage]}
		}
		status.CurrentVolumeAttributesClassName = v.Spec.VolumeAttributesClassName
	}
	if apiequality.Semantic.DeepEqual(updated.Status, claim.Status) {
		return nil
	}
	if _, err := c.client.CoreV1().PersistentVolumeClaims(claim.Namespace).UpdateStatus(ctx, updated, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("update claim status: %w", err)
	}
	return nil
}

func (c *controller) reconcileVolume(ctx context.Context, name string) error {
	v, err := c.volumes.Get(name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	var claim *corev1.PersistentVolumeClaim
	if ref := v.Spec.ClaimRef; ref != nil {
		claim, err = c.claims.PersistentVolumeClaims(ref.Namespace).Get(ref.Name)
		if err != nil && !apierrors.IsNotFound(err) {
			return err
		} else if err != nil {
			claim = nil
		}
	}
	plan := decideVolume(v, claim, v.Annotations[volumes.ProvisionedBy] != "")
	if plan.reclaim {
		return c.reclaim(ctx, v, plan)
	}
	if plan.unbind {
		return c.unbind(ctx, v)
	}
	return c.writeVolumeStatus(ctx, v, plan.phase, plan.reason, plan.message)
}

// unbind gives a volume back that its claim does not want.
func (c *controller) unbind(ctx context.Context, v *corev1.PersistentVolume) error {
	updated := v.DeepCopy()
	if _, ours := v.Annotations[volumes.BoundByController]; ours {
		updated.Spec.ClaimRef = nil
		delete(updated.Annotations, volumes.BoundByController)
	} else {
		updated.Spec.ClaimRef.UID = "" // an administrator reserved it for a claim of that name
	}
	updated, err := c.client.CoreV1().PersistentVolumes().Update(ctx, updated, metav1.UpdateOptions{})
	if err != nil {
		return fmt.Errorf("unbind volume: %w", err)
	}
	return c.writeVolumeStatus(ctx, updated, corev1.VolumeAvailable, "", "")
}

// reclaim is about a volume whose claim seems gone. The cache may be behind,
// and data is at stake: the server is asked.
func (c *controller) reclaim(ctx context.Context, v *corev1.PersistentVolume, plan volumePlan) error {
	ref := v.Spec.ClaimRef
	claim, err := c.client.CoreV1().PersistentVolumeClaims(ref.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("read the claim of the volume: %w", err)
	}
	if err == nil && claim.UID == ref.UID && (claim.Spec.VolumeName == "" || claim.Spec.VolumeName == v.Name) {
		return nil // the cache will show it
	}
	if plan.note != nil && v.Status.Phase != plan.phase {
		c.events.Event(v, plan.note.kind, plan.note.reason, plan.note.message)
	}
	return c.writeVolumeStatus(ctx, v, plan.phase, plan.reason, plan.message)
}

// writeVolumeStatus writes the phase and why. Where the phase stands and this
// loop has nothing to say of it, words of others in the status stay.
func (c *controller) writeVolumeStatus(ctx context.Context, v *corev1.PersistentVolume, phase corev1.PersistentVolumePhase, reason, message string) error {
	silent := reason == "" && message == ""
	if v.Status.Phase == phase && (silent || v.Status.Reason == reason && v.Status.Message == message) {
		return nil
	}
	updated := v.DeepCopy()
	if v.Status.Phase != phase {
		now := metav1.Now()
		updated.Status.LastPhaseTransitionTime = &now
	}
	updated.Status.Phase, updated.Status.Reason, updated.Status.Message = phase, reason, message
	if _, err := c.client.CoreV1().PersistentVolumes().UpdateStatus(ctx, updated, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("update volume status: %w", err)
	}
	return nil
}
