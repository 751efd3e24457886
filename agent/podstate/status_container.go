package podstate

import (
	"fmt"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// container builds one container's status.
func (b *builder) container(spec *v1.Container, kind Kind, idle string) v1.ContainerStatus {
	c := b.o.Containers[spec.Name]
	size := b.o.Allocated.Of(spec)
	st := v1.ContainerStatus{
		Name: spec.Name, Image: spec.Image, RestartCount: c.Restarts, Started: ptr.To(false),
		AllocatedResources: size.Requests,
	}
	if _, sized := b.o.Allocated[spec.Name]; sized && c.Running() {
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
		// Not reported as running until postStart has ended.
		st.State.Waiting = &v1.ContainerStateWaiting{Reason: idle, Message: b.slow(spec, c)}
	case c.Running():
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
	return c.Running() && !c.Now.Started && c.Op == OpStart && spec.Lifecycle != nil && spec.Lifecycle.PostStart != nil
}

// slow names an operation that takes long.
func (b *builder) slow(spec *v1.Container, c *Container) string {
	switch {
	case c.Running() && c.Op == OpStart: // started, and now its hook
		return b.slowSince("Running the postStart hook", c.OpSince)
	case c.Op == OpPull:
		return b.slowSince(fmt.Sprintf("Pulling image %q", spec.Image), c.OpSince)
	case c.Op == OpStart:
		return b.slowSince("Starting", c.OpSince)
	case b.pulling(spec) != "":
		return b.pulling(spec)
	case b.o.Devices.Preparing:
		return b.slowSince("Having its devices prepared by their drivers", b.o.Devices.Since)
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
			ref := ImageSource(&b.d.Pod.Spec, m.Name).Reference
			if s := b.slowSince(fmt.Sprintf("Pulling image %q for volume %q", ref, m.Name), v.Since); s != "" {
				return s
			}
		}
	}
	return ""
}

// slowSince names what is under way once it has taken long.
func (b *builder) slowSince(what string, since time.Time) string {
	if b.now.Sub(since) < SlowAfter {
		return ""
	}
	return what + " since " + clock(since)
}

// waiting says why the container is not running but will be; nil: it will not.
func (b *builder) waiting(spec *v1.Container, kind Kind, c *Container, idle string) *v1.ContainerStateWaiting {
	if c.Running() || Ending(b.d, b.o) && c.Now != nil {
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
	if !WillRestart(&b.d.Pod.Spec, spec, kind, c) {
		return nil
	}
	if c.Op == OpNone && b.now.Before(RestartAt(c)) {
		return &v1.ContainerStateWaiting{Reason: "CrashLoopBackOff",
			Message: fmt.Sprintf("back-off %s restarting failed container=%s pod=%s_%s(%s)",
				shortDuration(c.BackOff), spec.Name, b.d.Pod.Name, b.d.Pod.Namespace, b.d.Pod.UID)}
	}
	return nil
}

// imageFault says why an image is not there.
func (b *builder) imageFault(f *Fault, ref string) *v1.ContainerStateWaiting {
	if f.Reason == "ErrImagePull" && b.now.Sub(f.At) >= ErrImagePullShown {
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
			return b.imageFault(v.Err, ImageSource(&b.d.Pod.Spec, m.Name).Reference)
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
			if RecursiveReadOnly(&m, b.o.ReadOnlyTrees) {
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
// has not looked yet repeats what was reported before.
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
	if b.o.Devices.Err != nil {
		return b.o.Devices.Err
	}
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

// RecursiveReadOnly reports whether what is mounted below the volume is
// read-only too (KEP-3857), where the kernel can do that for a whole tree.
func RecursiveReadOnly(m *v1.VolumeMount, readOnlyTrees bool) bool {
	return m.ReadOnly && m.RecursiveReadOnly != nil && *m.RecursiveReadOnly != v1.RecursiveReadOnlyDisabled && readOnlyTrees
}
