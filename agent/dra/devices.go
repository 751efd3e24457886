package dra

import (
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
)

// Resource is a device of a claim that a container has.
type Resource struct {
	ClaimNamespace, ClaimName string
	Driver, Pool, Device      string
	Share                     string   // of a device that several claims have parts of
	CDI                       []string // "vendor.com/class=name"
}

// request names what a container has of a claim; request is empty: all.
type request struct{ claim, request string }

// requestsOf are those of a container, by the names of the claims' objects.
func requestsOf(pod *v1.Pod, c *v1.Container) ([]request, error) {
	var out []request
	for _, use := range c.Resources.Claims {
		i := slices.IndexFunc(pod.Spec.ResourceClaims, func(p v1.PodResourceClaim) bool { return p.Name == use.Name })
		if i < 0 {
			return nil, fmt.Errorf("resources.claims: %q is none of spec.resourceClaims", use.Name)
		}
		name, _, err := resourceclaim.Name(pod, &pod.Spec.ResourceClaims[i])
		if err != nil {
			return nil, err
		}
		if name != nil {
			out = append(out, request{*name, use.Request})
		}
	}
	if e := pod.Status.ExtendedResourceClaimStatus; e != nil {
		for _, r := range e.RequestMappings {
			if r.ContainerName == c.Name {
				out = append(out, request{e.ResourceClaimName, r.RequestName})
			}
		}
	}
	return out, nil
}

// Resources are the devices of a container, in the order in which it asks for
// them. A claim that is not prepared is an error.
func (m *Manager) Resources(pod *v1.Pod, c *v1.Container) ([]Resource, error) {
	wants, err := requestsOf(pod, c)
	if err != nil {
		return nil, err
	}
	var out []Resource
	for _, w := range wants {
		r := m.byName(pod.Namespace, w.claim)
		if !has(r, pod.UID) || !r.prepared() {
			return nil, fmt.Errorf("ResourceClaim %s is not prepared for this pod", w.claim)
		}
		out = append(out, r.resources(w.request)...)
	}
	return out, nil
}

// resources are the devices of a request of the claim, of all if it is empty.
// The request of a device that was chosen of several is "REQUEST/CHOSEN".
func (r *record) resources(request string) []Resource {
	var out []Resource
	for _, driver := range sortedKeys(r.Drivers) {
		for _, d := range r.Drivers[driver].Devices {
			if request != "" && len(d.Requests) > 0 && !slices.ContainsFunc(d.Requests, func(name string) bool {
				return name == request || resourceclaim.BaseRequestRef(name) == request
			}) {
				continue
			}
			out = append(out, Resource{ClaimNamespace: r.Namespace, ClaimName: r.Name, Driver: driver, Pool: d.Pool, Device: d.Name, Share: d.Share, CDI: d.CDI})
		}
	}
	return out
}

// CDI are the names of the container's devices for the container's runtime, each
// once.
func (m *Manager) CDI(pod *v1.Pod, c *v1.Container) ([]string, error) {
	all, err := m.Resources(pod, c)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, r := range all {
		for _, id := range r.CDI {
			if !slices.Contains(out, id) {
				out = append(out, id)
			}
		}
	}
	return out, nil
}
