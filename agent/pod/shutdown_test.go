package pod_test

import (
	"slices"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// TestTerminate: a pod ends for the machine's sake as the kubelet ends it, its hook
// and its own grace period counting.
func TestTerminate(t *testing.T) {
	inBubble(t, func(n *node) {
		n.runtime.IgnoreTerm = func(c api.Container) bool { return c.Name != "quick" }
		hook := &v1.Lifecycle{PreStop: &v1.LifecycleHandler{Exec: &v1.ExecAction{Command: []string{"bye"}}}}
		quick, slow, long := ctr("quick"), ctr("slow"), ctr("long")
		quick.Lifecycle = hook
		n.create(testPod("a", v1.RestartPolicyAlways, quick))
		n.create(testPod("b", v1.RestartPolicyAlways, slow))
		c := testPod("c", v1.RestartPolicyAlways, long)
		c.Spec.TerminationGracePeriodSeconds = ptr.To(int64(3600))
		n.create(c)
		n.after(time.Second)
		if got := len(n.pods.Active()); got != 3 {
			t.Fatalf("%d active pods, want 3", got)
		}
		n.pods.SetShutdown(true)
		a := n.pods.Terminate("uid-a", time.Minute)
		b := n.pods.Terminate("uid-b", time.Minute)
		most := n.pods.Terminate("uid-c", time.Minute)
		n.after(time.Second)
		if !closed(a) || !slices.ContainsFunc(n.runtime.Execs(), func(e []string) bool { return slices.Equal(e, []string{"bye"}) }) {
			t.Errorf("a has ended: %v; commands %v", closed(a), n.runtime.Execs())
		}
		p := n.get("a")
		if p.Status.Phase != v1.PodFailed || p.Status.Reason != "Terminated" || p.Status.Message != "Pod was terminated in response to imminent node shutdown." {
			t.Errorf("a: %s, %s: %s", p.Status.Phase, p.Status.Reason, p.Status.Message)
		}
		if condition(p, v1.DisruptionTarget) != v1.ConditionTrue {
			t.Errorf("a: conditions %+v", p.Status.Conditions)
		}
		// What still runs takes no more requests.
		if p := n.get("b"); closed(b) || p.Status.Phase != v1.PodRunning || condition(p, v1.PodReady) != v1.ConditionFalse {
			t.Errorf("b: ended %v, phase %s, conditions %+v", closed(b), p.Status.Phase, p.Status.Conditions)
		}
		n.after(30 * time.Second) // the pod's own
		if !closed(b) || closed(most) {
			t.Errorf("after 31 s: b has ended %v, c %v", closed(b), closed(most))
		}
		n.after(30 * time.Second) // the longest
		if !closed(most) || n.get("c").Status.Phase != v1.PodFailed {
			t.Errorf("after 61 s: c has ended %v, %s", closed(most), n.get("c").Status.Phase)
		}
		if got := len(n.pods.Active()); got > 0 {
			t.Errorf("%d active pods, want none", got)
		}
		if !closed(n.pods.Terminate("uid-of-none", time.Minute)) {
			t.Error("a pod that is not known is waited for")
		}
	})
}

// TestNewPodsDuringShutdown: they are refused, and taken after a cancellation.
func TestNewPodsDuringShutdown(t *testing.T) {
	inBubble(t, func(n *node) {
		n.pods.SetShutdown(true)
		n.create(testPod("late", v1.RestartPolicyAlways, ctr("a")))
		n.after(time.Second)
		p := n.get("late")
		if p.Status.Phase != v1.PodFailed || p.Status.Reason != "NodeShutdown" || p.Status.Message != "Pod was rejected as the node is shutting down." {
			t.Errorf("%s, %s: %s", p.Status.Phase, p.Status.Reason, p.Status.Message)
		}
		n.pods.SetShutdown(false)
		n.create(testPod("again", v1.RestartPolicyAlways, ctr("a")))
		n.after(time.Second)
		if p := n.get("again"); p.Status.Phase != v1.PodRunning {
			t.Errorf("after the cancellation: %s, %s", p.Status.Phase, p.Status.Message)
		}
		if p := n.get("late"); p.Status.Phase != v1.PodFailed {
			t.Errorf("a pod that was refused is %s", p.Status.Phase)
		}
	})
}

// TestTerminateWhileDeleted: a pod that is being deleted keeps its grace and says no
// other reason; it is waited for.
func TestTerminateWhileDeleted(t *testing.T) {
	inBubble(t, func(n *node) {
		n.runtime.IgnoreTerm = func(api.Container) bool { return true }
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
		n.after(time.Second)
		n.delete("p", 20)
		n.after(time.Second)
		left := n.pods.Terminate("uid-p", time.Minute)
		n.after(10 * time.Second)
		if closed(left) || n.get("p").Status.Reason == "Terminated" {
			t.Errorf("ended %v, reason %q", closed(left), n.get("p").Status.Reason)
		}
		n.after(10 * time.Second)
		if !closed(left) || n.get("p") != nil {
			t.Errorf("after its grace: ended %v, %+v", closed(left), n.get("p"))
		}
	})
}

// TestStaticPodAfterShutdown: a static pod that a shutdown ended runs again, after
// the boot as after a cancellation.
func TestStaticPodAfterShutdown(t *testing.T) {
	for _, boots := range []bool{false, true} {
		inStaticBubble(t, func(n *node) {
			n.reads(true, staticPod("web", "1"))
			n.pods.SetShutdown(true)
			left := n.pods.Terminate("web1", time.Minute)
			n.after(time.Second)
			if p := n.get("web-n1"); !closed(left) || p.Status.Phase != v1.PodFailed || p.Status.Reason != "Terminated" {
				t.Fatalf("ended %v, %s, %s", closed(left), p.Status.Phase, p.Status.Reason)
			}
			n.reads(true, staticPod("web", "1"), staticPod("new", "1"))
			if got := n.running(); len(got) > 0 {
				t.Fatalf("running %v while the machine goes down", got)
			}
			if boots {
				n.stop()
				n.runtime.Forget()
				n.start()
				n.reads(true, staticPod("web", "1"), staticPod("new", "1"))
			} else {
				n.pods.SetShutdown(false)
			}
			n.after(time.Second)
			if got := n.running(); !slices.Equal(got, []string{"new1", "web1"}) {
				t.Errorf("boots %v: running %v", boots, got)
			}
			if p := n.get("web-n1"); p.Status.Phase != v1.PodRunning || p.Status.Reason != "" {
				t.Errorf("boots %v: mirror %s, %s", boots, p.Status.Phase, p.Status.Reason)
			}
		})
	}
}
