package kubectl

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/e2e/features"
)

// TestE2EXRuntimeClass: a pod runs by the handler that its class names, with
// the class's overhead in its cgroup; without the class it is refused, and
// without the handler it says so.
func TestE2EXRuntimeClass(t *testing.T) {
	t.Parallel()
	k := start(t, "runtimeclass")
	features.Shows(k, 176, 258)
	k.apply(`
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: e2e-usual}
handler: runc
overhead: {podFixed: {cpu: 100m, memory: 16Mi}}
scheduling: {nodeSelector: {kubernetes.io/os: linux}}
---
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: e2e-strong}
handler: kata
`)
	defer k.ok("delete", "runtimeclass", "e2e-usual", "e2e-strong")
	k.has(k.ok("get", "runtimeclasses"), "NAME", "HANDLER", "e2e-strong", "kata")
	k.has(k.ok("explain", "runtimeclass.overhead"), "podFixed")
	k.has(k.field("node/"+node, "{.status.runtimeHandlers[*].name}"), "runc")
	of := func(name, class string) string {
		return strings.Replace(simple(name, "sleep", "runtimeClassName: "+class), "args:", `resources: {limits: {cpu: 100m, memory: 32Mi}}, args:`, 1)
	}

	k.has(k.failsIn(of("ghost", "e2e-none"), "apply", "-f", "-"), "Forbidden", `pod rejected: RuntimeClass "e2e-none" not found`)
	k.apply(of("usual", "e2e-usual"))
	k.apply(of("strong", "e2e-strong"))
	p := k.ready("usual")
	k.is("the class's overhead", p.Spec.Overhead.Memory().String(), "16Mi")
	k.is("the class's node selector", p.Spec.NodeSelector["kubernetes.io/os"], "linux")
	pid := k.process(string(p.UID), "sleep")
	dir := k.cgroup(pid, "memory")
	k.is("memory of the container", k.limit(dir, "memory.limit_in_bytes", "memory.max"), "33554432")
	k.is("memory of the pod", k.limit(filepath.Dir(dir), "memory.limit_in_bytes", "memory.max"), "50331648")
	k.eventuallyHas([]string{"describe", "pod", "strong"}, "FailedCreatePodSandBox", `no runtime for "kata" is configured`)
	k.eventuallyHas([]string{"get", "pod", "strong"}, "ContainerCreating")
	k.ok("delete", "pod", "usual", "strong", "--wait=false")
}
