package pod_test

import (
	"strconv"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/clusterd/clusterd/features"
)

// TestStatusWrites: a status is written when it has changed and never else; a
// change that the API was not there for is written when it is back. An exit is
// told by podmon, so nothing is asked for in between.
func TestStatusWrites(t *testing.T) {
	features.ShowsWithDoubles(t, 175, 178)
	inBubble(t, func(n *node) {
		down, written := false, 0
		var last v1.PodStatus
		n.api.PrependReactor("update", "pods", func(a k8stesting.Action) (bool, kruntime.Object, error) {
			if a.GetSubresource() != "status" {
				return false, nil, nil
			}
			if down {
				return refuse(a)
			}
			p := a.(k8stesting.UpdateAction).GetObject().(*v1.Pod)
			p.ResourceVersion = strconv.Itoa(written + 2) // as an API does it, unlike the one in memory
			status := p.Status
			if equality.Semantic.DeepEqual(status, last) {
				t.Errorf("the same status was written twice: %+v", status)
			}
			written++
			last = *status.DeepCopy()
			return false, nil, nil
		})
		first := testPod("p", v1.RestartPolicyNever, ctr("a"))
		first.ResourceVersion = "1"
		n.create(first)
		n.after(time.Second)
		if p := n.get("p"); p.Status.Phase != v1.PodRunning {
			t.Fatalf("status %+v", p.Status)
		}
		start := written
		n.after(time.Hour)
		if written != start {
			t.Errorf("%d writes in an hour without a change", written-start)
		}
		down = true
		n.runtime.Exit("a", 3)
		n.after(time.Minute)
		if s, c := n.runtime.Counts(); s != 1 || c != 1 {
			t.Errorf("%d sandboxes, %d containers: the exit code was thrown away before the API had it", s, c)
		}
		down = false
		n.after(time.Minute)
		if p := n.get("p"); p.Status.Phase != v1.PodFailed || p.Status.ContainerStatuses[0].State.Terminated.ExitCode != 3 {
			t.Errorf("status %+v", p.Status)
		}

		// An exit is in the status within moments, long before the next list.
		second := testPod("q", v1.RestartPolicyNever, ctr("b"))
		second.ResourceVersion = strconv.Itoa(written + 2)
		n.create(second)
		n.after(time.Second)
		n.runtime.Exit("b", 0)
		n.after(200 * time.Millisecond)
		if p := n.get("q"); p.Status.Phase != v1.PodSucceeded {
			t.Errorf("status %+v", p.Status)
		}
	})
}
