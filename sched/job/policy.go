package job

import (
	"fmt"
	"slices"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
)

// judge applies the Job's failure policy to a failed pod. The first rule that
// matches decides; without one the failure counts. message is for FailJob.
func judge(policy *batchv1.PodFailurePolicy, pod *corev1.Pod) (action batchv1.PodFailurePolicyAction, message string) {
	if policy == nil || pod.Status.Phase != corev1.PodFailed {
		return batchv1.PodFailurePolicyActionCount, ""
	}
	for i := range policy.Rules {
		rule := &policy.Rules[i]
		why, ok := "", false
		if rule.OnExitCodes != nil {
			why, ok = exited(rule.OnExitCodes, pod)
		} else {
			why, ok = conditioned(rule.OnPodConditions, pod)
		}
		if ok {
			return rule.Action, fmt.Sprintf("%s matching %s rule at index %d", why, rule.Action, i)
		}
	}
	return batchv1.PodFailurePolicyActionCount, ""
}

func exited(r *batchv1.PodFailurePolicyOnExitCodesRequirement, pod *corev1.Pod) (string, bool) {
	for _, list := range [][]corev1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		for i := range list {
			s := &list[i]
			t := s.State.Terminated
			if t == nil || t.ExitCode == 0 || r.ContainerName != nil && *r.ContainerName != s.Name {
				continue
			}
			if slices.Contains(r.Values, t.ExitCode) == (r.Operator == batchv1.PodFailurePolicyOnExitCodesOpIn) {
				return fmt.Sprintf("Container %s for pod %s/%s failed with exit code %d", s.Name, pod.Namespace, pod.Name, t.ExitCode), true
			}
		}
	}
	return "", false
}

func conditioned(patterns []batchv1.PodFailurePolicyOnPodConditionsPattern, pod *corev1.Pod) (string, bool) {
	for _, p := range patterns {
		for i := range pod.Status.Conditions {
			if c := &pod.Status.Conditions[i]; c.Type == p.Type && c.Status == p.Status {
				return fmt.Sprintf("Pod %s/%s has condition %s", pod.Namespace, pod.Name, c.Type), true
			}
		}
	}
	return "", false
}

// satisfied returns a sentence if the completed indexes meet a rule of the
// success policy.
func satisfied(policy *batchv1.SuccessPolicy, completed indexes, completions int) (string, bool) {
	if policy == nil {
		return "", false
	}
	for i := range policy.Rules {
		rule := &policy.Rules[i]
		have, want := completed.count(), completions
		if rule.SucceededIndexes != nil {
			named := parseIndexes(*rule.SucceededIndexes, completions)
			have, want = completed.in(named), named.count()
		}
		if rule.SucceededCount != nil {
			want = int(*rule.SucceededCount)
		}
		if have >= want {
			return fmt.Sprintf("Matched rules at index %d", i), true
		}
	}
	return "", false
}
