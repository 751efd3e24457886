// Package attachdetach says to which nodes the volumes of CSI drivers are
// attached: those with pods that use them. It makes and removes
// VolumeAttachments, which the drivers' external attachers carry out, and tells
// each node in its status what is attached to it.
//
// A node mounts a volume only after it is listed in volumesAttached, and reports
// what it uses. A volume is taken back by a write to the node's status that names the version in which the
// node did not use it: a node that begins to use it meanwhile makes that write
// fail, one that begins later sees that it does not have it any more.
package attachdetach

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	coordinationlisters "k8s.io/client-go/listers/coordination/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	storagelisters "k8s.io/client-go/listers/storage/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/apis/coordination"
	"github.com/clusterd/clusterd/sched/internal/bynode"
	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/internal/volumes"
	"github.com/clusterd/clusterd/sched/loop"
)

// Indexes of the informers.
const (
	podsByClaim        = "attachdetach/claim"
	attachmentsByPV    = "attachdetach/volume"
	attachmentsByNode  = "attachdetach/node"
	reportEvery        = time.Minute // how often a waiting pod gets an event that says why
	kindOfBlockedEvent = "FailedAttachVolume"
)

// controller has persistent volumes as keys.
type controller struct {
	*loop.Controller
	client      kubernetes.Interface
	clock       clock.WithTicker
	events      record.EventRecorder
	claims      corelisters.PersistentVolumeClaimLister
	volumes     corelisters.PersistentVolumeLister
	nodes       corelisters.NodeLister
	leases      coordinationlisters.LeaseNamespaceLister
	drivers     storagelisters.CSIDriverLister
	pods        cache.Indexer
	attachments cache.Indexer

	mu       sync.Mutex // guards all below
	unwanted map[unwantedKey]time.Time
	reported map[string]time.Time // by the pod's UID
}

type unwantedKey struct{ volume, node string }

// New returns the loop. It watches Pods, claims, volumes, Nodes and their Leases,
// CSIDrivers and VolumeAttachments.
func New(env loop.Env) (loop.Loop, error) {
	core, storage := env.Informers.Core().V1(), env.Informers.Storage().V1()
	leases := env.Informers.Coordination().V1().Leases()
	c := &controller{
		leases: leases.Lister().Leases(corev1.NamespaceNodeLease),
		client: env.Client, clock: env.Clock, events: env.Events.For("attachdetach-controller"),
		claims: core.PersistentVolumeClaims().Lister(), volumes: core.PersistentVolumes().Lister(), nodes: core.Nodes().Lister(), drivers: storage.CSIDrivers().Lister(),
		pods: core.Pods().Informer().GetIndexer(), attachments: storage.VolumeAttachments().Informer().GetIndexer(),
		unwanted: map[unwantedKey]time.Time{}, reported: map[string]time.Time{},
	}
	if err := core.Pods().Informer().AddIndexers(cache.Indexers{podsByClaim: claimsOf}); err != nil {
		return loop.Loop{}, fmt.Errorf("attachdetach: %w", err)
	}
	if err := bynode.Index(core.Pods().Informer()); err != nil {
		return loop.Loop{}, fmt.Errorf("attachdetach: %w", err)
	}
	if err := storage.VolumeAttachments().Informer().AddIndexers(cache.Indexers{attachmentsByPV: volumeOf, attachmentsByNode: nodeOf}); err != nil {
		return loop.Loop{}, fmt.Errorf("attachdetach: %w", err)
	}
	c.Controller = loop.New("attachdetach", env, 4, c.reconcile)
	loop.Watch(c.Controller, core.Pods().Informer(), func(old, pod *corev1.Pod) {
		if old != nil && pod != nil && old.Spec.NodeName == pod.Spec.NodeName && pods.Finished(old) == pods.Finished(pod) {
			return
		}
		c.enqueueOf(loop.Latest(old, pod))
		if pod == nil {
			c.mu.Lock()
			delete(c.reported, string(old.UID))
			c.mu.Unlock()
		}
	})
	loop.Watch(c.Controller, core.PersistentVolumeClaims().Informer(), func(old, claim *corev1.PersistentVolumeClaim) {
		if name := loop.Latest(old, claim).Spec.VolumeName; name != "" {
			c.Enqueue(loop.Key{Name: name})
		}
	})
	loop.Watch(c.Controller, core.PersistentVolumes().Informer(), func(old, v *corev1.PersistentVolume) {
		if now := loop.Latest(old, v); now.Spec.CSI != nil {
			c.Enqueue(loop.Key{Name: now.Name})
		}
	})
	loop.Watch(c.Controller, storage.VolumeAttachments().Informer(), func(old, a *storagev1.VolumeAttachment) {
		if name := loop.Latest(old, a).Spec.Source.PersistentVolumeName; name != nil {
			c.Enqueue(loop.Key{Name: *name})
		}
	})
	loop.Watch(c.Controller, core.Nodes().Informer(), func(old, node *corev1.Node) {
		if old != nil && node != nil && sameForVolumes(old, node) {
			return
		}
		c.enqueueAt(loop.Latest(old, node).Name)
	})
	loop.Watch(c.Controller, leases.Informer(), func(old, lease *coordinationv1.Lease) {
		if lease != nil && coordination.Taken(lease) && (old == nil || !coordination.Taken(old)) {
			c.enqueueAt(lease.Name)
		}
	})
	loop.Watch(c.Controller, storage.CSIDrivers().Informer(), func(old, d *storagev1.CSIDriver) {
		if old != nil && d != nil && attaches(old) == attaches(d) {
			return
		}
		name := loop.Latest(old, d).Name
		all, err := c.volumes.List(labels.Everything())
		if err != nil {
			return
		}
		for _, v := range all {
			if v.Spec.CSI != nil && v.Spec.CSI.Driver == name {
				c.Enqueue(loop.Key{Name: v.Name})
			}
		}
	})
	return c.Loop(), nil
}

// sameForVolumes reports whether a change of a node is none that counts here.
func sameForVolumes(old, node *corev1.Node) bool {
	return old.UID == node.UID && healthy(old) == healthy(node) &&
		apiequality.Semantic.DeepEqual(old.Spec.Taints, node.Spec.Taints) &&
		apiequality.Semantic.DeepEqual(old.Status.VolumesInUse, node.Status.VolumesInUse) &&
		apiequality.Semantic.DeepEqual(old.Status.VolumesAttached, node.Status.VolumesAttached)
}

func claimsOf(obj any) ([]string, error) {
	pod, ok := obj.(*corev1.Pod)
	if !ok || pod.Spec.NodeName == "" {
		return nil, nil
	}
	var out []string
	for _, use := range volumes.UsesOf(pod) {
		out = append(out, pod.Namespace+"/"+use.Claim)
	}
	return out, nil
}

func volumeOf(obj any) ([]string, error) {
	if a, ok := obj.(*storagev1.VolumeAttachment); ok && a.Spec.Source.PersistentVolumeName != nil {
		return []string{*a.Spec.Source.PersistentVolumeName}, nil
	}
	return nil, nil
}

func nodeOf(obj any) ([]string, error) {
	if a, ok := obj.(*storagev1.VolumeAttachment); ok {
		return []string{a.Spec.NodeName}, nil
	}
	return nil, nil
}

// attaches reports whether volumes of the driver are attached to nodes.
func attaches(d *storagev1.CSIDriver) bool {
	return d.Spec.AttachRequired == nil || *d.Spec.AttachRequired
}

// enqueueOf looks at the volumes of a pod.
func (c *controller) enqueueOf(pod *corev1.Pod) {
	for _, use := range volumes.UsesOf(pod) {
		if claim, err := c.claims.PersistentVolumeClaims(pod.Namespace).Get(use.Claim); err == nil && claim.Spec.VolumeName != "" {
			c.Enqueue(loop.Key{Name: claim.Spec.VolumeName})
		}
	}
}

// enqueueAt looks at the volumes that are attached to a node, and those that pods there
// wait for: a Node that was deleted and comes back has no attachments any more.
func (c *controller) enqueueAt(node string) {
	waiting, err := bynode.Pods(c.pods, node)
	if err != nil {
		return
	}
	for _, pod := range waiting {
		c.enqueueOf(pod)
	}
	here, err := c.attachments.ByIndex(attachmentsByNode, node)
	if err != nil {
		return
	}
	for _, obj := range here {
		if name := obj.(*storagev1.VolumeAttachment).Spec.Source.PersistentVolumeName; name != nil {
			c.Enqueue(loop.Key{Name: *name})
		}
	}
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	in, err := c.look(key.Name)
	if err != nil || in == nil {
		return err
	}
	todo := decide(*in)
	for _, b := range todo.blocked {
		c.report(b)
	}
	if todo.again > 0 {
		c.EnqueueAfter(key, todo.again)
	}
	for _, node := range todo.attach {
		_, err := c.client.StorageV1().VolumeAttachments().Create(ctx, attachmentOf(in.volume, node), metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("attach volume %s to node %s: %w", key.Name, node, err)
		}
	}
	for _, p := range in.places {
		switch {
		case slices.Contains(todo.tell, p.name):
			if err := c.tell(ctx, p.node, unique(in.volume), true); err != nil {
				return fmt.Errorf("tell node %s that volume %s is attached: %w", p.name, key.Name, err)
			}
			for _, pod := range p.pods {
				c.events.Eventf(pod, corev1.EventTypeNormal, "SuccessfulAttachVolume", "AttachVolume.Attach succeeded for volume %q", key.Name)
			}
		case slices.Contains(todo.take, p.name):
			if err := c.take(ctx, *in, p); err != nil {
				return fmt.Errorf("detach volume %s from node %s: %w", key.Name, p.name, err)
			}
		}
	}
	return nil
}

// look gathers what there is of a volume; nil: it is none of a CSI driver.
func (c *controller) look(name string) (*input, error) {
	in := &input{now: c.clock.Now()}
	v, err := c.volumes.Get(name)
	if err != nil && !apierrors.IsNotFound(err) {
		return nil, err
	}
	if err == nil {
		if v.Spec.CSI == nil {
			return nil, nil
		}
		in.volume = v
		d, err := c.drivers.Get(v.Spec.CSI.Driver)
		if err != nil && !apierrors.IsNotFound(err) {
			return nil, err
		}
		in.attaches = err != nil || attaches(d)
	}
	places := map[string]*place{}
	at := func(node string) *place {
		if places[node] == nil {
			p := &place{name: node}
			if n, err := c.nodes.Get(node); err == nil {
				p.node = n
			}
			if l, err := c.leases.Get(node); err == nil {
				p.fenced = coordination.Taken(l)
			}
			places[node] = p
		}
		return places[node]
	}
	have, err := c.attachments.ByIndex(attachmentsByPV, name)
	if err != nil {
		return nil, err
	}
	for _, obj := range have {
		a := obj.(*storagev1.VolumeAttachment)
		if in.volume != nil && a.Spec.Attacher == in.volume.Spec.CSI.Driver && a.Name == attachmentOf(in.volume, a.Spec.NodeName).Name ||
			in.volume == nil && strings.HasPrefix(a.Name, attachmentPrefix) {
			at(a.Spec.NodeName).attachment = a
		}
	}
	users, err := c.users(in.volume)
	if err != nil {
		return nil, err
	}
	for _, pod := range users {
		p := at(pod.Spec.NodeName)
		p.pods = append(p.pods, pod)
	}
	for _, p := range places {
		p.unwanted = c.since(unwantedKey{name, p.name}, len(p.pods) == 0 && p.attachment != nil, in.now)
		in.places = append(in.places, *p)
	}
	slices.SortFunc(in.places, func(a, b place) int { return cmp.Compare(a.name, b.name) })
	c.forget(name, places)
	return in, nil
}

// users are the pods with a node that use the volume and have not ended.
func (c *controller) users(v *corev1.PersistentVolume) ([]*corev1.Pod, error) {
	if v == nil || v.Spec.ClaimRef == nil {
		return nil, nil
	}
	ref := v.Spec.ClaimRef
	claim, err := c.claims.PersistentVolumeClaims(ref.Namespace).Get(ref.Name)
	if err != nil || claim.UID != ref.UID || claim.Spec.VolumeName != v.Name {
		if apierrors.IsNotFound(err) {
			err = nil
		}
		return nil, err
	}
	found, err := c.pods.ByIndex(podsByClaim, ref.Namespace+"/"+ref.Name)
	if err != nil {
		return nil, err
	}
	var out []*corev1.Pod
	for _, obj := range found {
		if pod := obj.(*corev1.Pod); !pods.Finished(pod) {
			out = append(out, pod)
		}
	}
	return out, nil
}

// since notes when a volume was first found unwanted on a node.
func (c *controller) since(key unwantedKey, unwanted bool, now time.Time) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !unwanted {
		delete(c.unwanted, key)
		return time.Time{}
	}
	if _, ok := c.unwanted[key]; !ok {
		c.unwanted[key] = now
	}
	return c.unwanted[key]
}

// forget drops what was noted of nodes that the volume has left.
func (c *controller) forget(volume string, places map[string]*place) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for key := range c.unwanted {
		if key.volume == volume && places[key.node] == nil {
			delete(c.unwanted, key)
		}
	}
}

// report tells a pod why it does not get its volume, now and then.
func (c *controller) report(b block) {
	c.mu.Lock()
	now := c.clock.Now()
	due := now.Sub(c.reported[string(b.pod.UID)]) >= reportEvery
	if due {
		c.reported[string(b.pod.UID)] = now
	}
	c.mu.Unlock()
	if due {
		c.events.Event(b.pod, corev1.EventTypeWarning, kindOfBlockedEvent, b.message)
	}
}

// tell writes into the node's status whether a volume is attached. It names the
// version that was decided on.
func (c *controller) tell(ctx context.Context, node *corev1.Node, name corev1.UniqueVolumeName, attached bool) error {
	if reported(node, name) == attached {
		return nil
	}
	next := node.DeepCopy()
	next.Status.VolumesAttached = slices.DeleteFunc(next.Status.VolumesAttached, func(a corev1.AttachedVolume) bool { return a.Name == name })
	if attached {
		next.Status.VolumesAttached = append(next.Status.VolumesAttached, corev1.AttachedVolume{Name: name})
	}
	_, err := c.client.CoreV1().Nodes().UpdateStatus(ctx, next, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// take has a volume detached from a node: first the node learns of it, then the
// attachment goes.
func (c *controller) take(ctx context.Context, in input, p place) error {
	if name := uniqueOf(in.volume); name != "" && p.node != nil {
		if !reported(p.node, name) {
			// Nothing is to be withdrawn: the node's status does not list the volume,
			// so the node mounts nothing. The server confirms that no earlier leader listed it.
			if err := c.confirm(ctx, p.node); err != nil {
				return err
			}
		} else if err := c.tell(ctx, p.node, name, false); err != nil {
			return err
		}
	}
	uid := p.attachment.UID
	err := c.client.StorageV1().VolumeAttachments().Delete(ctx, p.attachment.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// confirm fails if the node's object has changed since it was read.
func (c *controller) confirm(ctx context.Context, node *corev1.Node) error {
	now, err := c.client.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return err
	case now.UID != node.UID || !slices.Equal(now.Status.VolumesInUse, node.Status.VolumesInUse) || !apiequality.Semantic.DeepEqual(now.Status.VolumesAttached, node.Status.VolumesAttached):
		return apierrors.NewConflict(corev1.Resource("nodes"), node.Name, errors.New("what it uses has changed"))
	}
	return nil
}
