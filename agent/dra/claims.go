package dra

import (
	"context"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/ptr"
)

// wanted is a claim of a pod, by name.
type wanted struct {
	name string
	// made: it was made for this pod from a template, which its owner says.
	made bool
}

// wantedBy are the claims of a pod. Of a template that made none, there is none.
func wantedBy(pod *v1.Pod) ([]wanted, error) {
	var out []wanted
	for i := range pod.Spec.ResourceClaims {
		name, made, err := resourceclaim.Name(pod, &pod.Spec.ResourceClaims[i])
		if err != nil {
			return nil, fmt.Errorf("claim %s of the pod: %w: the leader makes it of ResourceClaimTemplate %q", pod.Spec.ResourceClaims[i].Name, err, ptr.Deref(pod.Spec.ResourceClaims[i].ResourceClaimTemplateName, ""))
		}
		if name != nil {
			out = append(out, wanted{*name, made})
		}
	}
	if e := pod.Status.ExtendedResourceClaimStatus; e != nil {
		out = append(out, wanted{e.ResourceClaimName, true})
	}
	return out, nil
}

// fetch reads a claim from the API and looks whether the pod may use it here.
func (m *Manager) fetch(ctx context.Context, pod *v1.Pod, w wanted) (*resourcev1.ResourceClaim, error) {
	claim, err := m.cfg.Client.ResourceV1().ResourceClaims(pod.Namespace).Get(ctx, w.name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) || apierrors.IsForbidden(err) {
		return nil, fmt.Errorf("ResourceClaim %s: %w", w.name, err)
	}
	if err != nil {
		return nil, fmt.Errorf("read ResourceClaim %s: %w", w.name, err)
	}
	if err := mayUse(pod, w, claim, m.cfg.Node()); err != nil {
		return nil, err
	}
	return claim, nil
}

// mayUse says why the pod may not use the claim on the node.
func mayUse(pod *v1.Pod, w wanted, claim *resourcev1.ResourceClaim, node *v1.Node) error {
	switch {
	case w.made && !metav1.IsControlledBy(claim, pod):
		return fmt.Errorf("ResourceClaim %s was not made for this pod: its controller in metadata.ownerReferences is not the pod's UID %s", claim.Name, pod.UID)
	case claim.Status.Allocation == nil:
		return fmt.Errorf("ResourceClaim %s is not allocated (status.allocation is not set): the scheduler allocates claims before it binds a pod; one that is bound by hand needs an allocated claim", claim.Name)
	case !resourceclaim.IsReservedForPod(pod, claim, false):
		return fmt.Errorf("ResourceClaim %s is not reserved for this pod: its UID %s is not in status.reservedFor", claim.Name, pod.UID)
	}
	at := claim.Status.Allocation.NodeSelector
	if at == nil {
		return nil
	}
	selector, err := nodeaffinity.NewNodeSelector(at)
	if err != nil {
		return fmt.Errorf("ResourceClaim %s: status.allocation.nodeSelector: %w", claim.Name, err)
	}
	if !selector.Match(node) {
		return fmt.Errorf("ResourceClaim %s is allocated for other nodes: status.allocation.nodeSelector does not match node %s", claim.Name, node.Name)
	}
	return nil
}

// newRecord is what has to be done for an allocated claim.
func newRecord(claim *resourcev1.ResourceClaim) *record {
	r := &record{Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID, Drivers: map[string]share{}}
	prepare, unprepare := map[string]bool{}, map[string]bool{}
	for _, d := range claim.Status.Allocation.Devices.Results {
		s := r.Drivers[d.Driver]
		if (d.AdminAccess == nil || !*d.AdminAccess) && d.ShareID == nil {
			s.Allocated = append(s.Allocated, d.Pool+"/"+d.Device)
		}
		r.Drivers[d.Driver] = s
		all := slices.Contains(d.SkipNodeOperations, resourcev1.SkipNodeOperationAll)
		prepare[d.Driver] = prepare[d.Driver] || !all && !slices.Contains(d.SkipNodeOperations, resourcev1.SkipNodeOperationNodePrepareResources)
		unprepare[d.Driver] = unprepare[d.Driver] || !all && !slices.Contains(d.SkipNodeOperations, resourcev1.SkipNodeOperationNodeUnprepareResources)
	}
	for name, s := range r.Drivers {
		s.Prepared, s.Unprepares = !prepare[name], unprepare[name]
		r.Drivers[name] = s
	}
	return r
}

// taken says which device of a claim is still prepared for another one: that
// claim was given up in the API before this node had taken it back.
func (m *Manager) taken(r *record) error {
	for _, other := range m.of(func(o *record) bool { return o.UID != r.UID }) {
		for name, s := range r.Drivers {
			for _, d := range s.Allocated {
				if slices.Contains(other.Drivers[name].Allocated, d) {
					return fmt.Errorf("ResourceClaim %s: device %s of driver %s is still prepared for ResourceClaim %s/%s: it is waited until that one is taken back", r.Name, d, name, other.Namespace, other.Name)
				}
			}
		}
	}
	return nil
}

// byName is the record of a claim of that name; one of another UID is of a claim
// that was deleted.
func (m *Manager) byName(namespace, name string) *record {
	for _, r := range m.of(func(r *record) bool { return r.Namespace == namespace && r.Name == name }) {
		return r
	}
	return nil
}

// has reports whether the pod is on a record.
func has(r *record, pod types.UID) bool { return r != nil && slices.Contains(r.Pods, pod) }
