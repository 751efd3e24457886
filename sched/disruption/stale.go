package disruption

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
)

// staleAfter is how long a pod may say that it is about to be disrupted, and not be
// deleted: upstream's time.
const staleAfter = 2 * time.Minute

// stale reports whether the pod's condition DisruptionTarget says what has not come to
// pass, or after what time it will (0: never). A node's own decision to end a pod may
// take as long as it does.
func stale(pod *corev1.Pod, now time.Time) (stale bool, in time.Duration) {
	c := pods.Condition(pod, corev1.DisruptionTarget)
	if c == nil || c.Status != corev1.ConditionTrue || c.Reason == corev1.PodReasonTerminationByKubelet || pod.DeletionTimestamp != nil || pods.Finished(pod) {
		return false, 0
	}
	left := c.LastTransitionTime.Add(staleAfter).Sub(now)
	return left <= 0, max(left, 0)
}

// reset takes the condition DisruptionTarget back from a pod that was not deleted
// after all: a Job that leaves such failures out of its count would do so for all
// that becomes of the pod.
func (c *controller) reset(ctx context.Context, key loop.Key) error {
	pod, err := c.pods.Pods(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	now := c.clock.Now()
	is, in := stale(pod, now)
	if in > 0 {
		c.stale.EnqueueAfter(key, in)
	}
	if !is {
		return nil
	}
	condition := *pods.Condition(pod, corev1.DisruptionTarget)
	condition.Status, condition.LastTransitionTime = corev1.ConditionFalse, metav1.NewTime(now)
	// The version: an eviction that is granted right now writes the condition again.
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID, "resourceVersion": pod.ResourceVersion},
		"status":   map[string]any{"conditions": []corev1.PodCondition{condition}},
	})
	if err != nil {
		return fmt.Errorf("encode condition: %w", err)
	}
	_, err = c.client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("take back the condition %s of a pod that was not deleted: %w", corev1.DisruptionTarget, err)
	}
	return nil
}
