package cronjob

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/seconds"
)

// manyMissed is how many missed times are worth a warning: clocks may have
// jumped, or there was no leader for long.
const manyMissed = 100

// Input is all that Decide looks at. Decide changes none of it.
type Input struct {
	CronJob *batchv1.CronJob
	// Jobs are those that the CronJob controls, in any order, with those of its active
	// ones that the cache does not show yet: an active one that is not among them is gone.
	Jobs []*batchv1.Job
	Now  time.Time
}

// Plan is what one pass does, in the order of the fields.
type Plan struct {
	// Delete holds finished Jobs beyond the history limits.
	Delete []*batchv1.Job
	// Replace holds running Jobs that make room for Create.
	Replace []*batchv1.Job
	// Create is the Job that is due, nil if none is; At is its time.
	Create *batchv1.Job
	At     time.Time
	// Status is the new status if nothing is created.
	Status batchv1.CronJobStatus
	// Events are to be written.
	Events []Event
	// Recheck is the time until the next Job is due, 0 for never.
	Recheck time.Duration
}

// Event is one event about the CronJob.
type Event struct{ Type, Reason, Message string }

func (p *Plan) warn(reason, format string, args ...any) {
	p.Events = append(p.Events, Event{corev1.EventTypeWarning, reason, fmt.Sprintf(format, args...)})
}

// Decide computes what a CronJob has to do now. Of several times missed only
// the last is caught up with, and only within the starting deadline.
func Decide(in Input) Plan {
	cj := in.CronJob
	p := Plan{Status: *cj.Status.DeepCopy()}
	running := takeStock(&p, in)
	p.Delete = surplus(cj, in.Jobs)
	if cj.DeletionTimestamp != nil || ptr.Deref(cj.Spec.Suspend, false) {
		return p
	}
	times, err := read(cj)
	if err != nil {
		p.warn("UnparseableSchedule", "%v", err)
		return p
	}
	since := cj.CreationTimestamp.Time
	if t := cj.Status.LastScheduleTime; t != nil && t.After(since) {
		since = t.Time
	}
	anchor := since
	deadline := cj.Spec.StartingDeadlineSeconds
	if deadline != nil {
		if earliest := in.Now.Add(-seconds.Duration(*deadline)); earliest.After(since) {
			since = earliest
		}
	}
	if next := times.next(anchor, in.Now); !next.IsZero() {
		p.Recheck = max(next.Sub(in.Now), 0) + 10*time.Millisecond
	}
	at := times.last(anchor, since, in.Now)
	if at.IsZero() {
		return p
	}
	if n := times.missed(since, in.Now, manyMissed+1); n > manyMissed {
		p.warn("TooManyMissedTimes", "too many missed start times. Set or decrease .spec.startingDeadlineSeconds or check clock skew")
	}
	if deadline != nil && at.Add(seconds.Duration(*deadline)).Before(in.Now) {
		p.warn("MissSchedule", "Missed scheduled time to start a job: %s", at.UTC().Format(time.RFC1123Z))
		return p
	}
	job := newJob(cj, at)
	if slices.ContainsFunc(in.Jobs, func(j *batchv1.Job) bool { return j.Name == job.Name }) {
		p.Status.LastScheduleTime = ptr.To(metav1.NewTime(at)) // made, but not written down
		return p
	}
	switch cj.Spec.ConcurrencyPolicy {
	case batchv1.ForbidConcurrent:
		if len(running) > 0 {
			p.Events = append(p.Events, Event{corev1.EventTypeNormal, "JobAlreadyActive", "Not starting job because prior execution is running and concurrency policy is Forbid"})
			return p
		}
	case batchv1.ReplaceConcurrent:
		p.Replace, p.Status.Active = running, nil
	}
	p.Create, p.At = job, at
	return p
}

// takeStock lists the Jobs that run, and returns them.
func takeStock(p *Plan, in Input) (running []*batchv1.Job) {
	was := map[types.UID]string{}
	for _, ref := range p.Status.Active {
		was[ref.UID] = ref.Name
	}
	jobs := slices.Clone(in.Jobs)
	slices.SortFunc(jobs, byStart)
	var active []corev1.ObjectReference
	for _, j := range jobs {
		how, done := ended(j)
		_, known := was[j.UID]
		delete(was, j.UID)
		if !done {
			running = append(running, j)
			active = append(active, reference(j))
			continue
		}
		if known {
			p.Events = append(p.Events, Event{corev1.EventTypeNormal, "SawCompletedJob", fmt.Sprintf("Saw completed job: %s, condition: %s", j.Name, how)})
		}
		if t := j.Status.CompletionTime; how == batchv1.JobComplete && t != nil && (p.Status.LastSuccessfulTime == nil || t.After(p.Status.LastSuccessfulTime.Time)) {
			p.Status.LastSuccessfulTime = t.DeepCopy()
		}
	}
	for _, name := range slices.Sorted(maps.Values(was)) {
		p.warn("MissingJob", "Job %s, which was active, does not exist any more", name)
	}
	p.Status.Active = active
	return running
}

func reference(j *batchv1.Job) corev1.ObjectReference {
	return corev1.ObjectReference{APIVersion: "batch/v1", Kind: "Job", Namespace: j.Namespace, Name: j.Name, UID: j.UID, ResourceVersion: j.ResourceVersion}
}

func ended(j *batchv1.Job) (batchv1.JobConditionType, bool) {
	for _, c := range j.Status.Conditions {
		if (c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed) && c.Status == corev1.ConditionTrue {
			return c.Type, true
		}
	}
	return "", false
}

func byStart(a, b *batchv1.Job) int {
	start := func(j *batchv1.Job) time.Time {
		if j.Status.StartTime != nil {
			return j.Status.StartTime.Time
		}
		return j.CreationTimestamp.Time
	}
	return cmp.Or(start(a).Compare(start(b)), cmp.Compare(a.Name, b.Name))
}

// surplus returns the oldest finished Jobs beyond the limits.
func surplus(cj *batchv1.CronJob, jobs []*batchv1.Job) []*batchv1.Job {
	var out []*batchv1.Job
	for kind, limit := range map[batchv1.JobConditionType]*int32{batchv1.JobComplete: cj.Spec.SuccessfulJobsHistoryLimit, batchv1.JobFailed: cj.Spec.FailedJobsHistoryLimit} {
		if limit == nil {
			continue
		}
		var kept []*batchv1.Job
		for _, j := range jobs {
			if how, done := ended(j); done && how == kind && j.DeletionTimestamp == nil {
				kept = append(kept, j)
			}
		}
		slices.SortFunc(kept, byStart)
		out = append(out, kept[:max(0, len(kept)-int(*limit))]...)
	}
	return out
}

// newJob returns the Job of that time. Its name is a function of the time: a
// second create is refused, however old a cache is.
func newJob(cj *batchv1.CronJob, at time.Time) *batchv1.Job {
	annotations := maps.Clone(cj.Spec.JobTemplate.Annotations)
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[batchv1.CronJobScheduledTimestampAnnotation] = at.Format(time.RFC3339)
	return &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{
			Name:            fmt.Sprintf("%s-%d", cj.Name, at.Unix()/60),
			Namespace:       cj.Namespace,
			Labels:          maps.Clone(cj.Spec.JobTemplate.Labels),
			Annotations:     annotations,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(cj, Kind)},
		},
		Spec: *cj.Spec.JobTemplate.Spec.DeepCopy(),
	}
}
