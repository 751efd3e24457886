package agent

import v1 "k8s.io/api/core/v1"

// RunningPods are the pods that run on this node, each with the addresses it has, as
// the API last had it: also those that it has no more.
func (a *Agent) RunningPods() []*v1.Pod {
	var out []*v1.Pod
	for _, v := range a.pods.Views() {
		if v.Status == nil {
			continue
		}
		p := *v.Pod // parts of it are shared, and not changed
		p.Status = v1.PodStatus{Phase: v.Status.Phase, PodIPs: v.Status.PodIPs}
		out = append(out, &p)
	}
	return out
}
