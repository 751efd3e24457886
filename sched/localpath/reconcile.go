package localpath

import (
	"fmt"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/apis/storage"
	"github.com/clusterd/clusterd/sched/internal/volumes"
)

// refusal says why no volume can be made for a claim as it is.
func refusal(claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass) string {
	spec := &claim.Spec
	switch {
	case !volumes.Waits(class):
		return fmt.Sprintf("storage class %q has volumeBindingMode Immediate: a folder needs a node, make a class with WaitForFirstConsumer", class.Name)
	case ptr.Deref(spec.VolumeMode, corev1.PersistentVolumeFilesystem) != corev1.PersistentVolumeFilesystem:
		return "volumeMode Block is not supported: a folder is no block device"
	case spec.Selector != nil:
		return "spec.selector is not supported for volumes that are made for a claim"
	case spec.DataSource != nil || spec.DataSourceRef != nil:
		return "spec.dataSource is not supported: a new folder is empty"
	}
	for _, mode := range spec.AccessModes {
		if mode != corev1.ReadWriteOnce && mode != corev1.ReadWriteOncePod {
			return fmt.Sprintf("access mode %s is not supported: a folder is on one node, ask for ReadWriteOnce or ReadWriteOncePod", mode)
		}
	}
	for name := range class.Parameters {
		return fmt.Sprintf("storage class %q has parameter %q: there are none", class.Name, name)
	}
	return ""
}

// newVolume is the volume for the claim on the node whose directory is dir. Its
// name follows from the claim's UID: a second attempt makes no second volume,
// and no text of a user gets into a path.
func newVolume(claim *corev1.PersistentVolumeClaim, class *storagev1.StorageClass, node *corev1.Node, dir string) *corev1.PersistentVolume {
	name := "pvc-" + string(claim.UID)
	return &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{
			Name:        name,
			Labels:      map[string]string{names.LocalPathNode: node.Name},
			Annotations: map[string]string{volumes.ProvisionedBy: names.LocalPathProvisioner},
			Finalizers:  []string{names.LocalPathFinalizer},
		},
		Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeSource:        corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: filepath.Join(dir, name)}},
			Capacity:                      corev1.ResourceList{corev1.ResourceStorage: claim.Spec.Resources.Requests[corev1.ResourceStorage]},
			AccessModes:                   claim.Spec.AccessModes,
			PersistentVolumeReclaimPolicy: ptr.Deref(class.ReclaimPolicy, corev1.PersistentVolumeReclaimDelete),
			StorageClassName:              class.Name,
			VolumeMode:                    ptr.To(corev1.PersistentVolumeFilesystem),
			ClaimRef: &corev1.ObjectReference{
				APIVersion: "v1", Kind: "PersistentVolumeClaim", Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
			},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{
					Key: corev1.LabelHostname, Operator: corev1.NodeSelectorOpIn, Values: []string{node.Labels[corev1.LabelHostname]},
				}},
			}}}},
		},
	}
}

// defaultClass is the class that a cluster begins with.
func defaultClass() *storagev1.StorageClass {
	return &storagev1.StorageClass{
		ObjectMeta:           metav1.ObjectMeta{Name: "local-path", Annotations: map[string]string{storage.DefaultClass: "true"}},
		Provisioner:          names.LocalPathProvisioner,
		ReclaimPolicy:        ptr.To(corev1.PersistentVolumeReclaimDelete),
		VolumeBindingMode:    ptr.To(storagev1.VolumeBindingWaitForFirstConsumer),
		AllowVolumeExpansion: ptr.To(true),
	}
}
