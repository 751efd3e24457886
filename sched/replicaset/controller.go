// Package replicaset keeps as many pods running as each ReplicaSet asks for.
// It decides how many and which; where they run is the scheduler's choice.
package replicaset

import (
	"context"
	"errors"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	appslisters "k8s.io/client-go/listers/apps/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/owned"
	"github.com/clusterd/clusterd/sched/internal/podctl"
	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
)

// Kind is the kind this controller is about.
var Kind = appsv1.SchemeGroupVersion.WithKind("ReplicaSet")

const (
	name    = "replicaset"
	workers = 8
)

type controller struct {
	*loop.Controller
	client kubernetes.Interface
	clock  clock.PassiveClock
	lister appslisters.ReplicaSetLister
	sets   cache.Indexer
	pods   *podctl.Control
}

// New returns the loop. It watches ReplicaSets and Pods.
func New(env loop.Env) (loop.Loop, error) {
	setInformer := env.Informers.Apps().V1().ReplicaSets()
	if err := owned.Index(setInformer.Informer()); err != nil {
		return loop.Loop{}, fmt.Errorf("index by controller: %w", err)
	}
	control, err := podctl.New(env, Kind, "replicaset-controller")
	if err != nil {
		return loop.Loop{}, err
	}
	c := &controller{
		client: env.Client,
		clock:  env.Clock,
		lister: setInformer.Lister(),
		sets:   setInformer.Informer().GetIndexer(),
		pods:   control,
	}
	c.Controller = loop.New(name, env, workers, c.reconcile)
	loop.Watch(c.Controller, setInformer.Informer(), c.onSet)
	control.Watch(c.Controller, c.wake, c.offer)
	return c.Loop(), nil
}

func (c *controller) onSet(old, rs *appsv1.ReplicaSet) {
	if old != nil && (rs == nil || rs.UID != old.UID) {
		c.pods.Pending.Forget(loop.KeyOf(old)) // its pods are no business of a namesake
	}
	c.Enqueue(loop.KeyOf(loop.Latest(old, rs)))
}

// A pass looks at all pods of its ReplicaSet. Events of large ones therefore
// gather for a while that grows with their size, so that n pods cost a number
// of passes that does not grow with n.
const (
	atOnce   = 32 // pods up to which nothing gathers
	perPod   = 100 * time.Microsecond
	maxPause = 200 * time.Millisecond
)

// pause is how long the pod events of a ReplicaSet gather.
func pause(replicas int32) time.Duration {
	if replicas <= atOnce {
		return 0
	}
	return min(time.Duration(replicas)*perPod, maxPause)
}

func (c *controller) wake(key loop.Key) {
	rs, err := c.lister.ReplicaSets(key.Namespace).Get(key.Name)
	if err != nil {
		c.Enqueue(key)
		return
	}
	if d := pause(max(ptr.Deref(rs.Spec.Replicas, 1), rs.Status.Replicas)); d > 0 {
		c.EnqueueAfter(key, d)
		return
	}
	c.Enqueue(key)
}

// offer wakes every ReplicaSet that could adopt the orphan.
func (c *controller) offer(pod *corev1.Pod) {
	sets, err := c.lister.ReplicaSets(pod.Namespace).List(labels.Everything())
	if err != nil {
		return
	}
	for _, rs := range sets {
		if podctl.Matches(rs.Spec.Selector, pod) {
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
	mine, wait, err := c.claim(ctx, rs)
	if err != nil {
		return err
	}

	var failed *failure
	var manageErr error
	switch {
	case rs.DeletionTimestamp != nil:
	case wait > 0:
		c.EnqueueAfter(key, wait)
	default:
		failed, manageErr = c.manage(ctx, rs, podctl.Active(mine))
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

// claim returns the ReplicaSet's pods, adopted and released as needed, and how
// long to wait if the cache may lack some.
func (c *controller) claim(ctx context.Context, rs *appsv1.ReplicaSet) ([]*corev1.Pod, time.Duration, error) {
	return c.pods.Claim(ctx, rs, rs.Spec.Selector, pods.Active, func(ctx context.Context) (metav1.Object, error) {
		return c.client.AppsV1().ReplicaSets(rs.Namespace).Get(ctx, rs.Name, metav1.GetOptions{})
	})
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
		_, err := podctl.SlowStart(d.Create, func(_, size int) (int, error) {
			return podctl.Parallel(size, func(int) error { return c.pods.CreateNamed(ctx, rs, NewPod(rs)) })
		})
		if err == nil || apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			return nil, nil // nothing can be created any more, and that is as it should be
		}
		return &failure{reason: "FailedCreate", err: cause(err)}, err
	case len(d.Delete) > 0:
		_, err := podctl.Parallel(len(d.Delete), func(i int) error { return c.pods.Delete(ctx, rs, d.Delete[i]) })
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
		if list, err := c.pods.Owned(sibling.UID); err == nil {
			add(list)
		}
	}
	return counts
}
