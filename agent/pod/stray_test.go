package pod_test

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/agenttest"
	"github.com/clusterd/clusterd/agent/podmon/api"
)

// losing loses the first n answers to op.
func losing(r *agenttest.Runtime, op string, n int) {
	r.Lose = func(asked string) bool {
		if asked != op || n == 0 {
			return false
		}
		n--
		return true
	}
}

// TestSandboxAnswerLost: podmon was killed after it had made the sandbox. A
// second one beside it once lived as long as the pod, and longer.
func TestSandboxAnswerLost(t *testing.T) {
	inBubble(t, func(n *node) {
		losing(n.runtime, "sandbox", 2)
		n.create(testPod("web", v1.RestartPolicyAlways, ctr("a")))
		n.after(10 * time.Second)
		if p := n.get("web"); p.Status.Phase != v1.PodRunning {
			t.Errorf("status %+v", p.Status)
		}
		if s, c := n.runtime.Counts(); s != 1 || c != 1 {
			t.Errorf("%d sandboxes and %d containers: %v", s, c, n.runtime.Calls())
		}
		if n.network.Attached() != 1 {
			t.Errorf("%d networks attached", n.network.Attached())
		}
	})
}

// TestStartAnswerLost: a container whose start was not answered is not started
// a second time, also when it has ended meanwhile.
func TestStartAnswerLost(t *testing.T) {
	for _, policy := range []v1.RestartPolicy{v1.RestartPolicyAlways, v1.RestartPolicyNever} {
		t.Run(string(policy), func(t *testing.T) {
			inBubble(t, func(n *node) {
				losing(n.runtime, "start", 1)
				if policy == v1.RestartPolicyNever {
					n.runtime.OnStart = func(c api.Container) { n.runtime.Exit(c.Name, 3) }
				}
				n.create(testPod("p", policy, ctr("a")))
				n.after(5 * time.Minute)
				p := n.get("p")
				if want := []string{"sandbox p 0", "start a"}; !slices.Equal(n.runtime.Calls()[:2], want) || slices.Contains(n.runtime.Calls()[2:], "start a") {
					t.Errorf("calls %v", n.runtime.Calls())
				}
				s := p.Status.ContainerStatuses[0]
				if policy == v1.RestartPolicyAlways && (s.State.Running == nil || !s.Ready || s.RestartCount != 0) {
					t.Errorf("status %+v", s)
				}
				if policy == v1.RestartPolicyNever && (s.State.Terminated == nil || s.State.Terminated.ExitCode != 3) {
					t.Errorf("status %+v", s)
				}
			})
		})
	}
}

// TestStartAnswerLostMeanwhile: podmon still starts the container whose start was
// not answered. Another one beside it once was started.
func TestStartAnswerLostMeanwhile(t *testing.T) {
	inBubble(t, func(n *node) {
		losing(n.runtime, "start", 1)
		runs := time.Now().Add(30 * time.Second)
		n.runtime.Listed = func(st *api.ContainerStatus) bool {
			if time.Now().Before(runs) {
				st.State = api.StateStarting
			}
			return true
		}
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
		n.after(20 * time.Second)
		if s := n.get("p").Status.ContainerStatuses[0]; s.State.Waiting == nil {
			t.Errorf("while it is being started: %+v", s)
		}
		n.runtime.Break() // the list comes again
		n.after(time.Minute)
		if s := n.get("p").Status.ContainerStatuses[0]; s.State.Running == nil || !s.Ready || s.RestartCount != 0 {
			t.Errorf("status %+v", s)
		}
		if calls := n.runtime.Calls(); !slices.Equal(calls, []string{"sandbox p 0", "start a"}) {
			t.Errorf("calls %v", calls)
		}
	})
}

// TestLostStartIsProbed: a container that is found after its start was given up
// is started and ready when its probes say so.
func TestLostStartIsProbed(t *testing.T) {
	inBubble(t, func(n *node) {
		losing(n.runtime, "start", 1)
		n.runtime.Listed = func(*api.ContainerStatus) bool { return false }
		p := testPod("p", v1.RestartPolicyAlways, ctr("a"))
		p.Spec.Containers[0].ReadinessProbe = &v1.Probe{
			ProbeHandler: v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{"true"}}}, InitialDelaySeconds: 3600, PeriodSeconds: 10, TimeoutSeconds: 1, SuccessThreshold: 1, FailureThreshold: 3,
		}
		n.create(p)
		n.after(300 * time.Millisecond)
		n.runtime.Listed = nil
		n.runtime.Break()
		n.after(time.Second)
		s := n.get("p").Status.ContainerStatuses[0]
		if s.State.Running == nil || s.Ready || s.Started == nil || !*s.Started {
			t.Errorf("status %+v", s)
		}
		if calls := n.runtime.Calls(); !slices.Equal(calls, []string{"sandbox p 0", "start a"}) {
			t.Errorf("calls %v", calls)
		}
	})
}

// TestStrays: what podmon holds of a pod that the pod does not use is ended,
// whoever left it and whenever it shows; what is used is not touched.
func TestStrays(t *testing.T) {
	stray := func(n *node, id string) {
		n.t.Helper()
		_, err := n.runtime.CreateSandbox(n.t.Context(), api.Sandbox{ID: id, PodUID: "uid-p", Namespace: "default", Name: "p"})
		if err != nil {
			n.t.Fatal(err)
		}
		if _, err := n.runtime.StartContainer(n.t.Context(), api.Container{ID: id + "-c", SandboxID: id, Name: "other"}); err != nil {
			n.t.Fatal(err)
		}
		n.runtime.Exit("other", 0)
	}
	check := func(n *node, id string) {
		n.t.Helper()
		if s, c := n.runtime.Counts(); s != 1 || c != 1 {
			n.t.Errorf("%d sandboxes and %d containers: %v", s, c, n.runtime.Calls())
		}
		s := n.get("p").Status.ContainerStatuses[0]
		if s.ContainerID != id || s.RestartCount != 0 || s.State.Running == nil {
			n.t.Errorf("the pod's own container was touched: %+v", s)
		}
	}
	t.Run("seen when the stream is opened again", func(t *testing.T) {
		inBubble(t, func(n *node) {
			n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
			n.after(time.Second)
			id := n.get("p").Status.ContainerStatuses[0].ContainerID
			stray(n, "stray")
			n.runtime.Break()
			n.after(time.Second)
			check(n, id)
		})
	})
	t.Run("seen in the minute's list", func(t *testing.T) {
		inBubble(t, func(n *node) {
			n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
			n.after(time.Second)
			id := n.get("p").Status.ContainerStatuses[0].ContainerID
			stray(n, "stray")
			n.after(2 * time.Minute)
			check(n, id)
		})
	})
	t.Run("seen by the next agent", func(t *testing.T) {
		inBubble(t, func(n *node) {
			stray(n, "early")
			n.create(testPod("q", v1.RestartPolicyAlways, ctr("a")))
			n.after(time.Second)
			n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
			n.after(time.Second)
			id := n.get("p").Status.ContainerStatuses[0].ContainerID
			n.stop()
			stray(n, "late")
			n.start()
			n.after(time.Second)
			n.delete("q", 0)
			n.after(2 * time.Second)
			check(n, id)
		})
	})
	t.Run("of a pod that has ended", func(t *testing.T) {
		inBubble(t, func(n *node) {
			n.create(testPod("p", v1.RestartPolicyNever, ctr("a")))
			n.after(time.Second)
			n.runtime.Exit("a", 0)
			n.after(time.Second)
			stray(n, "stray")
			n.after(2 * time.Minute)
			if s, c := n.runtime.Counts(); s+c != 0 {
				t.Errorf("%d sandboxes and %d containers: %v", s, c, n.runtime.Calls())
			}
			if p := n.get("p"); p.Status.Phase != v1.PodSucceeded {
				t.Errorf("phase %s", p.Status.Phase)
			}
		})
	})
}

// TestDeletedPodsAreForgotten: the end of a pod in the watch may come while its
// worker has not yet heard that its own DELETE was done. The manager once kept
// the UID of such a pod for ever.
func TestDeletedPodsAreForgotten(t *testing.T) {
	inBubble(t, func(n *node) {
		for i := range 30 {
			name := fmt.Sprintf("p%d", i)
			n.create(testPod(name, v1.RestartPolicyAlways, ctr("a")))
			n.after(time.Second)
			n.delete(name, 1)
			n.after(5 * time.Second)
			if n.get(name) != nil {
				t.Fatal(name, "is not deleted")
			}
		}
		if left := n.pods.Ended(); left != 0 {
			t.Errorf("%d deleted pods are remembered", left)
		}
	})
}

// The bug: which pods there are was listed before the network began to look; one
// that came in between lost its network.
func TestPodComesWhileNetworksAreSwept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, nil, func(n *node) {
			n.network.BeforeLive = func() {
				n.create(testPod("web", v1.RestartPolicyAlways, ctr("a")))
				time.Sleep(10 * time.Second) // of the bubble
				if n.network.Attached() != 1 {
					t.Error("the pod got no network while others were looked for: the test shows nothing")
				}
			}
		})
		defer func() { n.stop() }()
		n.after(time.Minute)
		if p := n.get("web"); p.Status.Phase != v1.PodRunning || n.network.Attached() != 1 {
			t.Errorf("%d networks attached, status %+v", n.network.Attached(), p.Status)
		}
	})
}
