package disruption

import (
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/clusterd/clusterd/sched/internal/pods"
)

// evictionTTL is how long an eviction that was granted is counted as a pod that
// is about to go, though the pod shows no sign of it.
const evictionTTL = 2 * time.Minute

// Status computes a budget's status. all are the pods it selects, expected the
// number of pods their controllers want (or an error if that is unknown).
// recheck is the time until a granted eviction is not counted any longer, 0 for
// never.
func Status(pdb *policyv1.PodDisruptionBudget, all []*corev1.Pod, expected func() (int32, error), now time.Time) (status policyv1.PodDisruptionBudgetStatus, recheck time.Duration) {
	status = *pdb.Status.DeepCopy()
	status.ObservedGeneration = pdb.Generation
	status.DisruptedPods, recheck = granted(pdb.Status.DisruptedPods, all, now)

	status.CurrentHealthy = 0
	for _, pod := range all {
		if _, going := status.DisruptedPods[pod.Name]; !going && pods.Active(pod) && pods.Ready(pod) {
			status.CurrentHealthy++
		}
	}
	want, desired, err := needs(&pdb.Spec, int32(len(all)), expected)
	if err != nil {
		// Nothing may be evicted while it is unknown what would be enough.
		status.DisruptionsAllowed = 0
		setCondition(&status, metav1.ConditionFalse, policyv1.SyncFailedReason, err.Error(), pdb.Generation, now)
		return status, recheck
	}
	status.ExpectedPods, status.DesiredHealthy = want, desired
	status.DisruptionsAllowed = max(0, status.CurrentHealthy-desired)
	if want <= 0 {
		status.DisruptionsAllowed = 0
	}
	if status.DisruptionsAllowed > 0 {
		setCondition(&status, metav1.ConditionTrue, policyv1.SufficientPodsReason, "", pdb.Generation, now)
	} else {
		setCondition(&status, metav1.ConditionFalse, policyv1.InsufficientPodsReason, "", pdb.Generation, now)
	}
	return status, recheck
}

// needs resolves the budget: how many pods there should be, and how many of
// them have to be healthy.
func needs(spec *policyv1.PodDisruptionBudgetSpec, selected int32, expected func() (int32, error)) (want, desired int32, err error) {
	switch {
	case spec.MaxUnavailable != nil:
		if want, err = expected(); err != nil {
			return 0, 0, err
		}
		n, err := intstr.GetScaledValueFromIntOrPercent(spec.MaxUnavailable, int(want), true)
		if err != nil {
			return 0, 0, fmt.Errorf("maxUnavailable: %w", err)
		}
		return want, max(0, want-int32(n)), nil
	case spec.MinAvailable == nil:
		return selected, 0, nil
	case spec.MinAvailable.Type == intstr.Int:
		return selected, spec.MinAvailable.IntVal, nil
	}
	if want, err = expected(); err != nil {
		return 0, 0, err
	}
	n, err := intstr.GetScaledValueFromIntOrPercent(spec.MinAvailable, int(want), true)
	if err != nil {
		return 0, 0, fmt.Errorf("minAvailable: %w", err)
	}
	return want, int32(n), nil
}

// granted drops evictions that have happened (the pod is gone or going) and
// those that did not happen in time.
func granted(noted map[string]metav1.Time, all []*corev1.Pod, now time.Time) (map[string]metav1.Time, time.Duration) {
	var out map[string]metav1.Time
	recheck := time.Duration(0)
	for _, pod := range all {
		since, ok := noted[pod.Name]
		if !ok || pod.DeletionTimestamp != nil {
			continue
		}
		left := since.Add(evictionTTL).Sub(now)
		if left <= 0 {
			continue
		}
		if out == nil {
			out = map[string]metav1.Time{}
		}
		out[pod.Name] = since
		if recheck == 0 || left < recheck {
			recheck = left
		}
	}
	return out, recheck
}

func setCondition(status *policyv1.PodDisruptionBudgetStatus, value metav1.ConditionStatus, reason, message string, generation int64, now time.Time) {
	meta.SetStatusCondition(&status.Conditions, metav1.Condition{
		Type: policyv1.DisruptionAllowedCondition, Status: value, Reason: reason, Message: message,
		ObservedGeneration: generation, LastTransitionTime: metav1.NewTime(now),
	})
}
