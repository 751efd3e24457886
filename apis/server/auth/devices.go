package auth

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
)

// Devices finds what drivers of devices offer. Missing objects are NotFound
// StatusErrors.
type Devices interface {
	ResourceSlice(ctx context.Context, name string) (*resourcev1.ResourceSlice, error)
}

// readDevices lets a node read the claims of its pods, one by name, and have the
// slices of its own devices.
func (z *NodeAuthorizer) readDevices(ctx context.Context, node string, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if a.GetSubresource() != "" {
		return authorizer.DecisionNoOpinion, "", nil
	}
	switch a.GetResource() {
	case "resourceclaims":
		return z.readDeviceClaim(ctx, node, a)
	case "resourceslices":
		return z.ownSlice(ctx, node, a)
	}
	return authorizer.DecisionNoOpinion, "", nil
}

func (z *NodeAuthorizer) readDeviceClaim(ctx context.Context, node string, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if a.GetVerb() != "get" || a.GetName() == "" {
		return authorizer.DecisionNoOpinion, "a node may only get an individual resourceclaim of one of its pods", nil
	}
	pods, err := z.pods.OnNode(ctx, node, a.GetNamespace())
	if err != nil {
		return authorizer.DecisionNoOpinion, "", fmt.Errorf("find the pods of node %s: %w", node, err)
	}
	for _, pod := range pods {
		if pod.Namespace == a.GetNamespace() && slices.Contains(DeviceClaims(pod), a.GetName()) {
			return authorizer.DecisionAllow, "", nil
		}
	}
	return authorizer.DecisionNoOpinion, fmt.Sprintf("no pod bound to node %s uses it", node), nil
}

// DeviceClaims are the names of the pod's claims of devices, as far as they have
// been made.
func DeviceClaims(pod *corev1.Pod) []string {
	var out []string
	for name := range resourceclaim.PodClaims(pod) {
		out = append(out, name)
	}
	return out
}

// ownSlice lets a node have the slices that name it. Whether one that is to be
// created, or is among several that are deleted, does so, noderestriction looks at.
func (z *NodeAuthorizer) ownSlice(ctx context.Context, node string, a authorizer.Attributes) (authorizer.Decision, string, error) {
	switch a.GetVerb() {
	case "create":
		return authorizer.DecisionAllow, "", nil
	case "list", "watch", "deletecollection":
		if selected(a, resourcev1.ResourceSliceSelectorNodeName) == node {
			return authorizer.DecisionAllow, "", nil
		}
		return authorizer.DecisionNoOpinion, "a node may only list, watch and delete resourceslices with field selector spec.nodeName=" + node, nil
	case "get", "update", "patch", "delete":
		found, err := z.pods.ResourceSlice(ctx, a.GetName())
		switch {
		case apierrors.IsNotFound(err):
			return authorizer.DecisionNoOpinion, fmt.Sprintf("node %s has no resourceslice by that name", node), nil
		case err != nil:
			return authorizer.DecisionNoOpinion, "", err
		case found.Spec.NodeName == nil || *found.Spec.NodeName != node:
			return authorizer.DecisionNoOpinion, "it is of another node", nil
		}
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionNoOpinion, "", nil
}
