// Package cronjob makes Jobs by the clock.
package cronjob

import (
	"context"
	"errors"
	"fmt"
	"slices"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	batchlisters "k8s.io/client-go/listers/batch/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/owned"
	"github.com/clusterd/clusterd/sched/loop"
)

// Kind is the kind this controller is about.
var Kind = batchv1.SchemeGroupVersion.WithKind("CronJob")

const (
	name    = "cronjob"
	workers = 4
)

type controller struct {
	*loop.Controller
	client kubernetes.Interface
	clock  clock.PassiveClock
	events record.EventRecorder
	lister batchlisters.CronJobLister
	jobs   cache.Indexer
}

// New returns the loop. It watches CronJobs and Jobs.
func New(env loop.Env) (loop.Loop, error) {
	informer := env.Informers.Batch().V1().CronJobs()
	jobs := env.Informers.Batch().V1().Jobs()
	if err := owned.Index(jobs.Informer()); err != nil {
		return loop.Loop{}, fmt.Errorf("index jobs by controller: %w", err)
	}
	c := &controller{
		client: env.Client, clock: env.Clock, events: env.Events.For("cronjob-controller"),
		lister: informer.Lister(), jobs: jobs.Informer().GetIndexer(),
	}
	c.Controller = loop.New(name, env, workers, c.reconcile)
	loop.Watch(c.Controller, informer.Informer(), func(old, cj *batchv1.CronJob) {
		c.Enqueue(loop.KeyOf(loop.Latest(old, cj)))
	})
	loop.Watch(c.Controller, jobs.Informer(), func(old, j *batchv1.Job) {
		for _, o := range []*batchv1.Job{old, j} {
			if o == nil {
				continue
			}
			if ref := metav1.GetControllerOf(o); ref != nil && ref.Kind == Kind.Kind && ref.APIVersion == Kind.GroupVersion().String() {
				c.Enqueue(loop.Key{Namespace: o.Namespace, Name: ref.Name})
			}
		}
	})
	return c.Loop(), nil
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	cj, err := c.lister.CronJobs(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	jobs, err := owned.By[batchv1.Job](c.jobs, cj.UID)
	if err != nil {
		return err
	}
	if jobs, err = c.withUnseen(ctx, cj, jobs); err != nil {
		return err
	}
	plan := Decide(Input{CronJob: cj, Jobs: jobs, Now: c.clock.Now()})
	if plan.Recheck > 0 {
		c.EnqueueAfter(key, plan.Recheck)
	}
	for _, say := range plan.Events {
		c.events.Event(cj, say.Type, say.Reason, say.Message)
	}
	for _, j := range append(plan.Delete, plan.Replace...) {
		if err := c.remove(ctx, cj, j); err != nil {
			return err
		}
	}
	if plan.Create != nil {
		stored, err := c.create(ctx, cj, plan.Create)
		if err != nil {
			return err
		}
		if stored != nil {
			plan.Status.Active = append(plan.Status.Active, reference(stored))
		}
		plan.Status.LastScheduleTime = ptr.To(metav1.NewTime(plan.At))
	}
	return c.updateStatus(ctx, cj, plan.Status)
}

// withUnseen adds the active Jobs that exist but are not in the cache, which may be older
// than the status that names them. One that was orphaned is none of the CronJob's any more.
func (c *controller) withUnseen(ctx context.Context, cj *batchv1.CronJob, jobs []*batchv1.Job) ([]*batchv1.Job, error) {
	for _, ref := range cj.Status.Active {
		if slices.ContainsFunc(jobs, func(j *batchv1.Job) bool { return j.UID == ref.UID }) {
			continue
		}
		live, err := c.client.BatchV1().Jobs(cj.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
		case err != nil:
			return nil, fmt.Errorf("look for active job %s: %w", ref.Name, err)
		case live.UID == ref.UID && metav1.IsControlledBy(live, cj):
			jobs = append(slices.Clip(jobs), live)
		}
	}
	return jobs, nil
}

// errTaken is returned when the Job's name belongs to another owner's object.
var errTaken = errors.New("the name is taken by a job of another")

func (c *controller) create(ctx context.Context, cj *batchv1.CronJob, j *batchv1.Job) (*batchv1.Job, error) {
	api := c.client.BatchV1().Jobs(cj.Namespace)
	stored, err := api.Create(ctx, j, metav1.CreateOptions{})
	switch {
	case err == nil:
		c.events.Eventf(cj, corev1.EventTypeNormal, "SuccessfulCreate", "Created job %v", j.Name)
		return stored, nil
	case apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause):
		return nil, nil
	case apierrors.IsAlreadyExists(err):
		live, err := api.Get(ctx, j.Name, metav1.GetOptions{})
		if err != nil {
			return nil, fmt.Errorf("read job of the same name: %w", err)
		}
		if ref := metav1.GetControllerOf(live); ref != nil && ref.UID == cj.UID {
			return nil, nil // made before; the cache will show it
		}
		err = fmt.Errorf("job %s: %w", j.Name, errTaken)
		c.events.Eventf(cj, corev1.EventTypeWarning, "FailedCreate", "Error creating job: %v", err)
		return nil, err
	}
	if ctx.Err() == nil {
		c.events.Eventf(cj, corev1.EventTypeWarning, "FailedCreate", "Error creating job: %v", err)
	}
	return nil, fmt.Errorf("create job: %w", err)
}

func (c *controller) remove(ctx context.Context, cj *batchv1.CronJob, j *batchv1.Job) error {
	if j.DeletionTimestamp != nil {
		return nil
	}
	err := c.client.BatchV1().Jobs(j.Namespace).Delete(ctx, j.Name, metav1.DeleteOptions{
		Preconditions:     &metav1.Preconditions{UID: &j.UID},
		PropagationPolicy: ptr.To(metav1.DeletePropagationBackground),
	})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	if err != nil {
		c.events.Eventf(cj, corev1.EventTypeWarning, "FailedDelete", "Deleted job: %v", err)
		return fmt.Errorf("delete job %s: %w", j.Name, err)
	}
	c.events.Eventf(cj, corev1.EventTypeNormal, "SuccessfulDelete", "Deleted job %v", j.Name)
	return nil
}

func (c *controller) updateStatus(ctx context.Context, cj *batchv1.CronJob, status batchv1.CronJobStatus) error {
	// Which version of a running Job was seen last is not worth a write.
	same := *status.DeepCopy()
	if len(same.Active) == len(cj.Status.Active) {
		for i := range same.Active {
			same.Active[i].ResourceVersion = cj.Status.Active[i].ResourceVersion
		}
	}
	if apiequality.Semantic.DeepEqual(cj.Status, same) {
		return nil
	}
	updated := cj.DeepCopy()
	updated.Status = status
	_, err := c.client.BatchV1().CronJobs(cj.Namespace).UpdateStatus(ctx, updated, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("update status: %w", err)
	}
	return nil
}
