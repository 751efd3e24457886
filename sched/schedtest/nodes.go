package schedtest

import (
	"context"
	"encoding/json"
	"hash/fnv"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
)

// RunNodes plays the agents of all nodes until ctx ends: pods that are bound
// become Running and ready, pods that are deleted go. Nodes that are dead do
// nothing; dead may be nil, and may be called at any time.
func RunNodes(ctx context.Context, t testing.TB, client kubernetes.Interface, dead func(node string) bool) {
	for ctx.Err() == nil {
		w, err := client.CoreV1().Pods("").Watch(ctx, metav1.ListOptions{})
		if err != nil {
			if ctx.Err() == nil {
				t.Errorf("watch pods: %v", err)
			}
			return
		}
		serve(ctx, t, client, dead, w.ResultChan())
		w.Stop()
	}
}

func serve(ctx context.Context, t testing.TB, client kubernetes.Interface, dead func(node string) bool, events <-chan watch.Event) {
	for {
		select {
		case <-ctx.Done():
			return
		case event, ok := <-events:
			if !ok {
				return
			}
			pod, isPod := event.Object.(*corev1.Pod)
			if !isPod || pod.Spec.NodeName == "" || dead != nil && dead(pod.Spec.NodeName) {
				continue
			}
			if err := act(ctx, client, pod); err != nil && ctx.Err() == nil {
				t.Errorf("agent of %s: pod %s: %v", pod.Spec.NodeName, pod.Name, err)
			}
		}
	}
}

// act does what an agent does about one pod.
func act(ctx context.Context, client kubernetes.Interface, pod *corev1.Pod) error {
	api := client.CoreV1().Pods(pod.Namespace)
	if pod.DeletionTimestamp != nil {
		options := metav1.NewDeleteOptions(0)
		options.Preconditions = metav1.NewUIDPreconditions(string(pod.UID))
		return ignoreGone(api.Delete(ctx, pod.Name, *options))
	}
	if pod.Status.Phase != corev1.PodPending && pod.Status.Phase != "" {
		return nil
	}
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"uid": pod.UID},
		"status": map[string]any{
			"phase":      corev1.PodRunning,
			"podIP":      address(pod),
			"podIPs":     []corev1.PodIP{{IP: address(pod)}},
			"conditions": []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: metav1.Now()}},
		},
	})
	if err != nil {
		return err
	}
	_, err = api.Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	return ignoreGone(err)
}

// address is a pod's, made of its UID: unique enough for tests.
func address(pod *corev1.Pod) string {
	h := fnv.New32a()
	h.Write([]byte(pod.UID))
	n := h.Sum32()
	return netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}).String()
}

func ignoreGone(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil
	}
	return err
}
