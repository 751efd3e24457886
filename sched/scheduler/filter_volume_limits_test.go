package scheduler

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/volumes"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// TestDriversLimitNodes has a driver that takes one volume on node a, and tells
// how much room it has.
func TestDriversLimitNodes(t *testing.T) {
	const driver = "disks.example.com"
	claim := func(name, volume, size string) *corev1.PersistentVolumeClaim {
		c := &corev1.PersistentVolumeClaim{
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: schedtest.Namespace, Annotations: map[string]string{}},
			Spec: corev1.PersistentVolumeClaimSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: ptr.To("k"), VolumeName: volume,
				Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse(size)}},
			},
		}
		if volume != "" {
			c.Annotations[volumes.BindCompleted], c.Status.Phase = "yes", corev1.ClaimBound
		}
		return c
	}
	volume := func(name string) *corev1.PersistentVolume {
		return &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: name}},
		}}
	}
	room := func(node, capacity string, most *resource.Quantity) *storagev1.CSIStorageCapacity {
		return &storagev1.CSIStorageCapacity{
			ObjectMeta: metav1.ObjectMeta{Name: "at-" + node, Namespace: "x"}, StorageClassName: "k", MaximumVolumeSize: most,
			NodeTopology: &metav1.LabelSelector{MatchLabels: map[string]string{"disk": node}}, Capacity: ptr.To(resource.MustParse(capacity)),
		}
	}
	one := &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: driver, NodeID: "a", Allocatable: &storagev1.VolumeNodeResources{Count: ptr.To(int32(1))}}}}}
	tells := &storagev1.CSIDriver{ObjectMeta: metav1.ObjectMeta{Name: driver}, Spec: storagev1.CSIDriverSpec{StorageCapacity: ptr.To(true)}}
	const full, small = "1 node(s) exceed max volume count", "node(s) did not have enough free storage"
	for name, c := range map[string]struct {
		csiNode *storagev1.CSINode
		driver  *storagev1.CSIDriver
		rooms   []*storagev1.CSIStorageCapacity
		claims  []*corev1.PersistentVolumeClaim // "c" is the pod's, "o" that of a pod on a
		fit     string
		why     string
	}{
		"nothing is told":                 {claims: []*corev1.PersistentVolumeClaim{claim("c", "v1", "1Gi"), claim("o", "v2", "1Gi")}, fit: "a b"},
		"it is the first":                 {csiNode: one, claims: []*corev1.PersistentVolumeClaim{claim("c", "v1", "1Gi")}, fit: "a b"},
		"it is the second":                {csiNode: one, claims: []*corev1.PersistentVolumeClaim{claim("c", "v1", "1Gi"), claim("o", "v2", "1Gi")}, fit: "b", why: full},
		"it is the second, to be made":    {csiNode: one, claims: []*corev1.PersistentVolumeClaim{claim("c", "", "1Gi"), claim("o", "v2", "1Gi")}, fit: "b", why: full},
		"it is there already":             {csiNode: one, claims: []*corev1.PersistentVolumeClaim{claim("c", "v1", "1Gi"), claim("o", "v1", "1Gi")}, fit: "a b"},
		"no room is told of":              {driver: tells, claims: []*corev1.PersistentVolumeClaim{claim("c", "", "1Gi")}, why: "2 " + small},
		"there is room on one":            {driver: tells, rooms: []*storagev1.CSIStorageCapacity{room("a", "512Mi", nil), room("b", "4Gi", nil)}, claims: []*corev1.PersistentVolumeClaim{claim("c", "", "1Gi")}, fit: "b", why: "1 " + small},
		"it is too large for one volume":  {driver: tells, rooms: []*storagev1.CSIStorageCapacity{room("a", "4Gi", nil), room("b", "4Gi", ptr.To(resource.MustParse("512Mi")))}, claims: []*corev1.PersistentVolumeClaim{claim("c", "", "1Gi")}, fit: "a", why: "1 " + small},
		"it is bound, room is no matter":  {driver: tells, claims: []*corev1.PersistentVolumeClaim{claim("c", "v1", "1Gi")}, fit: "a b"},
		"room counts if the driver tells": {rooms: []*storagev1.CSIStorageCapacity{room("a", "1Mi", nil)}, claims: []*corev1.PersistentVolumeClaim{claim("c", "", "1Gi")}, fit: "a b"},
	} {
		t.Run(name, func(t *testing.T) {
			factory := informers.NewSharedInformerFactory(fake.NewSimpleClientset(), 0)
			core, storage := factory.Core().V1(), factory.Storage().V1()
			mode := storagev1.VolumeBindingWaitForFirstConsumer
			errs := []error{
				add(c.csiNode, storage.CSINodes().Informer().GetStore().Add), add(c.driver, storage.CSIDrivers().Informer().GetStore().Add),
				add(&storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "k"}, Provisioner: driver, VolumeBindingMode: &mode}, storage.StorageClasses().Informer().GetStore().Add),
				add(volume("v1"), core.PersistentVolumes().Informer().GetStore().Add), add(volume("v2"), core.PersistentVolumes().Informer().GetStore().Add),
			}
			for _, r := range c.rooms {
				errs = append(errs, add(r, storage.CSIStorageCapacities().Informer().GetStore().Add))
			}
			for _, pvc := range c.claims {
				errs = append(errs, add(pvc, core.PersistentVolumeClaims().Informer().GetStore().Add))
			}
			for _, err := range errs {
				if err != nil {
					t.Fatal(err)
				}
			}
			user := func(name, claim string) *schedtest.PodBuilder {
				p := schedtest.Pod(name)
				p.P.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}}
				return p
			}
			s := world([]*schedtest.NodeBuilder{schedtest.Node("a").Label("disk", "a"), schedtest.Node("b").Label("disk", "b")}, user("other", "o").On("a"))
			s.storage = &storageView{
				claims: core.PersistentVolumeClaims().Lister(), volumes: core.PersistentVolumes().Lister(), classes: storage.StorageClasses().Lister(),
				csiNodes: storage.CSINodes().Lister(), csiDrivers: storage.CSIDrivers().Lister(), capacities: storage.CSIStorageCapacities().Lister(),
			}
			v := runFilters(s, newPodInfo(user("p", "c").Obj()))
			var fit []string
			for _, name := range []string{"a", "b"} {
				for _, n := range v.fit {
					if n.name == name {
						fit = append(fit, name)
					}
				}
			}
			if strings.Join(fit, " ") != c.fit || c.why != "" && !strings.Contains(v.explain(), c.why) {
				t.Errorf("fits %v, want %q; %s, want %s", fit, c.fit, v.explain(), c.why)
			}
		})
	}
}
