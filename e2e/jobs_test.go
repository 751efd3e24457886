package e2e

import (
	"context"
	"errors"
	"fmt"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// An index in the arguments makes pods of one template differ: index 0 ends well
// and the others with their number, or the others sleep on.
var (
	fallsByIndex  = []string{"exit", "$(JOB_COMPLETION_INDEX)"}
	sleepsByIndex = []string{"sleep", "$(JOB_COMPLETION_INDEX)000"}
)

func job(name string, change func(*batchv1.JobSpec), args ...string) *batchv1.Job {
	p := pod(name, args...)
	p.Spec.RestartPolicy = corev1.RestartPolicyNever
	j := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"suite": "jobs"}}}
	j.Spec.Template = corev1.PodTemplateSpec{Spec: p.Spec}
	if change != nil {
		change(&j.Spec)
	}
	return j
}

// indexed makes a Job of n indexes, all at once.
func indexed(n int32, more func(*batchv1.JobSpec)) func(*batchv1.JobSpec) {
	return func(s *batchv1.JobSpec) {
		s.CompletionMode, s.Completions, s.Parallelism = ptr.To(batchv1.IndexedCompletion), &n, &n
		if more != nil {
			more(s)
		}
	}
}

func (e *env) createJob(ns string, j *batchv1.Job) {
	e.t.Helper()
	if _, err := e.api.BatchV1().Jobs(ns).Create(e.t.Context(), j, metav1.CreateOptions{}); err != nil {
		e.t.Fatal(err)
	}
}

// jobIs waits for what is says of a Job, and returns it.
func (e *env) jobIs(ns, name, what string, is func(*batchv1.Job) bool) *batchv1.Job {
	e.t.Helper()
	var j *batchv1.Job
	e.eventually("job "+name+" "+what, func(ctx context.Context) (err error) {
		if j, err = e.api.BatchV1().Jobs(ns).Get(ctx, name, metav1.GetOptions{}); err == nil && !is(j) {
			err = fmt.Errorf("status %+v", j.Status)
		}
		return err
	})
	return j
}

// jobEnds waits for a condition with a reason; pods have been counted by then.
func (e *env) jobEnds(ns, name string, how batchv1.JobConditionType, reason string) *batchv1.Job {
	e.t.Helper()
	return e.jobIs(ns, name, fmt.Sprintf("is %s with %s", how, reason), func(j *batchv1.Job) bool {
		c := jobCondition(j, how)
		return c != nil && (reason == "" || c.Reason == reason)
	})
}

func jobCondition(j *batchv1.Job, kind batchv1.JobConditionType) *batchv1.JobCondition {
	for i := range j.Status.Conditions {
		if c := &j.Status.Conditions[i]; c.Type == kind && c.Status == corev1.ConditionTrue {
			return c
		}
	}
	return nil
}

func (e *env) jobPods(ns, name string) []corev1.Pod {
	e.t.Helper()
	list, err := e.api.CoreV1().Pods(ns).List(e.t.Context(), metav1.ListOptions{LabelSelector: batchv1.JobNameLabel + "=" + name})
	if err != nil {
		e.t.Fatal(err)
	}
	return list.Items
}

// jobCases are the rows of CONFORMANCE about Jobs.
func jobCases(e *env, ns string) {
	// Its container fails, then finds what it misses. It waits for ten seconds
	// between two runs, and so begins first.
	j := job("local", nil, "cat", "/config/word")
	j.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyOnFailure
	j.Spec.Template.Spec.Volumes = []corev1.Volume{{Name: "config", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
		LocalObjectReference: corev1.LocalObjectReference{Name: "later"}, Optional: ptr.To(true)}}}}
	j.Spec.Template.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "config", MountPath: "/config"}}
	e.createJob(ns, j)
	e.eventually("its container has failed", func(context.Context) error {
		for _, p := range e.jobPods(ns, "local") {
			if s := p.Status.ContainerStatuses; len(s) == 1 && (s[0].State.Terminated != nil || s[0].LastTerminationState.Terminated != nil) {
				return nil
			}
		}
		return errors.New("it has not")
	})
	e.ctl("-n", ns, "create", "configmap", "later", "--from-literal=word=go")
	e.cases("failures by index", []int{133}, func(e *env) {
		e.createJob(ns, job("per-index", indexed(3, func(s *batchv1.JobSpec) { s.BackoffLimitPerIndex = ptr.To[int32](1) }), fallsByIndex...))
		e.createJob(ns, job("fail-index", indexed(3, func(s *batchv1.JobSpec) {
			s.BackoffLimitPerIndex = ptr.To[int32](1)
			s.PodFailurePolicy = onExit(batchv1.PodFailurePolicyActionFailIndex, 1, 2)
		}), fallsByIndex...))
		e.createJob(ns, job("too-many", indexed(4, func(s *batchv1.JobSpec) {
			s.BackoffLimitPerIndex, s.MaxFailedIndexes = ptr.To[int32](0), ptr.To[int32](1)
		}), fallsByIndex...))
		j := e.jobEnds(ns, "per-index", batchv1.JobFailed, batchv1.JobReasonFailedIndexes)
		if s := j.Status; s.CompletedIndexes != "0" || ptr.Deref(s.FailedIndexes, "") != "1,2" || s.Failed != 4 {
			e.t.Errorf("per-index: %+v", s)
		}
	})
	e.cases("an index fails at once", []int{135}, func(e *env) {
		j := e.jobEnds(ns, "fail-index", batchv1.JobFailed, batchv1.JobReasonFailedIndexes)
		if s := j.Status; s.CompletedIndexes != "0" || ptr.Deref(s.FailedIndexes, "") != "1,2" || s.Failed != 2 {
			e.t.Errorf("fail-index: %+v", s)
		}
	})
	e.cases("too many failed indexes", []int{137}, func(e *env) {
		e.jobEnds(ns, "too-many", batchv1.JobFailed, batchv1.JobReasonMaxFailedIndexesExceeded)
	})
	e.cases("an exit code fails the Job", []int{129}, func(e *env) {
		e.createJob(ns, job("exit-code", func(s *batchv1.JobSpec) { s.PodFailurePolicy = onExit(batchv1.PodFailurePolicyActionFailJob, 3) }, "exit", "3"))
		if j := e.jobEnds(ns, "exit-code", batchv1.JobFailed, batchv1.JobReasonPodFailurePolicy); j.Status.Failed != 1 {
			e.t.Errorf("exit-code: %+v", j.Status)
		}
	})
	e.cases("success policies", []int{138, 139, 140}, func(e *env) {
		policy := func(rule batchv1.SuccessPolicyRule) func(*batchv1.JobSpec) {
			return indexed(2, func(s *batchv1.JobSpec) {
				s.SuccessPolicy = &batchv1.SuccessPolicy{Rules: []batchv1.SuccessPolicyRule{rule}}
			})
		}
		e.createJob(ns, job("all", policy(batchv1.SuccessPolicyRule{SucceededIndexes: ptr.To("0-1")}), "exit", "0"))
		e.createJob(ns, job("count", policy(batchv1.SuccessPolicyRule{SucceededCount: ptr.To[int32](1)}), sleepsByIndex...))
		e.createJob(ns, job("named", policy(batchv1.SuccessPolicyRule{SucceededIndexes: ptr.To("0")}), sleepsByIndex...))
		for name, completed := range map[string]string{"all": "0,1", "count": "0", "named": "0"} {
			j := e.jobEnds(ns, name, batchv1.JobComplete, "")
			if jobCondition(j, batchv1.JobSuccessCriteriaMet) == nil || j.Status.CompletedIndexes != completed || j.Status.Active != 0 {
				e.t.Errorf("%s: %+v", name, j.Status)
			}
		}
	})
	e.cases("each index knows itself", []int{131}, func(e *env) {
		e.createJob(ns, job("indexes", indexed(3, nil), "env"))
		e.jobEnds(ns, "indexes", batchv1.JobComplete, "")
		seen := map[string]bool{}
		for _, p := range e.jobPods(ns, "indexes") {
			i := p.Annotations[batchv1.JobCompletionIndexAnnotation]
			seen[i] = true
			if p.Spec.Hostname != "indexes-"+i || p.Labels[batchv1.JobCompletionIndexAnnotation] != i {
				e.t.Errorf("%s: index %s, host name %s, labels %v", p.Name, i, p.Spec.Hostname, p.Labels)
			}
			mustContain(e.t, p.Name, e.ctl("-n", ns, "logs", p.Name), "JOB_COMPLETION_INDEX="+i+"\n", "HOSTNAME=indexes-"+i+"\n")
		}
		if len(seen) != 3 {
			e.t.Errorf("indexes %v", seen)
		}
	})
	e.cases("failed tasks restart in place", []int{136}, func(e *env) {
		j := e.jobEnds(ns, "local", batchv1.JobComplete, "")
		if pods := e.jobPods(ns, "local"); j.Status.Succeeded != 1 || j.Status.Failed != 0 || len(pods) != 1 || pods[0].Status.ContainerStatuses[0].RestartCount == 0 {
			e.t.Errorf("local: %+v", j.Status)
		}
	})
	e.cases("an eviction is no failure", []int{128}, func(e *env) {
		e.createJob(ns, job("evicted", func(s *batchv1.JobSpec) {
			s.BackoffLimit = ptr.To[int32](0)
			s.PodFailurePolicy = &batchv1.PodFailurePolicy{Rules: []batchv1.PodFailurePolicyRule{{Action: batchv1.PodFailurePolicyActionIgnore,
				OnPodConditions: []batchv1.PodFailurePolicyOnPodConditionsPattern{{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue}}}}}
		}, "sleep"))
		first := e.podsReady(ns, batchv1.JobNameLabel+"=evicted", 1)[0]
		err := e.api.CoreV1().Pods(ns).EvictV1(e.t.Context(), &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: first.Name}})
		if err != nil {
			e.t.Fatal(err)
		}
		e.renewed(ns, batchv1.JobNameLabel+"=evicted", first.UID)
		j := e.jobIs(ns, "evicted", "goes on", func(j *batchv1.Job) bool { return j.Status.Active == 1 && ptr.Deref(j.Status.Ready, 0) == 1 })
		if j.Status.Failed != 0 || len(j.Status.Conditions) != 0 {
			e.t.Errorf("evicted: %+v", j.Status)
		}
	})
	e.cases("adopts, releases, and is deleted", []int{127, 132}, func(e *env) {
		e.createJob(ns, job("mine", func(s *batchv1.JobSpec) { s.Parallelism = ptr.To[int32](2) }, "sleep"))
		pods := e.podsReady(ns, batchv1.JobNameLabel+"=mine", 2)
		patch := func(body string) {
			if _, err := e.api.CoreV1().Pods(ns).Patch(e.t.Context(), pods[0].Name, types.MergePatchType, []byte(body), metav1.PatchOptions{}); err != nil {
				e.t.Fatal(err)
			}
		}
		owned := func(want bool) {
			e.podIs(ns, pods[0].Name, fmt.Sprintf("the Job's: %t", want), func(p *corev1.Pod) error {
				if (metav1.GetControllerOf(p) != nil) != want {
					return fmt.Errorf("owners %+v", p.OwnerReferences)
				}
				return nil
			})
		}
		patch(`{"metadata":{"ownerReferences":null}}`)
		owned(true)
		patch(`{"metadata":{"labels":null}}`)
		owned(false)
		e.podsReady(ns, batchv1.JobNameLabel+"=mine", 2)
		if err := e.api.BatchV1().Jobs(ns).Delete(e.t.Context(), "mine", metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)}); err != nil {
			e.t.Fatal(err)
		}
		e.eventually("the Job and its pods are gone, the released one is not", func(ctx context.Context) error {
			if left := e.jobPods(ns, "mine"); len(left) > 0 {
				return fmt.Errorf("%d pods", len(left))
			}
			_, err := e.api.BatchV1().Jobs(ns).Get(ctx, "mine", metav1.GetOptions{})
			if !apierrors.IsNotFound(err) {
				return fmt.Errorf("the Job: %w", err)
			}
			return nil
		})
		e.podReady(ns, pods[0].Name)
		e.ctl("-n", ns, "delete", "pod", pods[0].Name, "--grace-period=1", "--wait=false")
	})
	e.cases("status and lifecycle", []int{130, 134}, func(e *env) {
		jobs := e.api.BatchV1().Jobs(ns)
		e.createJob(ns, job("idle", func(s *batchv1.JobSpec) { s.Suspend = ptr.To(true) }, "sleep"))
		e.jobIs(ns, "idle", "is suspended", func(j *batchv1.Job) bool { return jobCondition(j, batchv1.JobSuspended) != nil })
		j, err := jobs.Patch(e.t.Context(), "idle", types.StrategicMergePatchType, []byte(`{"status":{"conditions":[{"type":"Patched","status":"True"}]}}`), metav1.PatchOptions{}, "status")
		if err != nil || jobCondition(j, "Patched") == nil {
			e.t.Errorf("patch of the status: %v, %+v", err, j)
		}
		e.eventually("the status is updated", func(ctx context.Context) error {
			j, err := jobs.Get(ctx, "idle", metav1.GetOptions{})
			if err != nil {
				return err
			}
			j.Status.Conditions = append(j.Status.Conditions, batchv1.JobCondition{Type: "Updated", Status: corev1.ConditionTrue})
			if j, err = jobs.UpdateStatus(ctx, j, metav1.UpdateOptions{}); err == nil && jobCondition(j, "Updated") == nil {
				e.t.Errorf("the answer: %+v", j.Status)
			}
			return err
		})
		if j, err = jobs.Patch(e.t.Context(), "idle", types.MergePatchType, []byte(`{"metadata":{"annotations":{"a":"b"}},"spec":{"suspend":false}}`), metav1.PatchOptions{}); err != nil || j.Annotations["a"] != "b" {
			e.t.Errorf("patch: %v", err)
		}
		e.jobIs(ns, "idle", "runs", func(j *batchv1.Job) bool { return j.Status.Active == 1 })
		all, err := e.api.BatchV1().Jobs("").List(e.t.Context(), metav1.ListOptions{LabelSelector: "suite=jobs"})
		if err != nil || len(all.Items) < 8 {
			e.t.Errorf("list of all namespaces: %v, %v", all, err)
		}
		if err := jobs.DeleteCollection(e.t.Context(), metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationForeground)}, metav1.ListOptions{LabelSelector: "suite=jobs"}); err != nil {
			e.t.Fatal(err)
		}
		e.eventually("no Job is left", func(ctx context.Context) error {
			left, err := jobs.List(ctx, metav1.ListOptions{})
			if err == nil && len(left.Items) > 0 {
				err = fmt.Errorf("%d Jobs", len(left.Items))
			}
			return err
		})
	})
}

func onExit(action batchv1.PodFailurePolicyAction, codes ...int32) *batchv1.PodFailurePolicy {
	return &batchv1.PodFailurePolicy{Rules: []batchv1.PodFailurePolicyRule{{
		Action: action, OnExitCodes: &batchv1.PodFailurePolicyOnExitCodesRequirement{Operator: batchv1.PodFailurePolicyOnExitCodesOpIn, Values: codes},
	}}}
}
