package core

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestSetPodCondition(t *testing.T) {
	now := time.Unix(1000, 0)
	then, probed := metav1.NewTime(time.Unix(10, 0)), metav1.NewTime(time.Unix(20, 0))
	ready := corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: then}
	waits := corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable,
		Message: "no node", ObservedGeneration: 3, LastTransitionTime: then, LastProbeTime: probed}
	for name, tt := range map[string]struct {
		old       []corev1.PodCondition
		set, want corev1.PodCondition
		at        int
	}{
		"none before": {
			[]corev1.PodCondition{ready},
			corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionTrue},
			corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, LastTransitionTime: metav1.NewTime(now)}, 1,
		},
		"the status moves": {
			[]corev1.PodCondition{waits, ready},
			corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, ObservedGeneration: 4},
			corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionTrue, ObservedGeneration: 4, LastTransitionTime: metav1.NewTime(now)}, 0,
		},
		"another reason": {
			[]corev1.PodCondition{ready, waits},
			corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonSchedulerError},
			corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonSchedulerError,
				ObservedGeneration: 3, LastTransitionTime: then, LastProbeTime: probed}, 1,
		},
	} {
		status := corev1.PodStatus{Conditions: tt.old}
		want := append([]corev1.PodCondition(nil), tt.old...)
		if tt.at == len(want) {
			want = append(want, tt.want)
		} else {
			want[tt.at] = tt.want
		}
		SetPodCondition(&status, tt.set, now)
		if diff := cmp.Diff(want, status.Conditions); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}
