// Package gc deletes objects whose owners are gone. It watches the metadata of
// every kind the server serves and knows none of them by name.
package gc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/metadata"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/loop"
)

const (
	workers = 8
	// inFlight bounds concurrent releases of one owner's dependents.
	inFlight = 16
	// lookAgain is how soon an object is looked at again whose owner is not
	// watched.
	lookAgain = 10 * time.Second
	// maxAbsent bounds the memory of owners that were found not to exist.
	maxAbsent = 4096
)

type collector struct {
	*loop.Controller
	metadata  metadata.Interface
	discovery discovery.DiscoveryInterfaces
	graph     *graph
	monitors  *monitors
	// running: the queue exists, workers take from it.
	running atomic.Bool

	mu sync.Mutex // guards absent
	// absent remembers owners that do not exist. UIDs are never used twice, so
	// an entry stays true; the rest of the key is there because a reference may
	// name an existing UID under a wrong name or namespace.
	absent map[coordinates]bool
}

// coordinates name the object that a reference of some object means.
type coordinates struct {
	apiVersion, kind, namespace, name string
	uid                               types.UID
}

// New returns the loop. Shared returns the informer that other loops run for a
// kind, nil if there is none: what they watch is not watched a second time.
// A nil shared stands for none at all.
func New(env loop.Env, metadata metadata.Interface, shared Shared) loop.Loop {
	c := &collector{
		metadata:  metadata,
		discovery: env.Client.Discovery(),
		graph:     newGraph(),
		absent:    map[coordinates]bool{},
	}
	c.monitors = newMonitors(metadata, c.discovery, env.Clock, c.onChange)
	c.monitors.shared, c.monitors.onEnd, c.monitors.onListed = shared, c.forget, c.listed
	c.Controller = loop.New("gc", env, workers, c.reconcile)
	return loop.Loop{Name: "gc", Run: c.run}
}

func (c *collector) run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var group errgroup.Group
	defer group.Wait() //nolint:errcheck // its error is returned below
	defer cancel()
	group.Go(func() error { return c.monitors.run(ctx) })
	// Owners and dependents become known in any order. Only when every kind has
	// been listed does an unknown owner mean anything.
	if !c.monitors.waitSynced(ctx) {
		return group.Wait()
	}
	err := c.RunReady(ctx, func() {
		c.running.Store(true)
		for _, uid := range c.graph.withOwners() {
			c.enqueue(uid)
		}
	})
	cancel()
	return errors.Join(err, group.Wait())
}

// Keys of the queue are UIDs.
func (c *collector) enqueue(uid types.UID) { c.Enqueue(loop.Key{Name: string(uid)}) }

// onChange is called by the monitors; now is nil for a deleted object.
func (c *collector) onChange(old, now *object) {
	var dependents []*object
	if now != nil {
		old = c.graph.put(now)
		dependents = c.graph.of(now.uid)
	} else {
		if old = c.graph.drop(old.uid); old == nil {
			return
		}
		dependents = c.graph.of(old.uid)
	}
	if !c.running.Load() {
		return // all are looked at when work begins
	}
	for _, uid := range followUps(old, now, dependents, func(uid types.UID) bool { return c.graph.get(uid) != nil }) {
		c.enqueue(uid)
	}
}

// forget takes the objects of a resource that is not watched any more out of the
// graph: no event will say what becomes of them. Owners that waited for them go on.
// Those that depend on them are let be: that their owner's kind is not served does not
// say that it is gone. They are looked at when it is served again.
func (c *collector) forget(resource schema.GroupVersionResource) {
	for _, o := range c.graph.forget(resource) {
		for _, ref := range o.owners {
			if c.running.Load() {
				c.enqueue(ref.UID)
			}
		}
	}
}

// listed looks at what depends on objects of a kind that is known by now and has none
// of their UIDs.
func (c *collector) listed(kind schema.GroupKind) {
	if !c.running.Load() {
		return
	}
	for _, uid := range c.graph.lacking(kind) {
		c.enqueue(uid)
	}
}

func (c *collector) reconcile(ctx context.Context, key loop.Key) error {
	o := c.graph.get(types.UID(key.Name))
	if o == nil {
		return nil // gone; its dependents were enqueued by that event
	}
	switch {
	case o.orphaning():
		return c.orphan(ctx, o)
	case o.foreground():
		return c.finishForeground(ctx, o)
	case o.deleting || len(o.owners) == 0:
		return nil
	}
	return c.collect(ctx, o)
}

// collect deletes o if all its owners are gone.
func (c *collector) collect(ctx context.Context, o *object) error {
	if c.allKnown(o) {
		return nil
	}
	// From here on only the server's word counts.
	live, err := c.live(ctx, o)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read %s %s: %w", o.kind, o.name, err)
	}
	if live.UID != o.uid || live.DeletionTimestamp != nil {
		return nil
	}
	states := make([]ownerState, len(live.OwnerReferences))
	for i := range live.OwnerReferences {
		if states[i], err = c.ownerState(ctx, o, &live.OwnerReferences[i]); err != nil {
			return err
		}
	}
	if !c.allKnown(o) {
		// Some owner is of a kind that is not watched, perhaps not yet: no event
		// of its end will come.
		defer c.EnqueueAfter(loop.Key{Name: string(o.uid)}, lookAgain)
	}
	v := judge(live.OwnerReferences, states, live.Finalizers, len(c.graph.of(o.uid)) > 0)
	switch v.Do {
	case prune:
		return c.prune(ctx, o, live, v.Prune)
	case remove:
		klog.FromContext(ctx).V(2).Info("collecting", "kind", o.kind, "object", klog.KRef(o.namespace, o.name), "policy", v.Policy)
		collected.Inc()
		err := c.resource(o).Delete(ctx, o.name, metav1.DeleteOptions{
			PropagationPolicy: &v.Policy,
			// The version: it was not given a new owner since.
			Preconditions: &metav1.Preconditions{UID: &live.UID, ResourceVersion: &live.ResourceVersion},
		})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("delete %s %s: %w", o.kind, o.name, err)
		}
	}
	return nil
}

// allKnown spares the server a question: every owner is in the graph, just as
// the reference says, and none waits for its dependents.
func (c *collector) allKnown(o *object) bool {
	return !slices.ContainsFunc(o.owners, func(ref metav1.OwnerReference) bool {
		owner := c.graph.get(ref.UID)
		return owner == nil || !meant(owner, o, &ref) || owner.foreground()
	})
}

// meant reports whether owner is what the reference of o names: references
// reach into the own namespace and to cluster-scoped objects only.
func meant(owner, o *object, ref *metav1.OwnerReference) bool {
	gv, err := schema.ParseGroupVersion(ref.APIVersion)
	return err == nil && owner.kind == gv.WithKind(ref.Kind).GroupKind() && owner.name == ref.Name &&
		(owner.namespace == "" || owner.namespace == o.namespace)
}

// ownerState finds out about one owner, at the server if the graph does not know.
func (c *collector) ownerState(ctx context.Context, o *object, ref *metav1.OwnerReference) (ownerState, error) {
	if owner := c.graph.get(ref.UID); owner != nil && meant(owner, o, ref) {
		if owner.foreground() {
			return waiting, nil
		}
		return solid, nil
	}
	at := coordinates{ref.APIVersion, ref.Kind, o.namespace, ref.Name, ref.UID}
	c.mu.Lock()
	known := c.absent[at]
	c.mu.Unlock()
	if known {
		return absent, nil
	}
	mapping, err := c.monitors.mapping(ctx, ref)
	if err != nil {
		// Perhaps a group that does not answer just now: never delete for that.
		return solid, fmt.Errorf("owner %s %s of %s %s: %w", ref.Kind, ref.Name, o.kind, o.name, err)
	}
	namespace := ""
	if mapping.namespaced {
		if namespace = o.namespace; namespace == "" {
			klog.FromContext(ctx).V(2).Info("cluster-scoped object names a namespaced owner; left alone", "kind", o.kind, "object", o.name, "owner", ref.Name)
			return solid, nil
		}
	}
	live, err := c.metadata.Resource(mapping.GroupVersionResource).Namespace(namespace).Get(ctx, ref.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err) || err == nil && live.UID != ref.UID:
		c.mu.Lock()
		if len(c.absent) >= maxAbsent {
			clear(c.absent)
		}
		c.absent[at] = true
		c.mu.Unlock()
		return absent, nil
	case err != nil:
		return solid, fmt.Errorf("look for owner %s %s: %w", ref.Kind, ref.Name, err)
	case live.DeletionTimestamp != nil && slices.Contains(live.Finalizers, metav1.FinalizerDeleteDependents):
		return waiting, nil
	}
	return solid, nil
}

func (c *collector) resource(o *object) metadata.ResourceInterface {
	return c.metadata.Resource(o.resource).Namespace(o.namespace)
}

func (c *collector) live(ctx context.Context, o *object) (*metav1.PartialObjectMetadata, error) {
	return c.resource(o).Get(ctx, o.name, metav1.GetOptions{})
}

// prune removes references to owners that do not exist any more from an object that has
// others.
func (c *collector) prune(ctx context.Context, o *object, live *metav1.PartialObjectMetadata, gone []types.UID) error {
	left := slices.DeleteFunc(slices.Clone(live.OwnerReferences), func(r metav1.OwnerReference) bool {
		return slices.Contains(gone, r.UID)
	})
	return c.patch(ctx, o, live.ResourceVersion, "ownerReferences", left)
}

// patch replaces one list of an object's metadata, at the version that was read.
func (c *collector) patch(ctx context.Context, o *object, version, field string, value any) error {
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": o.uid, "resourceVersion": version, field: value,
	}})
	if err != nil {
		return fmt.Errorf("encode %s: %w", field, err)
	}
	_, err = c.resource(o).Patch(ctx, o.name, types.MergePatchType, body, metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("change %s of %s %s: %w", field, o.kind, o.name, err)
	}
	return nil
}

// orphan lets the dependents of an object go free, then the object itself.
func (c *collector) orphan(ctx context.Context, o *object) error {
	var group errgroup.Group
	group.SetLimit(inFlight)
	for _, d := range c.graph.of(o.uid) {
		group.Go(func() error { return c.release(ctx, d, o.uid) })
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return c.unhold(ctx, o, metav1.FinalizerOrphanDependents)
}

// release takes the reference to one owner off a dependent.
func (c *collector) release(ctx context.Context, d *object, owner types.UID) error {
	live, err := c.live(ctx, d)
	if apierrors.IsNotFound(err) || err == nil && live.UID != d.uid {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read %s %s: %w", d.kind, d.name, err)
	}
	if !slices.ContainsFunc(live.OwnerReferences, func(r metav1.OwnerReference) bool { return r.UID == owner }) {
		return nil
	}
	return c.prune(ctx, d, live, []types.UID{owner})
}

// finishForeground removes the hold on an object whose blocking dependents are
// all gone, or sees to it that they go.
func (c *collector) finishForeground(ctx context.Context, o *object) error {
	blocked := false
	for _, d := range c.graph.of(o.uid) {
		if !d.blocks(o.uid) {
			continue
		}
		blocked = true
		if !d.deleting {
			c.enqueue(d.uid)
		}
	}
	if blocked {
		if ring := c.graph.ring(o); ring != nil {
			return c.unblock(ctx, o, ring)
		}
		return nil // the end of each of them wakes us
	}
	return c.unhold(ctx, o, metav1.FinalizerDeleteDependents)
}

// unblock lets the owners in a ring of objects that wait for each other go before
// o: none of them would ever.
func (c *collector) unblock(ctx context.Context, o *object, ring map[types.UID]bool) error {
	live, err := c.live(ctx, o)
	if apierrors.IsNotFound(err) || err == nil && live.UID != o.uid {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read %s %s: %w", o.kind, o.name, err)
	}
	refs := slices.Clone(live.OwnerReferences)
	for i := range refs {
		if ring[refs[i].UID] {
			refs[i].BlockOwnerDeletion = ptr.To(false)
		}
	}
	return c.patch(ctx, o, live.ResourceVersion, "ownerReferences", refs)
}

// unhold takes one of our finalizers off.
func (c *collector) unhold(ctx context.Context, o *object, finalizer string) error {
	live, err := c.live(ctx, o)
	if apierrors.IsNotFound(err) || err == nil && live.UID != o.uid {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read %s %s: %w", o.kind, o.name, err)
	}
	if !slices.Contains(live.Finalizers, finalizer) {
		return nil
	}
	left := slices.DeleteFunc(slices.Clone(live.Finalizers), func(f string) bool { return f == finalizer })
	return c.patch(ctx, o, live.ResourceVersion, "finalizers", left)
}
