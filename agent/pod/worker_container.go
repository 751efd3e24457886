package pod

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podspec"
	"github.com/clusterd/clusterd/agent/podstate"
)

// pull makes the container's image present, as the pull policy says.
func (w *worker) pull(c *podstate.Container, spec *v1.Container) {
	ref, policy, pod := spec.Image, spec.ImagePullPolicy, w.pod
	if c.ImageRef != ref {
		c.ImageDelay = 0
	}
	if w.unconfirmed.Load() && policy == v1.PullAlways {
		policy = v1.PullIfNotPresent // it ran with what is here, and its registry may be out of reach, too
	}
	name := c.Name
	w.operate(c, podstate.OpPull, func(ctx context.Context) func() {
		img, reason, err := w.m.ensureImage(ctx, pod, ref, policy, func(kind, reason, msg string) {
			w.send(func() { w.containerEvent(name, kind, reason, "%s", msg) })
		})
		return func() {
			c.ImageRef = ref
			if err == nil {
				w.images[name] = img
				c.ImageReady, c.ImageID, c.ImageErr, c.ImageDelay = true, img.NameFor(ref), nil, 0
				return
			}
			if errors.Is(err, context.Canceled) {
				return // given up on purpose
			}
			if _, here, gerr := w.m.cfg.Images.Get(ref); gerr == nil && here && policy != v1.PullAlways && !errors.As(err, new(unproven)) {
				return // it was brought while the pull failed
			}
			c.ImageDelay = podstate.NextBackOff(c.ImageDelay)
			now := time.Now()
			c.ImageErr = &podstate.Fault{Reason: reason, Message: err.Error(), At: now, RetryAt: now.Add(c.ImageDelay)}
			if reason == "ErrImagePull" {
				w.containerEvent(name, v1.EventTypeWarning, "Failed", "Failed to pull image %q: %v", ref, err)
			}
			w.containerEvent(name, v1.EventTypeWarning, "Failed", "Error: %s", reason)
		}
	})
}

// ensureImage finds or pulls an image. reason is the status's word for err.
func (m *Manager) ensureImage(ctx context.Context, pod *v1.Pod, ref string, policy v1.PullPolicy, tell func(kind, reason, msg string)) (img image.Image, reason string, err error) {
	have, present, err := m.cfg.Images.Get(ref)
	switch {
	case errors.Is(err, image.ErrInvalidName):
		tell(v1.EventTypeWarning, "InspectFailed", fmt.Sprintf("Failed to apply default image tag %q: %v", ref, err))
		return img, "InvalidImageName", err
	case err != nil:
		return img, "ImageInspectError", err
	}
	closed := false // it is here, and not for this pod
	if present && policy != v1.PullAlways {
		may, err := m.mayUse(ctx, pod, ref, have)
		switch {
		case errors.Is(err, image.ErrNotFound):
			present = false // it has gone just now
		case err != nil:
			return img, "ErrImagePull", unproven{err}
		case may:
			tell(v1.EventTypeNormal, "Pulled", fmt.Sprintf("Container image %q already present on machine and can be accessed by the pod", ref))
			return have, "", nil
		}
		closed = present
	}
	if policy == v1.PullNever {
		err := fmt.Errorf("Container image %q is not present with pull policy of Never", ref) //nolint:staticcheck // ST1005: the API's words
		if closed {
			err = fmt.Errorf("Container image %q is present with pull policy of Never but does not have the proper credentials to access the image", ref) //nolint:staticcheck // as above
			err = unproven{err}
		}
		tell(v1.EventTypeWarning, "ErrImageNeverPull", err.Error())
		return img, "ErrImageNeverPull", err
	}
	if img, reason, err = m.fetchImage(ctx, pod, ref, tell); err != nil && closed {
		err = unproven{fmt.Errorf("the image is on the node, and was pulled with other credentials than this pod's: %w", err)}
	}
	return img, reason, err
}

// fetchImage pulls an image with what the pod has.
func (m *Manager) fetchImage(ctx context.Context, pod *v1.Pod, ref string, tell func(kind, reason, msg string)) (img image.Image, reason string, err error) {
	asking, cancel := context.WithTimeout(ctx, authDeadline)
	auths, err := m.pullAuths(asking, pod, ref)
	cancel()
	if err != nil {
		return img, "ErrImagePull", err
	}
	tell(v1.EventTypeNormal, "Pulling", fmt.Sprintf("Pulling image %q", ref))
	began := time.Now()
	stop := m.tellPull(ctx, ref, tell)
	img, err = m.pullImage(ctx, ref, auths)
	stop()
	if err != nil {
		if errors.Is(err, image.ErrInvalidName) {
			return img, "InvalidImageName", err
		}
		return img, "ErrImagePull", err
	}
	took := time.Since(began).Round(time.Millisecond)
	tell(v1.EventTypeNormal, "Pulled", fmt.Sprintf("Successfully pulled image %q in %s (%s including waiting). Image size: %d bytes.", ref, took, took, img.Size))
	return img, "", nil
}

// startContainer makes the next instance.
func (w *worker) startContainer(c *podstate.Container, attempt uint32) {
	spec, kind, pod, sandbox, img := w.spec(c.Name), w.kind(c.Name), podstate.Granted(w.pod, w.obs.Allocated), w.obs.Sandbox, w.images[c.Name]
	before := c.StartErr
	backOff := time.Duration(0)
	if c.Now != nil && c.Now.StopCause != podstate.StopChanged && c.Now.StopCause != podstate.StopResized {
		backOff = c.BackOff
		if c.Now.FinishedAt.Sub(c.Now.StartedAt) >= podstate.ResetAfter {
			backOff = 0
		}
		backOff = podstate.NextBackOff(backOff)
	}
	target, err := w.targetOf(c.Name)
	if err != nil {
		c.StartErr = faulted(before, podstate.ReasonCreateContainer, err)
		if c.StartErr.News() {
			w.containerEvent(c.Name, v1.EventTypeWarning, "Failed", "Error: %v", err)
		}
		w.send(func() {}) // plan the next try
		return
	}
	services := w.m.cfg.Services
	if w.static {
		services = nil // it must run without the API
	}
	c.ImageReady = false
	id := podspec.NewID()
	w.starting[c.Name] = id
	verify := time.Since(w.verified[img.ID]) >= verifyAgain
	w.operate(c, podstate.OpStart, func(ctx context.Context) func() {
		in := podspec.Input{Pod: pod, Container: spec, Kind: kind, ID: id, Sandbox: sandbox, Attempt: attempt, Image: img, BackOff: backOff, Target: target, Services: services}
		st, reason, err := w.m.startInstance(ctx, w.ctx, in)
		if verify && (err != nil && reason != "CreateContainerConfigError" || st.StartError != "") {
			w.verifyImage(ctx, c.Name, img)
		}
		if err != nil {
			return func() {
				c.StartErr = faulted(before, reason, err)
				if c.StartErr.News() {
					w.containerEvent(c.Name, v1.EventTypeWarning, "Failed", "Error: %v", err)
				}
			}
		}
		if without := podspec.SELinuxLeftOut(pod, spec); without != "" && attempt == 0 {
			w.containerEvent(c.Name, v1.EventTypeWarning, "SELinuxLeftOut", "%s", without)
		}
		registered := make(chan *podstate.Instance, 1)
		w.send(func() { registered <- w.register(c, st, backOff, spec.Resources) })
		var hookErr error
		if st.StartError == "" && spec.Lifecycle != nil && spec.Lifecycle.PostStart != nil {
			hookErr = w.m.runHook(ctx, spec.Lifecycle.PostStart, w.target(spec, st.Container.ID, sandbox), 0)
		}
		var inst *podstate.Instance
		select {
		case inst = <-registered:
		case <-w.ctx.Done():
			return func() {}
		}
		return func() {
			if hookErr != nil {
				w.containerEvent(c.Name, v1.EventTypeWarning, "FailedPostStartHook", "PostStartHook failed: %v", hookErr)
				inst.Sick = "failed postStart hook"
			}
			if inst.Running {
				w.begun(c, inst)
			}
		}
	})
}

// begun: an instance runs, and its postStart hook has ended. What its probes are
// to find out is not so yet.
func (w *worker) begun(c *podstate.Container, inst *podstate.Instance) {
	spec := w.spec(c.Name)
	inst.Started = spec.StartupProbe == nil
	inst.Ready = spec.ReadinessProbe == nil
	if c.Now == inst {
		w.startProbes(c)
	}
}

// targetOf is the running instance whose processes an ephemeral container asks
// to see, "": it asks for none.
func (w *worker) targetOf(name string) (id string, err error) {
	i := slices.IndexFunc(w.pod.Spec.EphemeralContainers, func(e v1.EphemeralContainer) bool { return e.Name == name })
	if i < 0 || w.pod.Spec.EphemeralContainers[i].TargetContainerName == "" {
		return "", nil
	}
	target := w.pod.Spec.EphemeralContainers[i].TargetContainerName
	c := w.obs.Containers[target]
	if c == nil || !c.Running() {
		return "", fmt.Errorf("target container %q is not running: it is tried again until it is", target)
	}
	return c.Now.ID, nil
}

// verifyAgain is how long an image of a pod counts as verified: all its files are
// looked at.
const verifyAgain = 5 * time.Minute

// verifyImage looks whether a damaged image is why a container did not start;
// it is pulled again then before the next try.
func (w *worker) verifyImage(ctx context.Context, container string, img image.Image) {
	err := w.m.cfg.Images.Verify(ctx, img.ID)
	if err == nil {
		w.send(func() { w.verified[img.ID] = time.Now() })
	}
	if errors.Is(err, image.ErrDamaged) {
		w.send(func() {
			w.containerEvent(container, v1.EventTypeWarning, "ImageDamaged", "Image will be pulled again: %v", err)
		})
	}
}

// register makes a started container the newest instance; size is what it was
// made with.
func (w *worker) register(c *podstate.Container, st api.ContainerStatus, backOff time.Duration, size v1.ResourceRequirements) *podstate.Instance {
	inst := podstate.InstanceOf(st)
	inst.Applied = size
	inst.CreatedAt = time.Now()
	w.forget(c)
	c.Last, c.Now = c.Now, inst
	c.Restarts, c.BackOff, c.StartErr = int32(inst.Attempt), backOff, nil
	w.exits[inst.ID] = make(chan struct{})
	w.containerEvent(c.Name, v1.EventTypeNormal, "Created", "Container created")
	if st.StartError != "" {
		w.containerEvent(c.Name, v1.EventTypeWarning, "Failed", "Error: %s", st.StartError)
	} else {
		w.containerEvent(c.Name, v1.EventTypeNormal, "Started", "Container started")
	}
	if early, ok := w.early[inst.ID]; ok {
		delete(w.early, inst.ID)
		w.exit(c, inst, early)
	} else if !inst.Running {
		w.exit(c, inst, st)
	}
	return inst
}

// forget drops the record and log of the instance before the last: one dead
// instance is kept, for `logs --previous` and lastState.
func (w *worker) forget(c *podstate.Container) {
	old := c.Last
	if old == nil {
		return
	}
	delete(w.exits, old.ID)
	pod, name := w.pod, c.Name
	w.background(createDeadline, func(ctx context.Context) func() {
		if old.Recorded {
			if err := w.m.removeContainer(ctx, old.ID); err != nil {
				klog.FromContext(ctx).Error(err, "Dead container stays until the pod ends", "container", name)
			}
		}
		logs, _ := filepath.Glob(w.m.spec.LogPath(pod, name, old.Attempt) + "*") // rotated ones too
		for _, p := range append(logs, w.m.spec.MessagePath(pod, name, old.Attempt)) {
			_ = os.Remove(p) // the pod's end removes the directory anyway
		}
		return func() {}
	})
}

// startInstance mounts the root file system, builds the spec and starts. ctx
// ends when the start is given up, run when the agent stops: once podmon was
// asked, its answer is waited for. reason is the status's word for err.
func (m *Manager) startInstance(ctx, run context.Context, in podspec.Input) (st api.ContainerStatus, reason string, err error) {
	release, err := m.slot(ctx)
	if err != nil {
		return st, "RunContainerError", err
	}
	defer release()
	ctx, cancel := context.WithTimeout(ctx, createDeadline)
	defer cancel()
	if in.RootFS, err = m.mountRoot(ctx, in.Pod, in.Image, in.ID); err != nil {
		return st, podstate.ReasonCreateContainer, fmt.Errorf("mount image: %w", err)
	}
	unmount := func() {
		ctx, cancel := context.WithTimeout(run, apiDeadline)
		defer cancel()
		if uerr := m.cfg.Images.Unmount(ctx, in.ID); uerr != nil {
			klog.FromContext(run).Error(uerr, "Root file system of a container that was not made stays mounted", "id", in.ID)
		}
	}
	msg, err := m.spec.Container(ctx, in)
	if err != nil {
		unmount()
		return st, podspec.Reason(err), err
	}
	if err = m.inject(ctx, in.Pod, in.Container, &msg); err == nil {
		err = podspec.Startable(&msg) // devices have variables too
	}
	if err != nil {
		unmount()
		return st, podstate.ReasonCreateContainer, err
	}
	m.linkLog(ctx, in, msg.LogPath)
	if m.cfg.CPUs != nil {
		set, own := m.cpusOf(in.Pod, in.Container.Name)
		msg.Resources.CpusetCpus = set.String()
		if own {
			m.pin(ctx) // others go first
		}
	}
	if ctx.Err() != nil {
		unmount()
		return st, "RunContainerError", ctx.Err()
	}
	asked, cancel2 := context.WithTimeout(run, createDeadline)
	defer cancel2()
	st, err = m.cfg.Runtime.StartContainer(asked, msg)
	if err != nil && !refused(err) {
		st, err = m.outcome(run, in.ID, err)
	}
	if err != nil {
		if run.Err() == nil { // else the next agent finds what has become of it
			unmount()
		}
		if api.IsCode(err, api.CodeInvalid) {
			return st, podstate.ReasonCreateContainer, err
		}
		return st, "RunContainerError", err
	}
	st.Container = msg // the answer may leave it out
	if m.cfg.CPUs != nil {
		if set, _ := m.cpusOf(in.Pod, in.Container.Name); set.String() != msg.Resources.CpusetCpus {
			m.wantPin() // it changed while this one was started
		}
	}
	if st.StartError != "" {
		st.State = api.StateExited
	}
	return st, "", nil
}

// refused reports whether podmon itself says no: nothing was done.
func refused(err error) bool {
	var e *api.Error
	return errors.As(err, &e)
}

// outcome finds out what has become of a start whose answer did not come, and
// asks until podmon says it: a container that has run must not run again as if
// it had not. One that is still being started is waited for, longer than podmon
// lets a start take. cause is returned when there is none.
func (m *Manager) outcome(ctx context.Context, id string, cause error) (api.ContainerStatus, error) {
	var starting time.Time // since when it is known
	for again := 10 * time.Millisecond; ; again = min(2*again, 5*time.Second) {
		ask, cancel := context.WithTimeout(ctx, apiDeadline)
		_, containers, err := m.cfg.Runtime.List(ask)
		cancel()
		if err == nil {
			i := slices.IndexFunc(containers, func(c api.ContainerStatus) bool { return c.Container.ID == id })
			switch {
			case i < 0:
				return api.ContainerStatus{}, cause
			case containers[i].State != api.StateStarting:
				return containers[i], nil
			case starting.IsZero():
				starting = time.Now()
			case time.Since(starting) > createDeadline:
				return api.ContainerStatus{}, cause
			}
		}
		select {
		case <-time.After(again):
		case <-ctx.Done():
			return api.ContainerStatus{}, cause
		}
	}
}

// onContainer takes news of a container.
func (w *worker) onContainer(st api.ContainerStatus) {
	if st.State == api.StateStarting {
		return // the event of its start or end follows
	}
	id := st.Container.ID
	for _, c := range w.obs.Containers {
		if c.Now != nil && c.Now.ID == id {
			if c.Now.Running && st.State == api.StateExited {
				w.exit(c, c.Now, st)
			}
			return
		}
		if c.Last != nil && c.Last.ID == id {
			return
		}
	}
	c := w.obs.Containers[st.Container.Name]
	switch {
	case w.obs.TornDown || w.obs.TearingDown:
	case w.obs.Strays[id] != nil:
	case c != nil && c.Op == podstate.OpStart && w.starting[c.Name] == id:
		if st.State == api.StateExited {
			w.early[id] = st // its start has not answered yet
		}
	case c != nil && c.Op != podstate.OpStart && (c.Now == nil || c.Now.Attempt < st.Container.Attempt):
		// A start whose answer was lost.
		inst := w.register(c, st, c.BackOff, w.spec(c.Name).Resources)
		if inst.Running {
			w.begun(c, inst)
		}
	}
}

// exit takes the end of an instance.
func (w *worker) exit(c *podstate.Container, i *podstate.Instance, st api.ContainerStatus) {
	if len(st.Container.Labels) == 0 {
		st.Container.Labels = map[string]string{podstate.LabelMessage: w.m.spec.MessagePath(w.pod, c.Name, i.Attempt)}
	}
	if st.Container.LogPath == "" {
		st.Container.LogPath = w.m.spec.LogPath(w.pod, c.Name, i.Attempt)
	}
	i.Exited(st, lastWords(st, w.spec(c.Name)), time.Now())
	if ch := w.exits[i.ID]; ch != nil {
		close(ch)
		delete(w.exits, i.ID)
	}
	w.stopProbes(i.ID)
	if st.StartError != "" {
		return // reported as such
	}
	if kind, reason, message := exitWords(c.Name, i); reason != "" {
		w.containerEvent(c.Name, kind, reason, "%s", message)
	}
}

// exitWords is the event that tells of an instance's end; none for one that was
// asked for and obeyed, which the event Killing reported.
func exitWords(name string, i *podstate.Instance) (kind, reason, message string) {
	switch {
	case i.Reason == "OOMKilled":
		return v1.EventTypeWarning, "OOMKilling", fmt.Sprintf("Container %s was killed: it used more memory than its limit", name)
	case i.StopCause != podstate.StopNone && i.Signal == podspec.SigKill:
		return v1.EventTypeWarning, "Killed", fmt.Sprintf("Container %s was killed: it had not ended within its grace period", name)
	case i.StopCause != podstate.StopNone:
		return "", "", ""
	case i.Reason == "ContainerStatusUnknown":
		return v1.EventTypeWarning, "Exited", fmt.Sprintf("Container %s has ended, and its exit code is not known", name)
	case i.Signal != 0:
		return v1.EventTypeWarning, "Exited", fmt.Sprintf("Container %s was ended by signal %d (%s)", name, i.Signal, unix.SignalName(unix.Signal(i.Signal)))
	case i.ExitCode != 0:
		return v1.EventTypeWarning, "Exited", fmt.Sprintf("Container %s exited with code %d", name, i.ExitCode)
	}
	return v1.EventTypeNormal, "Exited", fmt.Sprintf("Container %s exited with code 0", name)
}

// lost takes the disappearance of a container from podmon's list.
func (w *worker) lost(listed map[string]bool, asOf time.Time) {
	for _, c := range w.obs.Containers {
		i := c.Now
		if i == nil || !i.Running || !i.Recorded || listed[i.ID] || i.CreatedAt.After(asOf) {
			continue
		}
		w.exit(c, i, api.ContainerStatus{ExitCode: 137, Lost: true})
		i.Recorded = false
	}
}

// stopContainer ends an instance: preStop hook, stop signal, grace, kill.
func (w *worker) stopContainer(c *podstate.Container, s podstate.Stop) {
	i, spec, pod := c.Now, w.spec(c.Name), w.pod
	if i == nil || i.ID != s.ID || !i.Running {
		return
	}
	if i.StopCause == podstate.StopNone {
		w.containerEvent(c.Name, v1.EventTypeNormal, "Killing", "%s", s.Message)
	}
	i.StopCause = s.Cause
	exited := w.exits[i.ID]
	var preStop *v1.LifecycleHandler
	if spec != nil && spec.Lifecycle != nil && !i.PreStopDone {
		preStop = spec.Lifecycle.PreStop
	}
	signal := podspec.StopSignal(spec, w.imageSignal(c))
	target := w.target(spec, i.ID, w.obs.Sandbox)
	if p := w.probes[i.ID]; p != nil {
		p.stopLiveness()
	}
	deadline := s.At.Add(s.Grace)
	if s.Cause == podstate.StopPod && w.obs.EndSince.IsZero() {
		w.obs.EndSince = s.At
	}
	since := s.At // the next plan reckons from the same moments, else the stop it wants is another one
	if c.Op == podstate.OpStop {
		since = c.OpSince
	}
	w.operate(c, podstate.OpStop, func(ctx context.Context) func() {
		stage := func(doing string, until time.Time) {
			now := time.Now()
			w.send(func() {
				if ctx.Err() == nil { // else another stop has taken its place
					c.Stop = podstate.StopStage{Doing: doing, Since: now, Until: until}
				}
			})
		}
		if preStop != nil {
			err := w.m.runHook(ctx, preStop, target, s.Grace)
			if ctx.Err() != nil { // another stop has taken this one's place: it runs the hook
				return func() {}
			}
			w.send(func() {
				i.PreStopDone = true
				if err != nil {
					w.containerEvent(c.Name, v1.EventTypeWarning, "FailedPreStopHook", "PreStopHook failed: %v", err)
				}
			})
		}
		grace := max(time.Until(deadline), podstate.MinGrace)
		stage(stopEnds, time.Now().Add(grace))
		err := w.m.endInstance(ctx, i.ID, signal, grace, exited, func() { stage(stopKilled, time.Time{}) })
		return func() {
			if err != nil && i.Running {
				w.event(v1.EventTypeWarning, "FailedKillPod", "error killing container %s of pod %s: %v", c.Name, klog.KObj(pod), err)
			}
		}
	})
	c.OpSince, c.StopGrace = since, s.Grace
	if preStop != nil {
		c.Stop = podstate.StopStage{Doing: stopPreStop, Since: s.At, Until: deadline}
	}
}

// What a stop waits for, for the status.
const (
	stopPreStop = "running its preStop hook"
	stopEnds    = "waiting for it to end after its stop signal"
	stopKilled  = "killed, but the kernel has not yet let go of its processes"
)

// killTimeout is how long a killed process may take to be gone before it is
// killed again.
const killTimeout = 10 * time.Second

// endInstance signals and waits. It returns when the instance has exited, or
// ctx has ended, or podmon refuses; killed is called when the grace is over.
func (m *Manager) endInstance(ctx context.Context, id string, signal int, grace time.Duration, exited <-chan struct{}, killed func()) error {
	send := func(sig int, all bool) error {
		ctx, cancel := context.WithTimeout(ctx, apiDeadline)
		defer cancel()
		err := m.cfg.Runtime.Signal(ctx, api.Signal{ID: id, Signal: sig, All: all})
		if isNotFound(err) || api.IsCode(err, api.CodeNotRunning) {
			return nil
		}
		return err
	}
	if err := send(signal, false); err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Info("Stop signal was not delivered", "id", id, "err", err)
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	for {
		select {
		case <-exited:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
		}
		if err := send(podspec.SigKill, true); err != nil {
			return err
		}
		killed()
		timer.Reset(killTimeout)
	}
}
