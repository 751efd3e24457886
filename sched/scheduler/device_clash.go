package scheduler

import (
	"slices"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"
)

// clash names a device of the claim's allocation that another claim has for
// itself, or that is shared beyond what there is; "": there is none. Two leaders
// at once can come to that, as each writes another claim: a pod is bound only
// after its leader has seen that there is no clash.
func (v *deviceView) clash(claim *resourcev1.ResourceClaim, a *resourcev1.AllocationResult) string {
	for i := range a.Devices.Results {
		r := &a.Devices.Results[i]
		id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
		if ptr.Deref(r.AdminAccess, false) {
			continue
		}
		if others := v.holders[id].Len(); others > 1 || others == 1 && !v.holders[id].Has(claim.UID) {
			return id.String()
		}
	}
	if v.refresh() != nil {
		return "" // the cache cannot be read: nothing is allocated by it either
	}
	for i := range a.Devices.Results {
		r := &a.Devices.Results[i]
		if device := v.device(r); device != nil && !ptr.Deref(r.AdminAccess, false) && (v.overCapacity(r, device) || v.overCounters(r, device)) {
			return structured.MakeDeviceID(r.Driver, r.Pool, r.Device).String()
		}
	}
	return ""
}

// device finds the device of a result as its driver offers it now; nil: it does
// not.
func (v *deviceView) device(r *resourcev1.DeviceRequestAllocationResult) *resourcev1.Device {
	for _, slice := range v.slicesOf(r) {
		if i := slices.IndexFunc(slice.Spec.Devices, func(d resourcev1.Device) bool { return d.Name == r.Device }); i >= 0 {
			return &slice.Spec.Devices[i]
		}
	}
	return nil
}

// slicesOf are the current slices of a result's pool.
func (v *deviceView) slicesOf(r *resourcev1.DeviceRequestAllocationResult) (out []*resourcev1.ResourceSlice) {
	for _, slice := range v.offered {
		if slice.Spec.Driver == r.Driver && slice.Spec.Pool.Name == r.Pool && v.current(slice) {
			out = append(out, slice)
		}
	}
	return out
}

// overCapacity reports whether claims share more of the device than it has.
func (v *deviceView) overCapacity(r *resourcev1.DeviceRequestAllocationResult, device *resourcev1.Device) bool {
	if r.ShareID == nil {
		return false
	}
	for name, total := range v.taken.AggregatedCapacity[structured.MakeDeviceID(r.Driver, r.Pool, r.Device)] {
		if capacity, ok := device.Capacity[name]; ok && total.Cmp(capacity.Value) > 0 {
			return true
		}
	}
	return false
}

// overCounters reports whether devices of the pool that are taken use more of a
// counter that this one uses than there is.
func (v *deviceView) overCounters(r *resourcev1.DeviceRequestAllocationResult, device *resourcev1.Device) bool {
	if len(device.ConsumesCounters) == 0 {
		return false
	}
	used, there := map[[2]string]*resource.Quantity{}, map[[2]string]resource.Quantity{}
	for _, slice := range v.slicesOf(r) {
		for _, set := range slice.Spec.SharedCounters {
			for name, counter := range set.Counters {
				there[[2]string{set.Name, name}] = counter.Value
			}
		}
		for i := range slice.Spec.Devices {
			other := &slice.Spec.Devices[i]
			if len(other.ConsumesCounters) == 0 || !structured.IsDeviceAllocated(structured.MakeDeviceID(r.Driver, r.Pool, other.Name), &v.taken) {
				continue
			}
			for _, consumes := range other.ConsumesCounters {
				for name, counter := range consumes.Counters {
					key := [2]string{consumes.CounterSet, name}
					if used[key] == nil {
						used[key] = &resource.Quantity{}
					}
					used[key].Add(counter.Value)
				}
			}
		}
	}
	for _, consumes := range device.ConsumesCounters {
		for name := range consumes.Counters {
			key := [2]string{consumes.CounterSet, name}
			if has, ok := there[key]; ok && used[key] != nil && used[key].Cmp(has) > 0 {
				return true
			}
		}
	}
	return false
}
