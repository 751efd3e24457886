package resource

import (
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// stamp notes when the taint was added, if it does not say so itself.
func stamp(t *resourcev1.DeviceTaint, now metav1.Time) {
	if t.TimeAdded == nil {
		at := now.Rfc3339Copy()
		t.TimeAdded = &at
	}
}

// stampDevices notes when the taints of the slice's devices were added. One that
// the old slice had is as old as there: a driver that writes its devices again,
// without times, does not prolong what claims tolerate.
func stampDevices(s, old *resourcev1.ResourceSlice, now metav1.Time) {
	type key struct {
		device, key, value string
		effect             resourcev1.DeviceTaintEffect
	}
	had := map[key]*metav1.Time{}
	if old != nil {
		for i := range old.Spec.Devices {
			for _, t := range old.Spec.Devices[i].Taints {
				had[key{old.Spec.Devices[i].Name, t.Key, t.Value, t.Effect}] = t.TimeAdded
			}
		}
	}
	for i := range s.Spec.Devices {
		for j := range s.Spec.Devices[i].Taints {
			t := &s.Spec.Devices[i].Taints[j]
			if t.TimeAdded == nil {
				t.TimeAdded = had[key{s.Spec.Devices[i].Name, t.Key, t.Value, t.Effect}].DeepCopy()
			}
			stamp(t, now)
		}
	}
}
