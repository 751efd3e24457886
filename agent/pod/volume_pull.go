package pod

import (
	"context"
	"errors"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/podspec"
	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/agent/volume"
)

// pullVolume makes the image of a volume present and mounts it.
func (w *worker) pullVolume(name string) {
	v, src, pod := w.obs.ImageVolumes[name], podstate.ImageSource(&w.pod.Spec, name), w.pod
	v.Busy, v.Since = true, time.Now()
	ctx, cancel := context.WithCancel(w.ctx)
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

func (w *worker) pulledVolume(v *podstate.ImageVolume, src *v1.ImageVolumeSource, img image.Image, reason string, err error) {
	switch {
	case err == nil:
		*v = podstate.ImageVolume{Ready: true, ImageID: img.NameFor(src.Reference)}
		return
	case errors.Is(err, context.Canceled):
		return // given up on purpose
	case reason == podstate.ReasonCreateContainer:
		before := v.Err
		v.Err = faulted(before, reason, err)
		if v.Err.News() {
			w.event(v1.EventTypeWarning, "Failed", "Error: %v", err)
		}
		return
	}
	if _, here, gerr := w.m.cfg.Images.Get(src.Reference); gerr == nil && here && src.PullPolicy != v1.PullAlways && !errors.As(err, new(unproven)) {
		return // it was brought while the pull failed
	}
	v.Delay = podstate.NextBackOff(v.Delay)
	now := time.Now()
	v.Err = &podstate.Fault{Reason: reason, Message: err.Error(), At: now, RetryAt: now.Add(v.Delay)}
	if reason == "ErrImagePull" {
		w.event(v1.EventTypeWarning, "Failed", "Failed to pull image %q: %v", src.Reference, err)
	}
	w.event(v1.EventTypeWarning, "Failed", "Error: %s", reason)
}

// mountImageVolume finds, or pulls and mounts, the image of a volume. reason is
// the status's word for err.
func (m *Manager) mountImageVolume(ctx context.Context, pod *v1.Pod, name string, src *v1.ImageVolumeSource, tell func(kind, reason, msg string)) (img image.Image, reason string, err error) {
	failed := func(err error) error { return fmt.Errorf("%w: volume %q: %w", volume.ErrImageVolume, name, err) }
	if podspec.HasUsers(pod) { // before a look at what is mounted
		if _, err := m.takeUsers(ctx, string(pod.UID)); err != nil {
			return img, podstate.ReasonCreateContainer, failed(err)
		}
	}
	img, mounted, err := m.cfg.Images.Volume(string(pod.UID), name)
	if err != nil {
		return img, podstate.ReasonCreateContainer, failed(err)
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
		return img, podstate.ReasonCreateContainer, failed(err)
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
