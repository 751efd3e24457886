package podstate

import (
	"time"

	v1 "k8s.io/api/core/v1"
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

// ImageSource is the image that a volume of the pod is made of; nil: of none.
func ImageSource(spec *v1.PodSpec, name string) *v1.ImageVolumeSource {
	for i := range spec.Volumes {
		if spec.Volumes[i].Name == name {
			return spec.Volumes[i].Image
		}
	}
	return nil
}

// SeedImageVolumes makes an entry for each image volume. Those that an earlier
// agent has mounted are found when they are asked for.
func SeedImageVolumes(spec *v1.PodSpec) map[string]*ImageVolume {
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

// ReasonCreateContainer is the reason when a container cannot be made of what is
// there.
const ReasonCreateContainer = "CreateContainerError"
