package job

import (
	"cmp"
	"slices"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/pods"
)

// manage compares the pods that run with those that should.
func (s *state) manage() {
	want := s.wanted()
	running := len(s.active)
	if indexed(s.job) {
		running -= s.dropStrays()
	}
	if running > want {
		s.drop(running - want)
		return
	}
	missing := want - running
	if onlyFailed(s.job) {
		missing -= len(s.terminating)
	}
	missing = min(missing, burst)
	if missing <= 0 {
		return
	}
	if indexed(s.job) {
		s.createIndexes(missing)
		return
	}
	if wait := s.pause(); wait > 0 {
		s.recheck(wait)
		return
	}
	for range missing {
		s.plan.Create = append(s.plan.Create, Create{Index: -1})
	}
}

// wanted is how many pods should run at once.
func (s *state) wanted() int {
	parallel := int(ptr.Deref(s.job.Spec.Parallelism, 1))
	switch {
	case indexed(s.job):
		return min(parallel, s.completions()-s.completed.count()-s.failedIdx.count())
	case s.job.Spec.Completions != nil:
		return min(parallel, s.completions()-s.succeeded)
	case s.succeeded > 0: // the queue is empty: those that run may end
		return min(parallel, len(s.active))
	}
	return parallel
}

// drop deletes the n pods whose loss hurts least.
func (s *state) drop(n int) {
	dropped := map[*corev1.Pod]bool{}
	for _, pod := range s.plan.Drop {
		dropped[pod] = true
	}
	rest := slices.DeleteFunc(slices.Clone(s.active), func(p *corev1.Pod) bool { return dropped[p] })
	value := func(p *corev1.Pod) int {
		switch {
		case p.Spec.NodeName == "":
			return 0
		case p.Status.Phase != corev1.PodRunning:
			return 1
		case !pods.Ready(p):
			return 2
		}
		return 3
	}
	slices.SortFunc(rest, func(a, b *corev1.Pod) int {
		return cmp.Or(cmp.Compare(value(a), value(b)), -cmp.Compare(indexOf(s.job, a), indexOf(s.job, b)),
			-a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	s.plan.Drop = append(s.plan.Drop, rest[:min(n, len(rest))]...)
}

// dropStrays deletes active pods of an Indexed Job that no index needs, and
// returns how many those are.
func (s *state) dropStrays() int {
	n := len(s.plan.Drop)
	for _, pod := range s.active {
		i := indexOf(s.job, pod)
		if i < 0 || s.completed.has(i) || s.failedIdx.has(i) || s.latest[i] != pod && pods.Active(s.latest[i]) {
			s.plan.Drop = append(s.plan.Drop, pod)
		}
	}
	return len(s.plan.Drop) - n
}

// createIndexes makes pods for the lowest indexes that have none.
func (s *state) createIndexes(n int) {
	if !perIndex(s.job) {
		if wait := s.pause(); wait > 0 {
			s.recheck(wait)
			return
		}
	}
	taken := map[int]bool{}
	for _, pod := range s.active {
		taken[indexOf(s.job, pod)] = true
	}
	if onlyFailed(s.job) {
		for _, pod := range s.terminating {
			taken[indexOf(s.job, pod)] = true
		}
	}
	for i := 0; i < s.completions() && n > 0; i++ {
		if taken[i] || s.completed.has(i) || s.failedIdx.has(i) {
			continue
		}
		next := Create{Index: i}
		if last := s.latest[i]; perIndex(s.job) && last != nil && failed(s.job, last) && !dropped(last) {
			next.Failures = failuresOf(last, batchv1.JobIndexFailureCountAnnotation)
			next.Ignored = failuresOf(last, batchv1.JobIndexIgnoredFailureCountAnnotation)
			if action, _ := judge(s.job.Spec.PodFailurePolicy, last); action == batchv1.PodFailurePolicyActionIgnore {
				next.Ignored++
			} else {
				next.Failures++
			}
			if wait := endOf(last).Add(backoff(next.Failures + next.Ignored)).Sub(s.in.Now); wait > 0 {
				s.recheck(wait)
				continue
			}
		}
		s.plan.Create = append(s.plan.Create, next)
		n--
	}
}

// pause is how long to wait before the next pod after failures in a row.
func (s *state) pause() time.Duration {
	var lastSuccess, lastFailure time.Time
	for _, pod := range s.in.Pods {
		if end := endOf(pod); pod.Status.Phase == corev1.PodSucceeded && end.After(lastSuccess) {
			lastSuccess = end
		}
	}
	n := 0
	for _, pod := range s.in.Pods {
		if !failed(s.job, pod) || pod.Status.Phase == corev1.PodSucceeded || dropped(pod) {
			continue
		}
		if end := endOf(pod); end.After(lastSuccess) {
			n++
			if end.After(lastFailure) {
				lastFailure = end
			}
		}
	}
	if n == 0 {
		return 0
	}
	return lastFailure.Add(backoff(n)).Sub(s.in.Now)
}

func backoff(failures int) time.Duration {
	return min(firstBackoff<<min(max(failures-1, 0), 10), maxBackoff)
}
