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
		if v.Status == nil || !podstate.Terminal(v.Status.Phase) {
			out = append(out, resourcesOf(v.Pod, a.cfg.CPUs, a.claimed))
		}
	}
	slices.SortFunc(out, func(a, b podresources.Pod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	return out
}

// claimed are the devices that a container has of its pod's claims; those of a
// pod that waits for them are not listed.
func (a *Agent) claimed(p *v1.Pod, c *v1.Container) []podresources.Claimed {
	if a.devices == nil || !podstate.UsesClaims(p) {
		return nil
	}
	all, err := a.devices.Resources(p, c)
	if err != nil {
		return nil
	}
	var out []podresources.Claimed
	for _, r := range all {
		out = append(out, podresources.Claimed(r))
	}
	return out
}

// resourcesOf are one pod's. Init containers that end are left out: what they
// have had, others have by now.
func resourcesOf(p *v1.Pod, cpus pod.CPUs, claimed func(*v1.Pod, *v1.Container) []podresources.Claimed) podresources.Pod {
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
		r := podresources.Container{Name: c.Name, Claimed: claimed(p, c)}
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
