package resourceclaim

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/sched/internal/pods"
)

// maxBase is what of a claim's name is not its suffix: names of claims become
// parts of paths and labels, which have 63 characters.
const maxBase = 63 - 1 - suffixLength

// suffixLength is how much of the hash ends a claim's name.
const suffixLength = 8

// claimName names the claim that is made for one entry of pod.spec.resourceClaims.
// It is a function of the pod's UID, so that a second attempt to make it is
// refused by the server; try counts names that others took.
func claimName(pod *corev1.Pod, entry string, try int) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%s/%s/%d", pod.UID, entry, try))
	base := pod.Name + "-" + entry
	if len(base) > maxBase {
		// Both parts stay recognizable.
		half := min(len(entry), max(maxBase/2, maxBase-1-len(pod.Name)))
		base = pod.Name[:min(len(pod.Name), maxBase-1-half)] + "-" + entry[:half]
	}
	return base + "-" + hex.EncodeToString(sum[:])[:suffixLength]
}

// newClaim is the claim for the entry, as the template says.
func newClaim(pod *corev1.Pod, entry string, template *resourcev1.ResourceClaimTemplate, try int) *resourcev1.ResourceClaim {
	annotations := maps.Clone(template.Spec.Annotations)
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[resourcev1.PodResourceClaimAnnotation] = entry
	return &resourcev1.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{
			Name: claimName(pod, entry, try), Namespace: pod.Namespace,
			Labels: maps.Clone(template.Spec.Labels), Annotations: annotations,
			OwnerReferences: []metav1.OwnerReference{*metav1.NewControllerRef(pod, corev1.SchemeGroupVersion.WithKind("Pod"))},
		},
		Spec: *template.Spec.Spec.DeepCopy(),
	}
}

// over reports whether the pod will use devices no more: it has ended, or is
// deleted before it got a node.
func over(pod *corev1.Pod) bool {
	return pods.Finished(pod) || pod.DeletionTimestamp != nil && pod.Spec.NodeName == ""
}

// isPod reports whether a consumer is a pod. What else reserves claims is left
// alone: what it is, and when it ends, is not known here.
func isPod(user resourcev1.ResourceClaimConsumerReference) bool {
	return user.APIGroup == "" && user.Resource == "pods"
}

// podOf is the consumer reference of a pod.
func podOf(pod *corev1.Pod) resourcev1.ResourceClaimConsumerReference {
	return resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: pod.Name, UID: pod.UID}
}

// decision is what a claim needs.
type decision struct {
	// status is its new status; nil: the one it has.
	status *resourcev1.ResourceClaimStatus
	// release says that the finalizer goes, once status is written.
	release bool
	// drop says that the claim was made for a pod that is over.
	drop bool
}

// decide says what the claim needs, given which consumers use it no more, and
// whether the pod that it was made for is over.
//
// A claim is deallocated when the last of its consumers goes: the next one may
// get other devices, on another node. One that was never reserved keeps what it
// has, until it is deleted.
func decide(claim *resourcev1.ResourceClaim, gone func(resourcev1.ResourceClaimConsumerReference) bool, ownerOver bool) decision {
	left := slices.DeleteFunc(slices.Clone(claim.Status.ReservedFor), gone)
	fewer := len(left) < len(claim.Status.ReservedFor)
	deallocate := len(left) == 0 && claim.Status.Allocation != nil && (fewer || claim.DeletionTimestamp != nil)
	var d decision
	if fewer || deallocate {
		d.status = claim.Status.DeepCopy()
		d.status.ReservedFor = left
		if len(left) == 0 {
			d.status.ReservedFor = nil
		}
		if deallocate {
			d.status.Allocation, d.status.Devices = nil, nil
		}
	}
	allocated := claim.Status.Allocation != nil && !deallocate
	d.release = !allocated && (deallocate || claim.DeletionTimestamp != nil) && slices.Contains(claim.Finalizers, resourcev1.Finalizer)
	d.drop = len(left) == 0 && ownerOver && claim.DeletionTimestamp == nil
	return d
}
