package scheduler

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// A device may have to be made ready for its pod after it was allocated, by its
// driver: attached to the node, say. It names conditions that the claim's status
// has to show for it before the pod is bound, and others that end the attempt.

// conditionTimeout is how long devices have for that, from their allocation on;
// upstream's default.
const conditionTimeout = 10 * time.Minute

var (
	// errDeviceFailed is returned when a device has a condition of failure.
	errDeviceFailed = errors.New("the device cannot be made ready")
	// errDeviceLate is returned when a device was not ready in time.
	errDeviceLate = errors.New("the device was not made ready in time")
)

// unready names what a claim's devices lack for their pod to be bound; "" if
// nothing. failed says why they never will have it.
func unready(claim *resourcev1.ResourceClaim) (lacks string, failed error) {
	if claim.Status.Allocation == nil {
		return "", nil
	}
	var all []string
	for i := range claim.Status.Allocation.Devices.Results {
		r := &claim.Status.Allocation.Devices.Results[i]
		if len(r.BindingConditions) == 0 {
			continue
		}
		device := fmt.Sprintf("device %s/%s/%s", r.Driver, r.Pool, r.Device)
		has := conditionsOf(claim, r)
		for _, name := range r.BindingFailureConditions {
			if c := meta.FindStatusCondition(has, name); c != nil && c.Status == metav1.ConditionTrue {
				return "", fmt.Errorf("%w: %s of resourceclaim %s has the condition %s (%s: %s)", errDeviceFailed, device, claim.Name, name, c.Reason, c.Message)
			}
		}
		var missing []string
		for _, name := range r.BindingConditions {
			if !meta.IsStatusConditionTrue(has, name) {
				missing = append(missing, name)
			}
		}
		if len(missing) > 0 {
			all = append(all, fmt.Sprintf("%s of resourceclaim %s lacks %s", device, claim.Name, strings.Join(missing, ", ")))
		}
	}
	return strings.Join(all, "; "), nil
}

// conditionsOf are those that the driver has written of an allocated device.
func conditionsOf(claim *resourcev1.ResourceClaim, r *resourcev1.DeviceRequestAllocationResult) []metav1.Condition {
	for i := range claim.Status.Devices {
		d := &claim.Status.Devices[i]
		if d.Driver == r.Driver && d.Pool == r.Pool && d.Device == r.Device && ptr.Deref(d.ShareID, "") == string(ptr.Deref(r.ShareID, "")) {
			return d.Conditions
		}
	}
	return nil
}

// awaits reports whether a pod that uses the claim has to wait for its devices.
func awaits(claim *resourcev1.ResourceClaim) bool {
	lacks, failed := unready(claim)
	return lacks != "" || failed != nil
}

// devicesReady waits until the claims' devices are ready for the pod. A claim
// whose devices have failed, or were not ready in time, is given back, also for
// others of the pod's gang.
func (s *scheduler) devicesReady(ctx context.Context, pod *corev1.Pod, claims []*resourcev1.ResourceClaim, others []*corev1.Pod, off <-chan struct{}) error {
	if len(claims) == 0 {
		return nil
	}
	began := s.clock.Now()
	for said := false; ; said = true {
		changed := s.deviceNews.wait()
		if !s.stillWaiting(pod) {
			return errGone
		}
		lacks, late, until, err := s.lookForConditions(claims, began)
		if err != nil {
			if late != nil {
				err = errors.Join(err, s.giveBack(ctx, pod, late, others...))
			}
			return err
		}
		if lacks == "" {
			return nil
		}
		if !said {
			s.eventsFor(pod).Eventf(pod, corev1.EventTypeNormal, "WaitForDevices", "%s: the driver has until %s", lacks, until.UTC().Format(time.RFC3339))
		}
		timeout := s.clock.NewTimer(until.Sub(s.clock.Now()))
		select {
		case <-ctx.Done():
			timeout.Stop()
			return ctx.Err()
		case <-changed:
			timeout.Stop()
		case <-off:
			timeout.Stop()
			return errCalledOff // who called it off gives the devices back
		case <-timeout.C():
		}
	}
}

// lookForConditions says what the devices of the claims lack and until when they
// may. With an error that a claim's devices are the cause of, it returns the claim.
func (s *scheduler) lookForConditions(claims []*resourcev1.ResourceClaim, began time.Time) (lacks string, bad *resourcev1.ResourceClaim, until time.Time, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, decided := range claims {
		k := s.devices.claims[nameOf(decided)]
		if k == nil || k.claim.UID != decided.UID || k.claim.Status.Allocation == nil {
			return "", nil, until, fmt.Errorf("resourceclaim %s: %w", decided.Name, errClaimChanged)
		}
		this, failed := unready(k.claim)
		if failed != nil {
			return "", k.claim, until, failed
		}
		if this == "" {
			continue
		}
		end := began
		if at := k.claim.Status.Allocation.AllocationTimestamp; at != nil {
			end = at.Time
		}
		end = end.Add(conditionTimeout)
		if !s.clock.Now().Before(end) {
			return "", k.claim, until, fmt.Errorf("%w: %s, %v after its allocation", errDeviceLate, this, conditionTimeout)
		}
		if lacks == "" {
			lacks = this
		}
		if until.IsZero() || end.Before(until) {
			until = end
		}
	}
	return lacks, nil, until, nil
}
