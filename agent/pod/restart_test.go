package pod_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime"
)

// started counts the starts of a container.
func (n *node) started(container string) (k int) {
	for _, c := range n.runtime.Calls() {
		if c == "start "+container {
			k++
		}
	}
	return k
}

// TestCrashLoopReset: who ran for ten minutes has not crashed in a row: the
// next start is at once, and the delays begin again. A second less is not enough.
func TestCrashLoopReset(t *testing.T) {
	for _, tt := range []struct {
		name string
		ran  time.Duration
		wait time.Duration // before the next start
		then string        // the delay that the next crash meets
	}{
		{"long enough", 10 * time.Minute, 0, "back-off 10s"},
		{"not long enough", 10*time.Minute - time.Second, 20 * time.Second, "back-off 40s"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, func(n *node) {
				starts := 0
				n.runtime.OnStart = func(c api.Container) {
					if starts++; starts <= 2 {
						go n.runtime.Exit(c.Name, 1) // twice at once: 10 s are over, 20 s come
					}
				}
				n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
				n.after(11 * time.Second)
				if got := n.started("a"); got != 3 {
					t.Fatalf("%d starts", got)
				}
				began := n.get("p").Status.ContainerStatuses[0].State.Running.StartedAt
				n.after(time.Until(began.Add(tt.ran)))
				n.runtime.Exit("a", 1)
				if tt.wait > 0 {
					n.after(tt.wait - 2*time.Second)
					if got := n.started("a"); got != 3 {
						t.Fatalf("%d starts before the back-off of %s was over", got, tt.wait)
					}
				}
				n.after(4 * time.Second)
				if got := n.started("a"); got != 4 {
					t.Fatalf("%d starts after the back-off of %s", got, tt.wait)
				}
				n.runtime.Exit("a", 1)
				n.after(time.Second)
				if !n.events.has("BackOff Back-off restarting failed container a") {
					t.Errorf("events: %v", n.events.list)
				}
				if w := n.get("p").Status.ContainerStatuses[0].State.Waiting; w == nil || w.Reason != "CrashLoopBackOff" || !strings.Contains(w.Message, tt.then) {
					t.Errorf("state %+v, want %s", w, tt.then)
				}
			})
		})
	}
}

// TestContainerRestartRules is KEP-5307: a container's own policy goes before
// its pod's, and a rule for an exit code before both.
func TestContainerRestartRules(t *testing.T) {
	const always, never, onFailure = v1.ContainerRestartPolicyAlways, v1.ContainerRestartPolicyNever, v1.ContainerRestartPolicyOnFailure
	in := func(codes ...int32) v1.ContainerRestartRule {
		return v1.ContainerRestartRule{Action: v1.ContainerRestartRuleActionRestart,
			ExitCodes: &v1.ContainerRestartRuleOnExitCodes{Operator: v1.ContainerRestartRuleOnExitCodesOpIn, Values: codes}}
	}
	notIn := func(codes ...int32) v1.ContainerRestartRule {
		r := in(codes...)
		r.ExitCodes.Operator = v1.ContainerRestartRuleOnExitCodesOpNotIn
		return r
	}
	for _, tt := range []struct {
		name     string
		pod      v1.RestartPolicy
		own      v1.ContainerRestartPolicy
		rules    []v1.ContainerRestartRule
		code     int
		restarts bool
	}{
		{"own Always", v1.RestartPolicyNever, always, nil, 0, true},
		{"own OnFailure, failure", v1.RestartPolicyNever, onFailure, nil, 1, true},
		{"own OnFailure, success", v1.RestartPolicyAlways, onFailure, nil, 0, false},
		{"own Never", v1.RestartPolicyAlways, never, nil, 1, false},
		{"rule matches", v1.RestartPolicyNever, never, []v1.ContainerRestartRule{in(42, 43)}, 43, true},
		{"rule does not match", v1.RestartPolicyAlways, never, []v1.ContainerRestartRule{in(42)}, 41, false},
		{"rule does not match, own Always", v1.RestartPolicyNever, always, []v1.ContainerRestartRule{in(42)}, 41, true},
		{"NotIn matches", v1.RestartPolicyNever, never, []v1.ContainerRestartRule{notIn(0, 1)}, 2, true},
		{"NotIn does not match", v1.RestartPolicyNever, never, []v1.ContainerRestartRule{notIn(0, 1)}, 1, false},
		{"a later rule", v1.RestartPolicyNever, never, []v1.ContainerRestartRule{in(1), in(2)}, 2, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, func(n *node) {
				c := ctr("a")
				c.RestartPolicy, c.RestartPolicyRules = &tt.own, tt.rules
				n.create(testPod("p", tt.pod, c, ctr("other")))
				n.after(time.Second)
				n.runtime.Exit("a", tt.code)
				n.after(time.Second)
				p := n.get("p")
				s := p.Status.ContainerStatuses[0]
				if restarted := s.RestartCount == 1 && s.State.Running != nil; restarted != tt.restarts || p.Status.Phase != v1.PodRunning {
					t.Errorf("phase %s, status %+v", p.Status.Phase, s)
				}
			})
		})
	}
}

// TestInitRestartRules: the same for init containers; one that may not run again
// fails its pod.
func TestInitRestartRules(t *testing.T) {
	for _, tt := range []struct {
		name  string
		pod   v1.RestartPolicy
		own   v1.ContainerRestartPolicy
		phase v1.PodPhase
	}{
		{"own Never in a pod that restarts", v1.RestartPolicyAlways, v1.ContainerRestartPolicyNever, v1.PodFailed},
		{"own OnFailure in a pod that does not", v1.RestartPolicyNever, v1.ContainerRestartPolicyOnFailure, v1.PodRunning},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, func(n *node) {
				init := ctr("i")
				init.RestartPolicy = &tt.own
				p := testPod("p", tt.pod, ctr("a"))
				p.Spec.InitContainers = []v1.Container{init}
				n.create(p)
				n.after(time.Second)
				n.runtime.Exit("i", 1)
				n.after(time.Second)
				n.runtime.Exit("i", 0) // the second run, if there is one
				n.after(time.Second)
				if got := n.get("p").Status; got.Phase != tt.phase {
					t.Errorf("phase %s, want %s: %+v", got.Phase, tt.phase, got.InitContainerStatuses)
				}
			})
		})
	}
}

// TestProbeOrder: no other probe is asked before the startup probe has passed,
// and an initial delay counts from the container's start.
func TestProbeOrder(t *testing.T) {
	inBubble(t, func(n *node) {
		began := time.Now()
		var mu sync.Mutex
		asked := map[string]time.Duration{} // when first, and with success
		first := func(what string) time.Duration {
			mu.Lock()
			defer mu.Unlock()
			return asked[what]
		}
		n.runtime.ExecFn = func(_ context.Context, e api.Exec, _ runtime.ExecIO) (int, error) {
			if what := e.Args[0]; what != "startup" || time.Since(began) >= 20*time.Second {
				mu.Lock()
				defer mu.Unlock()
				if _, ok := asked[what]; !ok {
					asked[what] = time.Since(began).Round(time.Second)
				}
				return 0, nil
			}
			return 1, nil
		}
		probe := func(what string, delay int32) *v1.Probe {
			return &v1.Probe{ProbeHandler: v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{what}}},
				InitialDelaySeconds: delay, PeriodSeconds: 10, TimeoutSeconds: 1, FailureThreshold: 30, SuccessThreshold: 1}
		}
		c := ctr("a")
		c.StartupProbe, c.LivenessProbe, c.ReadinessProbe = probe("startup", 0), probe("live", 5), probe("ready", 40)
		n.create(testPod("p", v1.RestartPolicyAlways, c))
		n.after(19 * time.Second)
		if s := n.get("p").Status.ContainerStatuses[0]; *s.Started || s.Ready || first("live")+first("ready") > 0 {
			t.Errorf("before its startup probe has passed: %+v, others asked after %s, %s", s, first("live"), first("ready"))
		}
		n.after(15 * time.Second)
		if s := n.get("p").Status.ContainerStatuses[0]; !*s.Started || s.Ready || first("startup") < 20*time.Second || first("live") < first("startup") {
			t.Errorf("after its startup probe has passed: %+v, asked after %s, liveness after %s", s, first("startup"), first("live"))
		}
		n.after(8 * time.Second)
		if s := n.get("p").Status.ContainerStatuses[0]; !s.Ready || first("ready") != 40*time.Second {
			t.Errorf("40 s after its start: %+v, asked after %s", s, first("ready"))
		}
	})
}

// TestProbeGrace: a probe's own grace period goes before the pod's when it
// kills, and the container's own restart policy decides what follows.
func TestProbeGrace(t *testing.T) {
	inBubble(t, func(n *node) {
		n.runtime.IgnoreTerm = func(api.Container) bool { return true }
		n.runtime.ExecFn = func(context.Context, api.Exec, runtime.ExecIO) (int, error) { return 1, nil }
		c := ctr("a")
		c.RestartPolicy = ptr.To(v1.ContainerRestartPolicyNever)
		c.LivenessProbe = &v1.Probe{ProbeHandler: v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{"live"}}},
			PeriodSeconds: 10, TimeoutSeconds: 1, FailureThreshold: 1, SuccessThreshold: 1, TerminationGracePeriodSeconds: ptr.To(int64(3))}
		p := testPod("p", v1.RestartPolicyAlways, c, ctr("b"))
		p.Spec.TerminationGracePeriodSeconds = ptr.To(int64(300))
		n.create(p)
		n.after(2 * time.Second)
		if calls := n.runtime.Calls(); !slices.Contains(calls, "signal a 15") || slices.Contains(calls, "signal a 9") {
			t.Fatalf("calls %v", calls)
		}
		n.after(3 * time.Second)
		s := n.get("p").Status.ContainerStatuses[0]
		if s.State.Terminated == nil || s.State.Terminated.ExitCode != 137 || s.RestartCount != 0 {
			t.Errorf("killed after 3 s and not restarted: %+v", s)
		}
		if !n.events.has("Killing Container a failed liveness probe") || n.events.has("will be restarted") {
			t.Errorf("events %v", n.events.list)
		}
		n.runtime.IgnoreTerm = nil
	})
}

// TestSidecarProbes: a sidecar's readiness is part of the pod's, its startup
// probe holds up what comes after it, and its liveness restarts it alone.
func TestSidecarProbes(t *testing.T) {
	inBubble(t, func(n *node) {
		began := time.Now()
		var died atomic.Bool
		bad := func(what string) bool {
			switch d := time.Since(began); what {
			case "startup":
				return d < 10*time.Second
			case "ready":
				return d < 30*time.Second
			default: // "live"
				return d > 60*time.Second && !died.Swap(true) // once
			}
		}
		n.runtime.ExecFn = func(_ context.Context, e api.Exec, _ runtime.ExecIO) (int, error) {
			if bad(e.Args[0]) {
				return 1, nil
			}
			return 0, nil
		}
		probe := func(what string) *v1.Probe {
			return &v1.Probe{ProbeHandler: v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{what}}},
				PeriodSeconds: 1, TimeoutSeconds: 1, FailureThreshold: 60, SuccessThreshold: 1}
		}
		side := ctr("side")
		side.RestartPolicy = ptr.To(v1.ContainerRestartPolicyAlways)
		side.StartupProbe, side.ReadinessProbe, side.LivenessProbe = probe("startup"), probe("ready"), probe("live")
		side.LivenessProbe.FailureThreshold = 1
		p := testPod("p", v1.RestartPolicyNever, ctr("a"))
		p.Spec.InitContainers = []v1.Container{side}
		n.create(p)
		n.after(8 * time.Second)
		if got := n.started("a"); got != 0 {
			t.Error("an app container runs before the sidecar's startup probe has passed")
		}
		n.after(12 * time.Second)
		if got := n.get("p"); n.started("a") != 1 || condition(got, v1.PodReady) != v1.ConditionFalse || condition(got, v1.PodInitialized) != v1.ConditionTrue {
			t.Errorf("%d starts, conditions %+v", n.started("a"), got.Status.Conditions)
		}
		n.after(20 * time.Second)
		if got := n.get("p"); condition(got, v1.PodReady) != v1.ConditionTrue {
			t.Errorf("conditions %+v", got.Status.Conditions)
		}
		n.after(60 * time.Second)
		got := n.get("p").Status
		if got.InitContainerStatuses[0].RestartCount != 1 || got.ContainerStatuses[0].RestartCount != 0 || !n.events.has("Container side failed liveness probe, will be restarted") {
			t.Errorf("sidecar %+v, app %+v, events %v", got.InitContainerStatuses[0], got.ContainerStatuses[0], n.events.list)
		}
	})
}

// TestReadinessGate: a gate that nobody has opened keeps the pod from being
// ready, and its containers are ready all the same.
func TestReadinessGate(t *testing.T) {
	inBubble(t, func(n *node) {
		p := testPod("p", v1.RestartPolicyAlways, ctr("a"))
		p.Spec.ReadinessGates = []v1.PodReadinessGate{{ConditionType: "example.com/gate"}}
		n.create(p)
		n.after(time.Second)
		if got := n.get("p"); condition(got, v1.ContainersReady) != v1.ConditionTrue || condition(got, v1.PodReady) != v1.ConditionFalse {
			t.Errorf("conditions %+v", got.Status.Conditions)
		}
		got := n.get("p")
		got.Status.Conditions = append(got.Status.Conditions, v1.PodCondition{Type: "example.com/gate", Status: v1.ConditionTrue})
		if _, err := n.api.CoreV1().Pods("default").UpdateStatus(t.Context(), got, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		n.after(time.Second)
		if got := n.get("p"); condition(got, v1.PodReady) != v1.ConditionTrue || condition(got, "example.com/gate") != v1.ConditionTrue {
			t.Errorf("conditions %+v", got.Status.Conditions)
		}
	})
}

// TestEndedByAnother: a running pod that another writer says has failed is ended, and
// stays failed, by its words. The node once said again and again that it runs.
func TestEndedByAnother(t *testing.T) {
	for _, restarted := range []bool{false, true} {
		inBubble(t, func(n *node) {
			n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
			n.after(time.Second)
			if restarted {
				n.stop()
			}
			p := n.get("p")
			p.Status.Phase, p.Status.Reason, p.Status.Message = v1.PodFailed, "NodeLost", "gone for long"
			if _, err := n.api.CoreV1().Pods("default").UpdateStatus(t.Context(), p, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			if restarted {
				n.start()
			}
			n.after(time.Minute)
			p = n.get("p")
			if p.Status.Phase != v1.PodFailed || p.Status.Reason != "NodeLost" || p.Status.Message != "gone for long" {
				t.Errorf("restarted %t: %s, %s: %s", restarted, p.Status.Phase, p.Status.Reason, p.Status.Message)
			}
			if s := p.Status.ContainerStatuses[0]; s.State.Terminated == nil || s.Ready {
				t.Errorf("restarted %t: the container %+v", restarted, s)
			}
			if calls := n.runtime.Calls(); !slices.Contains(calls, "signal a 15") {
				t.Errorf("restarted %t: %v", restarted, calls)
			}
		})
	}
}

// TestEndedWhileNoAgentRan: what had exited, or crashes again and again, when another
// writer ended the pod and no agent ran, does not start beside the pod's replacement.
func TestEndedWhileNoAgentRan(t *testing.T) {
	for name, crashes := range map[string]int{"exited": 1, "in back-off": 3} {
		t.Run(name, func(t *testing.T) {
			inBubble(t, func(n *node) {
				n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
				n.after(time.Second)
				for range crashes - 1 {
					n.runtime.Exit("a", 1)
					n.after(30 * time.Second)
				}
				if crashes > 1 {
					n.runtime.Exit("a", 1)
					n.after(time.Second)
					if s := n.get("p").Status.ContainerStatuses[0].State.Waiting; s == nil || s.Reason != "CrashLoopBackOff" {
						t.Fatalf("it is not in back-off: %+v", n.get("p").Status)
					}
				}
				n.stop()
				if crashes == 1 {
					n.runtime.Exit("a", 1)
				}
				p := n.get("p")
				p.Status.Phase, p.Status.Reason = v1.PodFailed, "NodeLost"
				if _, err := n.api.CoreV1().Pods("default").UpdateStatus(t.Context(), p, metav1.UpdateOptions{}); err != nil {
					t.Fatal(err)
				}
				calls := len(n.runtime.Calls())
				n.start()
				n.after(10 * time.Minute)
				if got := n.runtime.Calls()[calls:]; slices.Contains(got, "start a") {
					t.Errorf("it was started again: %v", got)
				}
				if p := n.get("p"); p.Status.Phase != v1.PodFailed || p.Status.Reason != "NodeLost" {
					t.Errorf("status %+v", p.Status)
				}
				if s, c := n.runtime.Counts(); s != 0 || c != 0 {
					t.Errorf("%d sandboxes, %d containers stay", s, c)
				}
			})
		})
	}
}

// TestEndedByAnotherHasItsPlace: a pod that another writer ended while no agent ran has
// its processors and ports as long as it runs.
func TestEndedByAnotherHasItsPlace(t *testing.T) {
	inBubble(t, func(n *node) {
		with := func(name string) *v1.Pod {
			c := ctr(name)
			c.Ports = []v1.ContainerPort{{ContainerPort: 80, HostPort: 8080}}
			return testPod(name, v1.RestartPolicyAlways, c)
		}
		n.runtime.IgnoreTerm = func(c api.Container) bool { return c.Name == "old" }
		n.create(with("old"))
		n.after(time.Second)
		n.stop()
		p := n.get("old")
		p.Status.Phase = v1.PodFailed
		if _, err := n.api.CoreV1().Pods("default").UpdateStatus(t.Context(), p, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		n.start()
		n.after(time.Second)
		n.create(with("early"))
		n.after(time.Second)
		if p := n.get("early"); p.Status.Phase != v1.PodFailed || p.Status.Reason != "NodePorts" {
			t.Errorf("the port of a pod that still runs was given away: %+v", p.Status)
		}
		n.after(time.Minute)
		n.create(with("late"))
		n.after(time.Second)
		if p := n.get("late"); p.Status.Phase != v1.PodRunning {
			t.Errorf("the port is not free once it has ended: %+v", p.Status)
		}
	})
}
