package scheduler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/sched/loop"
)

const (
	// deviceTimeout is how long the watch may be behind a write of a claim.
	deviceTimeout = time.Minute
	// answerWait is the time between two attempts to learn what became of a write.
	answerWait = time.Second
	// reserveTries bounds the attempts to reserve a claim that others write, too.
	reserveTries = 32
)

var (
	// errClaimChanged is returned when a claim is no longer what was decided on.
	errClaimChanged = errors.New("the claim has changed")
	// errClash is returned when two leaders gave one device away.
	errClash = errors.New("a device is allocated to another claim, too")
)

// bindDevices writes what was decided for the pod's claims, and returns when it
// is known that no other claim has the devices, and that they are ready, or when off
// is closed.
func (s *scheduler) bindDevices(ctx context.Context, pod *corev1.Pod, choices []deviceChoice, off <-chan struct{}) error {
	var written, conditional []*resourcev1.ResourceClaim
	var others []*corev1.Pod
	for i, choice := range choices {
		var claim *resourcev1.ResourceClaim
		var err error
		if choice.joins {
			continue // it is the one's who has the claim allocated
		}
		if isClosed(off) {
			s.forgetDevices(choices[i:])
			return errCalledOff
		}
		if choice.clear {
			if err := s.clearExtended(ctx, pod); err != nil {
				s.forgetDevices(choices[i+1:])
				return err
			}
			continue
		}
		if choice.make {
			choice, err = s.makeExtended(ctx, pod, choice, off)
		}
		if err != nil {
			// it could not be made
		} else if choice.allocation != nil {
			claim, err = s.allocate(ctx, pod, choice)
		} else {
			claim, err = s.reserve(ctx, pod, choice.claim)
		}
		if ctx.Err() != nil {
			return ctx.Err() // what is under way is the next leader's to see
		}
		s.mu.Lock()
		if err == nil {
			s.devices.wrote(claim)
		}
		s.devices.settle(choice.claim)
		s.mu.Unlock()
		if err != nil {
			s.forgetDevices(choices[i+1:])
			return err
		}
		if choice.allocation != nil || choice.wait {
			written = append(written, claim)
			others = append(others, choice.others()...)
		}
		if awaits(claim) {
			conditional = append(conditional, claim)
		}
		if choice.mappings != nil {
			if err := s.writeExtended(ctx, pod, &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: claim.Name, RequestMappings: choice.mappings}); err != nil {
				s.forgetDevices(choices[i+1:])
				return err
			}
		}
	}
	if err := s.alone(ctx, pod, written, others, off); err != nil {
		return err
	}
	return s.devicesReady(ctx, pod, conditional, others, off)
}

// forgetDevices gives back what was assumed and will not be written.
func (s *scheduler) forgetDevices(choices []deviceChoice) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settleDevices(choices)
}

// settleDevices is forgetDevices with the mutex held.
func (s *scheduler) settleDevices(choices []deviceChoice) {
	for _, choice := range choices {
		if choice.allocation != nil {
			s.devices.settle(choice.claim)
		}
	}
}

// allocate writes an allocation, with the pod as the first who may use it. The
// write names the version that was decided on. It returns only when it is known
// what became of the write, or ctx has ended: until then the devices are taken.
func (s *scheduler) allocate(ctx context.Context, pod *corev1.Pod, choice deviceChoice) (*resourcev1.ResourceClaim, error) {
	api := s.client.ResourceV1().ResourceClaims(pod.Namespace)
	claim := choice.claim.DeepCopy()
	if !slices.Contains(claim.Finalizers, resourcev1.Finalizer) {
		claim.Finalizers = append(claim.Finalizers, resourcev1.Finalizer)
		updated, err := s.updateClaim(ctx, claim, "")
		if err != nil {
			return nil, fmt.Errorf("put the finalizer on resourceclaim %s: %w", claim.Name, err)
		}
		claim = updated
	}
	claim.Status.Allocation = choice.allocation.DeepCopy()
	now := metav1.NewTime(s.clock.Now())
	claim.Status.Allocation.AllocationTimestamp = &now
	claim.Status.ReservedFor = append(claim.Status.ReservedFor, consumer(pod))
	for _, other := range choice.others() {
		claim.Status.ReservedFor = append(claim.Status.ReservedFor, consumer(other))
	}
	for lost := false; ; {
		written, err := s.updateClaim(ctx, claim, "status")
		if err == nil {
			return written, nil
		}
		if lost && apierrors.IsConflict(err) {
			// An earlier attempt may be what it conflicts with.
			live, getErr := api.Get(ctx, claim.Name, metav1.GetOptions{})
			if getErr == nil && live.UID == claim.UID && live.Status.Allocation != nil && resourceclaim.IsReservedForPod(pod, live, false) &&
				apiequality.Semantic.DeepEqual(live.Status.Allocation.Devices, claim.Status.Allocation.Devices) {
				return live, nil
			}
			if getErr != nil && loop.Ambiguous(getErr) {
				err = getErr
			}
		}
		if !loop.Ambiguous(err) {
			return nil, fmt.Errorf("allocate resourceclaim %s: %w", claim.Name, err)
		}
		if !lost {
			s.eventsFor(pod).Eventf(pod, corev1.EventTypeWarning, "FailedScheduling", "allocate resourceclaim %s: it is not known whether that was stored, asking until it is: %v", claim.Name, err)
		}
		lost = true
		klog.FromContext(ctx).Info("it is not known whether an allocation was written, asking again", "pod", klog.KObj(pod), "claim", claim.Name, "err", err)
		if err := s.sleep(ctx, answerWait); err != nil {
			return nil, err
		}
	}
}

// reserve adds the pod to those who may use an allocated claim. Others may be
// added at the same time.
func (s *scheduler) reserve(ctx context.Context, pod *corev1.Pod, decided *resourcev1.ResourceClaim) (*resourcev1.ResourceClaim, error) {
	claim := decided
	for range reserveTries {
		switch {
		case claim.UID != decided.UID || claim.DeletionTimestamp != nil,
			claim.Status.Allocation == nil || !apiequality.Semantic.DeepEqual(claim.Status.Allocation, decided.Status.Allocation):
			return nil, fmt.Errorf("reserve resourceclaim %s: %w", decided.Name, errClaimChanged)
		case resourceclaim.IsReservedForPod(pod, claim, false):
			return claim, nil
		case len(claim.Status.ReservedFor) >= resourcev1.ResourceClaimReservedForMaxSize:
			return nil, fmt.Errorf("reserve resourceclaim %s: it is reserved for %d pods already", decided.Name, len(claim.Status.ReservedFor))
		}
		updated := claim.DeepCopy()
		updated.Status.ReservedFor = append(updated.Status.ReservedFor, consumer(pod))
		written, err := s.updateClaim(ctx, updated, "status")
		if err == nil {
			return written, nil
		}
		if !apierrors.IsConflict(err) {
			return nil, fmt.Errorf("reserve resourceclaim %s: %w", decided.Name, err)
		}
		if claim, err = s.client.ResourceV1().ResourceClaims(pod.Namespace).Get(ctx, decided.Name, metav1.GetOptions{}); err != nil {
			return nil, fmt.Errorf("reserve resourceclaim %s: %w", decided.Name, err)
		}
	}
	return nil, fmt.Errorf("reserve resourceclaim %s: others were faster %d times", decided.Name, reserveTries)
}

// alone waits until the watch has shown the claims as they were written, and with
// them all that was written before: if another leader gave one of their devices
// to another claim, one of the two sees it. The claim is then given back, also for
// others of the pod's gang.
func (s *scheduler) alone(ctx context.Context, pod *corev1.Pod, written []*resourcev1.ResourceClaim, others []*corev1.Pod, off <-chan struct{}) error {
	if len(written) == 0 {
		return nil
	}
	timeout := s.clock.NewTimer(deviceTimeout)
	defer timeout.Stop()
	for {
		changed := s.deviceNews.wait()
		behind, clashing, device, err := s.lookAround(written)
		if err != nil {
			return err
		}
		if clashing != nil {
			if err := s.giveBack(ctx, pod, clashing, others...); err != nil {
				return err
			}
			return fmt.Errorf("%w: %s of resourceclaim %s", errClash, device, clashing.Name)
		}
		if behind == "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-off:
			return errCalledOff // who called it off gives the devices back
		case <-timeout.C():
			return fmt.Errorf("the watch has not shown the allocation of resourceclaim %s within %v", behind, deviceTimeout)
		}
	}
}

// lookAround names a claim that the watch has not shown yet as it was written,
// and one of whose devices another claim has, too.
func (s *scheduler) lookAround(written []*resourcev1.ResourceClaim) (behind string, clashing *resourcev1.ResourceClaim, device string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, claim := range written {
		k := s.devices.claims[nameOf(claim)]
		switch {
		case k == nil || k.claim.UID != claim.UID:
			return "", nil, "", fmt.Errorf("resourceclaim %s: %w", claim.Name, errClaimChanged)
		case older(k.shown, claim.ResourceVersion):
			behind = claim.Name
		default:
			if device := s.devices.clash(claim, claim.Status.Allocation); device != "" {
				return "", k.claim, device, nil
			}
		}
	}
	return behind, nil, "", nil
}

// others are the pods of a gang that share what is allocated.
func (c *deviceChoice) others() []*corev1.Pod {
	if c.shared == nil {
		return nil
	}
	return c.shared.others
}

// giveBack takes the allocation off a claim that only the pod uses, and those
// others that go without it, so that it can be allocated again.
func (s *scheduler) giveBack(ctx context.Context, pod *corev1.Pod, claim *resourcev1.ResourceClaim, others ...*corev1.Pod) error {
	decided := claim
	var written *resourcev1.ResourceClaim
	for tries := 0; written == nil; tries++ {
		for _, user := range claim.Status.ReservedFor {
			if user.UID != pod.UID && !slices.ContainsFunc(others, func(other *corev1.Pod) bool { return other.UID == user.UID }) {
				return nil
			}
		}
		updated := claim.DeepCopy()
		updated.Status.Allocation, updated.Status.Devices, updated.Status.ReservedFor = nil, nil, nil
		var err error
		written, err = s.updateClaim(ctx, updated, "status")
		if apierrors.IsConflict(err) && tries < reserveTries {
			// The driver says what becomes of its devices at the same time.
			written = nil
			claim, err = s.client.ResourceV1().ResourceClaims(pod.Namespace).Get(ctx, decided.Name, metav1.GetOptions{})
			if err == nil && (claim.UID != decided.UID || !apiequality.Semantic.DeepEqual(claim.Status.Allocation, decided.Status.Allocation)) {
				return nil // it is looked at again
			}
		}
		if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
			return nil // it is looked at again
		}
		if err != nil {
			return fmt.Errorf("give the devices of resourceclaim %s back: %w", decided.Name, err)
		}
	}
	s.mu.Lock()
	s.devices.wrote(written)
	s.mu.Unlock()
	if isExtended(claim) {
		// It is one attempt's; the next one may ask for other devices.
		err := s.client.ResourceV1().ResourceClaims(claim.Namespace).Delete(ctx, claim.Name, *metav1.NewPreconditionDeleteOptions(string(claim.UID)))
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return fmt.Errorf("delete resourceclaim %s, made for extended resources: %w", claim.Name, err)
		}
	}
	return nil
}

// updateClaim writes the claim, or its status.
func (s *scheduler) updateClaim(ctx context.Context, claim *resourcev1.ResourceClaim, subresource string) (*resourcev1.ResourceClaim, error) {
	callCtx, cancel := context.WithTimeout(ctx, bindTimeout)
	defer cancel()
	api := s.client.ResourceV1().ResourceClaims(claim.Namespace)
	if subresource == "status" {
		return api.UpdateStatus(callCtx, claim, metav1.UpdateOptions{})
	}
	return api.Update(callCtx, claim, metav1.UpdateOptions{})
}

// sleep waits for d on the scheduler's clock, or for the end of ctx.
func (s *scheduler) sleep(ctx context.Context, d time.Duration) error {
	timer := s.clock.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C():
		return nil
	}
}

// consumer is how a claim names a pod that may use it.
func consumer(pod *corev1.Pod) resourcev1.ResourceClaimConsumerReference {
	return resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: pod.Name, UID: pod.UID}
}
