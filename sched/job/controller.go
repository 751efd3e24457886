// Package job runs pods until enough of them have succeeded, and counts each
// of them exactly once.
package job

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	batchlisters "k8s.io/client-go/listers/batch/v1"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/podctl"
	"github.com/clusterd/clusterd/sched/loop"
)

// Kind is the kind this controller is about.
var Kind = batchv1.SchemeGroupVersion.WithKind("Job")

const (
	name    = "job"
	workers = 8
	// controllerName is the managedBy of the Jobs that are ours.
	controllerName = "kubernetes.io/job-controller"
)

type controller struct {
	*loop.Controller
	client kubernetes.Interface
	clock  clock.PassiveClock
	lister batchlisters.JobLister
	pods   *podctl.Control
}

// New returns the loop. It watches Jobs and Pods.
func New(env loop.Env) (loop.Loop, error) {
	informer := env.Informers.Batch().V1().Jobs()
	control, err := podctl.New(env, Kind, "job-controller")
	if err != nil {
		return loop.Loop{}, err
	}
	c := &controller{client: env.Client, clock: env.Clock, lister: informer.Lister(), pods: control}
	c.Controller = loop.New(name, env, workers, c.reconcile)
	loop.Watch(c.Controller, informer.Informer(), func(old, j *batchv1.Job) {
		if old != nil && (j == nil || j.UID != old.UID) {
			control.Pending.Forget(loop.KeyOf(old))
		}
		c.Enqueue(loop.KeyOf(loop.Latest(old, j)))
	})
	control.Watch(c.Controller, c.Enqueue, c.offer)
	return c.Loop(), nil
}

func ours(j *batchv1.Job) bool { return ptr.Deref(j.Spec.ManagedBy, controllerName) == controllerName }

// offer wakes every Job that could adopt the orphan.
func (c *controller) offer(pod *corev1.Pod) {
	jobs, err := c.lister.Jobs(pod.Namespace).List(labels.Everything())
	if err != nil {
		return
	}
	for _, j := range jobs {
		if podctl.Matches(j.Spec.Selector, pod) {
			c.Enqueue(loop.KeyOf(j))
		}
	}
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	j, err := c.lister.Jobs(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if !ours(j) {
		return nil // another controller's
	}
	// Only a pod with the finalizer can be counted: others are not adopted.
	mine, wait, err := c.pods.Claim(ctx, j, j.Spec.Selector, tracked, func(ctx context.Context) (metav1.Object, error) {
		return c.client.BatchV1().Jobs(j.Namespace).Get(ctx, j.Name, metav1.GetOptions{})
	})
	if err != nil {
		return err
	}
	if mine, err = c.unseen(ctx, j, mine); err != nil {
		return err
	}
	plan := Decide(Input{Job: j, Pods: mine, Now: c.clock.Now()})
	if plan.Recheck > 0 {
		c.EnqueueAfter(key, plan.Recheck)
	}
	if err := c.updateStatus(ctx, j, plan.Status); err != nil {
		return err // nothing else may happen on a stale version
	}
	if err := c.end(ctx, j, plan); err != nil {
		return err
	}
	if wait > 0 {
		c.EnqueueAfter(key, wait)
		return nil
	}
	return c.create(ctx, j, plan.Create)
}

// create makes the planned pods.
func (c *controller) create(ctx context.Context, j *batchv1.Job, planned []Create) error {
	_, err := podctl.SlowStart(len(planned), func(begin, size int) (int, error) {
		return podctl.Parallel(size, func(i int) error { return c.pods.CreateNamed(ctx, j, newPod(j, planned[begin+i])) })
	})
	if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return nil
	}
	return err
}

// unseen adds to the pods those that the status lists as not yet counted and the cache
// does not show: one that has gone is counted for good, one that the cache has not come
// to yet would be counted again.
func (c *controller) unseen(ctx context.Context, j *batchv1.Job, mine []*corev1.Pod) ([]*corev1.Pod, error) {
	waits := ptr.Deref(j.Status.UncountedTerminatedPods, batchv1.UncountedTerminatedPods{})
	missing := map[types.UID]bool{}
	for _, uid := range slices.Concat(waits.Succeeded, waits.Failed) {
		missing[uid] = true
	}
	for _, pod := range mine {
		delete(missing, pod.UID)
	}
	if len(missing) == 0 {
		return mine, nil
	}
	list, err := c.client.CoreV1().Pods(j.Namespace).List(ctx, metav1.ListOptions{LabelSelector: metav1.FormatLabelSelector(j.Spec.Selector)})
	if err != nil {
		return nil, fmt.Errorf("look for pods that are not counted yet: %w", err)
	}
	mine = slices.Clone(mine)
	for i := range list.Items {
		if pod := &list.Items[i]; missing[pod.UID] {
			mine = append(mine, pod)
		}
	}
	return mine, nil
}

// end carries out what the plan says about pods that are and the Job itself.
func (c *controller) end(ctx context.Context, j *batchv1.Job, plan Plan) error {
	_, released := podctl.Parallel(len(plan.Release), func(i int) error { return c.release(ctx, plan.Release[i]) })
	_, dropped := podctl.Parallel(len(plan.Drop), func(i int) error {
		// First the finalizer: then its end is none that counts.
		if err := c.release(ctx, plan.Drop[i]); err != nil {
			return err
		}
		return c.pods.Delete(ctx, j, plan.Drop[i])
	})
	_, stopped := podctl.Parallel(len(plan.Stop), func(i int) error { return c.pods.Delete(ctx, j, plan.Stop[i]) })
	if err := errors.Join(released, dropped, stopped); err != nil || !plan.Expired {
		return err
	}
	err := c.client.BatchV1().Jobs(j.Namespace).Delete(ctx, j.Name, metav1.DeleteOptions{
		Preconditions:     &metav1.Preconditions{UID: &j.UID, ResourceVersion: &j.ResourceVersion},
		PropagationPolicy: ptr.To(metav1.DeletePropagationForeground),
	})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete expired job: %w", err)
	}
	return nil
}

// release takes the tracking finalizer off a pod.
func (c *controller) release(ctx context.Context, pod *corev1.Pod) error {
	if !tracked(pod) {
		return nil
	}
	return releasePod(ctx, c.client, pod)
}

func releasePod(ctx context.Context, client kubernetes.Interface, pod *corev1.Pod) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid":                                 pod.UID,
		"$deleteFromPrimitiveList/finalizers": []string{batchv1.JobTrackingFinalizer},
	}})
	if err != nil {
		return fmt.Errorf("encode finalizers: %w", err)
	}
	_, err = client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, strategic, patch, metav1.PatchOptions{})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("take the finalizer off pod %s: %w", pod.Name, err)
	}
	return nil
}

func (c *controller) updateStatus(ctx context.Context, j *batchv1.Job, status batchv1.JobStatus) error {
	if apiequality.Semantic.DeepEqual(j.Status, status) {
		return nil
	}
	updated := j.DeepCopy()
	updated.Status = status
	stored, err := c.client.BatchV1().Jobs(j.Namespace).UpdateStatus(ctx, updated, metav1.UpdateOptions{})
	if err != nil {
		return fmt.Errorf("update status: %w", err)
	}
	c.tell(j, stored)
	return nil
}

// tell makes events of what changed in the Job's conditions.
func (c *controller) tell(old, j *batchv1.Job) {
	for i := range j.Status.Conditions {
		now := &j.Status.Conditions[i]
		was := condition(&old.Status, now.Type)
		if was != nil && was.Status == now.Status {
			continue
		}
		switch {
		case now.Type == batchv1.JobComplete && now.Status == corev1.ConditionTrue:
			c.pods.Events.Event(j, corev1.EventTypeNormal, "Completed", "Job completed")
		case now.Type == batchv1.JobFailed && now.Status == corev1.ConditionTrue:
			c.pods.Events.Event(j, corev1.EventTypeWarning, now.Reason, now.Message)
		case now.Type == batchv1.JobSuspended && now.Status == corev1.ConditionTrue:
			c.pods.Events.Event(j, corev1.EventTypeNormal, "Suspended", now.Message)
		case now.Type == batchv1.JobSuspended:
			c.pods.Events.Event(j, corev1.EventTypeNormal, "Resumed", now.Message)
		}
	}
}
