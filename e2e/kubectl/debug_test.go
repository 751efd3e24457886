package kubectl

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/features"
)

// TestE2EXDebug: kubectl debug in all its ways.
func TestE2EXDebug(t *testing.T) {
	t.Parallel()
	k := start(t, "debug")
	k.apply(simple("app", "sleep"))
	app := k.ready("app")

	ended := func(k *kit, pod, container string) func(*corev1.Pod) bool {
		return func(p *corev1.Pod) bool {
			for _, s := range p.Status.EphemeralContainerStatuses {
				if s.Name == container {
					return s.State.Terminated != nil
				}
			}
			return false
		}
	}
	k.sub("a container beside", func(k *kit) {
		k.ok("debug", "app", "--image="+image, "-c", "own", "--", "/hello", "cat", "/proc/net/fib_trie")
		p := k.podIs("app", "debugged", ended(k, "app", "own"))
		k.has(k.ok("logs", "app", "-c", "own"), app.Status.PodIP)
		if s := p.Status.ContainerStatuses[0]; s.RestartCount != 0 || !s.Ready {
			k.Errorf("the app: %+v", s)
		}
	})
	k.sub("with a target", func(k *kit) {
		features.Conforms(k, 282)
		k.ok("debug", "app", "--image="+image, "--target=main", "-c", "looking", "--", "/hello", "cat", "/proc/1/cmdline")
		k.podIs("app", "debugged", ended(k, "app", "looking"))
		k.is("process 1", k.ok("logs", "app", "-c", "looking"), "/hello\x00sleep\x00")
		k.has(k.ok("describe", "pod", "app"), "Ephemeral Containers:", "looking:")
	})
	k.sub("of a copy", func(k *kit) {
		k.ok("debug", "app", "--copy-to=copy", "--image="+image, "--share-processes", "-c", "dbg", "--", "/hello", "sleep")
		copied := k.ready("copy")
		main, dbg := k.process(string(copied.UID), "/hello sleep"), len(copied.Spec.Containers)
		if dbg != 2 || main == 0 {
			k.Errorf("containers of the copy: %+v", copied.Spec.Containers)
		}
		k.ok("delete", "pod", "copy", "--wait=false")
	})
	k.sub("of the node", func(k *kit) {
		k.ok("debug", "node/"+node, "--image="+image, "--", "/hello", "cat", "/host/etc/hostname")
		k.eventually("the debugging pod has ended", func(ctx context.Context) error {
			out := k.ok("get", "pods", "-o", "name")
			for name := range strings.Lines(out) {
				name = strings.TrimSpace(name)
				if !strings.HasPrefix(name, "pod/node-debugger-") {
					continue
				}
				want, err := os.ReadFile("/etc/hostname")
				if err != nil {
					return err
				}
				if got, errs, code := k.in("", "logs", name); code != 0 || got != string(want) { // it may not have begun
					return fmt.Errorf("log of %s: %q, want %q (exit %d: %s)", name, got, want, code, errs)
				}
				k.ok("delete", name, "--wait=false")
				return nil
			}
			return fmt.Errorf("no pod node-debugger-… in %q", out)
		})
	})
	k.ok("delete", "pod", "app", "--wait=false")
}
