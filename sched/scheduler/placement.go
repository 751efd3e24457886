package scheduler

import (
	"context"
	"errors"

	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
)

// placement is a pod that is assumed on a node.
type placement struct {
	pod  *corev1.Pod
	node string // "": the pod has none
	// What is to be done for its claims before it is bound.
	volumes []claimChoice
	devices []deviceChoice
	// off is closed when the pod will not be bound, whatever becomes of its claims: a
	// pod of its gang cannot be. Nothing is waited for then. nil: that never happens.
	off <-chan struct{}
}

// errCalledOff is returned for a pod whose gang cannot be bound.
var errCalledOff = errors.New("another pod of its group cannot be bound")

// take assumes p on the best of the nodes that fit it. s.mu is held.
func (s *scheduler) take(p *podInfo, v verdict) placement {
	chosen := best(s.snapshot, p, v.fit)
	place := placement{pod: p.pod, node: chosen.name}
	place.volumes, _ = p.storage.on(chosen.node)
	place.devices = p.devices.choose(p.pod, chosen)
	s.snapshot.assume(p, chosen.name)
	return place
}

// untake takes back take, before anything was written. s.mu is held.
func (s *scheduler) untake(place placement) {
	s.snapshot.forget(place.pod.UID)
	s.settleDevices(place.devices)
}

// prepares reports whether something is to be done before the pod is bound.
func (p placement) prepares() bool { return len(p.volumes)+len(p.devices) > 0 }

// prepare does what the pod's claims need on the node.
func (s *scheduler) prepare(ctx context.Context, place placement) error {
	if len(place.volumes) > 0 {
		if err := s.bindVolumes(ctx, place); err != nil {
			s.forgetDevices(place.devices)
			return err
		}
	}
	return s.bindDevices(ctx, place.pod, place.devices, place.off)
}

// isClosed reports whether c is; nil never is.
func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// unprepare gives back the devices that were allocated for a pod which is not
// bound after all, though nothing is wrong with it: its group must not keep them
// from others while it waits. Volumes stay made.
func (s *scheduler) unprepare(ctx context.Context, place placement) {
	for _, choice := range place.devices {
		if choice.allocation == nil {
			continue
		}
		s.mu.Lock()
		known := s.devices.claims[nameOf(choice.claim)]
		s.mu.Unlock()
		if known == nil || known.claim.UID != choice.claim.UID && !(choice.make && metav1.IsControlledBy(known.claim, place.pod)) || known.claim.Status.Allocation == nil ||
			!apiequality.Semantic.DeepEqual(known.claim.Status.Allocation.Devices, choice.allocation.Devices) {
			continue
		}
		if err := s.giveBack(ctx, place.pod, known.claim, choice.others()...); err != nil {
			klog.FromContext(ctx).Info("devices of a pod whose group could not be bound stay allocated until it is tried again", "pod", klog.KObj(place.pod), "err", err)
		}
	}
}
