package deployment

import (
	"fmt"
	"math"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

// Reasons of the conditions. kubectl rollout status and many scripts know them.
const (
	reasonAvailable    = "MinimumReplicasAvailable"
	reasonUnavailable  = "MinimumReplicasUnavailable"
	reasonCreated      = "NewReplicaSetCreated"
	reasonFound        = "FoundNewReplicaSet"
	reasonCreateFailed = "ReplicaSetCreateError"
	reasonUpdated      = "ReplicaSetUpdated"
	reasonComplete     = "NewReplicaSetAvailable"
	reasonTimedOut     = "ProgressDeadlineExceeded"
	reasonPaused       = "DeploymentPaused"
	reasonResumed      = "DeploymentResumed"
)

// status computes the Deployment's status from its ReplicaSets, and the time
// after which the progress deadline may change it.
//
// The Progressing condition (only with a deadline):
//
//	(none) ─► NewReplicaSetCreated / FoundNewReplicaSet ─► ReplicaSetUpdated ─► NewReplicaSetAvailable
//	                      │                                     │                     │ new template
//	                      └──── deadline ─► ProgressDeadlineExceeded ◄─┘ ◄── as before ┘
//	paused: DeploymentPaused (Unknown) ─► resumed: DeploymentResumed (Unknown) ─► as above
func (r *rollout) status() (appsv1.DeploymentStatus, time.Duration) {
	d, sets := r.d, r.sets()
	s := *d.Status.DeepCopy()
	s.ObservedGeneration = d.Generation
	s.Replicas, s.ReadyReplicas, s.UpdatedReplicas = 0, 0, 0
	var terminating int32
	for _, rs := range sets {
		s.Replicas += rs.Status.Replicas
		s.ReadyReplicas += rs.Status.ReadyReplicas
		terminating += ptr.Deref(rs.Status.TerminatingReplicas, 0)
	}
	s.TerminatingReplicas = &terminating
	s.AvailableReplicas = availableOf(sets)
	s.UnavailableReplicas = max(0, total(sets)-s.AvailableReplicas)
	if r.current != nil {
		s.UpdatedReplicas = r.current.Status.Replicas
	}

	_, unavailable := bounds(d)
	if s.AvailableReplicas >= r.desired()-unavailable {
		r.set(&s, appsv1.DeploymentAvailable, corev1.ConditionTrue, reasonAvailable, "Deployment has minimum availability.")
	} else {
		r.set(&s, appsv1.DeploymentAvailable, corev1.ConditionFalse, reasonUnavailable, "Deployment does not have minimum availability.")
	}
	r.pausedCondition(&s)
	if !r.rolling {
		return s, 0
	}
	r.progress(&s)
	r.failureCondition(&s, sets)
	return s, r.recheck(&s)
}

func (r *rollout) pausedCondition(s *appsv1.DeploymentStatus) {
	c := condition(s, appsv1.DeploymentProgressing)
	if !deadline(r.d) || c != nil && c.Reason == reasonTimedOut || r.d.DeletionTimestamp != nil {
		return
	}
	paused := c != nil && c.Reason == reasonPaused
	if r.d.Spec.Paused && !paused {
		r.set(s, appsv1.DeploymentProgressing, corev1.ConditionUnknown, reasonPaused, "Deployment is paused")
	} else if !r.d.Spec.Paused && paused {
		r.set(s, appsv1.DeploymentProgressing, corev1.ConditionUnknown, reasonResumed, "Deployment is resumed")
	}
}

func (r *rollout) progress(s *appsv1.DeploymentStatus) {
	const kind = appsv1.DeploymentProgressing
	if !deadline(r.d) {
		remove(s, kind)
		return
	}
	what := fmt.Sprintf("Deployment %q", r.d.Name)
	if r.current != nil {
		what = fmt.Sprintf("ReplicaSet %q", r.current.Name)
	}
	c := condition(s, kind)
	switch {
	case r.fresh:
		r.set(s, kind, corev1.ConditionTrue, reasonCreated, fmt.Sprintf("Created new replica set %q", r.current.Name))
	case r.current != nil && (c == nil || r.moved):
		r.set(s, kind, corev1.ConditionTrue, reasonFound, fmt.Sprintf("Found new replica set %q", r.current.Name))
	case c != nil && c.Reason == reasonComplete && s.Replicas == s.UpdatedReplicas:
		// A finished rollout stays finished: pods that come and go later are
		// no progress and have no deadline.
	case complete(r.d, s):
		r.set(s, kind, corev1.ConditionTrue, reasonComplete, what+" has successfully progressed.")
	case advanced(&r.d.Status, s):
		r.refresh(s, corev1.ConditionTrue, reasonUpdated, what+" is progressing.")
	case r.timedOut(c):
		r.set(s, kind, corev1.ConditionFalse, reasonTimedOut, what+" has timed out progressing.")
	}
}

// failureCondition repeats the ReplicaFailure of a ReplicaSet, the current
// one's if it has it.
func (r *rollout) failureCondition(s *appsv1.DeploymentStatus, sets []*appsv1.ReplicaSet) {
	var found *appsv1.ReplicaSetCondition
	for _, rs := range sets {
		for i := range rs.Status.Conditions {
			c := &rs.Status.Conditions[i]
			if c.Type == appsv1.ReplicaSetReplicaFailure && (found == nil || rs == r.current) {
				found = c
			}
		}
	}
	if found == nil {
		remove(s, appsv1.DeploymentReplicaFailure)
		return
	}
	r.set(s, appsv1.DeploymentReplicaFailure, found.Status, found.Reason, found.Message)
}

// complete reports whether the rollout has nothing left to do.
func complete(d *appsv1.Deployment, s *appsv1.DeploymentStatus) bool {
	want := ptr.Deref(d.Spec.Replicas, 1)
	return s.UpdatedReplicas == want && s.Replicas == want && s.AvailableReplicas == want && s.ObservedGeneration >= d.Generation
}

// advanced reports whether the rollout came closer to its end.
func advanced(old, s *appsv1.DeploymentStatus) bool {
	return s.UpdatedReplicas > old.UpdatedReplicas ||
		s.Replicas-s.UpdatedReplicas < old.Replicas-old.UpdatedReplicas ||
		s.ReadyReplicas > old.ReadyReplicas ||
		s.AvailableReplicas > old.AvailableReplicas
}

// deadline reports whether the Deployment has a progress deadline; the largest
// number means none.
func deadline(d *appsv1.Deployment) bool {
	return d.Spec.ProgressDeadlineSeconds != nil && *d.Spec.ProgressDeadlineSeconds != math.MaxInt32
}

func (r *rollout) timedOut(c *appsv1.DeploymentCondition) bool {
	switch {
	case c == nil || c.Reason == reasonComplete:
		return false
	case c.Reason == reasonTimedOut:
		return true
	}
	return r.left(c) <= 0
}

func (r *rollout) left(c *appsv1.DeploymentCondition) time.Duration {
	limit := time.Duration(*r.d.Spec.ProgressDeadlineSeconds) * time.Second
	return c.LastUpdateTime.Add(limit).Sub(r.now)
}

func (r *rollout) recheck(s *appsv1.DeploymentStatus) time.Duration {
	c := condition(s, appsv1.DeploymentProgressing)
	if c == nil || !deadline(r.d) || c.Reason == reasonTimedOut || c.Reason == reasonComplete {
		return 0
	}
	// Stored times have whole seconds; look just after the deadline.
	return max(r.left(c), 0) + time.Second
}

func condition(s *appsv1.DeploymentStatus, kind appsv1.DeploymentConditionType) *appsv1.DeploymentCondition {
	for i := range s.Conditions {
		if s.Conditions[i].Type == kind {
			return &s.Conditions[i]
		}
	}
	return nil
}

// set writes a condition unless status and reason are as they were.
func (r *rollout) set(s *appsv1.DeploymentStatus, kind appsv1.DeploymentConditionType, status corev1.ConditionStatus, reason, message string) {
	setCondition(s, kind, status, reason, message, r.now)
}

// refresh writes the Progressing condition even if only its time changes: each
// advance restarts the deadline.
func (r *rollout) refresh(s *appsv1.DeploymentStatus, status corev1.ConditionStatus, reason, message string) {
	if c := condition(s, appsv1.DeploymentProgressing); c != nil && c.Status == status {
		c.Reason, c.Message, c.LastUpdateTime = reason, message, metav1.NewTime(r.now)
		return
	}
	r.set(s, appsv1.DeploymentProgressing, status, reason, message)
}

func setCondition(s *appsv1.DeploymentStatus, kind appsv1.DeploymentConditionType, status corev1.ConditionStatus, reason, message string, now time.Time) {
	stamp := metav1.NewTime(now)
	c := appsv1.DeploymentCondition{Type: kind, Status: status, Reason: reason, Message: message, LastUpdateTime: stamp, LastTransitionTime: stamp}
	if old := condition(s, kind); old != nil {
		if old.Status == status && old.Reason == reason {
			return
		}
		if old.Status == status {
			c.LastTransitionTime = old.LastTransitionTime
		}
		*old = c
		return
	}
	s.Conditions = append(s.Conditions, c)
}

func remove(s *appsv1.DeploymentStatus, kind appsv1.DeploymentConditionType) {
	s.Conditions = slices.DeleteFunc(s.Conditions, func(c appsv1.DeploymentCondition) bool { return c.Type == kind })
}
