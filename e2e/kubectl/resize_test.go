package kubectl

import (
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/e2e/features"
)

// TestE2EXResize: a running container gets another size without a restart, as
// its cgroup and its status tell.
func TestE2EXResize(t *testing.T) {
	t.Parallel()
	k := start(t, "resize")
	features.Shows(k, 241)
	k.apply(strings.Replace(simple("p", "sleep"), "args:", `resources: {requests: {cpu: 100m, memory: 16Mi}, limits: {cpu: 200m, memory: 32Mi}}, args:`, 1))
	p := k.ready("p")
	pid := k.process(string(p.UID), "sleep")
	cgroups := func(memory int, cpu string) {
		k.Helper()
		for what, dir := range map[string]string{"container": k.cgroup(pid, "memory"), "pod": filepath.Dir(k.cgroup(pid, "memory"))} {
			k.is("memory of the "+what, k.limit(dir, "memory.limit_in_bytes", "memory.max"), strconv.Itoa(memory<<20))
		}
		for what, dir := range map[string]string{"container": k.cgroup(pid, "cpu"), "pod": filepath.Dir(k.cgroup(pid, "cpu"))} {
			k.is("cpu of the "+what, k.limit(dir, "cpu.cfs_quota_us", "cpu.max"), cpu)
		}
	}
	resize := func(resources string) {
		k.Helper()
		k.ok("patch", "pod", "p", "--subresource", "resize", "-p", `{"spec":{"containers":[{"name":"main","resources":`+resources+`}]}}`)
	}
	has := func(cpu, memory string) func(*corev1.Pod) bool {
		return func(p *corev1.Pod) bool {
			r := p.Status.ContainerStatuses[0].Resources
			return r != nil && r.Limits.Cpu().String() == cpu && r.Limits.Memory().String() == memory &&
				condition(p, corev1.PodResizeInProgress) == "" && p.Status.ObservedGeneration == p.Generation
		}
	}
	cgroups(32, "20000")
	resize(`{"requests":{"cpu":"200m"},"limits":{"cpu":"400m","memory":"64Mi"}}`)
	k.podIs("p", "larger", has("400m", "64Mi"))
	cgroups(64, "40000")
	resize(`{"requests":{"cpu":"50m"},"limits":{"cpu":"100m","memory":"24Mi"}}`)
	got := k.podIs("p", "smaller", has("100m", "24Mi"))
	cgroups(24, "10000")
	if s := got.Status.ContainerStatuses[0]; s.RestartCount != 0 || s.AllocatedResources.Cpu().String() != "50m" || k.process(string(p.UID), "sleep") != pid {
		k.Errorf("the container: %+v", s)
	}
	k.eventuallyHas([]string{"describe", "pod", "p"}, "ResizeCompleted")

	resize(`{"requests":{"cpu":"4000"},"limits":{"cpu":"4000"}}`)
	k.podIs("p", "told that it cannot be", func(p *corev1.Pod) bool { return condition(p, corev1.PodResizePending) == corev1.ConditionTrue })
	k.eventuallyHas([]string{"describe", "pod", "p"}, "Infeasible")
	cgroups(24, "10000")
	k.has(k.fails("patch", "pod", "p", "--subresource", "resize", "-p", `{"spec":{"containers":[{"name":"main","resources":{"limits":{"memory":null}}}]}}`),
		"resource limits cannot be removed")
	k.ok("delete", "pod", "p", "--wait=false")
}

// TestE2EXPodLevelResources: what a pod asks for as a whole is its class, its
// cgroup's limit, and that of a container without one of its own.
func TestE2EXPodLevelResources(t *testing.T) {
	t.Parallel()
	k := start(t, "podlevel")
	k.apply(simple("p", "sleep", "resources: {limits: {cpu: 200m, memory: 48Mi}}"))
	p := k.ready("p")
	k.is("its class", string(p.Status.QOSClass), "Guaranteed")
	k.is("what it asks for", p.Spec.Resources.Requests.Memory().String(), "48Mi")
	pid := k.process(string(p.UID), "sleep")
	for _, dir := range []string{k.cgroup(pid, "memory"), filepath.Dir(k.cgroup(pid, "memory"))} {
		k.is("memory of "+dir, k.limit(dir, "memory.limit_in_bytes", "memory.max"), strconv.Itoa(48<<20))
	}
	for _, dir := range []string{k.cgroup(pid, "cpu"), filepath.Dir(k.cgroup(pid, "cpu"))} {
		k.is("cpu of "+dir, k.limit(dir, "cpu.cfs_quota_us", "cpu.max"), "20000")
	}
	k.has(k.fails("patch", "pod", "p", "--subresource", "resize", "-p", `{"spec":{"resources":{"limits":{"cpu":"300m"},"requests":{"cpu":"300m"}}}}`),
		"what the pod as a whole asks for cannot be resized")
	k.apply(simple("big", "sleep", "resources: {limits: {cpu: 4000}}"))
	k.eventuallyHas([]string{"describe", "pod", "big"}, "FailedScheduling", "Insufficient cpu")
	k.ok("delete", "pod", "p", "big", "--wait=false")
}
