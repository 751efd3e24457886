package kubectl

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// TestE2EXUserNamespace: a pod with hostUsers: false is root inside and nobody
// outside, and has its volumes as any other.
func TestE2EXUserNamespace(t *testing.T) {
	t.Parallel()
	k := start(t, "users")
	k.has(k.ok("get", "nodes", "-o", "jsonpath={.items[*].status.runtimeHandlers[?(@.name==\"\")].features.userNamespaces}"), "true")
	k.ok("create", "configmap", "cm", "--from-literal=key=of the map")
	pod := func(name, more string) string {
		return fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %s}
spec:
  hostUsers: false
  %s
  terminationGracePeriodSeconds: 1
  securityContext: {runAsUser: 0, runAsGroup: 0, fsGroup: 2000}
  containers:
  - name: main
    image: %q
    args: [sleep]
    readinessProbe: {exec: {command: [/hello, id]}, periodSeconds: 1, timeoutSeconds: 30}
    securityContext: {procMount: Unmasked, capabilities: {add: [NET_ADMIN]}}
    volumeMounts: [{name: e, mountPath: /e}, {name: cm, mountPath: /cm}]
  - {name: side, image: %[3]q, args: [serve], securityContext: {runAsUser: 1000}, volumeMounts: [{name: e, mountPath: /e}]}
  volumes: [{name: e, emptyDir: {}}, {name: cm, configMap: {name: cm}}]
`, name, more, image)
	}
	k.apply(pod("a", "") + "---\n" + pod("b", "shareProcessNamespace: true"))
	first := map[string]int{}
	for _, name := range []string{"a", "b"} {
		p := k.ready(name)
		// As the documentation has people look: one line, not the host's ids.
		ids := strings.Fields(k.exec(name, "main", "cat", "/proc/self/uid_map"))
		if len(ids) != 3 || ids[0] != "0" || ids[2] != "65536" {
			k.Fatalf("uid_map of %s: %v", name, ids)
		}
		k.is("gid_map", strings.Join(strings.Fields(k.exec(name, "side", "cat", "/proc/self/gid_map")), " "), strings.Join(ids, " "))
		from, err := strconv.Atoi(ids[1])
		if err != nil || from < 65536 {
			k.Errorf("ids of %s begin at %s", name, ids[1])
		}
		first[name] = from
		k.is("id", k.exec(name, "main", "id"), "0 0 [2000]\n")
		k.is("id of the other", k.exec(name, "side", "id"), "1000 0 [2000]\n")
		k.is("the map", k.exec(name, "main", "cat", "/cm/key"), "of the map")
		k.exec(name, "side", "write", "/e/word", "from the other")
		k.is("the shared folder", k.exec(name, "main", "cat", "/e/word"), "from the other")
		// Its root sets what is the pod's, where /proc is not kept from it, and
		// nothing of the machine's.
		k.exec(name, "main", "write", "/proc/sys/net/ipv4/ip_forward", "1")
		k.has(k.fails("exec", name, "-c", "side", "--", "/hello", "write", "/proc/sys/net/ipv4/ip_forward", "1"), "read-only file system")
		k.has(k.fails("exec", name, "-c", "main", "--", "/hello", "write", "/proc/sys/kernel/panic", "1"), "permission denied")
		// The machine knows the pod's root by another id.
		main := k.process(string(p.UID), "sleep")
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", main))
		if err != nil {
			k.Fatal(err)
		}
		k.has(string(status), fmt.Sprintf("\nUid:\t%d\t", from))
	}
	if d := first["a"] - first["b"]; d > -65536 && d < 65536 && k.pod("a").Spec.NodeName == k.pod("b").Spec.NodeName {
		k.Errorf("two pods of a node share ids: they begin at %v", first)
	}
	k.ok("debug", "a", "--image="+image, "--container=look", "--image-pull-policy=Never", "--", "/hello", "sleep")
	k.podIs("a", "looked into", func(p *corev1.Pod) bool {
		s := p.Status.EphemeralContainerStatuses
		return len(s) == 1 && s[0].State.Running != nil
	})
	k.is("uid_map seen by the debugger", strings.Join(strings.Fields(k.exec("a", "look", "cat", "/proc/self/uid_map")), " "), fmt.Sprintf("0 %d 65536", first["a"]))

	k.has(k.failsIn(pod("c", "hostNetwork: true"), "apply", "-f", "-"), "spec.hostNetwork", "when `hostUsers` is false")
	k.has(k.failsIn(strings.Replace(simple("d", "sleep"), "args:", "securityContext: {procMount: Unmasked}, args:", 1), "apply", "-f", "-"), "procMount", "`hostUsers` must be false to use `Unmasked`")
	k.ok("delete", "pod", "a", "b", "--wait=false")
}
