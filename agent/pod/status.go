package pod

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/core"
)

// ContainerIDPrefix opens a container's ID in the API.
const ContainerIDPrefix = "clusterd://"

// errImagePullShown is how long ErrImagePull is shown before the status turns
// to ImagePullBackOff.
const errImagePullShown = 2 * time.Second

// reasonKillPod is told of a pod that has ended and does not leave the node.
const reasonKillPod = "FailedKillPod"

// reasonStopping is told of a pod whose end takes long, with what it waits for.
const reasonStopping = "Stopping"

// slowAfter is how long an operation may take before the status names it.
const slowAfter = time.Second

// BuildStatus says in the API's words what is observed. It is pure. The
// result continues old (the status last known to the API): conditions of
// others are kept, and transition times move only when a condition does.
func BuildStatus(d Desired, o Observed, old *v1.PodStatus, nodeIP netip.Addr, now time.Time) *v1.PodStatus {
	pod := d.Pod
	if o.Final {
		// Nothing was run by this agent: the API knows better than we do.
		st := old.DeepCopy()
		if st.QOSClass == "" {
			st.QOSClass = core.QOSClass(pod)
		}
		return st
	}
	b := builder{d: d, o: o, old: old, now: now}
	st := &v1.PodStatus{
		ObservedGeneration: pod.Generation,
		NominatedNodeName:  old.NominatedNodeName,
		QOSClass:           core.QOSClass(pod),
		Resize:             old.Resize,
	}
	if !o.StartedAt.IsZero() {
		st.StartTime = ptr.To(metav1.NewTime(o.StartedAt))
	}
	if nodeIP.IsValid() {
		st.HostIP = nodeIP.String()
		st.HostIPs = []v1.HostIP{{IP: nodeIP.String()}}
	}
	ips := o.Sandbox.IPs
	if pod.Spec.HostNetwork && len(ips) == 0 && nodeIP.IsValid() && o.Sandbox.State == SandboxReady {
		ips = []netip.Addr{nodeIP}
	}
	for _, ip := range ips {
		st.PodIPs = append(st.PodIPs, v1.PodIP{IP: ip.String()})
	}
	if len(ips) == 0 {
		st.PodIPs = old.PodIPs // a pod torn down still tells the address it had
	}
	if len(st.PodIPs) > 0 {
		st.PodIP = st.PodIPs[0].IP
	}

	initDone := b.initialized()
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		st.InitContainerStatuses = append(st.InitContainerStatuses, b.container(c, initKind(c), "PodInitializing"))
	}
	waiting := "ContainerCreating"
	if len(pod.Spec.InitContainers) > 0 && !initDone {
		waiting = "PodInitializing"
	}
	for i := range pod.Spec.Containers {
		st.ContainerStatuses = append(st.ContainerStatuses, b.container(&pod.Spec.Containers[i], KindApp, waiting))
	}
	for i := range pod.Spec.EphemeralContainers {
		c := v1.Container(pod.Spec.EphemeralContainers[i].EphemeralContainerCommon)
		st.EphemeralContainerStatuses = append(st.EphemeralContainerStatuses, b.container(&c, KindEphemeral, "ContainerCreating"))
	}

	shareMessages(st)

	st.Phase = b.phase(initDone)
	if terminal(st.Phase) {
		b.neverRan(st)
	}
	if o.Verdict != nil {
		st.Reason, st.Message = o.Verdict.Reason, o.Verdict.Message
	} else if f := o.TeardownErr; f != nil {
		st.Reason, st.Message = f.Reason, f.Message
	} else if old.Phase == st.Phase && terminal(old.Phase) && old.Reason != reasonKillPod && old.Reason != reasonStopping {
		st.Reason, st.Message = old.Reason, old.Message
	} else if st.Phase == v1.PodPending {
		st.Reason, st.Message = b.pendingReason()
	}
	b.slowEnd(st)
	b.conditions(st, initDone)
	return st
}

// shareMessages gives each container an equal part of what a pod may say of its
// ends, as the API's documentation of terminationMessagePath promises.
func shareMessages(st *v1.PodStatus) {
	lists := [][]v1.ContainerStatus{st.InitContainerStatuses, st.ContainerStatuses, st.EphemeralContainerStatuses}
	containers := 0
	for _, list := range lists {
		containers += len(list)
	}
	part := maxMessages / max(containers, 1)
	for _, list := range lists {
		for i := range list {
			for _, t := range []*v1.ContainerStateTerminated{list[i].State.Terminated, list[i].LastTerminationState.Terminated} {
				if t != nil && len(t.Message) > part {
					t.Message = strings.ToValidUTF8(t.Message[:part], "")
				}
			}
		}
	}
}

// slowEnd names what the end of the pod, or of one of its containers, waits for
// once that has taken long. An ended pod's own reason stays.
func (b *builder) slowEnd(st *v1.PodStatus) {
	var parts []string
	for _, spec := range allContainers(&b.d.Pod.Spec) {
		c := b.o.Containers[spec.Name]
		if c.Op != OpStop || c.Stop.Doing == "" || b.now.Sub(c.OpSince) < slowAfter {
			continue
		}
		part := fmt.Sprintf("Stopping container %s: %s since %s", spec.Name, c.Stop.Doing, clock(c.Stop.Since))
		if !c.Stop.Until.IsZero() {
			part += ", at most until " + clock(c.Stop.Until)
		}
		parts = append(parts, part)
	}
	if b.o.TearingDown && b.o.TeardownErr == nil {
		if part := b.slowSince(b.o.TeardownPart, b.o.TeardownSince); part != "" {
			parts = append(parts, part)
		}
	}
	if b.o.Sandbox.State == SandboxRemoving {
		if part := b.slowSince("Removing the sandbox that has ended", b.o.Sandbox.Since); part != "" {
			parts = append(parts, part)
		}
	}
	if len(parts) == 0 || terminal(st.Phase) && st.Reason+st.Message != "" {
		return
	}
	if st.Message != "" {
		parts = append([]string{st.Message}, parts...)
	}
	st.Message = strings.Join(parts, "; ")
	if st.Reason == "" && ending(b.d, b.o) {
		st.Reason = reasonStopping
	}
}

// clock is a time of day as messages tell it.
func clock(t time.Time) string { return t.UTC().Format(time.TimeOnly) + " UTC" }

// neverRan puts the statuses of an ended pod's containers right that never
// ran: a pod of which none did has no container statuses at all, else such a
// container counts as ended.
func (b *builder) neverRan(st *v1.PodStatus) {
	made := false
	for _, c := range b.o.Containers {
		made = made || c.Now != nil
	}
	if !made {
		st.InitContainerStatuses, st.ContainerStatuses, st.EphemeralContainerStatuses = nil, nil, nil
		return
	}
	for _, list := range [][]v1.ContainerStatus{st.InitContainerStatuses, st.ContainerStatuses} {
		for i := range list {
			if list[i].State.Waiting != nil {
				list[i].State = v1.ContainerState{Terminated: &v1.ContainerStateTerminated{
					ExitCode: 137, Reason: "ContainerStatusUnknown", Message: "The container was never started: the pod ended before.",
				}}
			}
		}
	}
}

func terminal(p v1.PodPhase) bool { return p == v1.PodSucceeded || p == v1.PodFailed }

type builder struct {
	d   Desired
	o   Observed
	old *v1.PodStatus
	now time.Time
}

func (b *builder) initialized() bool {
	p := planner{d: b.d, o: b.o, now: b.now, spec: &b.d.Pod.Spec}
	over := p.appsBegun()
	for i := range p.spec.InitContainers {
		spec := &p.spec.InitContainers[i]
		c := b.o.Containers[spec.Name]
		if initKind(spec) == KindSidecar {
			if !over && !(c.running() && c.Now.Started) {
				return false
			}
		} else if !over && !p.initDone(c) {
			return false
		}
	}
	return true
}

// pendingReason names what the pod as a whole waits for, when it has waited.
func (b *builder) pendingReason() (reason, message string) {
	for _, f := range []*Fault{b.o.Sandbox.Err, b.o.Volumes.Err} {
		if f != nil {
			return f.Reason, f.Message
		}
	}
	return "", ""
}

// phase follows from the containers; a terminal phase is final, and is told
// only when nothing runs any more.
func (b *builder) phase(initDone bool) v1.PodPhase {
	running, failed, waiting := 0, 0, 0
	alive := false
	spec := &b.d.Pod.Spec
	for _, c := range b.o.Containers {
		alive = alive || c.running()
	}
	over := ending(b.d, b.o) && !alive
	if b.o.Verdict != nil && !alive {
		return v1.PodFailed
	}
	if terminal(b.old.Phase) && !alive {
		return b.old.Phase
	}
	if initFailed(b.d, b.o) && !alive {
		return v1.PodFailed
	}
	if !initDone && !over {
		return v1.PodPending
	}
	for i := range spec.Containers {
		c := b.o.Containers[spec.Containers[i].Name]
		switch {
		case c.Now == nil, hooking(&spec.Containers[i], c) && c.Last == nil:
			waiting++
		case c.Now.Running:
			running++
		case c.Now.ExitCode != 0:
			failed++
		}
	}
	switch {
	case over && waiting == len(spec.Containers) && b.old.Phase != v1.PodRunning && b.o.Verdict == nil:
		// Deleted before anything ran: neither success nor failure.
		return v1.PodPending
	case over && failed == 0 && waiting == 0:
		return v1.PodSucceeded
	case over:
		return v1.PodFailed
	case waiting > 0:
		return v1.PodPending
	}
	return v1.PodRunning
}

// container builds one container's status.
func (b *builder) container(spec *v1.Container, kind Kind, idle string) v1.ContainerStatus {
	c := b.o.Containers[spec.Name]
	size := b.o.Allocated.of(spec)
	st := v1.ContainerStatus{
		Name: spec.Name, Image: spec.Image, RestartCount: c.Restarts, Started: ptr.To(false),
		AllocatedResources: size.Requests,
	}
	if _, sized := b.o.Allocated[spec.Name]; sized && c.running() {
		size = c.Now.Applied
	}
	if len(size.Requests)+len(size.Limits) > 0 {
		st.Resources = &v1.ResourceRequirements{Requests: size.Requests, Limits: size.Limits}
	}
	st.VolumeMounts = b.volumeMounts(spec)
	if spec.Lifecycle != nil {
		st.StopSignal = spec.Lifecycle.StopSignal
	}
	if c.Now != nil {
		st.ImageID, st.User = c.Now.ImageID, c.Now.User
		if c.Now.StopSignal != "" {
			st.StopSignal = ptr.To(v1.Signal(c.Now.StopSignal))
		}
		if c.Now.ID != "" {
			st.ContainerID = ContainerIDPrefix + c.Now.ID
		}
	}
	if c.Last != nil {
		st.LastTerminationState = v1.ContainerState{Terminated: terminatedState(c.Last)}
	}
	switch w := b.waiting(spec, kind, c, idle); {
	case kind != KindInit && hooking(spec, c):
		// Not told as running until postStart has ended.
		st.State.Waiting = &v1.ContainerStateWaiting{Reason: idle, Message: b.slow(spec, c)}
	case c.running():
		st.State.Running = &v1.ContainerStateRunning{StartedAt: metav1.NewTime(c.Now.StartedAt)}
		st.Started = ptr.To(c.Now.Started)
		st.Ready = c.Now.Started && c.Now.Ready && kind != KindInit
	case w != nil:
		st.State.Waiting = w
		if c.Now != nil {
			st.LastTerminationState = v1.ContainerState{Terminated: terminatedState(c.Now)}
		}
	case c.Now != nil:
		st.State.Terminated = terminatedState(c.Now)
		st.Ready = kind == KindInit && c.Now.ExitCode == 0
	default:
		st.State.Waiting = &v1.ContainerStateWaiting{Reason: idle, Message: b.slow(spec, c)}
	}
	return st
}

// hooking reports whether the container's process runs and its postStart has not
// ended yet.
func hooking(spec *v1.Container, c *Container) bool {
	return c.running() && !c.Now.Started && c.Op == OpStart && spec.Lifecycle != nil && spec.Lifecycle.PostStart != nil
}

// slow names an operation that takes long.
func (b *builder) slow(spec *v1.Container, c *Container) string {
	switch {
	case c.running() && c.Op == OpStart: // started, and now its hook
		return b.slowSince("Running the postStart hook", c.OpSince)
	case c.Op == OpPull:
		return b.slowSince(fmt.Sprintf("Pulling image %q", spec.Image), c.OpSince)
	case c.Op == OpStart:
		return b.slowSince("Starting", c.OpSince)
	case b.pulling(spec) != "":
		return b.pulling(spec)
	case b.o.Sandbox.State == SandboxCreating:
		return b.slowSince("Making the pod's sandbox", b.o.Sandbox.Since)
	case b.o.Volumes.Busy && !b.o.Volumes.Ready:
		return b.slowSince("Setting up volumes", b.o.Volumes.Since)
	}
	return ""
}

// pulling names an image volume of the container whose pull takes long.
func (b *builder) pulling(spec *v1.Container) string {
	for _, m := range spec.VolumeMounts {
		if v := b.o.ImageVolumes[m.Name]; v != nil && v.Busy {
			ref := imageSource(&b.d.Pod.Spec, m.Name).Reference
			if s := b.slowSince(fmt.Sprintf("Pulling image %q for volume %q", ref, m.Name), v.Since); s != "" {
				return s
			}
		}
	}
	return ""
}

// slowSince names what is under way once it has taken long.
func (b *builder) slowSince(what string, since time.Time) string {
	if b.now.Sub(since) < slowAfter {
		return ""
	}
	return what + " since " + clock(since)
}

// waiting says why the container is not running but will be; nil: it will not.
func (b *builder) waiting(spec *v1.Container, kind Kind, c *Container, idle string) *v1.ContainerStateWaiting {
	if c.running() || ending(b.d, b.o) && c.Now != nil {
		return nil
	}
	if f := c.ImageErr; f != nil && c.ImageRef == spec.Image {
		return b.imageFault(f, spec.Image)
	}
	if s := b.imageVolume(spec); s != nil && c.Op == OpNone {
		return s
	}
	if f := c.StartErr; f != nil {
		return &v1.ContainerStateWaiting{Reason: f.Reason, Message: f.Message}
	}
	if c.Now == nil {
		if f := b.podFault(); f != nil {
			return &v1.ContainerStateWaiting{Reason: idle, Message: f.Message}
		}
		return nil
	}
	if !willRestart(&b.d.Pod.Spec, spec, kind, c) {
		return nil
	}
	if c.Op == OpNone && b.now.Before(restartAt(c)) {
		return &v1.ContainerStateWaiting{Reason: "CrashLoopBackOff",
			Message: fmt.Sprintf("back-off %s restarting failed container=%s pod=%s_%s(%s)",
				shortDuration(c.BackOff), spec.Name, b.d.Pod.Name, b.d.Pod.Namespace, b.d.Pod.UID)}
	}
	return nil
}

// imageFault says why an image is not there.
func (b *builder) imageFault(f *Fault, ref string) *v1.ContainerStateWaiting {
	if f.Reason == "ErrImagePull" && b.now.Sub(f.At) >= errImagePullShown {
		return &v1.ContainerStateWaiting{Reason: "ImagePullBackOff",
			Message: fmt.Sprintf("Back-off pulling image %q: ErrImagePull: %s", ref, f.Message)}
	}
	return &v1.ContainerStateWaiting{Reason: f.Reason, Message: f.Message}
}

// imageVolume says which image volume keeps the container from starting; nil:
// none does, as far as is known.
func (b *builder) imageVolume(spec *v1.Container) *v1.ContainerStateWaiting {
	for _, m := range spec.VolumeMounts {
		if v := b.o.ImageVolumes[m.Name]; v != nil && v.Err != nil {
			return b.imageFault(v.Err, imageSource(&b.d.Pod.Spec, m.Name).Reference)
		}
	}
	return nil
}

// volumeMounts tells how volumes are mounted (KEP-3857), and of which images
// (KEP-5365).
func (b *builder) volumeMounts(spec *v1.Container) []v1.VolumeMountStatus {
	var out []v1.VolumeMountStatus
	for _, m := range spec.VolumeMounts {
		st := v1.VolumeMountStatus{Name: m.Name, MountPath: m.MountPath, ReadOnly: m.ReadOnly}
		if m.ReadOnly {
			st.RecursiveReadOnly = ptr.To(v1.RecursiveReadOnlyDisabled)
			if recursiveReadOnly(&m) {
				st.RecursiveReadOnly = ptr.To(v1.RecursiveReadOnlyEnabled)
			}
		}
		if ref := b.imageRef(m.Name); ref != "" {
			st.VolumeStatus = &v1.VolumeStatus{Image: &v1.ImageVolumeStatus{ImageRef: ref}}
		}
		out = append(out, st)
	}
	return out
}

// imageRef is the digest of the image that a volume was made of; an agent that
// has not looked yet repeats what was told before.
func (b *builder) imageRef(volume string) string {
	v := b.o.ImageVolumes[volume]
	if v == nil {
		return ""
	}
	if v.Ready {
		return v.ImageID
	}
	for _, list := range [][]v1.ContainerStatus{b.old.InitContainerStatuses, b.old.ContainerStatuses, b.old.EphemeralContainerStatuses} {
		for _, c := range list {
			for _, m := range c.VolumeMounts {
				if m.Name == volume && m.VolumeStatus != nil && m.VolumeStatus.Image != nil {
					return m.VolumeStatus.Image.ImageRef
				}
			}
		}
	}
	return ""
}

func (b *builder) podFault() *Fault {
	if b.o.Sandbox.Err != nil {
		return b.o.Sandbox.Err
	}
	return b.o.Volumes.Err
}

func shortDuration(d time.Duration) string {
	s := d.String()
	s = strings.TrimSuffix(s, "0s")
	if strings.HasSuffix(s, "m") || strings.HasSuffix(s, "h") {
		return s + "0s"
	}
	return d.String()
}

func terminatedState(i *Instance) *v1.ContainerStateTerminated {
	t := &v1.ContainerStateTerminated{
		ExitCode: i.ExitCode, Signal: 0, Reason: i.Reason, Message: i.Message,
		StartedAt: metav1.NewTime(i.StartedAt), FinishedAt: metav1.NewTime(i.FinishedAt),
	}
	if i.ID != "" {
		t.ContainerID = ContainerIDPrefix + i.ID
	}
	return t
}

// conditions sets the node's conditions and keeps all others.
func (b *builder) conditions(st *v1.PodStatus, initDone bool) {
	pod := b.d.Pod
	done := terminal(st.Phase)
	doneReason := map[v1.PodPhase]string{v1.PodSucceeded: "PodCompleted", v1.PodFailed: "PodFailed"}[st.Phase]

	set := func(t v1.PodConditionType, ok bool, reason, message string) {
		c := v1.PodCondition{Type: t, Status: v1.ConditionTrue, ObservedGeneration: pod.Generation}
		if !ok {
			c.Status, c.Reason, c.Message = v1.ConditionFalse, reason, message
		}
		if done && ok && t == v1.PodInitialized && doneReason == "PodCompleted" {
			c.Reason = doneReason
		}
		st.Conditions = append(st.Conditions, carry(c, b.old.Conditions, b.now))
	}

	set(v1.PodReadyToStartContainers, b.o.Sandbox.State == SandboxReady && b.o.Volumes.Ready, "", "")

	var missing []string
	for _, c := range st.InitContainerStatuses {
		if c.Ready || c.Started != nil && *c.Started {
			continue
		}
		missing = append(missing, c.Name)
	}
	if done && st.Phase == v1.PodSucceeded {
		initDone = true
	}
	set(v1.PodInitialized, initDone, "ContainersNotInitialized", fmt.Sprintf("containers with incomplete status: %v", missing))

	ready, reason, message := true, "", ""
	var unready []string
	for i := range st.ContainerStatuses {
		if !st.ContainerStatuses[i].Ready {
			unready = append(unready, st.ContainerStatuses[i].Name)
		}
	}
	for i := range st.InitContainerStatuses {
		if initKind(&pod.Spec.InitContainers[i]) == KindSidecar && !st.InitContainerStatuses[i].Ready {
			unready = append(unready, st.InitContainerStatuses[i].Name)
		}
	}
	switch {
	case done:
		ready, reason = false, doneReason
	case len(unready) > 0:
		ready, reason, message = false, "ContainersNotReady", fmt.Sprintf("containers with unready status: %v", unready)
	}
	set(v1.ContainersReady, ready, reason, message)

	if ready {
		var gates []string
		for _, g := range pod.Spec.ReadinessGates {
			if i := conditionIndex(b.old.Conditions, g.ConditionType); i < 0 {
				gates = append(gates, fmt.Sprintf("corresponding condition of pod readiness gate %q does not exist.", g.ConditionType))
			} else if b.old.Conditions[i].Status != v1.ConditionTrue {
				gates = append(gates, fmt.Sprintf("the status of pod readiness gate %q is not \"True\", but %s", g.ConditionType, b.old.Conditions[i].Status))
			}
		}
		if len(gates) > 0 {
			ready, reason, message = false, "ReadinessGatesNotReady", strings.Join(gates, ", ")
		}
	}
	set(v1.PodReady, ready, reason, message)
	set(v1.PodScheduled, true, "", "")
	if b.o.Disrupted {
		c := v1.PodCondition{Type: v1.DisruptionTarget, Status: v1.ConditionTrue, Reason: v1.PodReasonTerminationByKubelet,
			Message: b.o.Verdict.Message, ObservedGeneration: pod.Generation}
		st.Conditions = append(st.Conditions, carry(c, b.old.Conditions, b.now))
	}
	b.resizeConditions(st)

	for _, c := range b.old.Conditions {
		if !isTransient(c.Type) && conditionIndex(st.Conditions, c.Type) < 0 {
			st.Conditions = append(st.Conditions, c)
		}
	}
}

// resizeConditions tells of a resize that waits or is under way.
func (b *builder) resizeConditions(st *v1.PodStatus) {
	if terminal(st.Phase) {
		return
	}
	set := func(t v1.PodConditionType, reason, message string) {
		c := v1.PodCondition{Type: t, Status: v1.ConditionTrue, Reason: reason, Message: message, ObservedGeneration: b.d.Pod.Generation}
		st.Conditions = append(st.Conditions, carry(c, b.old.Conditions, b.now))
	}
	spec := &b.d.Pod.Spec
	if f := b.o.ResizePending; f != nil && b.o.wanted(spec) {
		set(v1.PodResizePending, f.Reason, f.Message)
	}
	if len(b.o.unapplied(spec)) > 0 || b.o.podUnapplied(b.d.Pod) {
		if f := b.o.ResizeErr; f != nil {
			set(v1.PodResizeInProgress, f.Reason, f.Message)
		} else {
			set(v1.PodResizeInProgress, "", "")
		}
	}
}

// owned are the condition types that the agent alone writes.
var owned = []v1.PodConditionType{v1.PodReadyToStartContainers, v1.PodInitialized, v1.ContainersReady, v1.PodReady, v1.PodScheduled,
	v1.PodResizePending, v1.PodResizeInProgress}

// isTransient tells of a condition type of the agent's that is there only
// while it is true.
func isTransient(t v1.PodConditionType) bool {
	return t == v1.PodResizePending || t == v1.PodResizeInProgress
}

// carry keeps the old transition time when the condition has not moved.
func carry(c v1.PodCondition, old []v1.PodCondition, now time.Time) v1.PodCondition {
	c.LastTransitionTime = metav1.NewTime(now)
	if i := conditionIndex(old, c.Type); i >= 0 && old[i].Status == c.Status {
		c.LastTransitionTime = old[i].LastTransitionTime
		c.LastProbeTime = old[i].LastProbeTime
	}
	return c
}

func conditionIndex(cs []v1.PodCondition, t v1.PodConditionType) int {
	return slices.IndexFunc(cs, func(c v1.PodCondition) bool { return c.Type == t })
}

// sameStatus compares what a reader would see: times by the second, as the
// API stores them.
func sameStatus(a, b *v1.PodStatus) bool {
	return equality.Semantic.DeepEqual(normalize(a), normalize(b))
}

// normalize rounds times to the API's second.
func normalize(s *v1.PodStatus) *v1.PodStatus {
	s = s.DeepCopy()
	trunc := func(t *metav1.Time) { *t = metav1.Time{Time: t.Truncate(time.Second).UTC()} }
	if s.StartTime != nil {
		trunc(s.StartTime)
	}
	for i := range s.Conditions {
		trunc(&s.Conditions[i].LastTransitionTime)
		trunc(&s.Conditions[i].LastProbeTime)
	}
	slices.SortFunc(s.Conditions, func(a, b v1.PodCondition) int { return strings.Compare(string(a.Type), string(b.Type)) })
	for _, list := range [][]v1.ContainerStatus{s.InitContainerStatuses, s.ContainerStatuses, s.EphemeralContainerStatuses} {
		for i := range list {
			for _, st := range []*v1.ContainerState{&list[i].State, &list[i].LastTerminationState} {
				if st.Running != nil {
					trunc(&st.Running.StartedAt)
				}
				if st.Terminated != nil {
					trunc(&st.Terminated.StartedAt)
					trunc(&st.Terminated.FinishedAt)
				}
			}
		}
	}
	return s
}
