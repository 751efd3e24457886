package pod_test

import (
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/features"
)

// TestRuntimeClass: a pod runs by a handler that the node has; for one that it
// has not, or a class that is not there, it waits and says why.
func TestRuntimeClass(t *testing.T) {
	features.ShowsWithDoubles(t, 176, 258)
	inBubble(t, func(n *node) {
		class := func(name, handler string) {
			t.Helper()
			c := &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Handler: handler}
			if _, err := n.api.NodeV1().RuntimeClasses().Create(t.Context(), c, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
		class("usual", "runc")
		class("strong", "kata")
		for _, name := range []string{"usual", "strong", "late"} {
			p := testPod(name, v1.RestartPolicyAlways, ctr("c-"+name))
			p.Spec.RuntimeClassName = &name
			n.create(p)
		}
		n.after(2 * time.Second)
		if p := n.get("usual"); p.Status.Phase != v1.PodRunning {
			t.Errorf("a class with a handler of the node: %+v", p.Status)
		}
		for name, want := range map[string]string{
			"strong": `no runtime for "kata" is configured: RuntimeClass "strong" asks for that handler, and this node has runc`,
			"late":   `RuntimeClass "late" not found`,
		} {
			s := n.get(name).Status
			if w := s.ContainerStatuses[0].State.Waiting; s.Phase != v1.PodPending || w == nil || !strings.Contains(w.Message, want) {
				t.Errorf("%s: the status does not say %q: %+v", name, want, s)
			}
			if !n.events.has("FailedCreatePodSandBox Failed to create pod sandbox: " + want) {
				t.Errorf("%s: no event %q in %v", name, want, n.events.list)
			}
		}
		if got := n.runtime.Calls(); strings.Join(got, ",") != "sandbox usual 0,start c-usual" {
			t.Errorf("calls %v", got)
		}

		class("late", "runc")
		n.after(time.Minute)
		if p := n.get("late"); p.Status.Phase != v1.PodRunning {
			t.Errorf("its class is there now: %+v", p.Status)
		}
	})
}
