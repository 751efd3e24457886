package pod_test

import (
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/podstate"
)

// TestBandwidth: a pod's annotations bound its network before its containers
// start, and one whose annotation means nothing does not start.
func TestBandwidth(t *testing.T) {
	inBubble(t, func(n *node) {
		with := func(name string, annotations map[string]string) *v1.Pod {
			p := testPod(name, v1.RestartPolicyAlways, ctr("app"))
			p.Annotations = annotations
			return p
		}
		n.create(with("both", map[string]string{podstate.AnnotationIngressBandwidth: "10M", podstate.AnnotationEgressBandwidth: "1500k"}))
		n.create(with("one", map[string]string{podstate.AnnotationEgressBandwidth: "1G"}))
		n.create(with("none", nil))
		n.create(with("bad", map[string]string{podstate.AnnotationEgressBandwidth: "fast"}))
		n.after(time.Second)
		for name, want := range map[string][2]uint64{"both": {10_000_000, 1_500_000}, "one": {0, 1_000_000_000}, "none": {}} {
			if got := n.network.Limits("uid-" + name); got != want {
				t.Errorf("%s: %d, want %d", name, got, want)
			}
			if p := n.get(name); p.Status.Phase != v1.PodRunning {
				t.Errorf("%s: %+v", name, p.Status)
			}
		}
		if p := n.get("bad"); p.Status.Phase != v1.PodPending {
			t.Errorf("bad: %+v", p.Status)
		}
		if got := n.network.Attached(); got != 3 {
			t.Errorf("%d networks are attached, want 3", got)
		}
	})
}
