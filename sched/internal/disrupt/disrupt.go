// Package disrupt deletes pods for the sake of something else, and tells them why
// before.
package disrupt

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// Delete sets the pod's condition DisruptionTarget and deletes the pod, with its
// grace. deleted is false if the pod is gone, or another one of its name.
func Delete(ctx context.Context, client kubernetes.Interface, pod *corev1.Pod, reason, message string, now time.Time) (deleted bool, err error) {
	api := client.CoreV1().Pods(pod.Namespace)
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID},
		"status": map[string]any{"conditions": []corev1.PodCondition{{
			Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue, Reason: reason, Message: message,
			ObservedGeneration: pod.Generation, LastTransitionTime: metav1.NewTime(now),
		}}},
	})
	if err != nil {
		return false, fmt.Errorf("encode condition: %w", err)
	}
	if _, err = api.Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status"); err == nil {
		err = api.Delete(ctx, pod.Name, *metav1.NewPreconditionDeleteOptions(string(pod.UID)))
	}
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return false, nil
	}
	return err == nil, err
}
