package scheduler

import (
	corev1 "k8s.io/api/core/v1"
)

var unschedulable = []string{"node(s) were unschedulable"}

// filterUnschedulable keeps pods off cordoned nodes, unless they tolerate the
// taint that a cordon stands for.
func filterUnschedulable(_ *snapshot, p *podInfo) func(*nodeInfo) []string {
	cordon := []corev1.Taint{{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}}
	_, refused := untolerated(cordon, p.pod.Spec.Tolerations, corev1.TaintEffectNoSchedule)
	if !refused {
		return nil
	}
	return func(n *nodeInfo) []string {
		if n.cordoned {
			return unschedulable
		}
		return nil
	}
}
