package nodelifecycle

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/sched/internal/seconds"
)

// eviction says when a pod has to leave its node.
type eviction int

const (
	stays  eviction = iota
	leaves          // at once
	later           // after some time
)

// evictionOf decides about a pod on a node with these taints. When the time
// comes is counted from when each taint was added, which is stored with it, so
// that a change of leader does not restart it. first is used for a taint
// without that time. With suspended, taints of lost nodes evict no pod.
func evictionOf(pod *corev1.Pod, all []corev1.Taint, first, now time.Time, suspended bool) (eviction, time.Duration) {
	what, wait := stays, time.Duration(0)
	for i := range all {
		taint := &all[i]
		if taint.Effect != corev1.TaintEffectNoExecute || suspended && lost(taint) {
			continue
		}
		limit, tolerated := tolerance(pod, taint)
		if !tolerated {
			return leaves, 0
		}
		if limit == nil {
			continue // without a limit
		}
		since := first
		if taint.TimeAdded != nil {
			since = taint.TimeAdded.Time
		}
		left := since.Add(seconds.Duration(*limit)).Sub(now)
		if left <= 0 {
			return leaves, 0
		}
		if what == stays || left < wait {
			what, wait = later, left
		}
	}
	return what, wait
}

// lost reports whether the taint stands for a node in trouble, not for an
// administrator's wish.
func lost(taint *corev1.Taint) bool {
	return taint.Key == corev1.TaintNodeUnreachable || taint.Key == corev1.TaintNodeNotReady
}

// tolerance returns for how many seconds the pod tolerates the taint; a nil limit is
// none. The shortest of the matching tolerations with a limit counts.
func tolerance(pod *corev1.Pod, taint *corev1.Taint) (limit *int64, tolerated bool) {
	for i := range pod.Spec.Tolerations {
		t := &pod.Spec.Tolerations[i]
		if !t.ToleratesTaint(klog.Background(), taint, true) {
			continue
		}
		tolerated = true
		if t.TolerationSeconds != nil && (limit == nil || *t.TolerationSeconds < *limit) {
			limit = t.TolerationSeconds
		}
	}
	return limit, tolerated
}
