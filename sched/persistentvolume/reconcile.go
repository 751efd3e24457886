package persistentvolume

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	helper "k8s.io/component-helpers/storage/volume"

	"github.com/clusterd/clusterd/sched/internal/volumes"
)

// note is an event to tell.
type note struct {
	kind, reason, message string
}

// claimInput is what the decision about a claim is taken on.
type claimInput struct {
	claim *corev1.PersistentVolumeClaim
	// volumes are all that there are.
	volumes []*corev1.PersistentVolume
	// class is the claim's, nil: it has none, or there is no class of the name.
	class *storagev1.StorageClass
	// fallback is the class for claims that name none, nil: there is none.
	fallback *storagev1.StorageClass
}

// claimPlan is what to do about a claim.
//
//	           a volume suits, or is made
//	Pending ─────────────────────────────► Bound ──── its volume goes ───► Lost
//	   │ ▲                                   ▲                              │
//	   └─┘ none yet: event why               └──── the volume is back ──────┘
type claimPlan struct {
	// bind is the volume that the claim gets, or has and whose other end is to
	// be corrected. It is written before the claim.
	bind *corev1.PersistentVolume
	// setClass is the class that the claim gets, as it names none; "": it stays.
	setClass string
	// provisioner makes the volume; "": none does.
	provisioner string
	phase       corev1.PersistentVolumeClaimPhase
	note        *note
}

func warn(reason, format string, args ...any) *note {
	return &note{corev1.EventTypeWarning, reason, fmt.Sprintf(format, args...)}
}

// decideClaim says what to do about the claim.
func decideClaim(in claimInput) claimPlan {
	claim := in.claim
	if _, completed := claim.Annotations[volumes.BindCompleted]; completed {
		return keepBound(in)
	}
	if claim.DeletionTimestamp != nil {
		return claimPlan{phase: corev1.ClaimPending} // a claim on its way out gets no volume
	}
	if claim.Spec.VolumeName != "" {
		return bindNamed(in)
	}
	waits := volumes.Waits(in.class)
	if v := volumes.Best(claim, in.volumes, nil, waits, nil); v != nil {
		if err := volumes.Satisfies(v, claim); err != nil {
			return claimPlan{phase: corev1.ClaimPending, note: warn("VolumeMismatch", "Cannot bind to requested volume %q: %v", v.Name, err)}
		}
		return claimPlan{bind: v, phase: corev1.ClaimBound}
	}
	if in.fallback != nil && !helper.PersistentVolumeClaimHasClass(claim) {
		return claimPlan{setClass: in.fallback.Name, phase: corev1.ClaimPending} // it was made before the class
	}
	className := helper.GetPersistentVolumeClaimClass(claim)
	plan := claimPlan{phase: corev1.ClaimPending}
	switch {
	case waits && claim.Annotations[volumes.SelectedNode] == "":
		plan.note = &note{corev1.EventTypeNormal, "WaitForFirstConsumer", "waiting for first consumer to be created before binding"}
	case volumes.Provisions(in.class):
		plan.provisioner = in.class.Provisioner
		plan.note = &note{corev1.EventTypeNormal, "ExternalProvisioning", fmt.Sprintf("Waiting for a volume to be created either by the external provisioner '%s' or manually by the system administrator. If volume creation is delayed, please verify that the provisioner is running and correctly registered.", in.class.Provisioner)}
	case className == "":
		plan.note = &note{corev1.EventTypeNormal, "FailedBinding", "no persistent volumes available for this claim and no storage class is set"}
	case in.class == nil:
		plan.note = warn("ProvisioningFailed", "storageclass.storage.k8s.io %q not found", className)
	default:
		plan.note = &note{corev1.EventTypeNormal, "FailedBinding", fmt.Sprintf("no persistent volumes available for this claim, and storage class %q has no provisioner", className)}
	}
	return plan
}

// bindNamed is about a claim that names its volume and has not got it yet.
func bindNamed(in claimInput) claimPlan {
	claim := in.claim
	pending := claimPlan{phase: corev1.ClaimPending}
	v := named(in.volumes, claim.Spec.VolumeName)
	switch {
	case v == nil:
		pending.note = &note{corev1.EventTypeNormal, "FailedBinding", fmt.Sprintf("volume %q is not there yet", claim.Spec.VolumeName)}
		return pending
	case v.Spec.ClaimRef != nil && !helper.IsVolumeBoundToClaim(v, claim):
		pending.note = warn("FailedBinding", "volume %q already bound to a different claim.", v.Name)
		return pending
	case v.DeletionTimestamp != nil:
		pending.note = warn("FailedBinding", "volume %q is being deleted", v.Name)
		return pending
	}
	if err := volumes.Satisfies(v, claim); err != nil {
		pending.note = warn("VolumeMismatch", "Cannot bind to requested volume %q: %v", v.Name, err)
		return pending
	}
	return claimPlan{bind: v, phase: corev1.ClaimBound}
}

// keepBound is about a claim that once got its volume.
func keepBound(in claimInput) claimPlan {
	claim := in.claim
	if claim.Spec.VolumeName == "" {
		return claimPlan{phase: corev1.ClaimLost, note: warn("ClaimLost", "Bound claim has lost reference to PersistentVolume. Data on the volume is lost!")}
	}
	v := named(in.volumes, claim.Spec.VolumeName)
	switch {
	case v == nil:
		return claimPlan{phase: corev1.ClaimLost, note: warn("ClaimLost", "Bound claim has lost its PersistentVolume. Data on the volume is lost!")}
	case v.Spec.ClaimRef == nil || helper.IsVolumeBoundToClaim(v, claim):
		return claimPlan{bind: v, phase: corev1.ClaimBound}
	}
	return claimPlan{phase: corev1.ClaimLost, note: warn("ClaimMisbound", "Two claims are bound to the same volume, this one is bound incorrectly")}
}

func named(all []*corev1.PersistentVolume, name string) *corev1.PersistentVolume {
	for _, v := range all {
		if v.Name == name {
			return v
		}
	}
	return nil
}

// volumePlan is what to do about a volume.
//
//	Pending ──► Available ──► Bound ──► Released ──► (gone)     Delete
//	                ▲           │           │  └───► Failed     no deleter
//	                └───────────┘           └────── stays       Retain
//	              its claim has another
type volumePlan struct {
	phase           corev1.PersistentVolumePhase
	reason, message string
	// unbind takes the claim's reference away: all of it where this loop wrote
	// it, the UID where an administrator reserved the volume for the claim.
	unbind bool
	// reclaim: the claim is permanently gone. It is done after the server has
	// confirmed it.
	reclaim bool
	note    *note
}

// decideVolume says what to do about the volume. claim is the one that it
// refers to, nil: there is none of that name. deleter reports whether
// a provisioner removes the volume when its object is deleted.
func decideVolume(v *corev1.PersistentVolume, claim *corev1.PersistentVolumeClaim, deleter bool) volumePlan {
	ref := v.Spec.ClaimRef
	switch {
	case ref == nil, ref.UID == "":
		return volumePlan{phase: corev1.VolumeAvailable}
	case claim == nil || claim.UID != ref.UID:
		return released(v, deleter)
	case claim.Spec.VolumeName == v.Name:
		return volumePlan{phase: corev1.VolumeBound}
	case claim.Spec.VolumeName == "":
		// Half bound: the claim's reconcile does the rest.
		return volumePlan{phase: v.Status.Phase}
	}
	// The claim has another volume.
	if _, made := v.Annotations[volumes.ProvisionedBy]; made && v.Spec.PersistentVolumeReclaimPolicy == corev1.PersistentVolumeReclaimDelete {
		return released(v, deleter)
	}
	return volumePlan{phase: corev1.VolumeAvailable, unbind: true}
}

// released is about a volume whose claim is gone.
func released(v *corev1.PersistentVolume, deleter bool) volumePlan {
	plan := volumePlan{phase: corev1.VolumeReleased, reclaim: true}
	switch v.Spec.PersistentVolumeReclaimPolicy {
	case corev1.PersistentVolumeReclaimRetain:
	case corev1.PersistentVolumeReclaimDelete:
		if !deleter {
			plan.phase, plan.reason = corev1.VolumeFailed, "VolumeFailedDelete"
			plan.message = "volumes of this kind have no deleter: the data is kept, and the object can be deleted by hand"
			plan.note = warn(plan.reason, "%s", plan.message)
		}
	default:
		plan.phase, plan.reason = corev1.VolumeFailed, "VolumeFailedRecycle"
		plan.message = "reclaim policy Recycle is not supported: use Delete with a provisioner, or Retain"
		plan.note = warn(plan.reason, "%s", plan.message)
	}
	return plan
}

// resizerOf is the driver that is to expand the claim's volume, "": none is
// needed.
func resizerOf(claim *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) string {
	want, has := claim.Spec.Resources.Requests[corev1.ResourceStorage], claim.Status.Capacity[corev1.ResourceStorage]
	if v.Spec.CSI == nil || claim.Status.Phase != corev1.ClaimBound || want.Cmp(has) <= 0 {
		return ""
	}
	return v.Spec.CSI.Driver
}
