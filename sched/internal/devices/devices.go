// Package devices answers what taints the devices of ResourceSlices have, by
// their drivers and by DeviceTaintRules.
package devices

import (
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/utils/ptr"
)

// ID names a device.
type ID struct{ Driver, Pool, Device string }

// Of names the device of an allocation's result.
func Of(r *resourcev1.DeviceRequestAllocationResult) ID { return ID{r.Driver, r.Pool, r.Device} }

// Selects reports whether the selector of a rule is of the device. None selects
// nothing, an empty one all.
func Selects(s *resourcev1.DeviceTaintSelector, id ID) bool {
	return s != nil && ptr.Deref(s.Driver, id.Driver) == id.Driver && ptr.Deref(s.Pool, id.Pool) == id.Pool && ptr.Deref(s.Device, id.Device) == id.Device
}

// Tainted is the slice with the taints of the rules that select its devices; the
// slice itself if none does.
func Tainted(slice *resourcev1.ResourceSlice, rules []*resourcev1.DeviceTaintRule) *resourcev1.ResourceSlice {
	out := slice
	for _, rule := range rules {
		for i := range slice.Spec.Devices {
			if !Selects(rule.Spec.DeviceSelector, ID{slice.Spec.Driver, slice.Spec.Pool.Name, slice.Spec.Devices[i].Name}) {
				continue
			}
			if out == slice {
				out = slice.DeepCopy()
			}
			out.Spec.Devices[i].Taints = append(out.Spec.Devices[i].Taints, rule.Spec.Taint)
		}
	}
	return out
}
