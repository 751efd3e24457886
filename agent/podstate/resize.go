package podstate

import (
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/apis/core"
)

// In-place resize (KEP-1287). The spec says what is wanted; what the node has
// granted is *allocated*, and is what containers are made with; what the
// running instance's cgroup holds is *applied*.
//
//	spec ≠ allocated ──fits──▶ allocated ≠ applied ──cgroup written──▶ all equal
//	        └─ does not fit: PodResizePending    └─ PodResizeInProgress
//
// An agent that is killed on the way starts again from what the API was last
// reported was allocated, and asks again.

// ResizeRetry is how often a resize that does not fit is looked at again, even
// if no pod of the node has ended.
const ResizeRetry = time.Minute

// Allocation is what the node has granted, by container; a container without
// an entry has what its spec says.
type Allocation map[string]v1.ResourceRequirements

// Of is the container's allocation.
func (a Allocation) Of(c *v1.Container) v1.ResourceRequirements {
	if r, ok := a[c.Name]; ok {
		return r
	}
	return c.Resources
}

// Granted is the pod as the node has granted it: its resources are what is
// allocated. The result shares with pod what does not differ.
func Granted(pod *v1.Pod, a Allocation) *v1.Pod {
	same := true
	for name := range a {
		for _, c := range AllContainers(&pod.Spec) {
			same = same && (c.Name != name || equalResources(a[name], c.Resources))
		}
	}
	if same {
		return pod
	}
	out := *pod
	apply := func(list []v1.Container) []v1.Container {
		list = append([]v1.Container(nil), list...)
		for i := range list {
			list[i].Resources = a.Of(&list[i])
		}
		return list
	}
	out.Spec.Containers, out.Spec.InitContainers = apply(pod.Spec.Containers), apply(pod.Spec.InitContainers)
	return &out
}

// equalResources compares cpu and memory: nothing else can be resized.
func equalResources(a, b v1.ResourceRequirements) bool {
	for _, name := range []v1.ResourceName{v1.ResourceCPU, v1.ResourceMemory} {
		for _, lists := range [][2]v1.ResourceList{{a.Requests, b.Requests}, {a.Limits, b.Limits}} {
			x, inX := lists[0][name]
			y, inY := lists[1][name]
			if inX != inY || x.Cmp(y) != 0 {
				return false
			}
		}
	}
	return true
}

// Resizable lists the containers that can be resized: app containers and
// sidecars.
func Resizable(spec *v1.PodSpec) []*v1.Container {
	var out []*v1.Container
	for i := range spec.InitContainers {
		if c := &spec.InitContainers[i]; InitKind(c) == KindSidecar {
			out = append(out, c)
		}
	}
	for i := range spec.Containers {
		out = append(out, &spec.Containers[i])
	}
	return out
}

// wanted tells whether the spec asks for other resources than are allocated.
func (o *Observed) wanted(spec *v1.PodSpec) bool {
	for _, c := range Resizable(spec) {
		if !equalResources(o.Allocated.Of(c), c.Resources) {
			return true
		}
	}
	return false
}

// Unapplied lists the running containers whose cgroups do not hold what is
// allocated.
func (o *Observed) Unapplied(spec *v1.PodSpec) []*v1.Container {
	var out []*v1.Container
	for _, c := range Resizable(spec) {
		if oc := o.Containers[c.Name]; oc != nil && oc.Running() && !equalResources(o.Allocated.Of(c), oc.Now.Applied) {
			out = append(out, c)
		}
	}
	return out
}

// NeedsRestart tells whether the container's policy asks for a restart to go
// from one size to another.
func NeedsRestart(c *v1.Container, from, to v1.ResourceRequirements) bool {
	for _, p := range c.ResizePolicy {
		if p.RestartPolicy != v1.RestartContainer {
			continue
		}
		only := func(r v1.ResourceRequirements) v1.ResourceRequirements {
			out := v1.ResourceRequirements{Requests: v1.ResourceList{}, Limits: v1.ResourceList{}}
			if q, ok := r.Requests[p.ResourceName]; ok {
				out.Requests[p.ResourceName] = q
			}
			if q, ok := r.Limits[p.ResourceName]; ok {
				out.Limits[p.ResourceName] = q
			}
			return out
		}
		if !equalResources(only(from), only(to)) {
			return true
		}
	}
	return false
}

// resize plans what the spec's resources ask for.
func (p *planner) resize() {
	if p.o.wanted(p.spec) && !p.held(p.o.ResizePending) {
		p.add(Grant{})
		return // what is granted is applied by the next plan
	}
	apply := false
	for _, c := range p.o.Unapplied(p.spec) {
		oc := p.o.Containers[c.Name]
		switch {
		case oc.Op != OpNone:
		case NeedsRestart(c, oc.Now.Applied, p.o.Allocated.Of(c)):
			p.add(Stop{Container: c.Name, ID: oc.Now.ID, At: p.now, Grace: p.specGrace(), Cause: StopResized,
				Message: fmt.Sprintf("Container %s is resized, will be restarted", c.Name)})
		default:
			apply = true
		}
	}
	if (apply || p.o.podUnapplied(p.d.Pod)) && !p.o.Resizing && !p.held(p.o.ResizeErr) {
		p.add(Resize{})
	}
}

// podUnapplied tells whether the pod's own cgroup does not hold what is
// allocated.
func (o *Observed) podUnapplied(pod *v1.Pod) bool {
	if o.Sandbox.State != SandboxReady || o.Sandbox.Limits.CPUShares == 0 { // it has always at least 2
		return false
	}
	have, want := o.Sandbox.Limits, PodLimits(pod, o.Allocated)
	differs := func(have, want int64) bool { return want != 0 && have != want } // 0: left alone
	return differs(int64(have.CPUShares), int64(want.CPUShares)) || differs(have.CPUQuota, want.CPUQuota) || differs(have.MemoryLimit, want.MemoryLimit)
}

// PodLimits are the limits of the pod's own cgroup. Ephemeral containers came
// later and change nothing of it.
func PodLimits(pod *v1.Pod, a Allocation) api.Resources {
	out := *Granted(pod, a)
	out.Spec.EphemeralContainers = nil
	return PodResources(&out, 0)
}

// Grantable says why the node cannot give the pod what its spec asks for, nil:
// it can. others are the pods that hold a part of the node beside it. It is
// pure.
func Grantable(pod *v1.Pod, node *v1.Node, others []*v1.Pod) (reason, message string) {
	want := core.Requests(pod)
	for _, name := range []v1.ResourceName{v1.ResourceCPU, v1.ResourceMemory} {
		q, asked := want[name]
		have, known := node.Status.Allocatable[name]
		if asked && known && q.Cmp(have) > 0 {
			return v1.PodReasonInfeasible, fmt.Sprintf("Node didn't have enough capacity: %s, requested: %s, capacity: %s", name, q.String(), have.String())
		}
	}
	used := v1.ResourceList{}
	for _, o := range others {
		AddList(used, core.Requests(o))
	}
	for _, name := range []v1.ResourceName{v1.ResourceCPU, v1.ResourceMemory} {
		q, asked := want[name]
		have, known := node.Status.Allocatable[name]
		total, u := used[name].DeepCopy(), used[name]
		total.Add(q)
		if asked && known && total.Cmp(have) > 0 {
			return v1.PodReasonDeferred, fmt.Sprintf("Node didn't have enough resource: %s, requested: %s, used by others: %s, capacity: %s", name, q.String(), u.String(), have.String())
		}
	}
	return "", ""
}

// seedAllocation is the allocation that the status last reported, and for a new
// pod what its spec says.
func seedAllocation(pod *v1.Pod) Allocation {
	reported := map[string]*v1.ContainerStatus{}
	for _, list := range [][]v1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses} {
		for i := range list {
			reported[list[i].Name] = &list[i]
		}
	}
	out := Allocation{}
	for _, c := range Resizable(&pod.Spec) {
		out[c.Name] = c.Resources
		if st := reported[c.Name]; st != nil && st.Resources != nil {
			out[c.Name] = overlay(c.Resources, v1.ResourceRequirements{Requests: st.AllocatedResources, Limits: st.Resources.Limits})
		}
	}
	return out
}

// seedApplied is what the cgroup of a running instance holds, after a restart
// of the agent: podmon has the figures, the API the words.
func seedApplied(pod *v1.Pod, have api.Resources, allocated v1.ResourceRequirements, reported v1.ContainerStatus) v1.ResourceRequirements {
	want := ContainerResources(pod, allocated)
	if have.CPUShares == want.CPUShares && have.CPUQuota == want.CPUQuota && have.MemoryLimit == want.MemoryLimit {
		return allocated
	}
	if reported.Resources != nil && !equalResources(*reported.Resources, allocated) {
		return *reported.Resources
	}
	return v1.ResourceRequirements{} // unknown: it is written again
}

// overlay is base with cpu and memory of r.
func overlay(base, r v1.ResourceRequirements) v1.ResourceRequirements {
	out := *base.DeepCopy()
	for _, lists := range []struct {
		to   *v1.ResourceList
		from v1.ResourceList
	}{{&out.Requests, r.Requests}, {&out.Limits, r.Limits}} {
		for _, name := range []v1.ResourceName{v1.ResourceCPU, v1.ResourceMemory} {
			q, ok := lists.from[name]
			switch {
			case !ok:
				delete(*lists.to, name)
			case *lists.to == nil:
				*lists.to = v1.ResourceList{name: q}
			default:
				(*lists.to)[name] = q
			}
		}
	}
	return out
}
