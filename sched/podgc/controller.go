// Package podgc removes pods that no other loop removes: those of nodes that no
// longer exist or are out of service, those that a node has ended by itself and
// cannot say so, those deleted before they got a node, and the oldest finished ones
// when there are too many.
package podgc

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	coordinationlisters "k8s.io/client-go/listers/coordination/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/apis/coordination"
	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
)

const (
	// every is how often all pods are looked over.
	every = 20 * time.Second
	// quarantine is how long a node must be missing before its pods count as lost
	// with it: it may be about to register.
	quarantine = 40 * time.Second
	// maxFinished is how many finished pods are kept.
	maxFinished = 12500
)

// all is the one key of this loop: every pass looks at everything.
var all = loop.Key{Name: "all"}

type controller struct {
	*loop.Controller
	client  kubernetes.Interface
	clock   clock.PassiveClock
	pods    corelisters.PodLister
	nodes   corelisters.NodeLister
	leases  coordinationlisters.LeaseNamespaceLister
	missing map[string]time.Time // since when a node is missing; the one worker's
}

// New returns the loop. It watches Pods, Nodes and their Leases.
func New(env loop.Env) loop.Loop {
	core, leases := env.Informers.Core().V1(), env.Informers.Coordination().V1().Leases()
	c := &controller{
		client:  env.Client,
		clock:   env.Clock,
		pods:    core.Pods().Lister(),
		nodes:   core.Nodes().Lister(),
		leases:  leases.Lister().Leases(corev1.NamespaceNodeLease),
		missing: map[string]time.Time{},
	}
	c.Controller = loop.New("podgc", env, 1, c.reconcile)
	loop.Watch(c.Controller, core.Nodes().Informer(), func(old, node *corev1.Node) {
		if node == nil || outOfService(node) && (old == nil || !outOfService(old)) {
			c.Enqueue(all)
		}
	})
	loop.Watch(c.Controller, leases.Informer(), func(old, lease *coordinationv1.Lease) {
		if lease != nil && coordination.Taken(lease) && (old == nil || !coordination.Taken(old)) {
			c.Enqueue(all)
		}
	})
	loop.Watch(c.Controller, core.Pods().Informer(), func(old, pod *corev1.Pod) {
		if pod != nil && pod.DeletionTimestamp != nil && (old == nil || old.DeletionTimestamp == nil) {
			c.Enqueue(all) // its node may be gone
		}
	})
	return loop.Loop{Name: "podgc", Run: func(ctx context.Context) error {
		return c.RunReady(ctx, func() { c.Enqueue(all) })
	}}
}

func (c *controller) reconcile(ctx context.Context, _ loop.Key) error {
	c.EnqueueAfter(all, every)
	everyPod, err := c.pods.List(labels.Everything())
	if err != nil {
		return err
	}
	nodes, err := c.nodes.List(labels.Everything())
	if err != nil {
		return err
	}
	known := map[string]*corev1.Node{}
	for _, node := range nodes {
		known[node.Name] = node
	}
	now := c.clock.Now()
	c.observe(everyPod, known, now)

	var errs []error
	for _, victim := range Decide(everyPod, known, c.missing, c.taken, now) {
		// What the cache says is asked of the server, after the pod was seen.
		confirm := map[Reason]func(context.Context, string) (bool, error){NodeGone: c.really, Fenced: c.stillTaken}[victim.Reason]
		if confirm != nil {
			if sure, err := confirm(ctx, victim.Pod.Spec.NodeName); err != nil || !sure {
				errs = append(errs, err)
				continue
			}
		}
		errs = append(errs, c.remove(ctx, victim))
	}
	return errors.Join(errs...)
}

// observe keeps the list of missing nodes that pods still name.
func (c *controller) observe(everyPod []*corev1.Pod, known map[string]*corev1.Node, now time.Time) {
	still := map[string]bool{}
	for _, pod := range everyPod {
		name := pod.Spec.NodeName
		if name == "" || known[name] != nil {
			continue
		}
		still[name] = true
		if _, ok := c.missing[name]; !ok {
			c.missing[name] = now
		}
	}
	for name := range c.missing {
		if !still[name] {
			delete(c.missing, name)
		}
	}
}

// really asks the server whether a node that the cache lacks does not exist.
func (c *controller) really(ctx context.Context, node string) (bool, error) {
	_, err := c.client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("look for node %s: %w", node, err)
	}
	return false, nil
}

// taken tells, as the cache has it, whether a node's Lease was taken from it.
func (c *controller) taken(node string) bool {
	lease, err := c.leases.Get(node)
	return err == nil && coordination.Taken(lease)
}

// stillTaken asks the server for the same. If it is so now, it was so when the
// pod was seen: the node has not reported since what it runs, and will report
// this pod as failed.
func (c *controller) stillTaken(ctx context.Context, node string) (bool, error) {
	lease, err := c.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(ctx, node, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return false, nil
	case err != nil:
		return false, fmt.Errorf("look for the lease of node %s: %w", node, err)
	}
	return coordination.Taken(lease), nil
}

func (c *controller) remove(ctx context.Context, v Victim) error {
	pod := v.Pod
	klog.FromContext(ctx).V(2).Info("removing pod", "pod", klog.KObj(pod), "node", pod.Spec.NodeName, "why", v.Reason)
	if !pods.Finished(pod) && (v.Reason == NodeGone || v.Reason == OutOfService || v.Reason == Fenced) {
		// Controllers that count this pod should see how it ended.
		if err := c.fail(ctx, pod, v.Reason == NodeGone); err != nil {
			return err
		}
	}
	options := metav1.NewDeleteOptions(0)
	options.Preconditions = metav1.NewUIDPreconditions(string(pod.UID))
	err := c.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, *options)
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("remove pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return nil
}

// fail reports that the pod has failed. disrupted: no eviction has set a reason before.
func (c *controller) fail(ctx context.Context, pod *corev1.Pod, disrupted bool) error {
	status := map[string]any{"phase": corev1.PodFailed}
	if disrupted {
		status["conditions"] = []corev1.PodCondition{{
			Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue,
			Reason: "DeletionByPodGC", Message: "PodGC: node no longer exists",
			LastTransitionTime: metav1.NewTime(c.clock.Now()),
		}}
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": pod.UID}, "status": status})
	if err != nil {
		return fmt.Errorf("encode pod status: %w", err)
	}
	_, err = c.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("fail pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return nil
}
