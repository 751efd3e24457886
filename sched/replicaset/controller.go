// Package replicaset keeps as many pods running as each ReplicaSet asks for.
// It decides how many and which; where they run is the scheduler's choice.
package replicaset

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	appslisters "k8s.io/client-go/listers/apps/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/owned"
	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
)

// Kind is the kind this controller is about.
var Kind = appsv1.SchemeGroupVersion.WithKind("ReplicaSet")

const (
	name    = "replicaset"
	workers = 8
	// inFlight bounds concurrent pod writes of one ReplicaSet.
	inFlight = 32
)

type controller struct {
	*loop.Controller
	client  kubernetes.Interface
	clock   clock.PassiveClock
	events  record.EventRecorder
	lister  appslisters.ReplicaSetLister
	sets    cache.Indexer
	pods    cache.Indexer
	pending *loop.Pending
}

// New returns the loop. It watches ReplicaSets and Pods.
func New(env loop.Env) (loop.Loop, error) {
	setInformer := env.Informers.Apps().V1().ReplicaSets()
	podInformer := env.Informers.Core().V1().Pods()
	if err := errors.Join(owned.Index(podInformer.Informer()), owned.Index(setInformer.Informer())); err != nil {
		return loop.Loop{}, fmt.Errorf("index by controller: %w", err)
	}
	c := &controller{
		client: env.Client,
		clock:  env.Clock,
		events: env.Events.For("replicaset-controller"),
		lister: setInformer.Lister(),
		sets:   setInformer.Informer().GetIndexer(),
		pods:   podInformer.Informer().GetIndexer(),
		pending: loop.NewPending(env.Clock, func(ctx context.Context, key loop.Key) (metav1.Object, error) {
			return env.Client.CoreV1().Pods(key.Namespace).Get(ctx, key.Name, metav1.GetOptions{})
		}),
	}
	c.Controller = loop.New(name, env, workers, c.reconcile)
	loop.Watch(c.Controller, setInformer.Informer(), c.onSet)
	loop.Watch(c.Controller, podInformer.Informer(), c.onPod)
	return c.Loop(), nil
}

func (c *controller) onSet(old, rs *appsv1.ReplicaSet) {
	if old != nil && (rs == nil || rs.UID != old.UID) {
		c.pending.Forget(loop.KeyOf(old)) // its pods are no business of a namesake
	}
	c.Enqueue(loop.KeyOf(loop.Latest(old, rs)))
}

func (c *controller) onPod(old, pod *corev1.Pod) {
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
	if metav1.GetControllerOf(pod) == nil && pod.DeletionTimestamp == nil {
		c.offer(pod)
	}
}

// saw tells the pod's ReplicaSet, if it has one, what the cache shows now.
func (c *controller) saw(pod *corev1.Pod, alive bool) {
	ref := metav1.GetControllerOf(pod)
	if ref == nil || ref.Kind != Kind.Kind || !sameGroup(ref.APIVersion) {
		return
	}
	owner := loop.Key{Namespace: pod.Namespace, Name: ref.Name}
	if alive {
		c.pending.SawPresent(owner, loop.KeyOf(pod))
	} else {
		c.pending.SawGone(owner, loop.KeyOf(pod))
	}
	c.Enqueue(owner)
}

func sameGroup(apiVersion string) bool { return apiVersion == appsv1.SchemeGroupVersion.String() }

// offer wakes every ReplicaSet that could adopt the orphan.
func (c *controller) offer(pod *corev1.Pod) {
	sets, err := c.lister.ReplicaSets(pod.Namespace).List(labels.Everything())
	if err != nil {
		return
	}
	for _, rs := range sets {
		selector, err := metav1.LabelSelectorAsSelector(rs.Spec.Selector)
		if err == nil && !selector.Empty() && selector.Matches(labels.Set(pod.Labels)) {
			c.Enqueue(loop.KeyOf(rs))
		}
	}
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	rs, err := c.lister.ReplicaSets(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	mine, err := c.claim(ctx, rs)
	if err != nil {
		return err
	}

	var failed *failure
	var manageErr error
	if rs.DeletionTimestamp == nil {
		settled, wait, err := c.pending.Settled(ctx, key)
		if err != nil {
			return err
		}
		if settled {
			failed, manageErr = c.manage(ctx, rs, active(mine))
		} else {
			c.EnqueueAfter(key, wait)
		}
	}

	status, recheck := Status(rs, mine, failed, c.clock.Now())
	if recheck > 0 {
		c.EnqueueAfter(key, recheck)
	}
	if apiequality.Semantic.DeepEqual(status, rs.Status) {
		return manageErr
	}
	updated := rs.DeepCopy()
	updated.Status = status
	_, err = c.client.AppsV1().ReplicaSets(rs.Namespace).UpdateStatus(ctx, updated, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		err = nil
	}
	if err != nil {
		err = fmt.Errorf("update status: %w", err)
	}
	return errors.Join(manageErr, err)
}

// claim returns the ReplicaSet's pods, adopted and released as needed.
func (c *controller) claim(ctx context.Context, rs *appsv1.ReplicaSet) ([]*corev1.Pod, error) {
	selector, err := metav1.LabelSelectorAsSelector(rs.Spec.Selector)
	if err != nil {
		return nil, fmt.Errorf("selector: %w", err)
	}
	candidates, err := owned.By[corev1.Pod](c.pods, rs.UID)
	if err != nil {
		return nil, err
	}
	free, err := owned.Orphans[corev1.Pod](c.pods, rs.Namespace)
	if err != nil {
		return nil, err
	}
	for _, pod := range free {
		if pods.Active(pod) {
			candidates = append(candidates, pod)
		}
	}
	return owned.Claim(ctx, &owned.Claimer{
		Owner:    rs,
		Kind:     Kind,
		Selector: selector,
		Live: func(ctx context.Context) (metav1.Object, error) {
			return c.client.AppsV1().ReplicaSets(rs.Namespace).Get(ctx, rs.Name, metav1.GetOptions{})
		},
		Patch: func(ctx context.Context, name string, patch []byte) error {
			_, err := c.client.CoreV1().Pods(rs.Namespace).Patch(ctx, name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
			return err
		},
	}, candidates)
}

func active(all []*corev1.Pod) []*corev1.Pod {
	var out []*corev1.Pod
	for _, pod := range all {
		if pods.Active(pod) {
			out = append(out, pod)
		}
	}
	return out
}

// manage carries out Decide. The failure, if any, is for the status, the error
// for the queue.
func (c *controller) manage(ctx context.Context, rs *appsv1.ReplicaSet, mine []*corev1.Pod) (*failure, error) {
	var perNode map[string]int
	if len(mine) > int(ptr.Deref(rs.Spec.Replicas, 1)) {
		perNode = c.perNode(rs, mine)
	}
	d := Decide(rs, mine, perNode, c.clock.Now())
	switch {
	case d.Create > 0:
		_, err := slowStart(d.Create, func(size int) (int, error) {
			return parallel(size, func(int) error { return c.create(ctx, rs) })
		})
		if err == nil || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			return nil, nil // nothing can be created any more, and that is as it should be
		}
		return &failure{reason: "FailedCreate", err: cause(err)}, err
	case len(d.Delete) > 0:
		_, err := parallel(len(d.Delete), func(i int) error { return c.delete(ctx, rs, d.Delete[i]) })
		if err == nil {
			return nil, nil
		}
		return &failure{reason: "FailedDelete", err: err}, err
	}
	return nil, nil
}

// cause returns the server's own words for the condition's message: the count
// that wraps them changes with every pass and would rewrite the status.
func cause(err error) error {
	for {
		next := errors.Unwrap(err)
		if next == nil {
			return err
		}
		err = next
	}
}

// parallel calls f(0) … f(n-1), at most inFlight at once, and returns the
// number of successes and the first error.
func parallel(n int, f func(i int) error) (int, error) {
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

func (c *controller) create(ctx context.Context, rs *appsv1.ReplicaSet) error {
	owner, pod := loop.KeyOf(rs), NewPod(rs)
	c.pending.Creating(owner, loop.KeyOf(pod))
	_, err := c.client.CoreV1().Pods(pod.Namespace).Create(ctx, pod, metav1.CreateOptions{})
	c.pending.Answered(owner, loop.KeyOf(pod), err)
	if err != nil {
		if !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) && ctx.Err() == nil {
			c.events.Eventf(rs, corev1.EventTypeWarning, "FailedCreate", "Error creating: %v", err)
		}
		return err
	}
	c.events.Eventf(rs, corev1.EventTypeNormal, "SuccessfulCreate", "Created pod: %s", pod.Name)
	return nil
}

func (c *controller) delete(ctx context.Context, rs *appsv1.ReplicaSet, pod *corev1.Pod) error {
	owner := loop.KeyOf(rs)
	c.pending.Deleting(owner, loop.KeyOf(pod), pod.UID)
	err := c.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, *metav1.NewPreconditionDeleteOptions(string(pod.UID)))
	if apierrors.IsConflict(err) {
		err = apierrors.NewNotFound(corev1.Resource("pods"), pod.Name) // another pod has the name now
	}
	c.pending.Answered(owner, loop.KeyOf(pod), err)
	if apierrors.IsNotFound(err) {
		return nil // gone already; the cache will show it
	}
	if err != nil {
		if ctx.Err() == nil {
			c.events.Eventf(rs, corev1.EventTypeWarning, "FailedDelete", "Error deleting: %v", err)
		}
		return err
	}
	c.events.Eventf(rs, corev1.EventTypeNormal, "SuccessfulDelete", "Deleted pod: %s", pod.Name)
	return nil
}

// perNode counts active pods by node over the ReplicaSets that share rs's
// controller (a Deployment's old and new ones), or of rs alone.
func (c *controller) perNode(rs *appsv1.ReplicaSet, mine []*corev1.Pod) map[string]int {
	counts := map[string]int{}
	add := func(list []*corev1.Pod) {
		for _, pod := range list {
			if pods.Active(pod) && pod.Spec.NodeName != "" {
				counts[pod.Spec.NodeName]++
			}
		}
	}
	add(mine)
	ref := metav1.GetControllerOf(rs)
	if ref == nil {
		return counts
	}
	siblings, err := owned.By[appsv1.ReplicaSet](c.sets, ref.UID)
	if err != nil {
		return counts
	}
	for _, sibling := range siblings {
		if sibling.UID == rs.UID {
			continue
		}
		if list, err := owned.By[corev1.Pod](c.pods, sibling.UID); err == nil {
			add(list)
		}
	}
	return counts
}
