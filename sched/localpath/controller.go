// Package localpath provisions volumes that are directories on a node's disk. It
// writes the volumes' objects; the node that the scheduler chose makes the
// folder when it is first mounted, and removes it when the object is deleted.
package localpath

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
	storagelisters "k8s.io/client-go/listers/storage/v1"
	"k8s.io/client-go/tools/record"
	helper "k8s.io/component-helpers/storage/volume"

	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/sched/internal/volumes"
	"github.com/clusterd/clusterd/sched/loop"
)

// classKey asks for the default class. No volume has such a name.
var classKey = loop.Key{Name: "!class"}

// mark is the ConfigMap that says that the default class was made once: one
// that was deleted stays deleted.
const mark = "clusterd-local-path-class"

// controller has claims and volumes in one queue: keys with a namespace are
// claims, those without are volumes.
type controller struct {
	*loop.Controller
	client  kubernetes.Interface
	events  record.EventRecorder
	claims  corelisters.PersistentVolumeClaimLister
	volumes corelisters.PersistentVolumeLister
	nodes   corelisters.NodeLister
	classes storagelisters.StorageClassLister
}

// New returns the loop. It watches PersistentVolumeClaims, PersistentVolumes,
// Nodes and StorageClasses.
func New(env loop.Env) loop.Loop {
	core := env.Informers.Core().V1()
	classes := env.Informers.Storage().V1().StorageClasses()
	c := &controller{
		client: env.Client, events: env.Events.For(names.LocalPathProvisioner),
		claims: core.PersistentVolumeClaims().Lister(), volumes: core.PersistentVolumes().Lister(),
		nodes: core.Nodes().Lister(), classes: classes.Lister(),
	}
	classes.Informer()
	c.Controller = loop.New("localpath", env, 4, c.reconcile)
	loop.Watch(c.Controller, core.PersistentVolumeClaims().Informer(), func(_, claim *corev1.PersistentVolumeClaim) {
		if claim != nil {
			c.Enqueue(loop.KeyOf(claim))
		}
	})
	loop.Watch(c.Controller, core.PersistentVolumes().Informer(), func(_, v *corev1.PersistentVolume) {
		if v != nil && ours(v) {
			c.Enqueue(loop.Key{Name: v.Name})
		}
	})
	loop.Watch(c.Controller, core.Nodes().Informer(), func(old, node *corev1.Node) {
		if node == nil {
			c.orphan(old.Name)
		}
	})
	return loop.Loop{Name: "localpath", Run: func(ctx context.Context) error {
		return c.RunReady(ctx, func() { c.Enqueue(classKey) })
	}}
}

func ours(v *corev1.PersistentVolume) bool {
	return v.Annotations[volumes.ProvisionedBy] == names.LocalPathProvisioner
}

// orphan looks at the volumes of a node that is gone.
func (c *controller) orphan(node string) {
	all, err := c.volumes.List(labels.SelectorFromSet(labels.Set{names.LocalPathNode: node}))
	if err != nil {
		return
	}
	for _, v := range all {
		c.Enqueue(loop.Key{Name: v.Name})
	}
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	switch {
	case key == classKey:
		return c.makeClass(ctx)
	case key.Namespace == "":
		return c.reconcileVolume(ctx, key.Name)
	}
	claim, err := c.claims.PersistentVolumeClaims(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if volumes.Bound(claim) {
		return c.grow(ctx, claim)
	}
	if claim.DeletionTimestamp != nil || claim.Spec.VolumeName != "" {
		return nil
	}
	return c.provision(ctx, claim)
}

// provision makes the object of a volume for a claim that the binder has asked
// one for.
func (c *controller) provision(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	if claim.Annotations[volumes.Provisioner] != names.LocalPathProvisioner {
		return nil
	}
	class, err := c.classes.Get(helper.GetPersistentVolumeClaimClass(claim))
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if why := refusal(claim, class); why != "" {
		c.events.Event(claim, corev1.EventTypeWarning, "ProvisioningFailed", why)
		return nil
	}
	name := claim.Annotations[volumes.SelectedNode]
	if name == "" {
		return nil
	}
	node, err := c.client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		// The scheduler chooses another.
		c.events.Eventf(claim, corev1.EventTypeWarning, "ProvisioningFailed", "node %q, chosen for the volume, is gone", name)
		updated := claim.DeepCopy()
		delete(updated.Annotations, volumes.SelectedNode)
		_, err = c.client.CoreV1().PersistentVolumeClaims(claim.Namespace).Update(ctx, updated, metav1.UpdateOptions{})
		return err
	}
	if err != nil {
		return fmt.Errorf("read node %s: %w", name, err)
	}
	dir := node.Annotations[names.LocalPathRoot]
	if dir == "" || node.Labels[corev1.LabelHostname] == "" {
		c.events.Eventf(claim, corev1.EventTypeWarning, "ProvisioningFailed", "node %q does not say where its volumes are: its agent is older than this", name)
		return fmt.Errorf("node %s has no annotation %s or no label %s", name, names.LocalPathRoot, corev1.LabelHostname)
	}
	v := newVolume(claim, class, node, dir)
	_, err = c.client.CoreV1().PersistentVolumes().Create(ctx, v, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil // made before, and its claim's name is in it
	}
	if err != nil {
		return fmt.Errorf("create volume: %w", err)
	}
	c.events.Eventf(claim, corev1.EventTypeNormal, "ProvisioningSucceeded", "Successfully provisioned volume %s", v.Name)
	return nil
}

// grow gives a bound claim what it asks for: a directory has no size of its own.
func (c *controller) grow(ctx context.Context, claim *corev1.PersistentVolumeClaim) error {
	want, have := claim.Spec.Resources.Requests[corev1.ResourceStorage], claim.Status.Capacity[corev1.ResourceStorage]
	if want.Cmp(have) <= 0 {
		return nil
	}
	v, err := c.volumes.Get(claim.Spec.VolumeName)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil || !ours(v) || !helper.IsVolumeBoundToClaim(v, claim) {
		return err
	}
	size := v.Spec.Capacity[corev1.ResourceStorage]
	if size.Cmp(want) < 0 {
		updated := v.DeepCopy()
		updated.Spec.Capacity[corev1.ResourceStorage] = want
		if _, err := c.client.CoreV1().PersistentVolumes().Update(ctx, updated, metav1.UpdateOptions{}); err != nil {
			return fmt.Errorf("grow volume %s: %w", v.Name, err)
		}
	}
	updated := claim.DeepCopy()
	updated.Status.Capacity = corev1.ResourceList{corev1.ResourceStorage: want}
	if _, err := c.client.CoreV1().PersistentVolumeClaims(claim.Namespace).UpdateStatus(ctx, updated, metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("grow claim: %w", err)
	}
	c.events.Eventf(claim, corev1.EventTypeNormal, "VolumeResizeSuccessful", "volume %s has %s now", v.Name, want.String())
	return nil
}

// reconcileVolume deletes the object of a released volume, and lets one go
// whose node will never remove its directory.
func (c *controller) reconcileVolume(ctx context.Context, name string) error {
	v, err := c.volumes.Get(name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil || !ours(v) {
		return err
	}
	api := c.client.CoreV1()
	if v.DeletionTimestamp == nil {
		if v.Status.Phase != corev1.VolumeReleased || v.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimDelete {
			return nil
		}
		err := api.PersistentVolumes().Delete(ctx, v.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &v.UID, ResourceVersion: &v.ResourceVersion}})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete volume: %w", err)
		}
		return nil
	}
	if v.Status.Phase == corev1.VolumeBound || !slices.Contains(v.Finalizers, names.LocalPathFinalizer) {
		return nil
	}
	node := v.Labels[names.LocalPathNode]
	if _, err := api.Nodes().Get(ctx, node, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		return err // the node removes the directory, now or when it is back
	}
	c.events.Eventf(v, corev1.EventTypeWarning, "VolumeFailedDelete", "node %q is gone: its folder %s was not removed", node, v.Spec.Local.Path)
	updated := v.DeepCopy()
	updated.Finalizers = slices.DeleteFunc(updated.Finalizers, func(f string) bool { return f == names.LocalPathFinalizer })
	if _, err := api.PersistentVolumes().Update(ctx, updated, metav1.UpdateOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("let volume go: %w", err)
	}
	return nil
}

// makeClass makes the default class, once in a cluster's life.
func (c *controller) makeClass(ctx context.Context) error {
	marks := c.client.CoreV1().ConfigMaps(metav1.NamespaceSystem)
	_, err := marks.Get(ctx, mark, metav1.GetOptions{})
	if !apierrors.IsNotFound(err) {
		return err
	}
	if _, err := c.client.StorageV1().StorageClasses().Create(ctx, defaultClass(), metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("make the default storage class: %w", err)
	}
	_, err = marks.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: mark}}, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("note that the default storage class was made: %w", err)
	}
	return nil
}
