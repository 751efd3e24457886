package agent

import (
	"cmp"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/cpuset"

	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/agent/podresources"
	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/apis/core"
)

// podResources are the pods that have not ended, and what their containers have
// for themselves.
func (a *Agent) podResources() []podresources.Pod {
	var out []podresources.Pod
	for _, v := range a.pods.Views() {
		if v.Status == nil || !core.FinalPhase(v.Status.Phase) {
			out = append(out, resourcesOf(v.Pod, a.cfg.CPUs, a.devices))
		}
	}
	slices.SortFunc(out, func(a, b podresources.Pod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return out
}

// resourcesOf are one pod's. Init containers that end are left out: what they
// have had, others have by now.
func resourcesOf(p *v1.Pod, cpus pod.CPUs, has *devices) podresources.Pod {
	out := podresources.Pod{Namespace: p.Namespace, Name: p.Name}
	var list []*v1.Container
	for i := range p.Spec.InitContainers {
		if c := &p.Spec.InitContainers[i]; podstate.InitKind(c) == podstate.KindSidecar {
			list = append(list, c)
		}
	}
	for i := range p.Spec.Containers {
		list = append(list, &p.Spec.Containers[i])
	}
	guaranteed := core.QOSClass(p) == v1.PodQOSGuaranteed
	for _, c := range list {
		r := podresources.Container{Name: c.Name}
		r.Devices, r.Claimed = has.has(p, c)
		if guaranteed {
			r.Memory = podresources.Memory(c.Resources.Limits)
		}
		if cpus != nil {
			if set, own := cpus.Of(string(p.UID), c.Name); own {
				r.CPUs = ids(set)
			}
		}
		out.Containers = append(out.Containers, r)
	}
	return out
}

// ids are the numbers of processors.
func ids(set cpuset.CPUSet) []int64 {
	var out []int64
	for _, n := range set.List() {
		out = append(out, int64(n))
	}
	return out
}
