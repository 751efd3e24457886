package pod_test

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/clusterd/clusterd/features"
)

// TestAgentRestart: a new agent takes up what it finds, and starts nothing.
func TestAgentRestart(t *testing.T) {
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a"), ctr("b")))
		n.create(testPod("gone", v1.RestartPolicyAlways, ctr("c")))
		n.after(time.Second)
		id := n.get("p").Status.ContainerStatuses[0].ContainerID
		calls := len(n.runtime.Calls())
		n.stop()
		n.runtime.Exit("b", 7) // while nobody looks
		if err := n.api.CoreV1().Pods("default").Delete(t.Context(), "gone", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		n.start()
		n.after(5 * time.Second)
		p := n.get("p")
		if p.Status.ContainerStatuses[0].ContainerID != id || p.Status.ContainerStatuses[0].RestartCount != 0 {
			t.Errorf("a was touched: %+v", p.Status.ContainerStatuses[0])
		}
		b := p.Status.ContainerStatuses[1]
		if b.RestartCount != 1 || b.LastTerminationState.Terminated == nil || b.LastTerminationState.Terminated.ExitCode != 7 {
			t.Errorf("b: %+v", b)
		}
		for _, c := range n.runtime.Calls()[calls:] {
			if strings.HasPrefix(c, "sandbox") || c == "start a" {
				t.Errorf("call %q after the restart", c)
			}
		}
		if s, _ := n.runtime.Counts(); s != 1 {
			t.Errorf("%d sandboxes: the orphan was not removed", s)
		}
	})
}

// TestSeen: before the API's list is known the manager says so, and from that
// moment on every pod of it is found, with what runs.
func TestSeen(t *testing.T) {
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
		n.after(time.Second)
		n.stop()
		answers := make(chan struct{})
		n.api.PrependReactor("list", "pods", func(k8stesting.Action) (bool, kruntime.Object, error) {
			<-answers
			return false, nil, nil
		})
		n.start()
		synctest.Wait()
		select {
		case <-n.pods.Seen():
			t.Error("seen, but the API has not answered")
		default:
		}
		close(answers)
		<-n.pods.Seen()
		v, ok := n.pods.Find("default", "p", "")
		if !ok {
			t.Fatal("not found")
		}
		if c := v.Containers["a"]; !c.Running || c.Exited == nil {
			t.Errorf("container %+v", c)
		}
	})
}

// TestSourcesSeenGuard is FEATURES row 188: with the API down nothing is
// killed.
func TestSourcesSeenGuard(t *testing.T) {
	features.ShowsWithDoubles(t, 188)
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
		n.after(time.Second)
		n.stop()
		down := n.api
		n.api = fake.NewClientset()
		n.api.PrependReactor("list", "pods", refuse)
		n.start()
		n.after(5 * time.Minute)
		if s, c := n.runtime.Counts(); s != 1 || c != 1 {
			t.Errorf("%d sandboxes, %d containers with the API down", s, c)
		}
		n.api = down
	})
}

// TestReboot: nothing runs any more; the pods are made again.
func TestReboot(t *testing.T) {
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
		n.create(testPod("job", v1.RestartPolicyNever, ctr("b")))
		n.after(time.Second)
		n.stop()
		n.runtime.Forget()
		n.start()
		n.after(5 * time.Second)
		p := n.get("p")
		s := p.Status.ContainerStatuses[0]
		if p.Status.Phase != v1.PodRunning || s.RestartCount != 1 || s.LastTerminationState.Terminated == nil || s.LastTerminationState.Terminated.Reason != "ContainerStatusUnknown" {
			t.Errorf("status %+v", s)
		}
		if j := n.get("job"); j.Status.Phase != v1.PodFailed {
			t.Errorf("job is %s: a lost container of policy Never must not run again", j.Status.Phase)
		}
	})
}

// TestVanished: a container that podmon no longer knows is replaced, though
// its exit event was lost (FEATURES row 189).
func TestVanished(t *testing.T) {
	features.ShowsWithDoubles(t, 189)
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
		n.after(time.Second)
		n.runtime.Forget()
		n.after(3 * time.Minute)
		if p := n.get("p"); p.Status.Phase != v1.PodRunning || p.Status.ContainerStatuses[0].RestartCount != 1 {
			t.Errorf("status %+v", p.Status)
		}
		n.runtime.Break() // the stream is opened again
		n.after(time.Second)
		n.runtime.Exit("a", 1)
		n.after(time.Minute)
		if p := n.get("p"); p.Status.ContainerStatuses[0].RestartCount != 2 {
			t.Errorf("status %+v", p.Status.ContainerStatuses[0])
		}
	})
}
