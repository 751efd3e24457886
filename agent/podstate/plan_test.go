package podstate

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

var t0 = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// world is a pod and what is observed of it, changed by the rows of tables.
type world struct {
	d Desired
	o Observed
}

func newWorld(policy v1.RestartPolicy, inits, apps []string) *world {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "ns", UID: "u"}}
	p.Spec.RestartPolicy, p.Spec.TerminationGracePeriodSeconds = policy, ptr.To(int64(30))
	w := &world{Desired{Pod: p}, Observed{Containers: map[string]*Container{}, Strays: map[string]*Stray{}, StartedAt: t0}}
	for _, n := range inits {
		c := v1.Container{Name: n, Image: "i"}
		if n[0] == 's' {
			c.RestartPolicy = ptr.To(v1.ContainerRestartPolicyAlways)
		}
		p.Spec.InitContainers = append(p.Spec.InitContainers, c)
	}
	for _, n := range apps {
		p.Spec.Containers = append(p.Spec.Containers, v1.Container{Name: n, Image: "i"})
	}
	for _, c := range AllContainers(&p.Spec) {
		w.o.Containers[c.Name] = &Container{Name: c.Name}
	}
	return w
}

// up makes sandbox, volumes and images ready.
func (w *world) up() *world {
	w.o.Sandbox = Sandbox{ID: "s", State: SandboxReady, Made: true}
	w.o.Volumes.Ready = true
	for _, c := range w.o.Containers {
		c.ImageReady, c.ImageRef = true, "i"
	}
	return w
}

func (w *world) running(names ...string) *world {
	for _, n := range names {
		w.o.Containers[n].Now = &Instance{ID: n + "0", SandboxID: "s", Running: true, Started: true, Ready: true, StartedAt: t0,
			Hash: Hash(&v1.Container{Name: n, Image: "i"})}
	}
	return w
}

// imageVolume adds a volume made of an image, which a container mounts.
func (w *world) imageVolume(name, container string) *world {
	spec := &w.d.Pod.Spec
	spec.Volumes = append(spec.Volumes, v1.Volume{Name: name, VolumeSource: v1.VolumeSource{Image: &v1.ImageVolumeSource{Reference: "m"}}})
	for i := range spec.Containers {
		if c := &spec.Containers[i]; c.Name == container {
			c.VolumeMounts = append(c.VolumeMounts, v1.VolumeMount{Name: name, MountPath: "/" + name})
		}
	}
	w.o.ImageVolumes = SeedImageVolumes(spec)
	return w
}

// exited ends a container at t0.
func (w *world) exited(name string, code int32) *world {
	w.running(name)
	i := w.o.Containers[name].Now
	i.Running, i.Started, i.ExitCode, i.FinishedAt = false, false, code, t0
	return w
}

func (w *world) with(fn func(w *world)) *world { fn(w); return w }

func TestPlan(t *testing.T) {
	const always, never, onFailure = v1.RestartPolicyAlways, v1.RestartPolicyNever, v1.RestartPolicyOnFailure
	stop := func(name string, grace time.Duration, cause StopCause, msg string) Step {
		return Stop{Container: name, ID: name + "0", Grace: grace, Cause: cause, Message: msg}
	}
	ends := func(name string, grace time.Duration) Step {
		return stop(name, grace, StopPod, "Stopping container "+name)
	}
	deleted := func(w *world) {
		w.d.Pod.DeletionTimestamp = &metav1.Time{Time: t0}
		w.d.Pod.DeletionGracePeriodSeconds = ptr.To(int64(7))
	}
	a := []string{"a"}
	tests := []struct {
		name string
		w    *world
		at   time.Duration // after t0
		want []Step
	}{
		{"new pod: all that needs nothing else at once", newWorld(always, nil, []string{"a", "b"}), 0,
			[]Step{CreateSandbox{}, SetupVolumes{}, Pull{"a"}, Pull{"b"}}},
		{"in order: b after a was started", newWorld(always, nil, []string{"a", "b"}).up(), 0, []Step{Start{"a", 0}}},
		{"b's turn", newWorld(always, nil, []string{"a", "b"}).up().running("a"), 0, []Step{Start{"b", 0}}},
		{"b waits for a's postStart", newWorld(always, nil, []string{"a", "b"}).up().running("a").with(func(w *world) {
			w.d.Pod.Spec.Containers[0].Lifecycle = &v1.Lifecycle{PostStart: &v1.LifecycleHandler{Sleep: &v1.SleepAction{Seconds: 1}}}
			a := w.o.Containers["a"]
			a.Op, a.Now.Started, a.Now.Hash = OpStart, false, Hash(&w.d.Pod.Spec.Containers[0])
		}), 0, nil},
		{"a cannot start: b does not wait for it", newWorld(always, nil, []string{"a", "b"}).up().with(func(w *world) {
			w.o.Containers["a"].StartErr = &Fault{RetryAt: t0.Add(time.Minute)}
		}), 0, []Step{Start{"b", 0}, Wait{t0.Add(time.Minute)}}},
		{"nothing starts without volumes", newWorld(always, nil, a).up().with(func(w *world) { w.o.Volumes = Volumes{Busy: true} }), 0, nil},
		{"image volume: pulled beside the rest", newWorld(always, nil, a).imageVolume("v", "a"), 0,
			[]Step{CreateSandbox{}, SetupVolumes{}, PullVolume{"v"}, Pull{"a"}}},
		{"image volume: its container waits", newWorld(always, nil, a).up().imageVolume("v", "a").with(func(w *world) { w.o.ImageVolumes["v"].Busy = true }), 0, nil},
		{"image volume: mounted", newWorld(always, nil, a).up().imageVolume("v", "a").with(func(w *world) { w.o.ImageVolumes["v"].Ready = true }), 0, []Step{Start{"a", 0}}},
		{"image volume: back-off, and the next container's turn", newWorld(always, nil, []string{"a", "b"}).up().imageVolume("v", "a").with(func(w *world) {
			w.o.ImageVolumes["v"].Err = &Fault{RetryAt: t0.Add(time.Minute)}
		}), 0, []Step{Start{"b", 0}, Wait{t0.Add(time.Minute)}}},
		{"image volume: again after the back-off", newWorld(always, nil, a).up().imageVolume("v", "a").with(func(w *world) {
			w.o.ImageVolumes["v"].Err = &Fault{RetryAt: t0}
		}), 0, []Step{PullVolume{"v"}}},
		{"image volume: given up with the pod", newWorld(always, nil, a).up().imageVolume("v", "a").with(func(w *world) {
			w.o.ImageVolumes["v"].Busy, w.o.StatusStored = true, true
		}).with(deleted), 0, []Step{CancelVolume{"v"}}},
		{"all well: nothing to do", newWorld(always, nil, a).up().running("a"), 0, nil},
		{"one step at a time", newWorld(always, nil, a).up().with(func(w *world) { w.o.Containers["a"].Op = OpStart }), 0, nil},

		{"crash: first restart at once", newWorld(always, nil, a).up().exited("a", 1), 0, []Step{Start{"a", 1}}},
		{"crash: back-off", newWorld(always, nil, a).up().exited("a", 1).with(func(w *world) { w.o.Containers["a"].BackOff = 10 * time.Second }), 4 * time.Second,
			[]Step{Wait{t0.Add(10 * time.Second)}}},
		{"crash: back-off over", newWorld(always, nil, a).up().exited("a", 1).with(func(w *world) { w.o.Containers["a"].BackOff = 10 * time.Second }), 10 * time.Second,
			[]Step{Start{"a", 1}}},
		{"crash: a long run forgives", newWorld(always, nil, a).up().exited("a", 1).with(func(w *world) {
			w.o.Containers["a"].BackOff = time.Minute
			w.o.Containers["a"].Now.StartedAt = t0.Add(-ResetAfter)
		}), 0, []Step{Start{"a", 1}}},
		{"on failure: exit 0 stays", newWorld(onFailure, nil, []string{"a", "b"}).up().running("b").exited("a", 0), 0, nil},
		{"never: stays", newWorld(never, nil, []string{"a", "b"}).up().running("b").exited("a", 1), 0, nil},
		{"done, status not told yet", newWorld(never, nil, a).up().exited("a", 1), 0, nil},
		{"done, told: torn down", newWorld(never, nil, a).up().exited("a", 1).with(func(w *world) { w.o.StatusStored = true }), 0, []Step{Teardown{}}},
		{"done, torn down: stays", newWorld(never, nil, a).up().exited("a", 1).with(func(w *world) { w.o.StatusStored, w.o.TornDown = true, true }), 0, nil},

		{"init: first only", newWorld(always, []string{"i", "j"}, a).up(), 0, []Step{Start{"i", 0}}},
		{"init: second", newWorld(always, []string{"i", "j"}, a).up().exited("i", 0), 0, []Step{Start{"j", 0}}},
		{"init: app", newWorld(always, []string{"i", "j"}, a).up().exited("i", 0).exited("j", 0), 0, []Step{Start{"a", 0}}},
		{"init: failed, Always: again", newWorld(always, []string{"i"}, a).up().exited("i", 1), 0, []Step{Start{"i", 1}}},
		{"init: failed, Never: pod failed", newWorld(never, []string{"i"}, a).up().exited("i", 1).with(func(w *world) { w.o.StatusStored = true }), 0, []Step{Teardown{}}},
		{"init: not again once an app container ran", newWorld(always, []string{"i"}, a).up().exited("a", 1), 0, []Step{Start{"a", 1}}},
		{"sidecar: not passed before it started", newWorld(always, []string{"s", "i"}, a).up().running("s").with(func(w *world) { w.o.Containers["s"].Now.Started = false }), 0, nil},
		{"sidecar: passed when started", newWorld(always, []string{"s", "i"}, a).up().running("s"), 0, []Step{Start{"i", 0}}},
		{"sidecar: restarted whatever the policy", newWorld(never, []string{"s"}, a).up().running("a").exited("s", 0), 0, []Step{Start{"s", 1}}},
		{"sidecar: ends after the apps", newWorld(never, []string{"s", "t"}, a).up().running("s", "a").with(deleted), 0, []Step{ends("a", 7*time.Second)}},
		{"sidecar: has what the apps left", newWorld(never, []string{"s"}, a).up().running("s").exited("a", 0).with(func(w *world) { w.o.EndSince = t0 }), 10 * time.Second, []Step{ends("s", 20*time.Second)}},
		{"sidecar: has a moment at least", newWorld(never, []string{"s"}, a).up().running("s").exited("a", 0).with(func(w *world) { w.o.EndSince = t0 }), 29 * time.Second, []Step{ends("s", 2*time.Second)}},
		{"sidecar: stopping already", newWorld(never, []string{"s"}, a).up().running("s").exited("a", 0).with(func(w *world) {
			s := w.o.Containers["s"]
			w.o.EndSince, s.Op, s.OpSince, s.StopGrace = t0, OpStop, t0.Add(10*time.Second), 20*time.Second
		}), 15 * time.Second, nil},
		{"sidecar: sooner than begun", newWorld(never, []string{"s"}, a).up().running("s").exited("a", 0).with(deleted).with(func(w *world) {
			s := w.o.Containers["s"]
			w.o.EndSince, s.Op, s.OpSince, s.StopGrace = t0, OpStop, t0.Add(time.Second), 29*time.Second
		}), 15 * time.Second, []Step{ends("s", 6*time.Second)}},
		{"sidecars: last first", newWorld(never, []string{"s", "s2"}, a).up().running("s", "s2").exited("a", 0), 0, []Step{ends("s2", 30*time.Second)}},

		{"new image: stop", newWorld(always, nil, []string{"a", "b"}).up().running("a", "b").with(func(w *world) { w.d.Pod.Spec.Containers[0].Image = "x" }), 0,
			[]Step{stop("a", 30*time.Second, StopChanged, "Container a definition changed, will be restarted")}},
		{"new image: pull, no back-off", newWorld(never, nil, a).up().exited("a", 143).with(func(w *world) {
			w.d.Pod.Spec.Containers[0].Image = "x"
			w.o.Containers["a"].Now.StopCause, w.o.Containers["a"].BackOff = StopChanged, time.Hour
		}), 0, []Step{Pull{"a"}}},
		{"sick: stop", newWorld(always, nil, a).up().running("a").with(func(w *world) { w.o.Containers["a"].Now.Sick = "failed liveness probe" }), 0,
			[]Step{stop("a", 30*time.Second, StopUnhealthy, "Container a failed liveness probe, will be restarted")}},
		{"sick: probe's own grace", newWorld(never, nil, a).up().running("a").with(func(w *world) {
			w.o.Containers["a"].Now.Sick, w.o.Containers["a"].Now.SickGrace = "failed liveness probe", ptr.To(int64(3))
		}), 0, []Step{stop("a", 3*time.Second, StopUnhealthy, "Container a failed liveness probe")}},

		{"pause dead: survivors stop", newWorld(always, nil, a).up().running("a").with(func(w *world) { w.o.Sandbox.State = SandboxDead }), 0,
			[]Step{stop("a", 2*time.Second, StopSandbox, "Pod sandbox changed, it will be killed and re-created.")}},
		{"pause dead: removed", newWorld(always, nil, a).up().exited("a", 137).with(func(w *world) { w.o.Sandbox.State = SandboxDead }), 0, []Step{RemoveSandbox{"s"}}},
		{"pause dead: next attempt", newWorld(always, nil, a).up().exited("a", 137).with(func(w *world) {
			w.o.Sandbox = Sandbox{Attempt: 3, Made: true}
		}), 0, []Step{CreateSandbox{4}}},
		{"new sandbox: init containers run again", newWorld(always, []string{"i"}, a).up().exited("i", 0).exited("a", 137).with(func(w *world) { w.o.Sandbox.ID = "s2" }), 0, []Step{Start{"i", 1}}},
		{"sandbox refused: later", newWorld(always, nil, a).up().with(func(w *world) {
			w.o.Sandbox = Sandbox{Err: &Fault{RetryAt: t0.Add(time.Second)}}
		}), 0, []Step{Wait{t0.Add(time.Second)}}},

		{"image fault: later", newWorld(always, nil, a).up().with(func(w *world) {
			w.o.Containers["a"].ImageReady = false
			w.o.Containers["a"].ImageErr = &Fault{RetryAt: t0.Add(10 * time.Second)}
		}), 0, []Step{Wait{t0.Add(10 * time.Second)}}},
		{"image fault of another image: now", newWorld(always, nil, a).up().with(func(w *world) {
			w.o.Containers["a"].ImageReady, w.o.Containers["a"].ImageRef = false, "old"
			w.o.Containers["a"].ImageErr = &Fault{RetryAt: t0.Add(10 * time.Second)}
		}), 0, []Step{Pull{"a"}}},

		{"deleted: stop all", newWorld(always, nil, []string{"a", "b"}).up().running("a", "b").with(deleted), 0, []Step{ends("a", 7*time.Second), ends("b", 7*time.Second)}},
		{"deleted: give up a pull", newWorld(always, nil, a).up().with(deleted).with(func(w *world) { w.o.Containers["a"].Op = OpPull }), 0, []Step{Cancel{"a"}}},
		{"deleted: stopping already", newWorld(always, nil, a).up().running("a").with(deleted).with(func(w *world) {
			w.o.Containers["a"].Op, w.o.Containers["a"].StopGrace = OpStop, 7*time.Second
		}), 0, nil},
		{"deleted: sooner than begun", newWorld(always, nil, a).up().running("a").with(deleted).with(func(w *world) {
			w.o.Containers["a"].Op, w.o.Containers["a"].StopGrace = OpStop, time.Minute
		}), 0, []Step{ends("a", 7*time.Second)}},
		{"deleted: the status first", newWorld(always, nil, a).up().exited("a", 143).with(deleted), 0, nil},
		{"deleted: torn down", newWorld(always, nil, a).up().exited("a", 143).with(deleted).with(func(w *world) { w.o.StatusStored = true }), 0, []Step{Teardown{}}},
		{"deleted: not while the sandbox is being made", newWorld(always, nil, a).with(deleted).with(func(w *world) {
			w.o.StatusStored, w.o.Sandbox.State = true, SandboxCreating
		}), 0, nil},
		{"deleted: teardown failed, later", newWorld(always, nil, a).with(deleted).with(func(w *world) {
			w.o.StatusStored, w.o.TeardownErr = true, &Fault{RetryAt: t0.Add(time.Second)}
		}), 0, []Step{Wait{t0.Add(time.Second)}}},
		{"deleted: object goes", newWorld(always, nil, a).with(deleted).with(func(w *world) { w.o.TornDown = true }), 0, []Step{Finish{}}},
		{"gone: nobody to tell", newWorld(always, nil, a).up().exited("a", 1).with(func(w *world) { w.d.Gone = true }), 0, []Step{Teardown{}}},
		{"gone: quickly", newWorld(always, nil, a).up().running("a").with(func(w *world) { w.d.Gone = true }), 0, []Step{ends("a", 2*time.Second)}},

		{"deadline ahead", newWorld(always, nil, a).up().running("a").with(func(w *world) { w.d.Pod.Spec.ActiveDeadlineSeconds = ptr.To(int64(9)) }), 0,
			[]Step{Wait{t0.Add(9 * time.Second)}}},
		{"deadline passed", newWorld(always, nil, a).up().running("a").with(func(w *world) { w.d.Pod.Spec.ActiveDeadlineSeconds = ptr.To(int64(9)) }), 9 * time.Second,
			[]Step{Fail{Verdict{"DeadlineExceeded", "Pod was active on the node longer than the specified deadline"}}}},
		{"verdict: all stops", newWorld(always, nil, a).up().running("a").with(func(w *world) { w.o.Verdict = &Verdict{} }), 0, []Step{ends("a", 30*time.Second)}},
		{"restart rule: this code is final", newWorld(always, nil, []string{"a", "b"}).up().running("b").exited("a", 42).with(func(w *world) {
			w.d.Pod.Spec.Containers[0].RestartPolicy = ptr.To(v1.ContainerRestartPolicyNever)
		}), 0, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			for i, s := range tt.want {
				if s, ok := s.(Stop); ok {
					s.At = t0.Add(tt.at)
					tt.want[i] = s
				}
			}
			got := Plan(tt.w.d, tt.w.o, t0.Add(tt.at))
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Error(d)
			}
			if again := Plan(tt.w.d, tt.w.o, t0.Add(tt.at)); !cmp.Equal(got, again) {
				t.Errorf("not pure: then %v", again)
			}
		})
	}
}

// obey does what a plan says, at once and with success.
func (w *world) obey(steps []Step, now time.Time) time.Time {
	for _, s := range steps {
		switch s := s.(type) {
		case Wait:
			if s.Until.After(now) {
				now = s.Until
			}
		case SetupVolumes:
			w.o.Volumes.Ready = true
		case CreateSandbox:
			w.o.Sandbox = Sandbox{ID: fmt.Sprint("s", s.Attempt), State: SandboxReady, Attempt: s.Attempt, Made: true}
		case RemoveSandbox:
			w.o.Sandbox = Sandbox{Attempt: w.o.Sandbox.Attempt, Made: true}
		case EndStray:
			delete(w.o.Strays, s.ID)
		case Pull:
			c := w.o.Containers[s.Container]
			c.ImageReady, c.ImageRef = true, "i"
		case Start:
			c := w.o.Containers[s.Container]
			if c.Now != nil {
				c.BackOff = NextBackOff(c.BackOff)
			}
			c.Last, c.ImageReady = c.Now, false
			c.Now = &Instance{ID: fmt.Sprint(s.Container, s.Attempt), SandboxID: w.o.Sandbox.ID, Attempt: s.Attempt, Running: true, Started: true, StartedAt: now, Hash: Hash(&v1.Container{Name: s.Container, Image: "i"})}
		case Stop:
			i := w.o.Containers[s.Container].Now
			i.Running, i.ExitCode, i.FinishedAt, i.StopCause = false, 143, now, s.Cause
		case Fail:
			w.o.Verdict = &s.Verdict
		case Teardown:
			w.o.TornDown = true
			w.o.Sandbox.State = SandboxAbsent
		case Finish:
			w.o.Finished = true
		}
	}
	w.o.StatusStored = true
	return now
}

// TestPlanConverges: whatever happens to a pod, obeying the plan comes to
// rest: running, done, or finished once it is deleted.
func TestPlanConverges(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		policy := []v1.RestartPolicy{v1.RestartPolicyAlways, v1.RestartPolicyNever, v1.RestartPolicyOnFailure}[r.IntN(3)]
		w := newWorld(policy, []string{"i", "s", "j"}[:r.IntN(4)], []string{"a", "b", "c"}[:1+r.IntN(3)])
		now := t0
		for range 60 {
			now = w.obey(Plan(w.d, w.o, now), now).Add(time.Second)
			for name, c := range w.o.Containers {
				if !c.Running() {
					continue
				}
				if name == "i" || name == "j" || r.IntN(10) == 0 { // init containers end, others sometimes
					c.Now.Running, c.Now.ExitCode, c.Now.FinishedAt = false, int32(r.IntN(4)/3), now
				}
			}
			if w.o.Sandbox.State == SandboxReady && r.IntN(20) == 0 {
				w.o.Sandbox.State = SandboxDead
			}
			if r.IntN(20) == 0 {
				w.o.Strays["stray"] = &Stray{}
			}
		}
		w.d.Pod.DeletionTimestamp, w.d.Pod.DeletionGracePeriodSeconds = &metav1.Time{Time: now}, ptr.To(int64(1))
		for n := 0; !w.o.Finished; n++ {
			if n > 30 {
				t.Fatalf("seed %d: deleted pod does not end: %+v", seed, Plan(w.d, w.o, now))
			}
			now = w.obey(Plan(w.d, w.o, now), now).Add(time.Second)
		}
		for name, c := range w.o.Containers {
			if c.Running() {
				t.Errorf("seed %d: %s runs in a finished pod", seed, name)
			}
		}
	}
}

// TestClockSetBack: a container that ended before the machine's clock was set
// back by an hour does not wait an hour for its next run.
func TestClockSetBack(t *testing.T) {
	for name, end := range map[string]time.Time{"set back": t0.Add(time.Hour), "set forward": t0.Add(-time.Hour), "right": t0} {
		i := &Instance{StartedAt: end.Add(-time.Second)}
		i.Exited(api.ContainerStatus{ExitCode: 1, FinishedAt: end.UnixNano()}, "", t0)
		c := &Container{Now: i, BackOff: 40 * time.Second}
		at := RestartAt(c)
		if wait := at.Sub(t0); wait > c.BackOff || name == "right" && wait != c.BackOff {
			t.Errorf("%s: it waits %s", name, wait)
		}
		if !i.FinishedAt.Equal(end) {
			t.Errorf("%s: the end is told as %s", name, i.FinishedAt)
		}
	}
}

func TestGraceFits(t *testing.T) {
	for s, want := range map[int64]time.Duration{-5: MinGrace, 0: MinGrace, 30: 30 * time.Second, 1 << 62: maxGraceSeconds * time.Second} {
		if got := Grace(s); got != want {
			t.Errorf("%d s: %s, want %s", s, got, want)
		}
	}
}
