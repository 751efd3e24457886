package kubectl

import (
	"context"
	"fmt"
	"regexp"
	"testing"

	"github.com/clusterd/clusterd/features"
)

// TestE2EXTop: who uses what, with nothing added to the cluster; and a node's
// metrics are reached through the API.
func TestE2EXTop(t *testing.T) {
	t.Parallel()
	k := start(t, "top")
	k.apply(simple("web", "serve"))
	k.ready("web")
	like := func(k *kit, pattern string, args ...string) {
		k.Helper()
		k.eventually(fmt.Sprintf("kubectl %q says %s", args, pattern), func(context.Context) error {
			if out, errs, code := k.in("", args...); code != 0 || !regexp.MustCompile(pattern).MatchString(out) {
				return fmt.Errorf("exit %d: %s%s", code, out, errs)
			}
			return nil
		})
	}
	k.sub("top and logs", func(k *kit) {
		features.Shows(k, 298)
		k.eventuallyHas([]string{"top", "pod"}, "web ") // a pod is told once it has run for a second
		like(k, `^NAME +CPU\(cores\) +MEMORY\(bytes\) *\nweb +\d+m +\d+Mi`, "top", "pod", "web")
		like(k, `\nweb +main +\d+m +\d+Mi`, "top", "pod", "-l", "app=web", "--containers")
		like(k, `\n`+node+` +\d+m +\d+% +\d+Mi +\d+%`, "top", "node")
		like(k, `^NAME +CPU +MEMORY +WINDOW\nweb +\d`, "get", "pods.metrics.k8s.io")
		k.eventuallyHas([]string{"logs", "web"}, "serving on")
	})
	k.sub("metrics of the node", func(k *kit) {
		features.Shows(k, 161)
		web := `container="main",namespace="` + k.ns + `",pod="web"}`
		for path, series := range map[string]string{
			"/metrics":          "kubelet_pod_start_duration_seconds_count ",
			"/metrics/resource": "container_memory_working_set_bytes{" + web,
			"/metrics/cadvisor": `container_spec_cpu_shares{container="main",id="`,
		} {
			k.eventuallyHas([]string{"get", "--raw", "/api/v1/nodes/" + node + "/proxy" + path}, series)
		}
	})
}
