package pod_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
)

// TestAdmittedByTheNewestNode: a pod is bound by a label that the watch has not
// brought to its node yet. The Node is read, and the pod runs; one that does not
// match that either fails; one that is deleted meanwhile never starts.
func TestAdmittedByTheNewestNode(t *testing.T) {
	inBubbleOf(t, func(n *node) { n.read = 5 * time.Second }, func(n *node) {
		selects := func(name, disk string) {
			p := testPod(name, v1.RestartPolicyAlways, ctr(name))
			p.Spec.NodeSelector = map[string]string{"disk": disk}
			n.create(p)
		}
		selects("gone", "ssd")
		selects("fits", "ssd")
		selects("other", "tape")
		n.create(testPod("any", v1.RestartPolicyAlways, ctr("any")))
		n.after(time.Second)
		if p := n.get("any"); p.Status.Phase != v1.PodRunning {
			t.Errorf("a pod without a selector waits: %s %s", p.Status.Phase, p.Status.Reason)
		}
		for _, name := range []string{"fits", "other"} {
			if p := n.get(name); p.Status.Phase != v1.PodPending {
				t.Errorf("%s before the Node is read: %s %s", name, p.Status.Phase, p.Status.Reason)
			}
		}
		p := n.get("fits") // an update meanwhile is not lost
		p.Labels = map[string]string{"new": "yes"}
		n.update(p)
		n.delete("gone", 0)
		n.after(10 * time.Second)
		if p := n.get("fits"); p.Status.Phase != v1.PodRunning {
			t.Errorf("fits: %s %s %s", p.Status.Phase, p.Status.Reason, p.Status.Message)
		}
		if p := n.get("other"); p.Status.Phase != v1.PodFailed || p.Status.Reason != "NodeAffinity" {
			t.Errorf("other: %s %s", p.Status.Phase, p.Status.Reason)
		}
		if slices.ContainsFunc(n.runtime.Calls(), func(c string) bool { return strings.Contains(c, "gone") }) {
			t.Error("a deleted pod was started")
		}
	})
}
