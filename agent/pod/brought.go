package pod

import (
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/podstate"
)

// onImages: images of the node were brought, removed or pinned. A container whose image
// is here and open to all waits no longer, neither for its back-off nor for a pull under
// way, which may hang. One that is to be pulled always has nothing of it.
func (w *worker) onImages() {
	for _, spec := range podstate.AllContainers(&w.pod.Spec) {
		c := w.obs.Containers[spec.Name]
		if spec.ImagePullPolicy == v1.PullAlways || c.Op != podstate.OpPull && c.ImageErr == nil {
			continue
		}
		if !w.m.brought(spec.Image) {
			continue
		}
		if c.ImageErr != nil {
			c.ImageErr.RetryAt = time.Time{}
		}
		if c.Op == podstate.OpPull {
			w.ops[c.Name].cancel()
		}
	}
	for name, v := range w.obs.ImageVolumes {
		src := podstate.ImageSource(&w.pod.Spec, name)
		if src.PullPolicy == v1.PullAlways || !v.Busy && v.Err == nil {
			continue
		}
		if !w.m.brought(src.Reference) {
			continue
		}
		if v.Err != nil {
			v.Err.RetryAt = time.Time{}
		}
		if cancel := w.volumePulls[name]; cancel != nil {
			cancel()
		}
	}
}

// brought says whether an image is here and open to all pods, as those are that somebody
// brings to the node. Of one that is not, a pod that waits for it has nothing: its
// registry has to be asked, as is done already.
func (m *Manager) brought(ref string) bool {
	img, present, err := m.cfg.Images.Get(ref)
	if err != nil || !present {
		return false
	}
	_, open, err := m.openToAll(ref, img)
	return err == nil && open
}
