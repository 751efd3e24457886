package scheduler

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/sched/internal/pods"
)

const (
	// bindsInFlight bounds concurrent bindings.
	bindsInFlight = 64
	bindTimeout   = 10 * time.Second
)

// bind tells the API where the assumed pod goes. If that fails the pod is taken
// off the node again and retried.
func (s *scheduler) bind(ctx context.Context, pod *corev1.Pod, node string, start time.Time) {
	callCtx, cancel := context.WithTimeout(ctx, bindTimeout)
	defer cancel()
	err := s.client.CoreV1().Pods(pod.Namespace).Bind(callCtx, &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
		Target:     corev1.ObjectReference{Kind: "Node", Name: node},
	}, metav1.CreateOptions{})
	if err == nil {
		s.queue.remove(pod.UID)
		attempts.WithLabelValues("scheduled").Inc()
		attemptSeconds.Observe(s.clock.Since(start).Seconds())
		s.eventsFor(pod).Eventf(pod, corev1.EventTypeNormal, "Scheduled", "Successfully assigned %s/%s to %s", pod.Namespace, pod.Name, node)
		return
	}
	s.unbound(ctx, pod, node, err)
}

// unbound takes a pod whose binding failed off its node, to be tried again.
func (s *scheduler) unbound(ctx context.Context, pod *corev1.Pod, node string, err error) {
	s.mu.Lock()
	s.snapshot.forget(pod.UID)
	s.mu.Unlock()
	s.queue.changed(podGone)       // the room it would have taken
	s.queue.changed(deviceChanged) // and devices
	if ctx.Err() != nil {
		return // leadership ended
	}
	if apierrors.IsNotFound(err) && !s.stillWaiting(pod) || errors.Is(err, errGone) {
		s.queue.remove(pod.UID)
		return
	}
	attempts.WithLabelValues("error").Inc()
	klog.FromContext(ctx).Info("bind failed, will retry", "pod", klog.KObj(pod), "node", node, "err", err)
	if !apierrors.IsConflict(err) {
		s.eventsFor(pod).Eventf(pod, corev1.EventTypeWarning, "FailedScheduling", "binding rejected: %v", err)
	}
	// If the binding arrived and only its answer was lost, the informer will
	// show the pod bound and take it out of the queue.
	s.queue.fail(pod.UID)
}

// report writes why a pod has no node into its PodScheduled condition.
// nominated is the node that the pod was promised, if any.
func (s *scheduler) report(ctx context.Context, pod *corev1.Pod, message, nominated string) error {
	condition := core.TimedPodCondition(pod.Status.Conditions, corev1.PodCondition{
		Type:               corev1.PodScheduled,
		Status:             corev1.ConditionFalse,
		Reason:             corev1.PodReasonUnschedulable,
		Message:            message,
		ObservedGeneration: pod.Generation,
	}, s.clock.Now())
	if old := pods.Condition(pod, corev1.PodScheduled); old != nil && old.Status == condition.Status && old.Reason == condition.Reason &&
		old.Message == message && pod.Status.NominatedNodeName == nominated {
		return nil
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID},
		"status":   map[string]any{"conditions": []corev1.PodCondition{condition}, "nominatedNodeName": nominated},
	})
	if err != nil {
		return fmt.Errorf("encode condition: %w", err)
	}
	_, err = s.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // gone, or another of the same name
	}
	return err
}
