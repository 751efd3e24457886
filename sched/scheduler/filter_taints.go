package scheduler

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
)

// filterTaints keeps pods off nodes with NoSchedule and NoExecute taints that
// they do not tolerate. That includes not-ready and unreachable nodes, which
// nodelifecycle taints.
func filterTaints(_ *snapshot, p *podInfo) func(*nodeInfo) []string {
	var last corev1.Taint // and what is said of it: many nodes have the same
	var words []string
	return func(n *nodeInfo) []string {
		if len(n.taints) == 0 {
			return nil
		}
		taint, refused := untolerated(n.taints, p.pod.Spec.Tolerations, corev1.TaintEffectNoSchedule, corev1.TaintEffectNoExecute)
		if !refused {
			return nil
		}
		if words == nil || last.Key != taint.Key || last.Value != taint.Value {
			last, words = taint, []string{fmt.Sprintf("node(s) had untolerated taint {%s: %s}", taint.Key, taint.Value)}
		}
		return words
	}
}

// untolerated returns the first taint with one of the effects that no
// toleration covers.
func untolerated(taints []corev1.Taint, tolerations []corev1.Toleration, effects ...corev1.TaintEffect) (corev1.Taint, bool) {
	for _, taint := range taints {
		for _, effect := range effects {
			if taint.Effect == effect && !tolerated(&taint, tolerations) {
				return taint, true
			}
		}
	}
	return corev1.Taint{}, false
}

func tolerated(taint *corev1.Taint, tolerations []corev1.Toleration) bool {
	for i := range tolerations {
		if tolerations[i].ToleratesTaint(klog.Background(), taint, true) {
			return true
		}
	}
	return false
}
