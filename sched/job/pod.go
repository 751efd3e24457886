package job

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/podctl"
	"github.com/clusterd/clusterd/sched/internal/pods"
)

const indexEnv = "JOB_COMPLETION_INDEX"

func indexed(j *batchv1.Job) bool {
	return ptr.Deref(j.Spec.CompletionMode, batchv1.NonIndexedCompletion) == batchv1.IndexedCompletion
}

func perIndex(j *batchv1.Job) bool { return indexed(j) && j.Spec.BackoffLimitPerIndex != nil }

// tracked reports whether the pod still waits to be counted.
func tracked(pod *corev1.Pod) bool {
	return slices.Contains(pod.Finalizers, batchv1.JobTrackingFinalizer)
}

// dropped reports whether the pod was ended by the Job, which was suspended or asked for
// fewer: that is no failure. Of one that counts the finalizer stays until it has ended.
func dropped(pod *corev1.Pod) bool {
	return !tracked(pod) && pod.Status.Phase != corev1.PodFailed
}

// onlyFailed reports whether a pod on its way out holds its place until it has
// ended.
func onlyFailed(j *batchv1.Job) bool {
	return ptr.Deref(j.Spec.PodReplacementPolicy, batchv1.TerminatingOrFailed) == batchv1.Failed
}

// failed reports whether the pod counts as a failure.
func failed(j *batchv1.Job, pod *corev1.Pod) bool {
	switch {
	case pod.Status.Phase == corev1.PodFailed:
		return true
	case pod.Status.Phase == corev1.PodSucceeded || pod.DeletionTimestamp == nil:
		return false
	case ptr.Deref(pod.DeletionGracePeriodSeconds, 1) == 0:
		return true // its node has let go of it, or was given up
	}
	return !onlyFailed(j)
}

// indexOf reads the pod's completion index; -1 if it has none within the Job's.
func indexOf(j *batchv1.Job, pod *corev1.Pod) int {
	n, err := strconv.Atoi(pod.Annotations[batchv1.JobCompletionIndexAnnotation])
	if err != nil || n < 0 || n >= int(ptr.Deref(j.Spec.Completions, 0)) {
		return -1
	}
	return n
}

// failuresOf reads how often the index had failed when the pod was made.
func failuresOf(pod *corev1.Pod, annotation string) int {
	n, err := strconv.Atoi(pod.Annotations[annotation])
	if err != nil || n < 0 {
		return 0
	}
	return n
}

// endOf is when the pod ended.
func endOf(pod *corev1.Pod) time.Time {
	var end time.Time
	for i := range pod.Status.ContainerStatuses {
		t := pod.Status.ContainerStatuses[i].State.Terminated
		if t == nil {
			end = time.Time{}
			break
		}
		if t.FinishedAt.After(end) {
			end = t.FinishedAt.Time
		}
	}
	switch {
	case !end.IsZero():
		return end
	case pod.DeletionTimestamp != nil:
		return pod.DeletionTimestamp.Time
	}
	if c := pods.Condition(pod, corev1.PodReady); c != nil && c.Status == corev1.ConditionFalse {
		return c.LastTransitionTime.Time
	}
	return pod.CreationTimestamp.Time
}

// Create is one pod to make.
type Create struct {
	// Index is the completion index, -1 for none.
	Index int
	// Failures and Ignored count the index's failures so far, for Jobs with a
	// back-off limit per index.
	Failures, Ignored int
}

// newPod returns a pod of the Job, without a name.
func newPod(j *batchv1.Job, n Create) *corev1.Pod {
	pod := podctl.FromTemplate(j, Kind, &j.Spec.Template)
	pod.GenerateName = j.Name + "-"
	pod.Finalizers = append(slices.Clone(pod.Finalizers), batchv1.JobTrackingFinalizer)
	if n.Index >= 0 {
		index := strconv.Itoa(n.Index)
		pod.GenerateName = fmt.Sprintf("%s-%d-", j.Name, n.Index)
		pod.Labels = with(pod.Labels, batchv1.JobCompletionIndexAnnotation, index)
		pod.Annotations = with(pod.Annotations, batchv1.JobCompletionIndexAnnotation, index)
		if perIndex(j) {
			pod.Annotations[batchv1.JobIndexFailureCountAnnotation] = strconv.Itoa(n.Failures)
			if n.Ignored > 0 {
				pod.Annotations[batchv1.JobIndexIgnoredFailureCountAnnotation] = strconv.Itoa(n.Ignored)
			}
		}
		pod.Spec.Hostname = fmt.Sprintf("%s-%d", j.Name, n.Index)
		for i := range pod.Spec.InitContainers {
			addIndex(&pod.Spec.InitContainers[i])
		}
		for i := range pod.Spec.Containers {
			addIndex(&pod.Spec.Containers[i])
		}
	}
	return pod
}

func with(m map[string]string, k, v string) map[string]string {
	if m == nil {
		m = map[string]string{}
	}
	m[k] = v
	return m
}

// addIndex tells the container its index, unless it has a variable of that name.
func addIndex(c *corev1.Container) {
	if slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == indexEnv }) {
		return
	}
	c.Env = append(c.Env, corev1.EnvVar{Name: indexEnv, ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{
		APIVersion: "v1", FieldPath: fmt.Sprintf("metadata.labels['%s']", batchv1.JobCompletionIndexAnnotation),
	}}})
}
