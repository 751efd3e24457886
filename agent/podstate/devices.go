package podstate

import (
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/apis/core"
)

// Devices is the state of what drivers and plugins of devices do for a pod.
//
//	none ──▶ preparing ──▶ ready ──containers ended for good──▶ releasing ──▶ none
type Devices struct {
	// Ready: all that the pod's claims were given, and all that it asks for of
	// plugins, is prepared.
	Ready bool
	// Preparing and Releasing are set while drivers are asked, since Since.
	Preparing, Releasing bool
	Since                time.Time
	// Held: drivers have prepared something, or may have: the pod has not ended
	// before they have taken it back, since its claims may be given to another as
	// soon as the API says that it has.
	Held bool
	Err  *Fault
}

// ReasonPrepareDevices is the reason of a fault of a pod whose devices are not
// there.
const ReasonPrepareDevices = "FailedPrepareDynamicResources"

// UsesClaims reports whether the pod has claims of devices.
func UsesClaims(pod *v1.Pod) bool {
	return len(pod.Spec.ResourceClaims) > 0 || pod.Status.ExtendedResourceClaimStatus != nil
}

// UsesDevices reports whether the pod may need something of drivers or plugins of
// devices before it starts: it has claims, or asks for extended resources.
func UsesDevices(pod *v1.Pod) bool {
	if UsesClaims(pod) {
		return true
	}
	for _, c := range AllContainers(&pod.Spec) {
		for name := range c.Resources.Limits {
			if core.IsExtended(name) {
				return true
			}
		}
	}
	return false
}

// devices plans what is to be prepared and reports whether all is.
func (p *planner) devices() bool {
	o := p.o.Devices
	if o.Ready || !UsesDevices(p.d.Pod) {
		return true
	}
	if !o.Preparing && !o.Releasing && !p.held(o.Err) {
		p.add(PrepareDevices{})
	}
	return false
}

// releaseDevices plans that what was prepared is taken back, once nothing runs,
// and reports whether all is.
func (p *planner) releaseDevices() bool {
	o := p.o.Devices
	if o.Preparing || o.Releasing {
		return false
	}
	if o.Held && !p.held(p.o.TeardownErr) {
		p.add(ReleaseDevices{})
	}
	return !o.Held
}
