package storage

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func TestStorageClassFaults(t *testing.T) {
	k := StorageClass()
	base := func() *storagev1.StorageClass {
		c := &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "c", ResourceVersion: "1"}, Provisioner: "example.com/disks", Parameters: map[string]string{"a": "b"}}
		k.Default(c)
		return c
	}
	checktest.Faults(t, k.Validate(base()))
	bad := base()
	bad.Provisioner, bad.ReclaimPolicy = "", ptr.To(corev1.PersistentVolumeReclaimRecycle)
	bad.Parameters[""] = "x"
	bad.AllowedTopologies = []corev1.TopologySelectorTerm{{MatchLabelExpressions: []corev1.TopologySelectorLabelRequirement{{Key: "zone"}}}}
	checktest.Faults(t, k.Validate(bad),
		"provisioner: Required value",
		`reclaimPolicy: Unsupported value: "Recycle"`,
		`parameters: Invalid value: ""`,
		"allowedTopologies[0].matchLabelExpressions[0].values: Required value")
	changed := base()
	changed.Provisioner, changed.Parameters = "example.com/other", nil
	changed.ReclaimPolicy, changed.VolumeBindingMode = ptr.To(corev1.PersistentVolumeReclaimRetain), ptr.To(storagev1.VolumeBindingWaitForFirstConsumer)
	changed.AllowVolumeExpansion = ptr.To(true) // this may change
	checktest.Faults(t, k.ValidateUpdate(changed, base()),
		"provisioner: Forbidden: updates to provisioner are forbidden.",
		"parameters: Forbidden: updates to parameters are forbidden.",
		"reclaimPolicy: Forbidden: updates to reclaimPolicy are forbidden.",
		"volumeBindingMode: Invalid value")
}

func TestVolumeAttachmentFaults(t *testing.T) {
	k := VolumeAttachment()
	checktest.Faults(t, k.Validate(&storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: "a"}}),
		"spec.attacher: Required value", "spec.nodeName: Required value", "spec.source: Required value: must specify exactly one")
}

func TestCSIFaults(t *testing.T) {
	driver := &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: "d"}}
	checktest.Faults(t, CSIDriver().Validate(driver.DeepCopy()),
		"spec.attachRequired: Required value", "spec.podInfoOnMount: Required value", "spec.storageCapacity: Required value")
	CSIDriver().Default(driver)
	checktest.Faults(t, CSIDriver().Validate(driver))

	node := &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{
		{Name: "d", NodeID: "x"}, {Name: "d"},
	}}}
	checktest.Faults(t, CSINode().Validate(node), `spec.drivers[1].name: Duplicate value: "d"`, "spec.drivers[1].nodeID: Required value")

	checktest.Faults(t, CSIStorageCapacity().Validate(&storagev1.CSIStorageCapacity{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "d"}}),
		"storageClassName: Required value")
	checktest.Faults(t, VolumeAttributesClass().Validate(&storagev1.VolumeAttributesClass{ObjectMeta: metav1.ObjectMeta{Name: "c"}, DriverName: "d"}),
		"parameters: Required value: must contain at least one key/value pair")
}
