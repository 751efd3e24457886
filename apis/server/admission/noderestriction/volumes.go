package noderestriction

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apiserver/pkg/admission"

	"github.com/clusterd/clusterd/apis/server/auth"
)

// csiNode lets a node say which drivers it has, of itself alone.
func csiNode(node string, a admission.Attributes) error {
	name := a.GetName()
	if obj, ok := a.GetObject().(*storagev1.CSINode); ok && name == "" {
		name = obj.Name
	}
	if name != node {
		return refuse(a, "node %q can only access the CSINode with its own name", node)
	}
	return nil
}

// claim lets a node say that a volume has grown: how large it is, and what is
// still to be done. The authorizer has seen that a pod of its uses the claim.
func claim(node string, a admission.Attributes) error {
	old, wasOK := a.GetOldObject().(*corev1.PersistentVolumeClaim)
	obj, ok := a.GetObject().(*corev1.PersistentVolumeClaim)
	if a.GetOperation() != admission.Update || a.GetSubresource() != "status" || !ok || !wasOK {
		return refuse(a, "node %q may only update the status of claims", node)
	}
	was, is := old.DeepCopy(), obj.DeepCopy()
	for _, c := range []*corev1.PersistentVolumeClaim{was, is} {
		c.ManagedFields, c.ResourceVersion, c.Generation = nil, "", 0
		c.Status.Capacity, c.Status.Conditions, c.Status.AllocatedResourceStatuses = nil, nil, nil
	}
	if !equality.Semantic.DeepEqual(was, is) {
		return refuse(a, "node %q may only say of a claim how large its volume is and what of its growth is to be done", node)
	}
	return nil
}

// driverAudiences are those of the tokens that the drivers of the pod's volumes
// are given.
func (p *plugin) driverAudiences(ctx context.Context, pod *corev1.Pod) []string {
	drivers := map[string]bool{}
	for _, v := range pod.Spec.Volumes {
		if v.CSI != nil {
			drivers[v.CSI.Driver] = true
		}
	}
	auth.VolumesOf(ctx, p.objects, pod, func(v *corev1.PersistentVolume) {
		if v.Spec.CSI != nil {
			drivers[v.Spec.CSI.Driver] = true
		}
	})
	var audiences []string
	for name := range drivers {
		d, err := p.objects.CSIDriver(ctx, name)
		if err != nil {
			continue // what is not known allows nothing
		}
		for _, request := range d.Spec.TokenRequests {
			audiences = append(audiences, request.Audience)
		}
	}
	return audiences
}
