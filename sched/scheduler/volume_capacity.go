package scheduler

import (
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// room is what is known of how large a volume of a class can be made where.
type room struct {
	selector labels.Selector
	most     *storagev1.CSIStorageCapacity
}

// rooms are those of the class; known is false where its driver does not tell,
// and every node is as good as another.
func (w *storageView) rooms(class *storagev1.StorageClass) (out []room, known bool) {
	if w.csiDrivers == nil || w.capacities == nil {
		return nil, false
	}
	driver, err := w.csiDrivers.Get(class.Provisioner)
	if err != nil || driver.Spec.StorageCapacity == nil || !*driver.Spec.StorageCapacity {
		return nil, false
	}
	all, err := w.capacities.List(labels.Everything())
	if err != nil {
		return nil, false
	}
	for _, c := range all {
		if c.StorageClassName != class.Name || c.NodeTopology == nil {
			continue
		}
		selector, err := metav1.LabelSelectorAsSelector(c.NodeTopology)
		if err != nil {
			continue // validation lets none pass
		}
		out = append(out, room{selector, c})
	}
	return out, true
}

// enough reports whether a volume for the claim can be made for the node, by
// what the driver has told last.
func enough(rooms []room, claim *corev1.PersistentVolumeClaim, node *corev1.Node) bool {
	size := claim.Spec.Resources.Requests[corev1.ResourceStorage]
	for _, r := range rooms {
		most := r.most.MaximumVolumeSize
		if most == nil {
			most = r.most.Capacity
		}
		if most != nil && most.Cmp(size) >= 0 && r.selector.Matches(labels.Set(node.Labels)) {
			return true
		}
	}
	return false
}
