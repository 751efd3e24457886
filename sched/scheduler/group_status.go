package scheduler

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
)

// groupPause is how long a group is watched before something is said of it: its
// pods are created and bound one by one, and each would cause a report about all others.
const groupPause = 500 * time.Millisecond

// reportGroup says of the pods of a group that cannot be tried what they wait
// for, and of the group whether its pods have their nodes.
func (s *scheduler) reportGroup(ctx context.Context, key loop.Key) error {
	group, err := s.groups.get(key)
	if err != nil {
		return err
	}
	s.mu.Lock()
	n := s.countGroup(key)
	preparing, refused := s.groups.preparing[key], s.groups.refused[key]
	s.mu.Unlock()
	why, _ := lack(key, group, n)
	if why != "" && !preparing {
		for _, pod := range n.waiting {
			if err := s.reportMember(ctx, pod, why); err != nil {
				return err
			}
		}
	}
	if group == nil {
		return nil
	}
	if why == "" {
		why = refused
	}
	condition := groupCondition(group, n, why)
	if condition == nil {
		return nil
	}
	condition.LastTransitionTime = metav1.NewTime(s.clock.Now())
	return s.writeGroup(ctx, group, *condition)
}

// reportMember says of a pod what its group waits for. What the pod was promised
// was taken back.
func (s *scheduler) reportMember(ctx context.Context, pod *corev1.Pod, why string) error {
	now, err := s.lister.Pods(pod.Namespace).Get(pod.Name)
	if err != nil || now.UID != pod.UID || !s.ours(now) {
		return nil // its own change will come
	}
	if c := pods.Condition(now, corev1.PodScheduled); c == nil || c.Message != why {
		s.eventsFor(now).Event(now, corev1.EventTypeWarning, "FailedScheduling", why)
	}
	if err := s.report(ctx, now, why, ""); err != nil {
		return fmt.Errorf("report what the pod group waits for: %w", err)
	}
	return nil
}

// groupCondition is what the status of a group is to say; nil: nothing new. Once
// its pods have had their nodes, that is never taken back.
func groupCondition(group *schedulingv1beta1.PodGroup, n headcount, why string) *metav1.Condition {
	c := &metav1.Condition{Type: schedulingv1beta1.PodGroupInitiallyScheduled, ObservedGeneration: group.Generation}
	need := 1
	if gang := group.Spec.SchedulingPolicy.Gang; gang != nil {
		need = int(gang.MinCount)
	}
	switch {
	case n.bound >= need:
		c.Status, c.Reason, c.Message = metav1.ConditionTrue, "Scheduled", fmt.Sprintf("%d pods have nodes, %d are needed", n.bound, need)
	case why != "" && len(n.waiting)+n.placed > 0:
		c.Status, c.Reason, c.Message = metav1.ConditionFalse, schedulingv1beta1.PodGroupReasonUnschedulable, why
	default:
		return nil
	}
	old := meta.FindStatusCondition(group.Status.Conditions, c.Type)
	if old != nil && (old.Status == metav1.ConditionTrue || old.Status == c.Status && old.Message == c.Message && old.ObservedGeneration == c.ObservedGeneration) {
		return nil
	}
	return c
}

func (s *scheduler) writeGroup(ctx context.Context, group *schedulingv1beta1.PodGroup, c metav1.Condition) error {
	if old := meta.FindStatusCondition(group.Status.Conditions, c.Type); old != nil && old.Status == c.Status {
		c.LastTransitionTime = old.LastTransitionTime
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": group.UID},
		"status":   map[string]any{"conditions": []metav1.Condition{c}},
	})
	if err != nil {
		return fmt.Errorf("encode condition: %w", err)
	}
	_, err = s.client.SchedulingV1beta1().PodGroups(group.Namespace).Patch(ctx, group.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // gone, or another of the same name
	}
	if err != nil {
		return fmt.Errorf("report on pod group: %w", err)
	}
	return nil
}
