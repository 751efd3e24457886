// Package hpa scales what HorizontalPodAutoscalers point at to the number of
// replicas at which each uses as much as its target says. Every fifteen seconds it
// reads metrics.k8s.io, custom.metrics.k8s.io and external.metrics.k8s.io, as far as
// the metrics of an autoscaler are there, and writes scale subresources.
package hpa

import (
	"context"
	"fmt"
	"sync"
	"time"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	autoscalinglisters "k8s.io/client-go/listers/autoscaling/v2"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/internal/scales"
	"github.com/clusterd/clusterd/sched/loop"
)

// period is the time between two looks at one autoscaler.
const period = 15 * time.Second

// metricsTimeout is how long the metrics of one autoscaler may take: nodes are asked
// for them.
const metricsTimeout = 12 * time.Second

type controller struct {
	*loop.Controller
	client  kubernetes.Interface
	events  record.EventRecorder
	clock   clock.PassiveClock
	scalers autoscalinglisters.HorizontalPodAutoscalerLister
	pods    corelisters.PodLister
	scales  *scales.Client

	mu        sync.Mutex // guards histories
	histories map[loop.Key]History
}

// New returns the loop. It watches HorizontalPodAutoscalers and reads Pods.
func New(env loop.Env) loop.Loop {
	scalers, pods := env.Informers.Autoscaling().V2().HorizontalPodAutoscalers(), env.Informers.Core().V1().Pods()
	c := &controller{
		client: env.Client, events: env.Events.For("horizontal-pod-autoscaler"), clock: env.Clock,
		scalers: scalers.Lister(), pods: pods.Lister(), scales: scales.New(env.Client),
		histories: map[loop.Key]History{},
	}
	c.Controller = loop.New("hpa", env, 5, c.reconcile)
	loop.Watch(c.Controller, scalers.Informer(), func(old, a *autoscalingv2.HorizontalPodAutoscaler) {
		if a == nil || old == nil || old.Generation != a.Generation {
			c.Enqueue(loop.KeyOf(loop.Latest(old, a)))
		}
	})
	loop.Watch(c.Controller, pods.Informer(), func(_, _ *corev1.Pod) {}) // to be filled before work begins
	return c.Loop()
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	a, err := c.scalers.HorizontalPodAutoscalers(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		c.remember(key, nil)
		return nil
	}
	if err != nil {
		return err
	}
	// Whatever comes of it: the next look is due. A failure is not tried again
	// sooner, what metrics say does not change so fast.
	c.EnqueueAfter(key, period)
	status := c.look(ctx, key, a)
	if apiequality.Semantic.DeepEqual(status, a.Status) {
		return nil
	}
	updated := a.DeepCopy()
	updated.Status = status
	_, err = c.client.AutoscalingV2().HorizontalPodAutoscalers(key.Namespace).UpdateStatus(ctx, updated, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("update status: %w", err)
	}
	return nil
}

// remember keeps the history of an autoscaler; nil: forgets it.
func (c *controller) remember(key loop.Key, h *History) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if h == nil {
		delete(c.histories, key)
		return
	}
	c.histories[key] = *h
}

func (c *controller) history(key loop.Key) History {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.histories[key]
}

// look decides, scales and tells what it did in the status.
func (c *controller) look(ctx context.Context, key loop.Key, a *autoscalingv2.HorizontalPodAutoscaler) autoscalingv2.HorizontalPodAutoscalerStatus {
	now := c.clock.Now()
	status := *a.Status.DeepCopy()
	failed := func(kind autoscalingv2.HorizontalPodAutoscalerConditionType, reason, message string) autoscalingv2.HorizontalPodAutoscalerStatus {
		conditions{&status, now}.set(kind, false, reason, message)
		c.events.Event(a, corev1.EventTypeWarning, reason, message)
		return status
	}
	if other := c.rival(a); other != "" {
		return failed(autoscalingv2.ScalingActive, "AmbiguousSelector", fmt.Sprintf("%s %s is the target of HorizontalPodAutoscaler %s too; delete one of them", a.Spec.ScaleTargetRef.Kind, a.Spec.ScaleTargetRef.Name, other))
	}
	ref := a.Spec.ScaleTargetRef
	target, of, err := c.scales.Get(ctx, a.Namespace, ref.APIVersion, ref.Kind, ref.Name)
	if err != nil {
		return failed(autoscalingv2.AbleToScale, "FailedGetScale", fmt.Sprintf("the HPA controller was unable to get the target's current scale: %v", err))
	}
	in := Input{Autoscaler: a.DeepCopy(), Replicas: target.Spec.Replicas, Exist: target.Status.Replicas, Now: now}
	conditions{&in.Autoscaler.Status, now}.set(autoscalingv2.AbleToScale, true, "SucceededGetScale", "the HPA controller was able to get the target's current scale")
	status = *in.Autoscaler.Status.DeepCopy()
	selector, err := labels.Parse(target.Status.Selector)
	if err != nil || selector.Empty() {
		return failed(autoscalingv2.ScalingActive, "InvalidSelector", "the HPA target's scale is missing a selector")
	}
	if in.Pods, err = c.pods.Pods(key.Namespace).List(selector); err != nil {
		return failed(autoscalingv2.ScalingActive, "FailedListPods", err.Error())
	}
	c.ask(ctx, &in, target.Status.Selector)
	// Metrics of nodes that do not answer take their time.
	in.Now = c.clock.Now()

	out := Decide(in, c.history(key))
	for _, fault := range out.Faults {
		c.events.Event(a, corev1.EventTypeWarning, fault.Reason, fault.Message)
	}
	if out.Failed {
		c.events.Event(a, corev1.EventTypeWarning, "FailedComputeMetricsReplicas", "no replica count follows from the metrics; the replicas stay as they are")
	}
	if out.Replicas != in.Replicas {
		c.write(ctx, a, target, of, &out, in.Now)
	}
	c.remember(key, &out.History)
	return out.Status
}

// write scales the target.
func (c *controller) write(ctx context.Context, a *autoscalingv2.HorizontalPodAutoscaler, target *autoscalingv1.Scale, of schema.GroupResource, out *Outcome, now time.Time) {
	before := target.Spec.Replicas
	target.Spec.Replicas = out.Replicas
	if err := c.scales.Update(ctx, a.Namespace, of, target); err != nil {
		conditions{&out.Status, now}.set(autoscalingv2.AbleToScale, false, "FailedUpdateScale", fmt.Sprintf("the HPA controller was unable to update the target scale: %v", err))
		c.events.Eventf(a, corev1.EventTypeWarning, "FailedRescale", "New size: %d; reason: %s; error: %v", out.Replicas, out.Reason, err)
		out.Status.DesiredReplicas = before
		return
	}
	conditions{&out.Status, now}.set(autoscalingv2.AbleToScale, true, "SucceededRescale", fmt.Sprintf("the HPA controller was able to update the target scale to %d", out.Replicas))
	c.events.Eventf(a, corev1.EventTypeNormal, "SuccessfulRescale", "New size: %d; reason: %s", out.Replicas, out.Reason)
	stamp := metav1.NewTime(now)
	out.Status.LastScaleTime = &stamp
	out.History = out.History.Scaled(before, out.Replicas, now)
}

// rival names another autoscaler with the same target, "" if there is none.
func (c *controller) rival(a *autoscalingv2.HorizontalPodAutoscaler) string {
	all, err := c.scalers.HorizontalPodAutoscalers(a.Namespace).List(labels.Everything())
	if err != nil {
		return ""
	}
	for _, other := range all {
		if other.Name != a.Name && same(other.Spec.ScaleTargetRef, a.Spec.ScaleTargetRef) {
			return other.Name
		}
	}
	return ""
}

func same(a, b autoscalingv2.CrossVersionObjectReference) bool {
	return a.Kind == b.Kind && a.Name == b.Name && schema.FromAPIVersionAndKind(a.APIVersion, a.Kind).Group == schema.FromAPIVersionAndKind(b.APIVersion, b.Kind).Group
}
