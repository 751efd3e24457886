package core

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/check/checktest"
)

func storageList(size string) corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}
}

func TestPersistentVolumeFaults(t *testing.T) {
	k := PersistentVolume()
	base := func() *corev1.PersistentVolume {
		v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "v", ResourceVersion: "1"}, Spec: corev1.PersistentVolumeSpec{
			Capacity: storageList("1Gi"), AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			PersistentVolumeSource: corev1.PersistentVolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/data"}},
		}}
		k.Default(v)
		return v
	}
	for name, test := range map[string]struct {
		change func(*corev1.PersistentVolume)
		want   []string
	}{
		"whole":        {func(*corev1.PersistentVolume) {}, nil},
		"no source":    {func(v *corev1.PersistentVolume) { v.Spec.HostPath = nil }, []string{"spec: Required value: must specify a volume type"}},
		"two sources":  {func(v *corev1.PersistentVolume) { v.Spec.NFS = &corev1.NFSVolumeSource{Server: "s", Path: "/p"} }, []string{"spec.nfs: Forbidden: may not specify more than 1 volume type"}},
		"no capacity":  {func(v *corev1.PersistentVolume) { v.Spec.Capacity = nil }, []string{"spec.capacity: Required value"}},
		"zero":         {func(v *corev1.PersistentVolume) { v.Spec.Capacity = storageList("0") }, []string{`spec.capacity[storage]: Invalid value: "0": must be greater than zero`}},
		"no modes":     {func(v *corev1.PersistentVolume) { v.Spec.AccessModes = nil }, []string{"spec.accessModes: Required value: at least 1 access mode is required"}},
		"unknown mode": {func(v *corev1.PersistentVolume) { v.Spec.AccessModes[0] = "RWO" }, []string{`spec.accessModes: Unsupported value: "RWO"`}},
		"local is far": {func(v *corev1.PersistentVolume) {
			v.Spec.HostPath, v.Spec.Local = nil, &corev1.LocalVolumeSource{Path: "/x"}
		}, []string{"spec.nodeAffinity: Required value: Local volume requires node affinity"}},
		"steps back": {func(v *corev1.PersistentVolume) { v.Spec.HostPath.Path = "/a/../b" }, []string{"spec.hostPath.path: Invalid value"}},
		"recycle root": {func(v *corev1.PersistentVolume) {
			v.Spec.HostPath.Path, v.Spec.PersistentVolumeReclaimPolicy = "/", corev1.PersistentVolumeReclaimRecycle
		}, []string{"spec.persistentVolumeReclaimPolicy: Forbidden: may not be 'recycle'"}},
		"class of none": {func(v *corev1.PersistentVolume) { v.Spec.StorageClassName = "A_b" }, []string{`spec.storageClassName: Invalid value: "A_b"`}},
	} {
		t.Run(name, func(t *testing.T) {
			v := base()
			test.change(v)
			checktest.Faults(t, k.Validate(v), test.want...)
		})
	}
	moved := base()
	moved.Spec.HostPath.Path = "/elsewhere"
	moved.Spec.VolumeMode = ptr.To(corev1.PersistentVolumeBlock)
	checktest.Faults(t, k.ValidateUpdate(moved, base()),
		"spec.persistentvolumesource: Forbidden: spec.persistentvolumesource is immutable after creation",
		"spec.volumeMode: Invalid value")
}

func TestPersistentVolumeClaimFaults(t *testing.T) {
	k := PersistentVolumeClaim()
	base := func(phase corev1.PersistentVolumeClaimPhase) *corev1.PersistentVolumeClaim {
		c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "d", ResourceVersion: "1"}, Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources:   corev1.VolumeResourceRequirements{Requests: storageList("2Gi")},
		}}
		c.Status.Phase = phase
		if phase == corev1.ClaimBound {
			c.Spec.VolumeName, c.Status.Capacity = "v", storageList("2Gi")
		}
		k.Default(c)
		return c
	}
	checktest.Faults(t, k.Validate(base("")))
	bad := base("")
	bad.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod, corev1.ReadOnlyMany}
	bad.Spec.Resources.Requests = nil
	bad.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: "Pod", Name: "p"}
	checktest.Faults(t, k.Validate(bad),
		"spec.accessModes: Forbidden: may not use ReadWriteOncePod with other access modes",
		"spec.resources[storage]: Required value",
		"spec.dataSource: Invalid value: \"Pod\": must be 'PersistentVolumeClaim'")

	const immutable = "spec: Forbidden: spec is immutable after creation"
	for name, test := range map[string]struct {
		phase  corev1.PersistentVolumeClaimPhase
		change func(*corev1.PersistentVolumeClaim)
		want   []string
	}{
		"bound now":           {corev1.ClaimPending, func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "v" }, nil},
		"class given later":   {corev1.ClaimPending, func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = ptr.To("fast") }, nil},
		"grows while pending": {corev1.ClaimPending, func(c *corev1.PersistentVolumeClaim) { c.Spec.Resources.Requests = storageList("3Gi") }, []string{immutable}},
		"grows":               {corev1.ClaimBound, func(c *corev1.PersistentVolumeClaim) { c.Spec.Resources.Requests = storageList("3Gi") }, nil},
		"shrinks":             {corev1.ClaimBound, func(c *corev1.PersistentVolumeClaim) { c.Spec.Resources.Requests = storageList("1Gi") }, []string{"spec.resources.requests.storage: Forbidden: field can not be less than status.capacity"}},
		"another volume":      {corev1.ClaimBound, func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeName = "w" }, []string{immutable}},
		"another class":       {corev1.ClaimBound, func(c *corev1.PersistentVolumeClaim) { c.Spec.StorageClassName = ptr.To("fast") }, []string{immutable}},
		"another mode":        {corev1.ClaimPending, func(c *corev1.PersistentVolumeClaim) { c.Spec.AccessModes[0] = corev1.ReadWriteMany }, []string{immutable}},
	} {
		t.Run(name, func(t *testing.T) {
			c, old := base(test.phase), base(test.phase)
			test.change(c)
			checktest.Faults(t, k.ValidateUpdate(c, old), test.want...)
		})
	}
}
