package podstate

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

// ErrImagePullShown is how long ErrImagePull is shown before the status turns
// to ImagePullBackOff.
const ErrImagePullShown = 2 * time.Second

// ReasonKillPod is the reason of an event about a pod that has ended and does not leave the node.
const ReasonKillPod = "FailedKillPod"

// reasonStopping is the reason of an event about a pod whose end takes long, with what it waits for.
const reasonStopping = "Stopping"

// SlowAfter is how long an operation may take before the status names it.
const SlowAfter = time.Second

// maxMessages bounds what all containers of a pod together say of their ends, in
// bytes.
const maxMessages = 12 << 10

// BuildStatus says in the API's words what is observed. It is pure. The
// result continues old (the status last known to the API): conditions of
// others are kept, and transition times move only when a condition does.
func BuildStatus(d Desired, o Observed, old *v1.PodStatus, nodeIPs []netip.Addr, now time.Time) *v1.PodStatus {
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
		// Others say which claims the pod has.
		ResourceClaimStatuses: old.ResourceClaimStatuses, ExtendedResourceClaimStatus: old.ExtendedResourceClaimStatus,
		NodeAllocatableResourceClaimStatuses: old.NodeAllocatableResourceClaimStatuses,
	}
	if !o.StartedAt.IsZero() {
		st.StartTime = ptr.To(metav1.NewTime(o.StartedAt))
	}
	for i, ip := range nodeIPs {
		if i == 0 {
			st.HostIP = ip.String()
		}
		st.HostIPs = append(st.HostIPs, v1.HostIP{IP: ip.String()})
	}
	ips := o.Sandbox.IPs
	if pod.Spec.HostNetwork && len(ips) == 0 && o.Sandbox.State == SandboxReady {
		ips = nodeIPs
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
		st.InitContainerStatuses = append(st.InitContainerStatuses, b.container(c, InitKind(c), "PodInitializing"))
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
	if core.FinalPhase(st.Phase) {
		b.neverRan(st, initDone)
	}
	if o.Verdict != nil {
		st.Reason, st.Message = o.Verdict.Reason, o.Verdict.Message
	} else if f := o.TeardownErr; f != nil {
		st.Reason, st.Message = f.Reason, f.Message
	} else if old.Phase == st.Phase && core.FinalPhase(old.Phase) && old.Reason != ReasonKillPod && old.Reason != reasonStopping {
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
	for _, spec := range AllContainers(&b.d.Pod.Spec) {
		c := b.o.Containers[spec.Name]
		if c.Op != OpStop || c.Stop.Doing == "" || b.now.Sub(c.OpSince) < SlowAfter {
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
	if b.o.Devices.Releasing {
		if part := b.slowSince("Having its devices taken back by their drivers", b.o.Devices.Since); part != "" {
			parts = append(parts, part)
		}
	}
	if b.o.Sandbox.State == SandboxRemoving {
		if part := b.slowSince("Removing the sandbox that has ended", b.o.Sandbox.Since); part != "" {
			parts = append(parts, part)
		}
	}
	if len(parts) == 0 || core.FinalPhase(st.Phase) && st.Reason+st.Message != "" {
		return
	}
	if st.Message != "" {
		parts = append([]string{st.Message}, parts...)
	}
	st.Message = strings.Join(parts, "; ")
	if st.Reason == "" && Ending(b.d, b.o) {
		st.Reason = reasonStopping
	}
}

// clock is a time of day as messages tell it.
func clock(t time.Time) string { return t.UTC().Format(time.TimeOnly) + " UTC" }

// neverRan puts the statuses of an ended pod's containers right that never
// ran: a pod of which none did has no container statuses at all. Of another one such
// a container counts as ended if those before it are done, as kubelet has it: after
// an init container that failed, the rest goes on waiting.
func (b *builder) neverRan(st *v1.PodStatus, initDone bool) {
	made := false
	for _, c := range b.o.Containers {
		made = made || c.Now != nil
	}
	if !made {
		st.InitContainerStatuses, st.ContainerStatuses, st.EphemeralContainerStatuses = nil, nil, nil
		return
	}
	ended := func(list []v1.ContainerStatus) {
		for i := range list {
			if list[i].State.Waiting != nil {
				list[i].State = v1.ContainerState{Terminated: &v1.ContainerStateTerminated{
					ExitCode: 137, Reason: "ContainerStatusUnknown", Message: "The container was never started: the pod ended before.",
				}}
			}
		}
	}
	if initDone {
		ended(st.InitContainerStatuses)
		ended(st.ContainerStatuses)
		return
	}
	last := 0 // after the last one that ran
	for i, s := range st.InitContainerStatuses {
		if s.State.Waiting == nil {
			last = i + 1
		}
	}
	ended(st.InitContainerStatuses[:last])
}

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
		if InitKind(spec) == KindSidecar {
			if !over && !(c.Running() && c.Now.Started) {
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
	for _, f := range []*Fault{b.o.Devices.Err, b.o.Sandbox.Err, b.o.Volumes.Err} {
		if f != nil {
			return f.Reason, f.Message
		}
	}
	return "", ""
}

// phase follows from the containers; a terminal phase is final, and is reported
// only when nothing runs any more and no device is held, unless another writer was
// first.
func (b *builder) phase(initDone bool) v1.PodPhase {
	if b.o.EndedAs != "" {
		return b.o.EndedAs
	}
	running, failed, waiting := 0, 0, 0
	alive := b.o.Alive()
	spec := &b.d.Pod.Spec
	over := Ending(b.d, b.o) && !alive
	if b.o.Verdict != nil && !alive {
		return v1.PodFailed
	}
	if core.FinalPhase(b.old.Phase) && !alive {
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

// SameStatus compares what a reader would see: times by the second, as the
// API stores them.
func SameStatus(a, b *v1.PodStatus) bool {
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
