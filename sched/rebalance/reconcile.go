package rebalance

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/sched/internal/pods"
)

const (
	// most is how many pods a pass evicts.
	most = 3
	// defaultSettled is for how long a pod is ready before it may be moved.
	defaultSettled = 10 * time.Minute
	// rest is for how long no other pod of a controller is moved after one was.
	rest = 30 * time.Minute
	// critical is the least priority of pods that the system needs.
	critical = 2_000_000_000
)

// replaces are the kinds that are known to make another pod in place of one that was
// evicted; pods of others move if they say so.
var replaces = map[string]bool{"ReplicaSet": true, "StatefulSet": true, "ReplicationController": true}

// movable reports whether the pod may be evicted so that its controller makes
// another one: it has one that does so, no data that go with it, and has run well for
// so long.
func movable(pod *corev1.Pod, settled time.Duration, now time.Time) bool {
	owner := metav1.GetControllerOf(pod)
	wish := pod.Annotations[names.Rebalance]
	switch {
	case wish == "false", owner == nil, !pods.Active(pod):
		return false
	case wish != "true" && !replaces[owner.Kind], owner.Kind == "DaemonSet", owner.Kind == "Node": // the last two are bound to the node
		return false
	case pod.Spec.RestartPolicy == corev1.RestartPolicyNever, pod.Spec.RestartPolicy == corev1.RestartPolicyOnFailure: // what it has done would be lost
		return false
	case pod.Spec.Priority != nil && *pod.Spec.Priority >= critical:
		return false
	case len(pod.Spec.ResourceClaims) > 0 || pod.Status.ExtendedResourceClaimStatus != nil || pod.Spec.SchedulingGroup != nil:
		return false // devices, and gangs, are more than requests
	case wish != "true" && local(pod):
		return false
	}
	ready, _ := pods.Available(pod, settled, now)
	return ready
}

// local reports whether the pod has data that go with it.
func local(pod *corev1.Pod) bool {
	for i := range pod.Spec.Volumes {
		if v := &pod.Spec.Volumes[i]; v.EmptyDir != nil || v.HostPath != nil || v.Ephemeral != nil {
			return true
		}
	}
	return false
}

// waiting reports whether the pod waits for a node: the room is for such pods first.
func waiting(pod *corev1.Pod) bool {
	return pod.Spec.NodeName == "" && pods.Active(pod) && len(pod.Spec.SchedulingGates) == 0
}

// rested forgets the controllers whose rest is over.
func rested(moved map[types.UID]time.Time, now time.Time) {
	for uid, at := range moved {
		if now.Sub(at) >= rest {
			delete(moved, uid)
		}
	}
}
