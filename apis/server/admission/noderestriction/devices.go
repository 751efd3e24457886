package noderestriction

import (
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/utils/ptr"
)

// slice lets a node create and delete what is offered on itself alone. What it
// changes, the authorizer has looked at: spec.nodeName never changes.
func slice(node string, a admission.Attributes) error {
	object := a.GetObject()
	switch a.GetOperation() {
	case admission.Create:
	case admission.Delete:
		object = a.GetOldObject()
	default:
		return nil
	}
	obj, ok := object.(*resourcev1.ResourceSlice)
	if !ok {
		return refuse(a, "unexpected type %T", object)
	}
	if ptr.Deref(obj.Spec.NodeName, "") != node {
		return refuse(a, "node %q can only create and delete resourceslices with spec.nodeName set to itself", node)
	}
	return nil
}

// sameClaims refuses that a node says of its pod that it has other claims: by
// their names it may read them.
func sameClaims(node string, old, obj *corev1.PodStatus, a admission.Attributes) error {
	if !equality.Semantic.DeepEqual(old.ResourceClaimStatuses, obj.ResourceClaimStatuses) ||
		!equality.Semantic.DeepEqual(old.ExtendedResourceClaimStatus, obj.ExtendedResourceClaimStatus) ||
		!equality.Semantic.DeepEqual(old.NodeAllocatableResourceClaimStatuses, obj.NodeAllocatableResourceClaimStatuses) {
		return refuse(a, "node %q cannot update the claims of devices in a pod's status", node)
	}
	return nil
}
