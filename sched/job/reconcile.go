package job

import (
	"cmp"
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/internal/seconds"
)

const (
	// burst is the most pods one pass makes or counts for one Job.
	burst = 500
	// Pause before a failed pod is replaced, doubling with each failure in a
	// row.
	firstBackoff = 10 * time.Second
	maxBackoff   = 10 * time.Minute

	reasonSuspended = "JobSuspended"
	reasonResumed   = "JobResumed"
)

// Input is all that Decide looks at. Decide changes none of it.
type Input struct {
	Job *batchv1.Job
	// Pods are those that the Job controls, in any order.
	Pods []*corev1.Pod
	Now  time.Time
}

// Plan is what one pass does, in the order of the fields. Nothing of it may
// happen unless Status was stored on the version of the Job it was decided on.
type Plan struct {
	Status batchv1.JobStatus
	// Release holds ended pods whose end is in Status: they may lose the
	// finalizer that kept them.
	Release []*corev1.Pod
	// Drop holds pods to delete that are not to be counted.
	Drop []*corev1.Pod
	// Stop holds pods to delete because the Job is decided; they are counted.
	Stop   []*corev1.Pod
	Create []Create
	// Recheck is the time after which time alone may change the plan, 0 for
	// never.
	Recheck time.Duration
	// Expired: the finished Job's time to live is over.
	Expired bool
}

// state is the working state of one Decide call.
//
// How a pod's end is counted exactly once, also when leaders change and crash:
//
//	pod ended, has finalizer ──► its UID in uncountedTerminatedPods  (status write)
//	                          ──► finalizer removed                   (pod patch)
//	UID listed, no finalizer ──► off the list, counter + 1            (status write)
//
// A status is written only on the version it was read at, and a pod's
// finalizer never comes back: so no step can happen twice.
type state struct {
	in     Input
	job    *batchv1.Job
	status batchv1.JobStatus
	plan   Plan

	active      []*corev1.Pod
	terminating []*corev1.Pod
	completed   indexes // of an Indexed Job
	failedIdx   indexes // with a back-off limit per index
	latest      map[int]*corev1.Pod
	succeeded   int // counted and to be counted
	failures    int
	verdict     *batchv1.JobCondition // FailureTarget or SuccessCriteriaMet
	stored      *batchv1.JobCondition // the verdict, if it was taken by an earlier pass
}

// Decide computes the next step of a Job.
func Decide(in Input) Plan {
	s := &state{in: in, job: in.Job, status: *in.Job.Status.DeepCopy(), latest: map[int]*corev1.Pod{}}
	if done := finished(&s.status); done != nil {
		s.afterwards(done)
		return s.plan
	}
	s.sort()
	s.count()
	s.start()
	s.judge()
	s.settle()
	s.plan.Status = s.status
	return s.plan
}

// finished returns the condition that ended the Job, nil if it goes on.
func finished(status *batchv1.JobStatus) *batchv1.JobCondition {
	for i := range status.Conditions {
		if c := &status.Conditions[i]; (c.Type == batchv1.JobComplete || c.Type == batchv1.JobFailed) && c.Status == corev1.ConditionTrue {
			return c
		}
	}
	return nil
}

// afterwards lets go of what a finished Job still holds.
func (s *state) afterwards(done *batchv1.JobCondition) {
	s.plan.Status = s.status
	for _, pod := range s.in.Pods {
		switch {
		case !pods.Finished(pod) && pod.DeletionTimestamp == nil:
			s.plan.Drop = append(s.plan.Drop, pod)
		case tracked(pod):
			s.plan.Release = append(s.plan.Release, pod)
		}
	}
	ttl := s.job.Spec.TTLSecondsAfterFinished
	if ttl == nil || s.job.DeletionTimestamp != nil {
		return
	}
	end := done.LastTransitionTime.Time
	if s.status.CompletionTime != nil {
		end = s.status.CompletionTime.Time
	}
	if left := end.Add(time.Duration(*ttl) * time.Second).Sub(s.in.Now); left > 0 {
		s.recheck(left)
	} else {
		s.plan.Expired = true
	}
}

func (s *state) recheck(after time.Duration) {
	if s.plan.Recheck == 0 || after < s.plan.Recheck {
		s.plan.Recheck = after
	}
}

func (s *state) completions() int { return int(ptr.Deref(s.job.Spec.Completions, 0)) }

// sort finds out what each pod is to the Job now.
func (s *state) sort() {
	if indexed(s.job) {
		s.completed = parseIndexes(s.status.CompletedIndexes, s.completions())
		if perIndex(s.job) {
			s.failedIdx = parseIndexes(ptr.Deref(s.status.FailedIndexes, ""), s.completions())
		}
	}
	ready := int32(0)
	for _, pod := range s.in.Pods {
		switch {
		case pods.Active(pod):
			s.active = append(s.active, pod)
			if pods.Ready(pod) {
				ready++
			}
		case pods.Terminating(pod) && !(tracked(pod) && ptr.Deref(pod.DeletionGracePeriodSeconds, 1) == 0):
			s.terminating = append(s.terminating, pod)
		}
		if i := indexOf(s.job, pod); indexed(s.job) && i >= 0 {
			if other := s.latest[i]; other == nil || later(pod, other) {
				s.latest[i] = pod
			}
		}
	}
	s.status.Active = int32(len(s.active))
	s.status.Ready = &ready
	s.status.Terminating = ptr.To(int32(len(s.terminating)))
}

// later orders the pods of one index.
func later(a, b *corev1.Pod) bool {
	x, y := failuresOf(a, batchv1.JobIndexFailureCountAnnotation)+failuresOf(a, batchv1.JobIndexIgnoredFailureCountAnnotation),
		failuresOf(b, batchv1.JobIndexFailureCountAnnotation)+failuresOf(b, batchv1.JobIndexIgnoredFailureCountAnnotation)
	return cmp.Or(cmp.Compare(x, y), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name)) > 0
}

// count moves ended pods one step on; see state.
func (s *state) count() {
	old := ptr.Deref(s.status.UncountedTerminatedPods, batchv1.UncountedTerminatedPods{})
	waits := map[types.UID]bool{}
	for _, pod := range s.in.Pods {
		if tracked(pod) {
			waits[pod.UID] = true
		}
	}
	var uncounted batchv1.UncountedTerminatedPods
	listed := map[types.UID]bool{}
	move := func(from []types.UID, counter *int32) (left []types.UID) {
		for _, uid := range from {
			if waits[uid] {
				left = append(left, uid)
				listed[uid] = true
			} else {
				*counter++
			}
		}
		return left
	}
	uncounted.Succeeded = move(old.Succeeded, &s.status.Succeeded)
	uncounted.Failed = move(old.Failed, &s.status.Failed)

	var completed, lost []int
	ended := slices.Clone(s.in.Pods)
	slices.SortFunc(ended, func(a, b *corev1.Pod) int { return cmp.Or(endOf(a).Compare(endOf(b)), cmp.Compare(a.Name, b.Name)) })
	room := burst
	for _, pod := range ended {
		switch {
		case !tracked(pod):
		case listed[pod.UID]:
			s.plan.Release = append(s.plan.Release, pod)
		case room == 0:
			s.recheck(time.Second)
		case pod.Status.Phase == corev1.PodSucceeded:
			room--
			if !indexed(s.job) {
				uncounted.Succeeded = append(uncounted.Succeeded, pod.UID)
			} else if i := indexOf(s.job, pod); i >= 0 && !s.failedIdx.has(i) {
				completed = append(completed, i)
			}
			s.plan.Release = append(s.plan.Release, pod)
		case failed(s.job, pod):
			room--
			action, why := judge(s.job.Spec.PodFailurePolicy, pod)
			i := indexOf(s.job, pod)
			if action == batchv1.PodFailurePolicyActionFailJob && s.verdict == nil {
				s.verdict = &batchv1.JobCondition{Type: batchv1.JobFailureTarget, Reason: batchv1.JobReasonPodFailurePolicy, Message: why}
			}
			if perIndex(s.job) && i >= 0 && !s.completed.has(i) && !s.failedIdx.has(i) && s.latest[i] == pod {
				over := failuresOf(pod, batchv1.JobIndexFailureCountAnnotation)+1 > int(*s.job.Spec.BackoffLimitPerIndex)
				switch {
				case action == batchv1.PodFailurePolicyActionFailIndex,
					action != batchv1.PodFailurePolicyActionIgnore && over:
					lost = append(lost, i)
				case s.verdict == nil && condition(&s.status, batchv1.JobFailureTarget) == nil && condition(&s.status, batchv1.JobSuccessCriteriaMet) == nil:
					continue // it remembers the index's failures until a successor does
				}
			}
			if action != batchv1.PodFailurePolicyActionIgnore {
				uncounted.Failed = append(uncounted.Failed, pod.UID)
			}
			s.plan.Release = append(s.plan.Release, pod)
		}
	}
	s.completed, s.failedIdx = s.completed.with(completed), s.failedIdx.with(lost)
	if indexed(s.job) {
		s.status.CompletedIndexes = s.completed.String()
		s.status.Succeeded = int32(s.completed.count())
		if perIndex(s.job) {
			s.status.FailedIndexes = ptr.To(s.failedIdx.String())
		}
	}
	s.status.UncountedTerminatedPods = &uncounted
	s.succeeded = int(s.status.Succeeded) + len(uncounted.Succeeded)
	s.failures = int(s.status.Failed) + len(uncounted.Failed)
}

// start notes since when the Job is under way, and whether it is suspended.
func (s *state) start() {
	suspended := ptr.Deref(s.job.Spec.Suspend, false)
	c := condition(&s.status, batchv1.JobSuspended)
	switch {
	case s.decided() != nil:
	case suspended:
		if c == nil || c.Status != corev1.ConditionTrue {
			s.set(batchv1.JobSuspended, corev1.ConditionTrue, reasonSuspended, "Job suspended")
		}
		s.status.StartTime = nil
	case c != nil && c.Status == corev1.ConditionTrue:
		s.set(batchv1.JobSuspended, corev1.ConditionFalse, reasonResumed, "Job resumed")
		s.status.StartTime = ptr.To(metav1.NewTime(s.in.Now))
	case s.status.StartTime == nil:
		s.status.StartTime = ptr.To(metav1.NewTime(s.in.Now))
	}
}

// decided returns the stored condition that says how the Job will end.
func (s *state) decided() *batchv1.JobCondition {
	if c := condition(&s.status, batchv1.JobFailureTarget); c != nil && c.Status == corev1.ConditionTrue {
		return c
	}
	if c := condition(&s.status, batchv1.JobSuccessCriteriaMet); c != nil && c.Status == corev1.ConditionTrue {
		return c
	}
	return nil
}

// judge finds out whether the Job has to end, and how.
func (s *state) judge() {
	if c := s.decided(); c != nil {
		s.verdict, s.stored = c, c
		return
	}
	if s.verdict == nil {
		s.verdict = s.failure()
	}
	if s.verdict == nil {
		s.verdict = s.success()
	}
	if v := s.verdict; v != nil {
		s.set(v.Type, corev1.ConditionTrue, v.Reason, v.Message)
	}
}

func (s *state) failure() *batchv1.JobCondition {
	fail := func(reason, message string) *batchv1.JobCondition {
		return &batchv1.JobCondition{Type: batchv1.JobFailureTarget, Reason: reason, Message: message}
	}
	limit := int(ptr.Deref(s.job.Spec.BackoffLimit, 6))
	if s.failures > limit || s.restartsBeyond(limit) {
		return fail(batchv1.JobReasonBackoffLimitExceeded, "Job has reached the specified backoff limit")
	}
	if d := s.job.Spec.ActiveDeadlineSeconds; d != nil && s.status.StartTime != nil {
		left := s.status.StartTime.Add(seconds.Duration(*d)).Sub(s.in.Now)
		if left <= 0 {
			return fail(batchv1.JobReasonDeadlineExceeded, "Job was active longer than specified deadline")
		}
		s.recheck(left)
	}
	if n := s.failedIdx.count(); n > 0 {
		if m := s.job.Spec.MaxFailedIndexes; m != nil && n > int(*m) {
			return fail(batchv1.JobReasonMaxFailedIndexesExceeded, "Job has exceeded the specified maximal number of failed indexes")
		}
		if _, met := satisfied(s.job.Spec.SuccessPolicy, s.completed, s.completions()); !met && n+s.completed.count() >= s.completions() {
			return fail(batchv1.JobReasonFailedIndexes, "Job has failed indexes")
		}
	}
	return nil
}

// restartsBeyond counts the restarts within pods, which are the failures of
// Jobs whose containers are restarted in place.
func (s *state) restartsBeyond(limit int) bool {
	if s.job.Spec.Template.Spec.RestartPolicy != corev1.RestartPolicyOnFailure {
		return false
	}
	total := 0
	for _, pod := range s.active {
		for _, list := range [][]corev1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
			for i := range list {
				total += int(list[i].RestartCount)
			}
		}
	}
	if limit == 0 {
		return total > 0
	}
	return total >= limit
}

func (s *state) success() *batchv1.JobCondition {
	met := func(reason, message string) *batchv1.JobCondition {
		return &batchv1.JobCondition{Type: batchv1.JobSuccessCriteriaMet, Reason: reason, Message: message}
	}
	const reached = "Reached expected number of succeeded pods"
	switch {
	case indexed(s.job):
		if why, ok := satisfied(s.job.Spec.SuccessPolicy, s.completed, s.completions()); ok {
			return met(batchv1.JobReasonSuccessPolicy, why)
		}
		if s.completed.count() >= s.completions() {
			return met(batchv1.JobReasonCompletionsReached, reached)
		}
	case s.job.Spec.Completions == nil: // a work queue: one success tells that it is empty
		if s.succeeded > 0 && len(s.active) == 0 {
			return met(batchv1.JobReasonCompletionsReached, reached)
		}
	case s.succeeded >= s.completions():
		return met(batchv1.JobReasonCompletionsReached, reached)
	}
	return nil
}

// settle acts on the verdict, or keeps the right number of pods running.
func (s *state) settle() {
	switch {
	case s.verdict != nil:
		s.plan.Stop = s.active
		s.finish()
	case s.job.DeletionTimestamp != nil:
	case ptr.Deref(s.job.Spec.Suspend, false):
		s.plan.Drop = s.active
	default:
		s.manage()
	}
}

// finish sets the final condition once no pod runs and all are counted.
func (s *state) finish() {
	if s.verdict != s.stored || len(s.active)+len(s.terminating) > 0 || slices.ContainsFunc(s.in.Pods, tracked) {
		return
	}
	if s.verdict.Type == batchv1.JobFailureTarget {
		s.set(batchv1.JobFailed, corev1.ConditionTrue, s.verdict.Reason, s.verdict.Message)
		return
	}
	s.set(batchv1.JobComplete, corev1.ConditionTrue, s.verdict.Reason, s.verdict.Message)
	s.status.CompletionTime = ptr.To(metav1.NewTime(s.in.Now))
}

func condition(status *batchv1.JobStatus, kind batchv1.JobConditionType) *batchv1.JobCondition {
	for i := range status.Conditions {
		if status.Conditions[i].Type == kind {
			return &status.Conditions[i]
		}
	}
	return nil
}

func (s *state) set(kind batchv1.JobConditionType, value corev1.ConditionStatus, reason, message string) {
	now := metav1.NewTime(s.in.Now)
	c := batchv1.JobCondition{Type: kind, Status: value, Reason: reason, Message: message, LastProbeTime: now, LastTransitionTime: now}
	if old := condition(&s.status, kind); old != nil {
		*old = c
		return
	}
	s.status.Conditions = append(s.status.Conditions, c)
}
