package podstate

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
)

// Step is one thing the worker has to do next. Steps of one plan are
// independent of each other and may run at the same time.
type Step interface{ step() }

// The steps.
type (
	// Wait asks to be planned again at a time, if nothing happens before.
	Wait struct{ Until time.Time }
	// SetupVolumes makes every volume of the pod.
	SetupVolumes struct{}
	// PrepareDevices has drivers prepare what the pod's claims were given, and
	// plugins what it asks for of extended resources.
	PrepareDevices struct{}
	// CancelDevices gives up a PrepareDevices that is under way.
	CancelDevices struct{}
	// ReleaseDevices has it taken back.
	ReleaseDevices struct{}
	// CreateSandbox makes network and pause.
	CreateSandbox struct{ Attempt uint32 }
	// RemoveSandbox removes a dead sandbox and its network, so that another
	// can be made.
	RemoveSandbox struct{ ID string }
	// EndStray ends and removes a sandbox or container that no spec asks for.
	EndStray struct{ ID string }
	// Pull makes the image of a container present.
	Pull struct{ Container string }
	// PullVolume makes the image of a volume present and mounts it.
	PullVolume struct{ Volume string }
	// CancelVolume gives up a PullVolume that is under way.
	CancelVolume struct{ Volume string }
	// Start makes and starts the next instance of a container.
	Start struct {
		Container string
		Attempt   uint32
	}
	// Stop ends an instance: preStop, stop signal, grace, kill.
	Stop struct {
		Container string
		ID        string
		At        time.Time // the plan's own: when the stop begins
		Grace     time.Duration
		Cause     StopCause
		Message   string
	}
	// Cancel gives up a pull or start that is under way.
	Cancel struct{ Container string }
	// Grant asks the node for the resources that the spec wants.
	Grant struct{}
	// Resize writes what is allocated into the cgroups.
	Resize struct{}
	// Fail sets the pod's verdict.
	Fail struct{ Verdict Verdict }
	// Teardown removes whatever the node holds for the pod.
	Teardown struct{}
	// Finish deletes the API object of a pod that is torn down.
	Finish struct{}
)

func (Wait) step()           {}
func (SetupVolumes) step()   {}
func (PrepareDevices) step() {}
func (CancelDevices) step()  {}
func (ReleaseDevices) step() {}
func (CreateSandbox) step()  {}
func (RemoveSandbox) step()  {}
func (EndStray) step()       {}
func (Pull) step()           {}
func (PullVolume) step()     {}
func (CancelVolume) step()   {}
func (Start) step()          {}
func (Stop) step()           {}
func (Cancel) step()         {}
func (Grant) step()          {}
func (Resize) step()         {}
func (Fail) step()           {}
func (Teardown) step()       {}
func (Finish) step()         {}

// MinGrace is the shortest grace period: SIGTERM and one second.
const MinGrace = time.Second

// Plan says what to do next for a pod. It is pure: the same values give the
// same steps. Operations under way (Op, Busy, Creating …) are part of
// Observed, so a step is never given twice; when nothing is left to do it
// returns none.
//
//	            ┌── devices ──▶ sandbox ──┐
//	admitted ──▶┤                         ├──▶ init containers ──▶ app containers ──▶ settled ─┐
//	            └── volumes ──────────────┘     (in order)          (restart policy)           │
//	      any state ── deleted │ gone │ deadline ──▶ stop all ─────────────────────────────────┤
//	                                                                                           ▼
//	          Finish (DELETE) ◀── deleted ── Teardown ◀── status stored ◀── devices released ──┘
func Plan(d Desired, o Observed, now time.Time) []Step {
	p := planner{d: d, o: o, now: now, spec: &d.Pod.Spec}
	if o.Finished {
		return nil
	}
	p.strays()
	if Ending(d, o) {
		p.end()
	} else {
		p.run()
	}
	if !p.wake.IsZero() {
		p.add(Wait{Until: p.wake})
	}
	return p.steps
}

// strays plans the end of what no spec asks for. Nothing new is made and
// nothing torn down meanwhile: it has the pod's address and its names.
func (p *planner) strays() {
	for _, id := range slices.Sorted(maps.Keys(p.o.Strays)) {
		if s := p.o.Strays[id]; !s.Busy && !p.held(s.Err) {
			p.add(EndStray{id})
		}
	}
}

type planner struct {
	d     Desired
	o     Observed
	now   time.Time
	spec  *v1.PodSpec
	steps []Step
	wake  time.Time
}

func (p *planner) add(s Step) { p.steps = append(p.steps, s) }

// later asks for another plan at t; it reports whether t is still to come.
func (p *planner) later(t time.Time) bool {
	if !t.After(p.now) {
		return false
	}
	if p.wake.IsZero() || t.Before(p.wake) {
		p.wake = t
	}
	return true
}

// held reports whether a fault keeps us from trying now.
func (p *planner) held(f *Fault) bool { return f != nil && p.later(f.RetryAt) }

// Ending reports whether the pod has to stop (or has stopped) for good.
func Ending(d Desired, o Observed) bool {
	return d.Gone || d.Pod.DeletionTimestamp != nil || o.Verdict != nil || o.Final || o.EndedAs != "" || settled(d, o)
}

// settled reports whether the pod's containers have run and none of them will
// run again: it has succeeded or failed by itself.
func settled(d Desired, o Observed) bool {
	if initFailed(d, o) {
		return true
	}
	for i := range d.Pod.Spec.Containers {
		c := o.Containers[d.Pod.Spec.Containers[i].Name]
		if c == nil || c.Now == nil || c.Now.Running || c.Op != OpNone {
			return false
		}
		if WillRestart(&d.Pod.Spec, &d.Pod.Spec.Containers[i], KindApp, c) {
			return false
		}
	}
	return true
}

// initFailed reports whether an init container has failed for good.
func initFailed(d Desired, o Observed) bool {
	for i := range d.Pod.Spec.InitContainers {
		spec := &d.Pod.Spec.InitContainers[i]
		c := o.Containers[spec.Name]
		if c == nil || c.Now == nil || c.Now.Running || c.Op != OpNone || InitKind(spec) != KindInit {
			continue
		}
		if c.Now.ExitCode != 0 && !WillRestart(&d.Pod.Spec, spec, KindInit, c) {
			return true
		}
	}
	return false
}

// WillRestart says whether an exited instance is followed by another, by the
// restart policy alone.
func WillRestart(spec *v1.PodSpec, cs *v1.Container, kind Kind, c *Container) bool {
	i := c.Now
	if i == nil {
		return true
	}
	if kind == KindEphemeral {
		return false
	}
	if i.StopCause == StopChanged || i.StopCause == StopResized || kind == KindSidecar {
		return true
	}
	if i.StopCause == StopPod {
		return false
	}
	if on, ok := ruleFor(cs.RestartPolicyRules, i.ExitCode); ok {
		return on
	}
	switch policyOf(spec, cs) {
	case v1.RestartPolicyNever:
		return false
	case v1.RestartPolicyOnFailure:
		return i.ExitCode != 0
	}
	return kind == KindApp || i.ExitCode != 0 // Always; an init container is done at 0
}

// policyOf is a container's own restart policy, or else its pod's.
func policyOf(spec *v1.PodSpec, c *v1.Container) v1.RestartPolicy {
	if c.RestartPolicy != nil {
		return v1.RestartPolicy(*c.RestartPolicy)
	}
	return spec.RestartPolicy
}

// ruleFor finds the first restart rule that speaks of an exit code.
func ruleFor(rules []v1.ContainerRestartRule, code int32) (restart, found bool) {
	for _, r := range rules {
		if r.ExitCodes == nil {
			continue
		}
		in := false
		for _, v := range r.ExitCodes.Values {
			in = in || v == code
		}
		if in == (r.ExitCodes.Operator == v1.ContainerRestartRuleOnExitCodesOpIn) {
			return r.Action == v1.ContainerRestartRuleActionRestart, true
		}
	}
	return false, false
}

// run plans a pod that is to run.
func (p *planner) run() {
	if s := p.spec.ActiveDeadlineSeconds; s != nil && !p.o.StartedAt.IsZero() {
		if !p.later(p.o.StartedAt.Add(time.Duration(*s) * time.Second)) {
			p.add(Fail{Verdict{"DeadlineExceeded", "Pod was active on the node longer than the specified deadline"}})
			return
		}
	}
	if p.o.Sandbox.State == SandboxDead {
		p.clearDeadSandbox()
		return
	}
	devices := p.devices()
	if p.o.Sandbox.State == SandboxAbsent && devices && len(p.o.Strays) == 0 && !p.held(p.o.Sandbox.Err) {
		attempt := p.o.Sandbox.Attempt
		if p.o.Sandbox.Made {
			attempt++
		}
		p.add(CreateSandbox{Attempt: attempt})
	}
	if v := p.o.Volumes; !v.Ready && !v.Busy && !p.held(v.Err) {
		p.add(SetupVolumes{})
	}
	p.imageVolumes()
	p.resize()
	ready := p.o.Sandbox.State == SandboxReady && p.o.Volumes.Ready && devices && len(p.o.Strays) == 0
	if p.initialize(ready) {
		p.apps(ready)
	}
	if ready {
		for i := range p.spec.EphemeralContainers {
			c := v1.Container(p.spec.EphemeralContainers[i].EphemeralContainerCommon)
			p.container(&c, KindEphemeral, true)
		}
	}
}

// clearDeadSandbox stops what survived the pause process, then removes the
// sandbox. Containers that share its namespaces cannot be kept.
func (p *planner) clearDeadSandbox() {
	clear := true
	for _, c := range p.all() {
		oc := p.o.Containers[c.Name]
		switch {
		case oc.busyStarting():
			clear = false
			p.add(Cancel{oc.Name})
		case oc.Op != OpNone:
			clear = false
		case oc.Running():
			clear = false
			p.add(Stop{Container: oc.Name, ID: oc.Now.ID, At: p.now, Grace: 2 * time.Second, Cause: StopSandbox,
				Message: "Pod sandbox changed, it will be killed and re-created."})
		}
	}
	if clear && !p.held(p.o.Sandbox.Err) {
		p.add(RemoveSandbox{p.o.Sandbox.ID})
	}
}

// initialize brings the init containers forward and reports whether the app
// containers may run.
func (p *planner) initialize(ready bool) bool {
	// Once an app container was made in this sandbox the initialization is
	// over, whatever becomes of its records; only sidecars are kept alive.
	over := p.appsBegun()
	for i := range p.spec.InitContainers {
		spec := &p.spec.InitContainers[i]
		c := p.o.Containers[spec.Name]
		if InitKind(spec) == KindSidecar {
			p.container(spec, KindSidecar, ready)
			if !over && !(c.Running() && c.Now.Started) {
				return false
			}
			continue
		}
		if over || p.initDone(c) {
			continue
		}
		p.container(spec, KindInit, ready)
		return false
	}
	return true
}

// initDone: the init container exited with 0, in the present sandbox.
func (p *planner) initDone(c *Container) bool {
	return c.Now != nil && !c.Now.Running && c.Op == OpNone && c.Now.ExitCode == 0 &&
		c.Now.StopCause == StopNone && p.current(c.Now)
}

// current reports whether the instance ran in the present sandbox. One that
// is known only from the API counts as such.
func (p *planner) current(i *Instance) bool {
	return i.SandboxID == "" || i.SandboxID == p.o.Sandbox.ID
}

func (p *planner) appsBegun() bool {
	for i := range p.spec.Containers {
		c := p.o.Containers[p.spec.Containers[i].Name]
		if c.Now != nil && p.current(c.Now) {
			return true
		}
	}
	return false
}

// apps brings the app containers forward. Their first instances start in the
// order of the spec, each when the one before it has been started and its
// postStart has ended; images are fetched all at once.
func (p *planner) apps(ready bool) {
	for i := range p.spec.Containers {
		c := p.o.Containers[p.spec.Containers[i].Name]
		before := c.Now == nil || c.Last == nil && hooking(&p.spec.Containers[i], c)
		p.container(&p.spec.Containers[i], KindApp, ready)
		_, faulted := p.imageVolumesReady(&p.spec.Containers[i])
		if before && c.StartErr == nil && c.ImageErr == nil && !faulted {
			ready = false
		}
	}
}

// container plans one container; mayStart: its turn has come.
func (p *planner) container(spec *v1.Container, kind Kind, mayStart bool) {
	c := p.o.Containers[spec.Name]
	if c.Op != OpNone {
		return
	}
	if c.Running() {
		p.health(spec, kind, c)
		return
	}
	rerunInit := kind == KindInit && c.Now != nil && !p.current(c.Now)
	if c.Now != nil && !rerunInit && !WillRestart(p.spec, spec, kind, c) {
		return
	}
	if c.Now != nil && p.later(RestartAt(c)) {
		return
	}
	if p.held(c.StartErr) {
		return
	}
	if !c.ImageReady || c.ImageRef != spec.Image {
		if c.ImageErr != nil && c.ImageRef == spec.Image && p.held(c.ImageErr) {
			return
		}
		p.add(Pull{spec.Name})
		return
	}
	if volumes, _ := p.imageVolumesReady(spec); mayStart && volumes {
		p.add(Start{Container: spec.Name, Attempt: nextAttempt(c)})
	}
}

func nextAttempt(c *Container) uint32 {
	if c.Now == nil {
		return uint32(c.Restarts)
	}
	return max(c.Now.Attempt+1, uint32(c.Restarts))
}

// health stops a running container that must not go on.
func (p *planner) health(spec *v1.Container, kind Kind, c *Container) {
	switch {
	case c.Now.Hash != "" && kind != KindEphemeral && c.Now.Hash != Hash(spec):
		p.add(Stop{Container: c.Name, ID: c.Now.ID, At: p.now, Grace: p.specGrace(), Cause: StopChanged,
			Message: fmt.Sprintf("Container %s definition changed, will be restarted", c.Name)})
	case c.Now.Sick != "":
		grace := p.specGrace()
		if s := c.Now.SickGrace; s != nil {
			grace = Grace(*s)
		}
		msg := fmt.Sprintf("Container %s %s", c.Name, c.Now.Sick)
		if policyOf(p.spec, spec) != v1.RestartPolicyNever {
			msg += ", will be restarted"
		}
		p.add(Stop{Container: c.Name, ID: c.Now.ID, At: p.now, Grace: grace, Cause: StopUnhealthy, Message: msg})
	}
}

// all lists every container of the spec, init containers first.
func (p *planner) all() []*v1.Container { return AllContainers(p.spec) }

// AllContainers lists every container of a spec: init containers first, ephemeral
// ones last.
func AllContainers(spec *v1.PodSpec) []*v1.Container {
	var out []*v1.Container
	for i := range spec.InitContainers {
		out = append(out, &spec.InitContainers[i])
	}
	for i := range spec.Containers {
		out = append(out, &spec.Containers[i])
	}
	for i := range spec.EphemeralContainers {
		c := v1.Container(spec.EphemeralContainers[i].EphemeralContainerCommon)
		out = append(out, &c)
	}
	return out
}

// specGrace is the pod's own grace period.
func (p *planner) specGrace() time.Duration {
	if s := p.spec.TerminationGracePeriodSeconds; s != nil {
		return Grace(*s)
	}
	return 30 * time.Second
}

// Grace is a grace period of the API, given in seconds; it is at least MinGrace.
func Grace(s int64) time.Duration {
	return max(time.Duration(min(s, maxGraceSeconds))*time.Second, MinGrace)
}

// maxGraceSeconds is a hundred years: what is more would not fit into a Duration.
const maxGraceSeconds = 100 * 365 * 24 * 3600

// Hash is a fingerprint of the part of a container's spec that may change
// while the pod lives and needs a new instance when it does.
func Hash(c *v1.Container) string {
	sum := sha256.Sum256([]byte(c.Name + "\x00" + c.Image))
	return hex.EncodeToString(sum[:8])
}
