package auth

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// Volumes finds what pods' volumes lead to. Missing objects are NotFound
// StatusErrors.
type Volumes interface {
	Claim(ctx context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error)
	Volume(ctx context.Context, name string) (*corev1.PersistentVolume, error)
	Attachment(ctx context.Context, name string) (*storagev1.VolumeAttachment, error)
}

// readAttachment lets a node get what is attached to it.
func (z *NodeAuthorizer) readAttachment(ctx context.Context, node string, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if a.GetVerb() != "get" || a.GetName() == "" {
		return authorizer.DecisionNoOpinion, "a node may only get an individual volumeattachment", nil
	}
	found, err := z.pods.Attachment(ctx, a.GetName())
	switch {
	case apierrors.IsNotFound(err):
		return authorizer.DecisionNoOpinion, fmt.Sprintf("no volume is attached to node %s by that name", node), nil
	case err != nil:
		return authorizer.DecisionNoOpinion, "", err
	case found.Spec.NodeName != node:
		return authorizer.DecisionNoOpinion, "it is of another node", nil
	}
	return authorizer.DecisionAllow, "", nil
}

// VolumesOf calls visit with each volume that the pod's claims are bound to.
func VolumesOf(ctx context.Context, from Volumes, pod *corev1.Pod, visit func(*corev1.PersistentVolume)) {
	for _, name := range claimsOf(pod) {
		claim, err := from.Claim(ctx, pod.Namespace, name)
		if err != nil || claim.Spec.VolumeName == "" {
			continue
		}
		v, err := from.Volume(ctx, claim.Spec.VolumeName)
		if err == nil && v.Spec.ClaimRef != nil && v.Spec.ClaimRef.UID == claim.UID {
			visit(v)
		}
	}
}

// driverSecret reports whether the driver of a volume of the node's pods is
// given the Secret by its node.
func (z *NodeAuthorizer) driverSecret(ctx context.Context, node, namespace, name string) (bool, error) {
	pods, err := z.pods.OnNode(ctx, node, "")
	if err != nil {
		return false, fmt.Errorf("find the pods of node %s: %w", node, err)
	}
	found := false
	for _, pod := range pods {
		VolumesOf(ctx, z.pods, pod, func(v *corev1.PersistentVolume) {
			if v.Spec.CSI == nil {
				return
			}
			for _, ref := range []*corev1.SecretReference{v.Spec.CSI.NodeStageSecretRef, v.Spec.CSI.NodePublishSecretRef, v.Spec.CSI.NodeExpandSecretRef} {
				found = found || ref != nil && ref.Namespace == namespace && ref.Name == name
			}
		})
		if found {
			return true, nil
		}
	}
	return false, nil
}

// claimStatus lets a node write the status of its pods' claims; what of it,
// noderestriction looks at.
func claimStatus(a authorizer.Attributes) bool {
	return a.IsResourceRequest() && a.GetAPIGroup() == "" && a.GetResource() == "persistentvolumeclaims" && a.GetSubresource() == "status" &&
		slices.Contains([]string{"update", "patch"}, a.GetVerb())
}
