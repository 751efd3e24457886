package scheduler

import (
	"context"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// The allocator says yes or no. Why it said no is found here, by counting what a
// node has for each request: only when the words are read, for it costs as much
// as the search did.

// tally of one way to meet a request, on one node.
type supply struct {
	matching, used, tainted int64
	incomplete              []string // pools that lack slices
}

func (s *supply) free() int64 { return s.matching - s.used - s.tainted }

func (s *supply) String() string {
	out := fmt.Sprintf("%d match, %d in use, %d tainted", s.matching, s.used, s.tainted)
	if len(s.incomplete) > 0 {
		out += ", incomplete: " + strings.Join(s.incomplete, ", ")
	}
	return out
}

// tellApart replaces the placeholder for refusals by the words of each node.
func (d *deviceDemand) tellApart(reasons map[string]int) {
	if reasons[noDevices[0]] == 0 {
		return
	}
	delete(reasons, noDevices[0])
	for i, n := range d.refused {
		if i == explained { // the others are counted without words of their own
			reasons[noDevices[0]] = len(d.refused) - i
			break
		}
		for _, word := range d.words(n, false) {
			reasons[word]++
		}
	}
}

// words says which requests the node cannot meet, with what it has of them if
// that is asked for.
func (d *deviceDemand) words(n *nodeInfo, figures bool) (out []string) {
	claims := d.claimsOn(n)
	for _, claim := range claims {
		for i := range claim.Spec.Devices.Requests {
			r := &claim.Spec.Devices.Requests[i]
			var ways []string
			met := false
			for _, a := range askedOf(r) {
				has := d.view.supply(n.node, &a)
				// Of all, none is as many as there are: what stands in the way is a pool.
				if met = met || a.mode != resourcev1.DeviceAllocationModeAll && has.free() >= a.count; met {
					break
				}
				if a.mode == resourcev1.DeviceAllocationModeAll && has.used+has.tainted == 0 && len(has.incomplete) == 0 && has.matching > 0 {
					met = true
					break
				}
				way := a.String()
				if figures {
					way += " (" + has.String() + ")"
				}
				ways = append(ways, way)
			}
			if !met {
				out = append(out, fmt.Sprintf("node(s) had too few devices for request %q of resourceclaim %q: %s", r.Name, claim.Name, strings.Join(ways, " or ")))
			}
		}
	}
	if len(out) == 0 {
		out = []string{fmt.Sprintf("node(s) cannot give all requests of resourceclaim %s devices at once (constraints, capacity, counters, pools)", quoted(claims))}
	}
	return out
}

// supply counts the devices that the node reaches and that match.
func (v *deviceView) supply(node *corev1.Node, a *asked) (out supply) {
	selectors := a.selectors
	if class, err := v.classes.Get(a.class); err == nil {
		selectors = slices.Concat(class.Spec.Selectors, a.selectors)
	}
	for _, slice := range slices.Concat(v.onNode[node.Name], v.anywhere) {
		spec := &slice.Spec
		perDevice := ptr.Deref(spec.PerDeviceNodeSelection, false)
		if !v.current(slice) || !perDevice && !reaches(node, spec.NodeName, spec.AllNodes, spec.NodeSelector) {
			continue
		}
		p := v.pools[poolID{spec.Driver, spec.Pool.Name}]
		for i := range spec.Devices {
			device := &spec.Devices[i]
			if perDevice && !reaches(node, device.NodeName, device.AllNodes, device.NodeSelector) || !v.matches(spec.Driver, device, selectors) {
				continue
			}
			if !p.complete() {
				if word := fmt.Sprintf("pool %s/%s has %d of %d ResourceSlices", spec.Driver, spec.Pool.Name, p.slices, p.want); !slices.Contains(out.incomplete, word) {
					out.incomplete = append(out.incomplete, word)
				}
				continue
			}
			out.matching++
			switch id := structured.MakeDeviceID(spec.Driver, spec.Pool.Name, device.Name); {
			case !a.admin && v.taken.AllocatedDevices.Has(id):
				out.used++
			case refusing(device.Taints, a.tolerations):
				out.tainted++
			}
		}
	}
	return out
}

// matches reports whether all selectors are of the device. One that cannot be
// evaluated is not: the allocator has reported it.
func (v *deviceView) matches(driver string, device *resourcev1.Device, selectors []resourcev1.DeviceSelector) bool {
	for i := range selectors {
		if selectors[i].CEL == nil {
			return false
		}
		compiled := v.cel.GetOrCompile(selectors[i].CEL.Expression)
		if compiled.Error != nil {
			return false
		}
		ok, _, err := compiled.DeviceMatches(context.Background(), cel.Device{
			Driver: driver, AllowMultipleAllocations: device.AllowMultipleAllocations, Attributes: device.Attributes, Capacity: device.Capacity,
		})
		if err != nil || !ok {
			return false
		}
	}
	return true
}

// refusing reports whether a taint keeps the device from those who do not
// tolerate it.
func refusing(taints []resourcev1.DeviceTaint, tolerations []resourcev1.DeviceToleration) bool {
	return slices.ContainsFunc(taints, func(taint resourcev1.DeviceTaint) bool {
		return (taint.Effect == resourcev1.DeviceTaintEffectNoSchedule || taint.Effect == resourcev1.DeviceTaintEffectNoExecute) &&
			!slices.ContainsFunc(tolerations, func(t resourcev1.DeviceToleration) bool { return resourceclaim.ToleratesTaint(t, taint) })
	})
}

// reaches reports whether devices for such nodes are for this one.
func reaches(node *corev1.Node, name *string, all *bool, selector *corev1.NodeSelector) bool {
	switch {
	case ptr.Deref(name, "") != "":
		return *name == node.Name
	case ptr.Deref(all, false):
		return true
	}
	ok, err := structured.NodeMatches(deviceFeatures, node, ptr.Deref(name, ""), ptr.Deref(all, false), selector)
	return err == nil && ok
}
