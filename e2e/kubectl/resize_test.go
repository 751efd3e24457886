package kubectl

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"

	"github.com/clusterd/clusterd/features"
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

// sixContainers are resized at once: what each asks for before and after.
var sixContainers = []struct{ name, before, after string }{
	{"c1", "requests: {cpu: 20m}", `"requests":{"cpu":"25m"},"limits":{"cpu":"35m"}`},                                                                                 // raised, a limit added
	{"c2", "requests: {memory: 35Mi}", `"requests":{"memory":"30Mi"},"limits":{"memory":"50Mi"}`},                                                                     // lowered, a limit added
	{"c3", "requests: {cpu: 20m, memory: 35Mi}", `"requests":{"cpu":"20m","memory":"30Mi"}`},                                                                          // one of two lowered
	{"c4", "requests: {cpu: 20m}", `"requests":{"cpu":"15m","memory":"35Mi"}`},                                                                                        // lowered, a request added
	{"c5", "requests: {memory: 35Mi}", `"requests":{"cpu":"20m","memory":"40Mi"}`},                                                                                    // raised, a request added
	{"c6", "limits: {cpu: 30m, memory: 45Mi}, requests: {cpu: 20m, memory: 35Mi}", `"requests":{"cpu":"25m","memory":"30Mi"},"limits":{"cpu":"28m","memory":"60Mi"}`}, // each way
}

// TestE2EXResizeSix: six containers of a pod are resized by one request, each in
// another way, and none is started again.
func TestE2EXResizeSix(t *testing.T) {
	t.Parallel()
	k := start(t, "resize-six")
	features.Conforms(k, 299)
	containers, patches := make([]string, len(sixContainers)), make([]string, len(sixContainers))
	for i, c := range sixContainers {
		containers[i] = fmt.Sprintf("  - {name: %s, image: %q, args: [sleep, '%d'], resources: {%s}}", c.name, image, 9000+i, c.before)
		patches[i] = fmt.Sprintf(`{"name":%q,"resources":{%s}}`, c.name, c.after)
	}
	k.apply("apiVersion: v1\nkind: Pod\nmetadata: {name: six}\nspec:\n  terminationGracePeriodSeconds: 1\n  containers:\n" + strings.Join(containers, "\n") + "\n")
	p := k.ready("six")
	pids := make([]int, len(sixContainers))
	for i := range pids {
		pids[i] = k.process(string(p.UID), fmt.Sprintf("/hello sleep %d", 9000+i))
	}
	k.ok("patch", "pod", "six", "--subresource", "resize", "-p", `{"spec":{"containers":[`+strings.Join(patches, ",")+`]}}`)
	want := map[string]corev1.ResourceRequirements{}
	for _, c := range sixContainers {
		var r corev1.ResourceRequirements
		k.decode("{"+c.after+"}", &r)
		want[c.name] = r
	}
	p = k.podIs("six", "resized", func(p *corev1.Pod) bool {
		if condition(p, corev1.PodResizeInProgress) != "" || condition(p, corev1.PodResizePending) != "" || p.Status.ObservedGeneration != p.Generation {
			return false
		}
		for _, s := range p.Status.ContainerStatuses {
			if s.Resources == nil || !equality.Semantic.DeepEqual(s.Resources.Requests, want[s.Name].Requests) || !equality.Semantic.DeepEqual(s.Resources.Limits, want[s.Name].Limits) ||
				!equality.Semantic.DeepEqual(s.AllocatedResources, want[s.Name].Requests) {
				return false
			}
		}
		return true
	})
	for i, s := range p.Status.ContainerStatuses {
		r := want[s.Name]
		if pid := k.process(string(p.UID), fmt.Sprintf("/hello sleep %d", 9000+i)); s.RestartCount != 0 || pid != pids[i] {
			k.Errorf("%s was started again: process %d, was %d", s.Name, pid, pids[i])
		}
		// The kernel has it too: a share of the processor for what is asked for, and
		// the limits where there are any.
		cpu, memory := k.cgroup(pids[i], "cpu"), k.cgroup(pids[i], "memory")
		if _, err := os.Stat(filepath.Join(cpu, "cpu.shares")); err == nil {
			k.is("shares of "+s.Name, k.limit(cpu, "cpu.shares", "cpu.weight"), strconv.FormatInt(max(2, r.Requests.Cpu().MilliValue()*1024/1000), 10))
		}
		if q, limited := r.Limits[corev1.ResourceCPU]; limited {
			k.is("quota of "+s.Name, k.limit(cpu, "cpu.cfs_quota_us", "cpu.max"), strconv.FormatInt(q.MilliValue()*100, 10))
		}
		if q, limited := r.Limits[corev1.ResourceMemory]; limited {
			k.is("memory of "+s.Name, k.limit(memory, "memory.limit_in_bytes", "memory.max"), strconv.FormatInt(q.Value(), 10))
		}
	}
	// What is asked for can be changed in any way but one, as upstream has it.
	k.has(k.fails("patch", "pod", "six", "--subresource", "resize", "-p", `{"spec":{"containers":[{"name":"c6","resources":{"limits":{"cpu":null}}}]}}`), "resource limits cannot be removed")
	k.has(k.fails("patch", "pod", "six", "--subresource", "resize", "-p", `{"spec":{"containers":[{"name":"c4","resources":{"requests":{"memory":null}}}]}}`), "resource requests cannot be removed")
	k.ok("delete", "pod", "six", "--wait=false")
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
