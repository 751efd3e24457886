package pod

import (
	"context"
	"errors"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/volume"
)

// ImageVolume is a volume made of an image (KEP-4639) as observed. It is pulled
// and mounted once in the pod's life; the containers that mount it wait for it,
// the others do not.
type ImageVolume struct {
	Ready   bool // mounted
	Busy    bool // being pulled or mounted
	Since   time.Time
	ImageID string // as the status names it, once Ready
	Err     *Fault
	Delay   time.Duration // back-off that the next fault of a pull will get
}

// imageSource is the image that a volume of the pod is made of; nil: of none.
func imageSource(spec *v1.PodSpec, name string) *v1.ImageVolumeSource {
	for i := range spec.Volumes {
		if spec.Volumes[i].Name == name {
			return spec.Volumes[i].Image
		}
	}
	return nil
}

// seedImageVolumes makes an entry for each image volume. Those that an earlier
// agent has mounted are found when they are asked for.
func seedImageVolumes(spec *v1.PodSpec) map[string]*ImageVolume {
	out := map[string]*ImageVolume{}
	for i := range spec.Volumes {
		if spec.Volumes[i].Image != nil {
			out[spec.Volumes[i].Name] = &ImageVolume{}
		}
	}
	return out
}

// imageVolumesOf lists the image volumes that a container mounts, by name.
func (o *Observed) imageVolumesOf(c *v1.Container) map[string]*ImageVolume {
	var out map[string]*ImageVolume
	for _, m := range c.VolumeMounts {
		if v := o.ImageVolumes[m.Name]; v != nil {
			if out == nil {
				out = map[string]*ImageVolume{}
			}
			out[m.Name] = v
		}
	}
	return out
}

// imageVolumes plans the pulls.
func (p *planner) imageVolumes() {
	for i := range p.spec.Volumes {
		name := p.spec.Volumes[i].Name
		if v := p.o.ImageVolumes[name]; v != nil && !v.Ready && !v.Busy && !p.held(v.Err) {
			p.add(PullVolume{name})
		}
	}
}

// cancelImageVolumes gives up the pulls under way and reports whether there
// are none.
func (p *planner) cancelImageVolumes() bool {
	quiet := true
	for i := range p.spec.Volumes {
		name := p.spec.Volumes[i].Name
		if v := p.o.ImageVolumes[name]; v != nil && v.Busy {
			p.add(CancelVolume{name})
			quiet = false
		}
	}
	return quiet
}

// imageVolumesReady reports whether every image volume of a container is
// mounted; faulted, that one of them could not be.
func (p *planner) imageVolumesReady(c *v1.Container) (ready, faulted bool) {
	ready = true
	for _, v := range p.o.imageVolumesOf(c) {
		ready = ready && v.Ready
		faulted = faulted || v.Err != nil
	}
	return ready, faulted
}

// pullVolume makes the image of a volume present and mounts it.
func (w *worker) pullVolume(name string) {
	v, src, pod := w.obs.ImageVolumes[name], imageSource(&w.pod.Spec, name), w.pod
	v.Busy, v.Since = true, time.Now()
	ctx, cancel := context.WithTimeout(w.ctx, pullDeadline)
	w.volumePulls[name] = cancel
	w.wg.Go(func() {
		defer cancel()
		img, reason, err := w.m.mountImageVolume(ctx, pod, name, src, func(kind, reason, msg string) {
			w.send(func() { w.event(kind, reason, "%s", msg) })
		})
		w.send(func() {
			delete(w.volumePulls, name)
			v.Busy = false
			w.pulledVolume(v, src, img, reason, err)
		})
	})
}

func (w *worker) pulledVolume(v *ImageVolume, src *v1.ImageVolumeSource, img image.Image, reason string, err error) {
	switch {
	case err == nil:
		*v = ImageVolume{Ready: true, ImageID: img.NameFor(src.Reference)}
		return
	case errors.Is(err, context.Canceled):
		return // given up on purpose
	case reason == reasonCreateContainer:
		before := v.Err
		v.Err = faulted(before, reason, err)
		if v.Err.news() {
			w.event(v1.EventTypeWarning, "Failed", "Error: %v", err)
		}
		return
	}
	if _, here, gerr := w.m.cfg.Images.Get(src.Reference); gerr == nil && here && src.PullPolicy != v1.PullAlways {
		return // it was brought while the pull failed
	}
	v.Delay = nextBackOff(v.Delay)
	now := time.Now()
	v.Err = &Fault{Reason: reason, Message: err.Error(), At: now, RetryAt: now.Add(v.Delay)}
	if reason == "ErrImagePull" {
		w.event(v1.EventTypeWarning, "Failed", "Failed to pull image %q: %v", src.Reference, err)
	}
	w.event(v1.EventTypeWarning, "Failed", "Error: %s", reason)
}

// reasonCreateContainer is told when a container cannot be made of what is
// there.
const reasonCreateContainer = "CreateContainerError"

// mountImageVolume finds, or pulls and mounts, the image of a volume. reason is
// the status's word for err.
func (m *Manager) mountImageVolume(ctx context.Context, pod *v1.Pod, name string, src *v1.ImageVolumeSource, tell func(kind, reason, msg string)) (img image.Image, reason string, err error) {
	failed := func(err error) error { return fmt.Errorf("%w: volume %q: %w", volume.ErrImageVolume, name, err) }
	if hasUsers(pod) { // before a look at what is mounted
		if _, err := m.takeUsers(ctx, string(pod.UID)); err != nil {
			return img, reasonCreateContainer, failed(err)
		}
	}
	img, mounted, err := m.cfg.Images.Volume(string(pod.UID), name)
	if err != nil {
		return img, reasonCreateContainer, failed(err)
	}
	if mounted {
		return img, "", nil
	}
	if img, reason, err = m.ensureImage(ctx, pod, src.Reference, src.PullPolicy, tell); err != nil {
		return img, reason, err
	}
	if err := m.mountVolume(ctx, pod, img, name); err != nil {
		if verr := m.cfg.Images.Verify(ctx, img.ID); errors.Is(verr, image.ErrDamaged) {
			tell(v1.EventTypeWarning, "ImageDamaged", fmt.Sprintf("Image will be pulled again: %v", verr))
		}
		return img, reasonCreateContainer, failed(err)
	}
	return img, "", nil
}

// sweepImageVolumes unmounts the image volumes of pods that are no more.
func (m *Manager) sweepImageVolumes(ctx context.Context) error {
	owners, err := m.cfg.Images.VolumeOwners()
	if err != nil {
		return err
	}
	var errs []error
	for _, uid := range owners {
		m.mu.Lock()
		used := m.workers[volumeUID(uid)] != nil
		m.mu.Unlock()
		if !used {
			errs = append(errs, m.cfg.Images.UnmountVolumes(ctx, uid))
		}
	}
	return errors.Join(errs...)
}
