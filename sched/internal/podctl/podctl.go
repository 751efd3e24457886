// Package podctl makes, deletes and claims the pods of one kind of owner, and
// remembers what it wrote until the cache shows it. Which pods there should be
// is its callers' decision.
package podctl

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"

	"github.com/clusterd/clusterd/sched/internal/newname"
	"github.com/clusterd/clusterd/sched/internal/owned"
	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
)

// Owner is an object that controls pods.
type Owner interface {
	runtime.Object
	metav1.Object
}

// Control writes the pods of all owners of one kind. Its methods may be called
// concurrently, for one owner from one goroutine at a time.
type Control struct {
	// Pending is the guard against a stale cache; see loop.Pending.
	Pending *loop.Pending
	// Events tells the owners' users what was done.
	Events record.EventRecorder

	kind   schema.GroupVersionKind
	client kubernetes.Interface
	pods   cache.Indexer
	inform cache.SharedIndexInformer
	noted  func(owner loop.Key)
}

// New returns a Control for owners of the kind, and indexes the pod informer.
// component signs the events.
func New(env loop.Env, kind schema.GroupVersionKind, component string) (*Control, error) {
	informer := env.Informers.Core().V1().Pods().Informer()
	if err := owned.Index(informer); err != nil {
		return nil, fmt.Errorf("index pods by controller: %w", err)
	}
	return &Control{
		Pending: loop.NewPending(env.Clock, func(ctx context.Context, key loop.Key) (metav1.Object, error) {
			return env.Client.CoreV1().Pods(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
		}),
		Events: env.Events.For(component),
		kind:   kind,
		client: env.Client,
		pods:   informer.GetIndexer(),
		inform: informer,
	}, nil
}

// Watch makes every change of an owner's pod call wake with the owner's key,
// and every new orphan call offer, if there is one.
func (c *Control) Watch(controller *loop.Controller, wake func(owner loop.Key), offer func(orphan *corev1.Pod)) {
	c.noted = wake
	loop.Watch(controller, c.inform, func(old, pod *corev1.Pod) {
		if pod == nil {
			c.saw(old, false)
			return
		}
		if old != nil {
			before, after := metav1.GetControllerOf(old), metav1.GetControllerOf(pod)
			if before != nil && (after == nil || before.UID != after.UID) {
				c.saw(old, false) // released, or taken over
			}
		}
		c.saw(pod, pod.DeletionTimestamp == nil)
		if offer != nil && metav1.GetControllerOf(pod) == nil && pod.DeletionTimestamp == nil {
			offer(pod)
		}
	})
}

// saw tells the pod's owner, if it is of our kind, what the cache shows now.
func (c *Control) saw(pod *corev1.Pod, alive bool) {
	ref := metav1.GetControllerOf(pod)
	if ref == nil || ref.Kind != c.kind.Kind || ref.APIVersion != c.kind.GroupVersion().String() {
		return
	}
	owner := loop.Key{Namespace: pod.Namespace, Name: ref.Name}
	if alive {
		c.Pending.SawPresent(owner, loop.KeyOf(pod))
	} else {
		c.Pending.SawGone(owner, loop.KeyOf(pod))
	}
	c.noted(owner)
}

// Matches reports whether a selector selects the object; an empty or broken
// one selects nothing.
func Matches(selector *metav1.LabelSelector, obj metav1.Object) bool {
	parsed, err := metav1.LabelSelectorAsSelector(selector)
	return err == nil && !parsed.Empty() && parsed.Matches(labels.Set(obj.GetLabels()))
}

// Owned returns the pods that the cache shows under the owner, without
// adopting or releasing any.
func (c *Control) Owned(owner types.UID) ([]*corev1.Pod, error) {
	return owned.By[corev1.Pod](c.pods, owner)
}

// Claim returns the owner's pods after adopting orphans that match its
// selector and releasing those that do not match any more. mayAdopt says which orphans
// come into question. live reads the owner from the server.
//
// A wait above 0 says that the pods may lack writes of ours: nothing may be
// made or deleted by them, and the owner is to be looked at again after it.
// That is asked before the cache is read. Asked afterwards, a write that the
// cache came to show in between would count as seen, and be made twice.
func (c *Control) Claim(ctx context.Context, owner Owner, selector *metav1.LabelSelector, mayAdopt func(*corev1.Pod) bool, live func(ctx context.Context) (metav1.Object, error)) (mine []*corev1.Pod, wait time.Duration, err error) {
	parsed, err := metav1.LabelSelectorAsSelector(selector)
	if err != nil {
		return nil, 0, fmt.Errorf("selector: %w", err)
	}
	settled, wait, err := c.Pending.Settled(ctx, loop.KeyOf(owner))
	if err != nil {
		return nil, 0, err
	}
	if settled {
		wait = 0
	}
	candidates, err := owned.By[corev1.Pod](c.pods, owner.GetUID())
	if err != nil {
		return nil, 0, err
	}
	free, err := owned.Orphans[corev1.Pod](c.pods, owner.GetNamespace())
	if err != nil {
		return nil, 0, err
	}
	for _, pod := range free {
		if mayAdopt(pod) {
			candidates = append(candidates, pod)
		}
	}
	mine, err = owned.Claim(ctx, &owned.Claimer{
		Owner:    owner,
		Kind:     c.kind,
		Selector: parsed,
		Live:     live,
		Patch:    func(ctx context.Context, name string, patch []byte) error { return c.Patch(ctx, owner, name, patch) },
	}, candidates)
	return mine, wait, err
}

// Patch sends a strategic merge patch for a pod.
func (c *Control) Patch(ctx context.Context, owner Owner, name string, patch []byte) error {
	_, err := c.client.CoreV1().Pods(owner.GetNamespace()).Patch(ctx, name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	return err
}

// Create makes the pod, whose name was chosen by the caller.
func (c *Control) Create(ctx context.Context, owner Owner, pod *corev1.Pod) error {
	return c.record(ctx, owner, pod, c.create(ctx, owner, pod))
}

// CreateNamed makes the pod under a new name that begins with its GenerateName;
// another one is tried when a name is taken.
func (c *Control) CreateNamed(ctx context.Context, owner Owner, pod *corev1.Pod) error {
	err := newname.Create(pod.GenerateName, maxName, func(name string) error {
		pod.Name = name
		return c.create(ctx, owner, pod)
	})
	return c.record(ctx, owner, pod, err)
}

func (c *Control) create(ctx context.Context, owner Owner, pod *corev1.Pod) error {
	key := loop.KeyOf(owner)
	c.Pending.Creating(key, loop.KeyOf(pod))
	_, err := c.client.CoreV1().Pods(pod.Namespace).Create(ctx, pod, metav1.CreateOptions{})
	c.Pending.Answered(key, loop.KeyOf(pod), err)
	return err
}

// record makes an event of the outcome of a pod's creation.
func (c *Control) record(ctx context.Context, owner Owner, pod *corev1.Pod, err error) error {
	if err != nil {
		if !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) && ctx.Err() == nil {
			c.Events.Eventf(owner, corev1.EventTypeWarning, "FailedCreate", "Error creating: %v", err)
		}
		return err
	}
	c.Events.Eventf(owner, corev1.EventTypeNormal, "SuccessfulCreate", "Created pod: %s", pod.Name)
	return nil
}

// Delete deletes the pod that was decided on, never another of its name.
func (c *Control) Delete(ctx context.Context, owner Owner, pod *corev1.Pod) error {
	key := loop.KeyOf(owner)
	c.Pending.Deleting(key, loop.KeyOf(pod), pod.UID)
	err := c.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, *metav1.NewPreconditionDeleteOptions(string(pod.UID)))
	if apierrors.IsConflict(err) {
		err = apierrors.NewNotFound(corev1.Resource("pods"), pod.Name) // another pod has the name now
	}
	c.Pending.Answered(key, loop.KeyOf(pod), err)
	if apierrors.IsNotFound(err) {
		return nil // gone already; the cache will show it
	}
	if err != nil {
		if ctx.Err() == nil {
			c.Events.Eventf(owner, corev1.EventTypeWarning, "FailedDelete", "Error deleting: %v", err)
		}
		return err
	}
	c.Events.Eventf(owner, corev1.EventTypeNormal, "SuccessfulDelete", "Deleted pod: %s", pod.Name)
	return nil
}

// FromTemplate returns a pod of the template that the owner controls, without
// a name.
func FromTemplate(owner Owner, kind schema.GroupVersionKind, template *corev1.PodTemplateSpec) *corev1.Pod {
	template = template.DeepCopy()
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace:       owner.GetNamespace(),
			Labels:          template.Labels,
			Annotations:     template.Annotations,
			Finalizers:      template.Finalizers,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(owner, kind)},
		},
		Spec: template.Spec,
	}
}

// maxName bounds a pod's name, which becomes its host name.
const maxName = 63

// Active returns those of all that are neither finished nor being deleted.
func Active(all []*corev1.Pod) []*corev1.Pod {
	var out []*corev1.Pod
	for _, pod := range all {
		if pods.Active(pod) {
			out = append(out, pod)
		}
	}
	return out
}

// inFlight bounds concurrent pod writes of one owner.
const inFlight = 32

// Parallel calls f(0) … f(n-1), at most inFlight at once, and returns the
// number of successes and the first error.
func Parallel(n int, f func(i int) error) (int, error) {
	var ok atomic.Int64
	var group errgroup.Group
	group.SetLimit(inFlight)
	for i := range n {
		group.Go(func() error {
			if err := f(i); err != nil {
				return err
			}
			ok.Add(1)
			return nil
		})
	}
	err := group.Wait()
	return int(ok.Load()), err
}

// SlowStart calls batch for n items in batches of 1, 2, 4 … and stops after
// the batch in which a call failed, so that a full quota is not hammered. begin
// is the index of the batch's first item. It returns the number of successes
// and the first error.
func SlowStart(n int, batch func(begin, size int) (ok int, err error)) (int, error) {
	done, begin := 0, 0
	for size := 1; begin < n; size *= 2 {
		size = min(size, n-begin)
		ok, err := batch(begin, size)
		done += ok
		if err != nil {
			return done, fmt.Errorf("%d of %d: %w", done, n, err)
		}
		begin += size
	}
	return done, nil
}
