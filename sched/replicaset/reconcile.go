package replicaset

import (
	"cmp"
	"math"
	"slices"
	"strconv"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/podctl"
	"github.com/clusterd/clusterd/sched/internal/pods"
)

// burst is the most pods one pass creates or deletes for one ReplicaSet.
const burst = 500

// Decision is what one pass does about the number of pods. At most one of the
// two is set.
type Decision struct {
	Create int
	Delete []*corev1.Pod
}

// Decide compares the ReplicaSet's active pods with its spec. perNode counts
// the active pods on each node of all ReplicaSets with the same controller: a
// rollout removes pods first where many of them share a node.
func Decide(rs *appsv1.ReplicaSet, active []*corev1.Pod, perNode map[string]int, now time.Time) Decision {
	want := int(ptr.Deref(rs.Spec.Replicas, 1))
	switch diff := len(active) - want; {
	case diff < 0:
		return Decision{Create: min(-diff, burst)}
	case diff > 0:
		return Decision{Delete: victims(active, min(diff, burst), perNode, now)}
	}
	return Decision{}
}

// victims picks the n pods whose loss hurts least.
func victims(active []*corev1.Pod, n int, perNode map[string]int, now time.Time) []*corev1.Pod {
	if n >= len(active) {
		return active
	}
	sorted := slices.Clone(active)
	slices.SortFunc(sorted, func(a, b *corev1.Pod) int { return rank(a, b, perNode, now) })
	return sorted[:n]
}

// rank is negative when a should be deleted before b.
func rank(a, b *corev1.Pod, perNode map[string]int, now time.Time) int {
	return cmp.Or(
		first(a.Spec.NodeName == "", b.Spec.NodeName == ""),
		cmp.Compare(phaseOrder(a), phaseOrder(b)),
		first(!pods.Ready(a), !pods.Ready(b)),
		cmp.Compare(deletionCost(a), deletionCost(b)),
		-cmp.Compare(perNode[a.Spec.NodeName], perNode[b.Spec.NodeName]),
		youngest(readySince(a), readySince(b), now),
		-cmp.Compare(restarts(a), restarts(b)),
		youngest(a.CreationTimestamp.Time, b.CreationTimestamp.Time, now),
		cmp.Compare(a.UID, b.UID),
	)
}

func first(a, b bool) int {
	switch {
	case a && !b:
		return -1
	case b && !a:
		return 1
	}
	return 0
}

func phaseOrder(pod *corev1.Pod) int {
	switch pod.Status.Phase {
	case corev1.PodRunning:
		return 2
	case corev1.PodUnknown:
		return 1
	}
	return 0
}

func deletionCost(pod *corev1.Pod) int32 {
	cost, err := strconv.ParseInt(pod.Annotations[corev1.PodDeletionCost], 10, 32)
	if err != nil {
		return 0 // absent, or refused by validation
	}
	return int32(cost)
}

func readySince(pod *corev1.Pod) time.Time {
	if c := pods.Condition(pod, corev1.PodReady); c != nil && c.Status == corev1.ConditionTrue {
		return c.LastTransitionTime.Time
	}
	return time.Time{}
}

func restarts(pod *corev1.Pod) (n int32) {
	for _, c := range pod.Status.ContainerStatuses {
		n = max(n, c.RestartCount)
	}
	return n
}

// youngest orders by age on a logarithmic scale, younger first: among pods of
// about the same age the choice falls to the next rule, so that not always the
// newest zone or node loses its pods.
func youngest(a, b time.Time, now time.Time) int {
	if a.IsZero() || b.IsZero() {
		return first(a.IsZero() && !b.IsZero(), b.IsZero() && !a.IsZero())
	}
	return cmp.Compare(logAge(a, now), logAge(b, now))
}

func logAge(t, now time.Time) int {
	age := now.Sub(t)
	if age <= 0 {
		return -1
	}
	return int(math.Log2(float64(age)))
}

// NewPod returns the next pod of the owner, which is of the kind, without a name.
func NewPod(owner podctl.Owner, kind schema.GroupVersionKind, template *corev1.PodTemplateSpec) *corev1.Pod {
	pod := podctl.FromTemplate(owner, kind, template)
	pod.GenerateName = owner.GetName() + "-"
	return pod
}

// failure is why a pass could not reach the wanted number of pods.
type failure struct {
	reason string // FailedCreate or FailedDelete
	err    error
}

// Status computes the ReplicaSet's status from its pods. recheck is the time
// until the next ready pod becomes available, 0 if there is none.
func Status(rs *appsv1.ReplicaSet, owned []*corev1.Pod, failed *failure, now time.Time) (status appsv1.ReplicaSetStatus, recheck time.Duration) {
	status = *rs.Status.DeepCopy()
	status.ObservedGeneration = rs.Generation
	status.Replicas, status.FullyLabeledReplicas, status.ReadyReplicas, status.AvailableReplicas = 0, 0, 0, 0
	terminating := int32(0)
	template := labels.Set(rs.Spec.Template.Labels).AsSelectorPreValidated()
	minReady := time.Duration(rs.Spec.MinReadySeconds) * time.Second
	for _, pod := range owned {
		if pods.Terminating(pod) {
			terminating++
		}
		if !pods.Active(pod) {
			continue
		}
		status.Replicas++
		if template.Matches(labels.Set(pod.Labels)) {
			status.FullyLabeledReplicas++
		}
		if !pods.Ready(pod) {
			continue
		}
		status.ReadyReplicas++
		available, wait := pods.Available(pod, minReady, now)
		if available {
			status.AvailableReplicas++
		} else if recheck == 0 || wait < recheck {
			recheck = wait
		}
	}
	status.TerminatingReplicas = &terminating
	status.Conditions = conditions(status.Conditions, failed, now)
	return status, recheck
}

func conditions(old []appsv1.ReplicaSetCondition, failed *failure, now time.Time) []appsv1.ReplicaSetCondition {
	var out []appsv1.ReplicaSetCondition
	var previous *appsv1.ReplicaSetCondition
	for i := range old {
		if old[i].Type == appsv1.ReplicaSetReplicaFailure {
			previous = &old[i]
			continue
		}
		out = append(out, old[i])
	}
	if failed == nil {
		return out
	}
	c := appsv1.ReplicaSetCondition{
		Type:               appsv1.ReplicaSetReplicaFailure,
		Status:             corev1.ConditionTrue,
		LastTransitionTime: metav1.NewTime(now),
		Reason:             failed.reason,
		Message:            failed.err.Error(),
	}
	if previous != nil && previous.Status == c.Status {
		c.LastTransitionTime = previous.LastTransitionTime
	}
	return append(out, c)
}
