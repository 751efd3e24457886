package pod_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/object"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime"
	"github.com/clusterd/clusterd/features"
)

func TestInitContainers(t *testing.T) {
	inBubble(t, func(n *node) {
		p := testPod("p", v1.RestartPolicyAlways, ctr("app"))
		side := ctr("side")
		side.RestartPolicy = ptr.To(v1.ContainerRestartPolicyAlways)
		p.Spec.InitContainers = []v1.Container{ctr("one"), side, ctr("two")}
		n.create(p)
		n.after(time.Second)
		if got := n.runtime.Calls(); !slices.Equal(got[1:], []string{"start one"}) {
			t.Fatalf("calls %v", got)
		}
		if p := n.get("p"); p.Status.Phase != v1.PodPending || condition(p, v1.PodInitialized) != v1.ConditionFalse {
			t.Errorf("status %+v", p.Status)
		}
		n.runtime.Exit("one", 0)
		n.after(time.Second)
		n.runtime.Exit("two", 1)
		n.after(time.Second)
		n.runtime.Exit("two", 0)
		n.after(time.Second)
		if got := n.runtime.Calls(); !slices.Equal(got[1:], []string{"start one", "start side", "start two", "start two", "start app"}) {
			t.Fatalf("calls %v", got)
		}
		if p := n.get("p"); p.Status.Phase != v1.PodRunning || condition(p, v1.PodInitialized) != v1.ConditionTrue || condition(p, v1.PodReady) != v1.ConditionTrue {
			t.Errorf("status %+v", p.Status)
		}
		n.runtime.Exit("side", 0) // comes back by itself
		n.after(time.Second)
		if s := n.get("p").Status.InitContainerStatuses[1]; s.State.Running == nil || s.RestartCount != 1 {
			t.Errorf("sidecar %+v", s)
		}
	})
}

// TestSidecarEndsLast: the pod is done when its app is; the sidecar follows.
func TestSidecarEndsLast(t *testing.T) {
	inBubble(t, func(n *node) {
		p := testPod("p", v1.RestartPolicyNever, ctr("app"))
		side := ctr("side")
		side.RestartPolicy = ptr.To(v1.ContainerRestartPolicyAlways)
		p.Spec.InitContainers = []v1.Container{side}
		n.create(p)
		n.after(time.Second)
		n.runtime.Exit("app", 0)
		n.after(time.Second)
		if p := n.get("p"); p.Status.Phase != v1.PodSucceeded {
			t.Errorf("phase %s", p.Status.Phase)
		}
		if !slices.Contains(n.runtime.Calls(), "signal side 15") {
			t.Errorf("calls %v", n.runtime.Calls())
		}
	})
}

// TestSidecarsShareTheGrace: app and sidecars have one grace period together. Each
// once had a whole one, so that a drain took as many times longer.
func TestSidecarsShareTheGrace(t *testing.T) {
	inBubble(t, func(n *node) {
		p := testPod("p", v1.RestartPolicyAlways, ctr("app"))
		for _, name := range []string{"one", "two"} {
			side := ctr(name)
			side.RestartPolicy = ptr.To(v1.ContainerRestartPolicyAlways)
			p.Spec.InitContainers = append(p.Spec.InitContainers, side)
		}
		n.runtime.IgnoreTerm = func(api.Container) bool { return true }
		n.create(p)
		n.after(time.Second)
		n.delete("p", 30)
		n.after(37 * time.Second)
		if n.get("p") != nil {
			t.Errorf("it still ends 37 s after it was asked to within 30: %v", n.runtime.Calls())
		}
	})
}

// TestSidecarStopsOnce: the stop of a sidecar that is under way is no other one at the
// next turn, though time has passed between the plan and what it began: its preStop
// hook runs once, to its end, and the stop signal follows once. Time also passes while
// the pod's grace period is made shorter, which does begin another.
func TestSidecarStopsOnce(t *testing.T) {
	for name, shorter := range map[string]bool{"undisturbed": false, "made sooner": true} {
		t.Run(name, func(t *testing.T) {
			inBubbleOf(t, func(n *node) { n.slow = time.Millisecond }, func(n *node) {
				var mu sync.Mutex
				begun, ended := 0, 0
				n.runtime.ExecFn = func(ctx context.Context, _ api.Exec, _ runtime.ExecIO) (int, error) {
					mu.Lock()
					begun++
					mu.Unlock()
					select {
					case <-time.After(5 * time.Second):
					case <-ctx.Done():
						return 0, ctx.Err()
					}
					mu.Lock()
					ended++
					mu.Unlock()
					return 0, nil
				}
				n.runtime.IgnoreTerm = func(c api.Container) bool { return c.Name == "side" }
				p := testPod("p", v1.RestartPolicyAlways, ctr("app"))
				side := ctr("side")
				side.RestartPolicy = ptr.To(v1.ContainerRestartPolicyAlways)
				side.Lifecycle = &v1.Lifecycle{PreStop: &v1.LifecycleHandler{Exec: &v1.ExecAction{Command: []string{"bye"}}}}
				p.Spec.InitContainers = []v1.Container{side}
				n.create(p)
				n.after(time.Second)
				n.delete("p", 60)
				want := 1
				n.after(3 * time.Second)
				if shorter {
					n.delete("p", 30)
					want = 2
				}
				turns := func(of time.Duration) {
					for range of / time.Second {
						n.pods.ObjectChanged("uid-p", object.Ref{}) // a turn for another reason
						n.after(time.Second)
					}
				}
				turns(4 * time.Second)
				if slices.Contains(n.runtime.Calls(), "signal side 15") != !shorter {
					t.Errorf("the stop signal comes with the hook under way, or not after it: %v", n.runtime.Calls())
				}
				turns(4 * time.Second)
				mu.Lock()
				if begun != want || ended != 1 {
					t.Errorf("the hook was begun %d times and ran to its end %d times, want %d and 1", begun, ended, want)
				}
				mu.Unlock()
				term := 0
				for _, c := range n.runtime.Calls() {
					if c == "signal side 15" {
						term++
					}
				}
				if term != 1 {
					t.Errorf("the stop signal came %d times", term)
				}
				n.after(time.Minute)
				if n.get("p") != nil {
					t.Error("the pod does not end")
				}
			})
		})
	}
}

func TestInitFailsForGood(t *testing.T) {
	inBubble(t, func(n *node) {
		p := testPod("p", v1.RestartPolicyNever, ctr("app"))
		p.Spec.InitContainers = []v1.Container{ctr("one")}
		n.create(p)
		n.after(time.Second)
		n.runtime.Exit("one", 3)
		n.after(time.Second)
		if p := n.get("p"); p.Status.Phase != v1.PodFailed || p.Status.InitContainerStatuses[0].State.Terminated.ExitCode != 3 {
			t.Errorf("status %+v", p.Status)
		}
		if slices.Contains(n.runtime.Calls(), "start app") {
			t.Error("app was started")
		}
	})
}

func TestPostStart(t *testing.T) {
	features.ShowsWithDoubles(t, 293)
	inBubble(t, func(n *node) {
		release := make(chan int)
		n.runtime.ExecFn = func(ctx context.Context, e api.Exec, _ runtime.ExecIO) (int, error) {
			select {
			case code := <-release:
				return code, nil
			case <-ctx.Done():
				return 0, ctx.Err()
			}
		}
		c := ctr("a")
		c.Lifecycle = &v1.Lifecycle{PostStart: &v1.LifecycleHandler{Exec: &v1.ExecAction{Command: []string{"hi"}}}}
		n.create(testPod("p", v1.RestartPolicyAlways, c))
		n.after(5 * time.Second)
		if s := n.get("p").Status.ContainerStatuses[0]; s.State.Running != nil {
			t.Errorf("running before postStart has ended: %+v", s)
		} else if w := s.State.Waiting; w == nil || !strings.Contains(w.Message, "Running the postStart hook since ") {
			t.Errorf("the hook is not named: %+v", s.State)
		}
		n.after(15 * time.Minute) // a hook has no deadline of its own
		release <- 0
		n.after(time.Second)
		if s := n.get("p").Status.ContainerStatuses[0]; s.State.Running == nil || !s.Ready {
			t.Errorf("status %+v", s)
		}
		n.runtime.Exit("a", 0)
		n.after(time.Second)
		release <- 1
		n.after(time.Second)
		if !n.events.has("FailedPostStartHook") {
			t.Errorf("events %v", n.events.list)
		}
		if !slices.Contains(n.runtime.Calls(), "signal a 15") {
			t.Errorf("calls %v", n.runtime.Calls())
		}
	})
}

// TestHooks: hooks that sleep are waited for, but none longer than the pod's
// grace period; one that fails is told and stops nothing.
func TestHooks(t *testing.T) {
	inBubble(t, func(n *node) {
		hook := func(name string, grace int64, post, pre *v1.LifecycleHandler) {
			c := ctr(name)
			c.Lifecycle = &v1.Lifecycle{PostStart: post, PreStop: pre}
			p := testPod(name, v1.RestartPolicyNever, c)
			p.Spec.TerminationGracePeriodSeconds = &grace
			n.create(p)
		}
		tcp := &v1.LifecycleHandler{TCPSocket: &v1.TCPSocketAction{}}
		sleep := func(s int64) *v1.LifecycleHandler { return &v1.LifecycleHandler{Sleep: &v1.SleepAction{Seconds: s}} }
		hook("tcp", 30, nil, tcp)
		hook("nap", 30, sleep(2), sleep(3))
		hook("none", 30, sleep(0), sleep(0))
		hook("long", 30, nil, sleep(20))
		n.after(time.Second)
		if s := n.get("nap").Status.ContainerStatuses[0]; s.State.Running != nil {
			t.Errorf("running before its postStart sleep is over: %+v", s)
		}
		n.after(5 * time.Second)
		for _, name := range []string{"tcp", "nap", "none", "long"} {
			if s := n.get(name).Status.ContainerStatuses[0]; s.State.Running == nil {
				t.Errorf("%s: %+v", name, s.State)
			}
		}
		for name, grace := range map[string]int64{"tcp": 30, "nap": 30, "none": 30, "long": 5} {
			n.delete(name, grace)
		}
		n.after(time.Second)
		if n.get("none") != nil || n.get("tcp") != nil {
			t.Error("a pod waits for a hook that is over")
		}
		n.after(time.Second)
		if n.get("nap") == nil {
			t.Error("the sleep before the stop was not waited for")
		}
		n.after(2 * time.Second)
		if n.get("nap") != nil || n.get("long") == nil {
			t.Error("a sleep of 3 s lasts longer, or one of 20 s ends before its pod's 5 s are over")
		}
		n.after(3 * time.Second)
		if n.get("long") != nil {
			t.Error("a sleep of 20 s outlasts its pod's 5 s")
		}
		for _, e := range []string{"PreStopHook failed: sleep of 20 s did not end within 5s", "PreStopHook failed: tcpSocket is not supported"} {
			if !n.events.has(e) {
				t.Errorf("no event %q in %v", e, n.events.list)
			}
		}
	})
}

func TestProbes(t *testing.T) {
	inBubble(t, func(n *node) {
		var mu sync.Mutex
		codes := map[string]int{"live": 0, "ready": 1}
		set := func(k string, v int) { mu.Lock(); codes[k] = v; mu.Unlock() }
		n.runtime.ExecFn = func(_ context.Context, e api.Exec, _ runtime.ExecIO) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			return codes[e.Args[0]], nil
		}
		c := ctr("a")
		p := func(cmd string) *v1.Probe {
			return &v1.Probe{ProbeHandler: v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{cmd}}}, PeriodSeconds: 5, TimeoutSeconds: 1, FailureThreshold: 2, SuccessThreshold: 1}
		}
		c.LivenessProbe, c.ReadinessProbe = p("live"), p("ready")
		n.create(testPod("p", v1.RestartPolicyAlways, c))
		n.after(2 * time.Second)
		if n.get("p").Status.ContainerStatuses[0].Ready {
			t.Error("ready before its probe")
		}
		set("ready", 0)
		n.after(6 * time.Second)
		if p := n.get("p"); !p.Status.ContainerStatuses[0].Ready || condition(p, v1.PodReady) != v1.ConditionTrue {
			t.Errorf("status %+v", p.Status)
		}
		set("ready", 1)
		n.after(11 * time.Second)
		if n.get("p").Status.ContainerStatuses[0].Ready {
			t.Error("ready though its probe failed twice")
		}
		set("live", 1)
		n.after(12 * time.Second)
		if s := n.get("p").Status.ContainerStatuses[0]; s.RestartCount != 1 {
			t.Errorf("status %+v", s)
		}
		for _, e := range []string{"Unhealthy Readiness probe failed", "Unhealthy Liveness probe failed", "Killing Container a failed liveness probe, will be restarted"} {
			if !n.events.has(e) {
				t.Errorf("no event %q in %v", e, n.events.list)
			}
		}
	})
}
