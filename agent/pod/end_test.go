package pod_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	ocispec "github.com/google/go-containerregistry/pkg/v1"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime"
	"github.com/clusterd/clusterd/features"
)

// TestRestartMatrix is FEATURES area N.
func TestRestartMatrix(t *testing.T) {
	tests := []struct {
		row      int // of FEATURES
		name     string
		policy   v1.RestartPolicy
		exits    []int // -1: keeps running
		phase    v1.PodPhase
		restarts []int32
	}{
		{221, "one, 0, Always", v1.RestartPolicyAlways, []int{0}, v1.PodRunning, []int32{1}},
		{222, "one, 0, OnFailure", v1.RestartPolicyOnFailure, []int{0}, v1.PodSucceeded, []int32{0}},
		{223, "one, 0, Never", v1.RestartPolicyNever, []int{0}, v1.PodSucceeded, []int32{0}},
		{224, "one, 1, Always", v1.RestartPolicyAlways, []int{1}, v1.PodRunning, []int32{1}},
		{225, "one, 1, OnFailure", v1.RestartPolicyOnFailure, []int{1}, v1.PodRunning, []int32{1}},
		{226, "one, 1, Never", v1.RestartPolicyNever, []int{1}, v1.PodFailed, []int32{0}},
		{227, "two, one 1, Always", v1.RestartPolicyAlways, []int{1, -1}, v1.PodRunning, []int32{1, 0}},
		{228, "two, one 1, OnFailure", v1.RestartPolicyOnFailure, []int{1, -1}, v1.PodRunning, []int32{1, 0}},
		{229, "two, one 1, Never", v1.RestartPolicyNever, []int{1, -1}, v1.PodRunning, []int32{0, 0}},
		{230, "two, both, Always", v1.RestartPolicyAlways, []int{0, 1}, v1.PodRunning, []int32{1, 1}},
		{231, "two, both, OnFailure", v1.RestartPolicyOnFailure, []int{0, 1}, v1.PodRunning, []int32{0, 1}},
		{232, "two, both, Never", v1.RestartPolicyNever, []int{0, 1}, v1.PodFailed, []int32{0, 0}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			features.ShowsWithDoubles(t, tt.row)
			inBubble(t, func(n *node) {
				var cs []v1.Container
				for i := range tt.exits {
					cs = append(cs, ctr("c"+string(rune('0'+i))))
				}
				n.create(testPod("p", tt.policy, cs...))
				n.after(200 * time.Millisecond)
				for i, code := range tt.exits {
					if code >= 0 {
						n.runtime.Exit(cs[i].Name, code)
					}
				}
				n.after(time.Second)
				p := n.get("p")
				if p.Status.Phase != tt.phase {
					t.Errorf("phase %s, want %s", p.Status.Phase, tt.phase)
				}
				for i, want := range tt.restarts {
					if got := p.Status.ContainerStatuses[i].RestartCount; got != want {
						t.Errorf("%s: %d restarts, want %d", cs[i].Name, got, want)
					}
				}
				if s, _ := n.runtime.Counts(); (s == 0) != (tt.phase != v1.PodRunning) {
					t.Errorf("%d sandboxes in phase %s", s, tt.phase)
				}
			})
		})
	}
}

func TestOOM(t *testing.T) {
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
		n.after(200 * time.Millisecond)
		n.runtime.OOM("a")
		n.after(time.Second)
		s := n.get("p").Status.ContainerStatuses[0]
		if l := s.LastTerminationState.Terminated; l == nil || l.Reason != "OOMKilled" || l.ExitCode != 137 || s.RestartCount != 1 || s.State.Running == nil {
			t.Errorf("status %+v", s)
		}
	})
}

func TestCrashLoop(t *testing.T) {
	inBubble(t, func(n *node) {
		n.runtime.OnStart = func(c api.Container) { go n.runtime.Exit(c.Name, 1) }
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
		starts := func() (k int) {
			for _, c := range n.runtime.Calls() {
				if c == "start a" {
					k++
				}
			}
			return k
		}
		n.after(time.Second)
		if got := starts(); got != 2 { // the first restart is at once
			t.Fatalf("%d starts", got)
		}
		s := n.get("p").Status.ContainerStatuses[0]
		if w := s.State.Waiting; w == nil || w.Reason != "CrashLoopBackOff" || !strings.Contains(w.Message, "back-off 10s restarting failed container=a") {
			t.Fatalf("state %+v", s.State)
		}
		if s.LastTerminationState.Terminated == nil || s.LastTerminationState.Terminated.ExitCode != 1 || n.get("p").Status.Phase != v1.PodRunning {
			t.Errorf("status %+v", s)
		}
		// Counted from the exit: each round begins a second after one.
		for i, wait := range []time.Duration{10, 20, 40, 80, 160, 300, 300} {
			n.after(wait*time.Second - 2*time.Second)
			if got := starts(); got != i+2 {
				t.Fatalf("%d starts before back-off %d s was over", got, wait)
			}
			n.after(2 * time.Second)
			if got := starts(); got != i+3 {
				t.Fatalf("%d starts after back-off %d s", got, wait)
			}
		}
		if !n.events.has("BackOff Back-off restarting failed container a") {
			t.Errorf("events %v", n.events.list)
		}
	})
}

// TestPauseDies is FEATURES row 201.
func TestPauseDies(t *testing.T) {
	features.ShowsWithDoubles(t, 199, 257)
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a"), ctr("b")))
		n.after(time.Second)
		// One dead container concerns itself alone …
		n.runtime.Exit("b", 0)
		n.after(time.Second)
		if s := n.get("p").Status.ContainerStatuses; s[0].RestartCount != 0 || s[1].RestartCount != 1 {
			t.Errorf("status %+v", s)
		}
		// … a dead sandbox all of them.
		was := n.get("p").Status.PodIP
		n.runtime.KillPause("p")
		n.after(15 * time.Second)
		p := n.get("p")
		if p.Status.Phase != v1.PodRunning || p.Status.PodIP == was ||
			p.Status.ContainerStatuses[0].RestartCount != 1 || p.Status.ContainerStatuses[1].RestartCount != 2 {
			t.Errorf("status %+v", p.Status)
		}
		if !slices.Contains(n.runtime.Calls(), "sandbox p 1") {
			t.Errorf("calls %v", n.runtime.Calls())
		}
	})
}

func TestDeadline(t *testing.T) {
	inBubble(t, func(n *node) {
		p := testPod("p", v1.RestartPolicyAlways, ctr("a"))
		p.Spec.ActiveDeadlineSeconds = ptr.To(int64(5))
		n.create(p)
		n.after(4 * time.Second)
		if n.get("p").Status.Phase != v1.PodRunning {
			t.Error("not running")
		}
		n.after(3 * time.Second)
		if p := n.get("p"); p.Status.Phase != v1.PodFailed || p.Status.Reason != "DeadlineExceeded" {
			t.Errorf("status %+v", p.Status)
		}
	})
}

func TestGraceAndKill(t *testing.T) {
	inBubble(t, func(n *node) {
		n.runtime.IgnoreTerm = func(api.Container) bool { return true }
		c := ctr("a")
		c.Lifecycle = &v1.Lifecycle{PreStop: &v1.LifecycleHandler{Exec: &v1.ExecAction{Command: []string{"bye"}}}}
		n.create(testPod("p", v1.RestartPolicyAlways, c))
		n.after(time.Second)
		n.delete("p", 20)
		n.after(19 * time.Second)
		if n.get("p") == nil {
			t.Fatal("gone before its grace period was over")
		}
		if got := n.runtime.Execs(); len(got) != 1 || got[0][0] != "bye" {
			t.Errorf("preStop: %v", got)
		}
		n.after(3 * time.Second)
		if p := n.get("p"); p != nil {
			t.Fatalf("still there: %+v", p.Status)
		}
		calls := n.runtime.Calls()
		if i, j := slices.Index(calls, "signal a 15"), slices.Index(calls, "signal a 9"); i < 0 || j < i {
			t.Errorf("calls %v", calls)
		}

		n.create(testPod("q", v1.RestartPolicyAlways, ctr("b"))) // a shorter grace period cuts a longer one
		n.after(time.Second)
		n.delete("q", 600)
		n.after(time.Second)
		n.delete("q", 1)
		n.after(3 * time.Second)
		if n.get("q") != nil {
			t.Error("still there")
		}
	})
}

// TestSlowEndIsNamed: whatever the end of a pod waits for is in its status after
// a second, and holds up no other pod.
func TestSlowEndIsNamed(t *testing.T) {
	inBubble(t, func(n *node) {
		n.runtime.IgnoreTerm = func(c api.Container) bool { return c.Name != "quick" }
		n.runtime.ExecFn = func(ctx context.Context, _ api.Exec, _ runtime.ExecIO) (int, error) {
			<-ctx.Done()
			return 0, ctx.Err()
		}
		n.network.SlowDetach = 10 * time.Second
		hooked := ctr("hooked")
		hooked.Lifecycle = &v1.Lifecycle{PreStop: &v1.LifecycleHandler{Exec: &v1.ExecAction{Command: []string{"hangs"}}}}
		n.create(testPod("p", v1.RestartPolicyAlways, hooked, ctr("deaf")))
		n.create(testPod("other", v1.RestartPolicyAlways, ctr("quick")))
		n.after(time.Second)
		says := func(want ...string) {
			t.Helper()
			p := n.get("p")
			if p == nil {
				t.Fatal("the pod is gone")
			}
			if p.Status.Reason != "Stopping" {
				t.Errorf("reason %q", p.Status.Reason)
			}
			for _, w := range want {
				if !strings.Contains(p.Status.Message, w) {
					t.Errorf("message %q does not say %q", p.Status.Message, w)
				}
			}
		}
		n.delete("p", 20)
		n.delete("other", 20)
		n.after(2 * time.Second)
		says("Stopping container hooked: running its preStop hook since ", ", at most until ",
			"Stopping container deaf: waiting for it to end after its stop signal since ")
		if p := n.get("other"); p.Status.Phase != v1.PodSucceeded && p.Status.Phase != v1.PodFailed {
			t.Errorf("the other pod is held up: %+v", p.Status)
		}
		n.after(22 * time.Second)
		says("Detaching its network since ")
		if p := n.get("p"); p.Status.Phase != v1.PodFailed || strings.Contains(p.Status.Message, "Stopping container") {
			t.Errorf("status %+v", p.Status)
		}
		n.after(10 * time.Second)
		if n.get("p") != nil || n.get("other") != nil {
			t.Error("still there")
		}

		// A pod that goes on says it without a reason, which would take the
		// place of its phase in lists.
		sick := ctr("sick")
		sick.LivenessProbe = &v1.Probe{ProbeHandler: v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{"false"}}}, PeriodSeconds: 1, TimeoutSeconds: 1, FailureThreshold: 1}
		p := testPod("goes-on", v1.RestartPolicyAlways, sick)
		p.Spec.TerminationGracePeriodSeconds = ptr.To(int64(60))
		n.create(p)
		n.after(10 * time.Second)
		if st := n.get("goes-on").Status; st.Reason != "" || !strings.Contains(st.Message, "Stopping container sick: waiting for it to end") || st.Phase != v1.PodRunning {
			t.Errorf("%s, reason %q, message %q", st.Phase, st.Reason, st.Message)
		}
	})
}

// TestRestartCountGrows: five failures of a liveness probe are five restarts,
// each later than the one before it.
func TestRestartCountGrows(t *testing.T) {
	features.ConformsWithDoubles(t, 327)
	inBubble(t, func(n *node) {
		n.runtime.ExecFn = func(context.Context, api.Exec, runtime.ExecIO) (int, error) { return 1, nil }
		c := ctr("a")
		c.LivenessProbe = &v1.Probe{ProbeHandler: v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{"well"}}}, PeriodSeconds: 1, TimeoutSeconds: 1, FailureThreshold: 1, SuccessThreshold: 1}
		n.create(testPod("p", v1.RestartPolicyAlways, c))
		last, began, waits := int32(0), time.Now(), []time.Duration(nil)
		for last < 5 && time.Since(began) < 20*time.Minute {
			n.after(time.Second)
			st := n.get("p").Status.ContainerStatuses
			if len(st) == 0 || st[0].RestartCount == last {
				continue
			}
			if st[0].RestartCount != last+1 {
				t.Fatalf("restart count %d comes after %d", st[0].RestartCount, last)
			}
			last++
			waits = append(waits, time.Since(began))
			began = time.Now()
		}
		if last != 5 || !slices.IsSorted(waits) {
			t.Errorf("%d restarts, after %v", last, waits)
		}
	})
}

// TestExitEvents: a container's end is told as an event, however it came.
func TestExitEvents(t *testing.T) {
	features.ShowsWithDoubles(t, 220)
	inBubble(t, func(n *node) {
		n.runtime.IgnoreTerm = func(c api.Container) bool { return c.Name == "deaf" }
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a"), ctr("deaf")))
		n.after(time.Second)
		n.runtime.Exit("a", 3)
		n.after(time.Second) // restarted at once
		n.runtime.Exit("a", 0)
		n.after(20 * time.Second)
		n.runtime.Exit("a", 139)
		n.after(time.Minute)
		n.runtime.OOM("a")
		n.after(2 * time.Minute)
		n.delete("p", 5)
		n.after(10 * time.Second)
		for event, times := range map[string]int{
			"Warning Exited Container a exited with code 3":                               1,
			"Normal Exited Container a exited with code 0":                                1,
			"Warning Exited Container a was ended by signal 11 (SIGSEGV)":                 1,
			"Warning OOMKilling Container a was killed: it used more memory than its":     1,
			"Warning BackOff Back-off restarting failed container a in pod p_default":     3, // the first restart is at once
			"Normal Killing Stopping container a":                                         1,
			"Warning Killed Container deaf was killed: it had not ended within its grace": 1,
			" Exited ": 3, // none for the stop that was obeyed
		} {
			if got := n.events.count(event); got != times {
				t.Errorf("event %q %d times, want %d", event, got, times)
			}
		}
		if t.Failed() {
			t.Log(strings.Join(n.events.list, "\n"))
		}
	})
}

// TestImageStopSignal: an agent that found the container knows the stop signal
// of its image all the same.
func TestImageStopSignal(t *testing.T) {
	inBubble(t, func(n *node) {
		n.images.Add("app:quit", ocispec.Config{Entrypoint: []string{"/app"}, StopSignal: "SIGUSR1"})
		c := ctr("a")
		c.Image = "app:quit"
		n.create(testPod("p", v1.RestartPolicyAlways, c))
		n.after(time.Second)
		n.stop()
		n.start()
		n.after(time.Second)
		if got := n.get("p").Status.ContainerStatuses[0].StopSignal; got == nil || *got != v1.SIGUSR1 {
			t.Errorf("the status tells of stop signal %v", got)
		}
		n.delete("p", 30)
		n.after(time.Second)
		if !slices.Contains(n.runtime.Calls(), "signal a 10") {
			t.Errorf("calls %v", n.runtime.Calls())
		}
	})
}
