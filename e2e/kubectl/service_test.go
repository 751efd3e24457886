package kubectl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/features"
)

// TestE2EXService looks at who belongs to a Service, and when.
func TestE2EXService(t *testing.T) {
	t.Parallel()
	k := start(t, "service")
	features.Shows(k, 216, 294, 295)
	k.apply(`apiVersion: v1
kind: Service
metadata: {name: web}
spec: {selector: {in: web}, ports: [{port: 80, targetPort: 8080}]}
`)
	member := func(name string) string {
		m := strings.Replace(simple(name, "serve", "volumes: [{name: e, emptyDir: {}}]"), "app: "+name, "in: web", 1)
		return strings.Replace(m, "args:", `volumeMounts: [{name: e, mountPath: /e}],
     readinessProbe: {periodSeconds: 1, timeoutSeconds: 30, failureThreshold: 1, exec: {command: [/hello, cat, /e/ready]}}, args:`, 1)
	}
	k.apply(member("one"))
	k.apply(member("two"))
	one, two := k.runs("one"), k.runs("two")
	for _, p := range []*corev1.Pod{one, two} {
		k.is(p.Name+" Ready", string(condition(p, corev1.PodReady)), "False")
	}
	members := func(want ...*corev1.Pod) {
		k.Helper()
		k.eventually(fmt.Sprintf("%d ready endpoints", len(want)), func(context.Context) error {
			got := k.ok("get", "endpointslices", "-l", "kubernetes.io/service-name=web", "-o",
				`jsonpath={range .items[*].endpoints[?(@.conditions.ready==true)]}{.addresses[0]},{end}`)
			if strings.Count(got, ",") != len(want) {
				return errors.New(got)
			}
			for _, p := range want {
				if !strings.Contains(","+got, ","+p.Status.PodIP+",") {
					return fmt.Errorf("%s is not in %s", p.Status.PodIP, got)
				}
			}
			return nil
		})
	}
	members()
	file := func(p *corev1.Pod) string {
		return fmt.Sprintf("/proc/%d/root/e/ready", k.process(string(p.UID), "/hello serve"))
	}
	for _, p := range []*corev1.Pod{one, two} {
		if err := os.WriteFile(file(p), nil, 0o644); err != nil {
			k.Fatal(err)
		}
		k.ready(p.Name)
	}
	members(one, two)
	if err := os.Remove(file(one)); err != nil {
		k.Fatal(err)
	}
	members(two)
	k.event("one", "Unhealthy", "Readiness probe failed")
	k.is("restarts", fmt.Sprint(k.pod("one").Status.ContainerStatuses[0].RestartCount), "0")
	k.ok("delete", "pod", "two")
	members()
	// A failing liveness probe starts the container again.
	k.apply(strings.Replace(simple("unwell", "serve"), "args:", "livenessProbe: {periodSeconds: 1, failureThreshold: 1, exec: {command: [/hello, exit, '1']}}, args:", 1))
	k.podIs("unwell", "was started again", func(p *corev1.Pod) bool {
		return len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].RestartCount > 0
	})
	k.event("unwell", "Unhealthy", "Liveness probe failed")
	k.ok("delete", "pod", "one", "unwell", "--wait=false")
}

// runs waits until a pod's containers run, Ready or not.
func (k *kit) runs(name string) *corev1.Pod {
	k.Helper()
	return k.podIs(name, "runs", func(p *corev1.Pod) bool {
		return len(p.Status.ContainerStatuses) > 0 && p.Status.ContainerStatuses[0].State.Running != nil && p.Status.PodIP != ""
	})
}
