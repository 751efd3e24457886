package podstate

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/apis/quantity"
)

// CgroupParent is the cgroup of a pod below each controller. Guaranteed pods
// stand beside the two class groups, so that these can be squeezed as one.
func CgroupParent(root string, pod *v1.Pod) string {
	switch core.QOSClass(pod) {
	case v1.PodQOSBurstable:
		root += "/burstable"
	case v1.PodQOSBestEffort:
		root += "/besteffort"
	}
	return root + "/pod" + string(pod.UID)
}

// systemNodeCritical is the class of pods that a node cannot do without.
const systemNodeCritical = "system-node-critical"

// OomSingleProcess tells whether just the process chosen by the kernel dies when
// the container is out of memory: the annotation names.SingleProcessOOMKill has
// it among its names, which commas separate. Other containers die as a whole. A
// name that the pod does not have is an error.
func OomSingleProcess(pod *v1.Pod, container string) (bool, error) {
	value, ok := pod.Annotations[names.SingleProcessOOMKill]
	if !ok {
		return false, nil
	}
	found := false
	for name := range strings.SplitSeq(value, ",") {
		name = strings.TrimSpace(name)
		if !slices.ContainsFunc(AllContainers(&pod.Spec), func(c *v1.Container) bool { return c.Name == name }) {
			return false, fmt.Errorf("annotation %s: %q is no container of the pod: give names of its containers, separated by commas", names.SingleProcessOOMKill, name)
		}
		found = found || name == container
	}
	return found, nil
}

const cpuPeriod = 100_000 // microseconds

// CpuShares turns a request into cgroup v1 shares.
func CpuShares(q resource.Quantity) uint64 {
	return uint64(min(max(q.MilliValue()*1024/1000, 2), 262144))
}

// cpuQuota turns a limit into microseconds per period; the kernel allows no
// less than 1 ms.
func cpuQuota(q resource.Quantity) int64 {
	return max(q.MilliValue()*cpuPeriod/1000, 1000)
}

// ContainerResources are the cgroup limits of one container of a pod, but for
// huge pages. A container without a limit of its own has that of its pod, so
// that a program that looks at its cgroup sees what it can have (KEP-2837).
func ContainerResources(pod *v1.Pod, r v1.ResourceRequirements) api.Resources {
	limit := func(name v1.ResourceName) resource.Quantity {
		if own := r.Limits[name]; !own.IsZero() || pod.Spec.Resources == nil {
			return own
		}
		return pod.Spec.Resources.Limits[name]
	}
	out := api.Resources{CPUShares: 2}
	req, ok := r.Requests[v1.ResourceCPU]
	if !ok {
		req = r.Limits[v1.ResourceCPU]
	}
	if !req.IsZero() {
		out.CPUShares = CpuShares(req)
	}
	if lim := limit(v1.ResourceCPU); !lim.IsZero() {
		out.CPUQuota, out.CPUPeriod = cpuQuota(lim), cpuPeriod
	}
	if lim := limit(v1.ResourceMemory); !lim.IsZero() {
		out.MemoryLimit = lim.Value()
	}
	return out
}

// Hugepages are the limits of huge pages by the kernel's names for their
// sizes: of each size that the node has, none unless asked for.
func Hugepages(limits, capacity v1.ResourceList) map[string]uint64 {
	var out map[string]uint64
	for name, have := range capacity {
		size, ok := strings.CutPrefix(string(name), v1.ResourceHugePagesPrefix)
		if !ok || have.IsZero() {
			continue
		}
		page, err := quantity.Parse(size)
		if err != nil {
			continue
		}
		if out == nil {
			out = map[string]uint64{}
		}
		limit := limits[name]
		out[pageName(page.Value())] = uint64(limit.Value())
	}
	return out
}

// pageName is the kernel's name for a size of page: "2MB".
func pageName(bytes int64) string {
	units := []string{"B", "KB", "MB", "GB", "TB"}
	u := 0
	for bytes >= 1024 && bytes%1024 == 0 && u < len(units)-1 {
		bytes /= 1024
		u++
	}
	return strconv.FormatInt(bytes, 10) + units[u]
}

// PodResources are the limits of the pod's own cgroup: shares are the sum of
// the requests; a quota or memory limit is set only when every container has
// one.
func PodResources(pod *v1.Pod, pidsLimit int64) api.Resources {
	total := core.Requests(pod)
	out := api.Resources{CPUShares: 2, PidsLimit: pidsLimit}
	if cpu := total[v1.ResourceCPU]; !cpu.IsZero() {
		out.CPUShares = CpuShares(cpu)
	}
	if cpu, ok := sumLimits(pod, v1.ResourceCPU); ok {
		out.CPUQuota, out.CPUPeriod = cpuQuota(cpu), cpuPeriod
	}
	if mem, ok := sumLimits(pod, v1.ResourceMemory); ok {
		out.MemoryLimit = mem.Value()
	}
	return out
}

// MemoryLimit is what the pod may use as a whole, in bytes; 0: one of its
// containers has no limit.
func MemoryLimit(pod *v1.Pod) int64 {
	q, _ := sumLimits(pod, v1.ResourceMemory)
	return q.Value()
}

// sumLimits is what the pod may use of a resource as a whole, with its
// overhead; false when one of its containers has no limit and neither has the
// pod.
func sumLimits(pod *v1.Pod, name v1.ResourceName) (resource.Quantity, bool) {
	whole := v1.ResourceList{}
	if pod.Spec.Resources != nil {
		whole = pod.Spec.Resources.Limits
	}
	if q := whole[name]; q.IsZero() {
		for _, c := range AllContainers(&pod.Spec) {
			if q := c.Resources.Limits[name]; len(pod.Spec.EphemeralContainers) > 0 || q.IsZero() {
				return resource.Quantity{}, false
			}
		}
	}
	return core.Limits(pod)[name], true
}

// AddList adds the amounts of l to those of into.
func AddList(into, l v1.ResourceList) {
	for n, q := range l {
		have := into[n]
		have.Add(q)
		into[n] = have
	}
}

// OomScoreAdj makes the kernel kill best-effort pods first, guaranteed ones
// and those the node cannot do without last; burstable ones by how little of
// the node's memory they asked for. A sidecar is not killed before the app
// containers that need it (KEP-753).
func OomScoreAdj(pod *v1.Pod, c *v1.Container, nodeMemory int64) int {
	score := ownOOMScoreAdj(pod, c, nodeMemory)
	if InitKind(c) == KindSidecar && slices.ContainsFunc(pod.Spec.InitContainers, func(i v1.Container) bool { return i.Name == c.Name }) {
		for i := range pod.Spec.Containers {
			score = min(score, ownOOMScoreAdj(pod, &pod.Spec.Containers[i], nodeMemory))
		}
	}
	return score
}

func ownOOMScoreAdj(pod *v1.Pod, c *v1.Container, nodeMemory int64) int {
	if pod.Spec.PriorityClassName == systemNodeCritical {
		return -997
	}
	switch core.QOSClass(pod) {
	case v1.PodQOSGuaranteed:
		return -997
	case v1.PodQOSBestEffort:
		return 1000
	}
	if nodeMemory <= 0 {
		return 999
	}
	adj := 1000 - int(1000*(memoryRequest(c)+sharedMemory(pod))/nodeMemory)
	return min(max(adj, 3), 999)
}

// memoryRequest is what a container asks for itself, in bytes.
func memoryRequest(c *v1.Container) int64 {
	req := c.Resources.Requests[v1.ResourceMemory]
	if req.IsZero() {
		req = c.Resources.Limits[v1.ResourceMemory]
	}
	return req.Value()
}

// sharedMemory is each container's part of what the pod as a whole asks for
// beyond its containers' own requests, in bytes (KEP-2837): the app containers
// and sidecars have it in common.
func sharedMemory(pod *v1.Pod) int64 {
	if pod.Spec.Resources == nil {
		return 0
	}
	req := pod.Spec.Resources.Requests[v1.ResourceMemory]
	left, sharers := req.Value(), int64(0)
	for i := range pod.Spec.InitContainers {
		if c := &pod.Spec.InitContainers[i]; InitKind(c) == KindSidecar {
			left -= memoryRequest(c)
			sharers++
		}
	}
	for i := range pod.Spec.Containers {
		left -= memoryRequest(&pod.Spec.Containers[i])
		sharers++
	}
	return max(left, 0) / max(sharers, 1)
}

// ExclusiveCPUs is how many processors each container is to have for itself:
// the app containers and sidecars of a Guaranteed pod that ask for whole ones.
// Where the pod as a whole asks, its containers share what it has.
func ExclusiveCPUs(pod *v1.Pod) map[string]int {
	if r := pod.Spec.Resources; core.QOSClass(pod) != v1.PodQOSGuaranteed || r != nil && len(r.Requests)+len(r.Limits) > 0 {
		return nil
	}
	out := map[string]int{}
	for _, c := range Resizable(&pod.Spec) {
		if q := c.Resources.Limits[v1.ResourceCPU]; !q.IsZero() && q.MilliValue()%1000 == 0 {
			out[c.Name] = int(q.Value())
		}
	}
	return out
}
