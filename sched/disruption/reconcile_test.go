package disruption

import (
	"errors"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/clusterd/clusterd/sched/schedtest"
)

var now = time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)

func TestStatus(t *testing.T) {
	ready := func(name string) *corev1.Pod { return schedtest.Pod(name).On("n").Ready(now).Obj() }
	three := []*corev1.Pod{ready("a"), ready("b"), ready("c")}
	sick := []*corev1.Pod{ready("a"), ready("b"), schedtest.Pod("c").On("n").Obj(), schedtest.Pod("d").On("n").Ready(now).Deleting(now).Obj()}
	ago := func(d time.Duration) metav1.Time { return metav1.NewTime(now.Add(-d)) }
	number, percent := intstr.FromInt32, intstr.FromString
	tests := []struct {
		name             string
		min, max         *intstr.IntOrString
		pods             []*corev1.Pod
		expected         int32
		expectedErr      error
		disrupted        map[string]metav1.Time
		allowed, desired int32
		reason           string
		left             int // entries of DisruptedPods
		recheck          time.Duration
	}{
		{name: "min 2 of 3", min: ref(number(2)), pods: three, allowed: 1, desired: 2, reason: "SufficientPods"},
		{name: "min 3 of 3", min: ref(number(3)), pods: three, allowed: 0, desired: 3, reason: "InsufficientPods"},
		{name: "min 50% of 3 is 2", min: ref(percent("50%")), pods: three, expected: 3, allowed: 1, desired: 2, reason: "SufficientPods"},
		{name: "max 1", max: ref(number(1)), pods: three, expected: 3, allowed: 1, desired: 2, reason: "SufficientPods"},
		{name: "max 1, one is missing", max: ref(number(1)), pods: three[:2], expected: 3, allowed: 0, desired: 2, reason: "InsufficientPods"},
		{name: "max more than all", max: ref(number(9)), pods: three, expected: 3, allowed: 3, desired: 0, reason: "SufficientPods"},
		{name: "sick and going pods do not count", min: ref(number(1)), pods: sick, allowed: 1, desired: 1, reason: "SufficientPods"},
		{name: "no pods", max: ref(number(1)), reason: "InsufficientPods"},
		{name: "unknown controller", max: ref(number(1)), pods: three, expectedErr: errors.New("found no controllers"), reason: "SyncFailed"},
		{
			name: "granted a moment ago", min: ref(number(2)), pods: three, disrupted: map[string]metav1.Time{"a": ago(time.Second)},
			allowed: 0, desired: 2, reason: "InsufficientPods", left: 1, recheck: evictionTTL - time.Second,
		},
		{
			name: "granted long ago, or done", min: ref(number(2)), pods: append(three, schedtest.Pod("d").Deleting(now).Obj()),
			disrupted: map[string]metav1.Time{"a": ago(evictionTTL), "d": ago(0), "gone": ago(0)},
			allowed:   1, desired: 2, reason: "SufficientPods",
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			pdb := &policyv1.PodDisruptionBudget{Spec: policyv1.PodDisruptionBudgetSpec{MinAvailable: test.min, MaxUnavailable: test.max}}
			pdb.Generation = 3
			pdb.Status.DisruptedPods = test.disrupted
			got, recheck := Status(pdb, test.pods, func() (int32, error) { return test.expected, test.expectedErr }, now)
			if got.DisruptionsAllowed != test.allowed || got.DesiredHealthy != test.desired || len(got.DisruptedPods) != test.left || recheck != test.recheck || got.ObservedGeneration != 3 {
				t.Errorf("status %+v, recheck %v", got, recheck)
			}
			if len(got.Conditions) != 1 || got.Conditions[0].Reason != test.reason {
				t.Errorf("conditions %+v, want reason %s", got.Conditions, test.reason)
			}
		})
	}
}

func ref(v intstr.IntOrString) *intstr.IntOrString { return &v }
