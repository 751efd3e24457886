package localpath

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/apis/storage"
	"github.com/clusterd/clusterd/sched/internal/volumes"
)

func claim() *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "..", Namespace: "d", UID: "c1"},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce},
			Resources:   corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("2Gi")}},
		},
	}
}

func TestRefusal(t *testing.T) {
	for name, c := range map[string]struct {
		claim func(*corev1.PersistentVolumeClaim)
		class func(*storagev1.StorageClass)
		want  string
	}{
		"as it should be": {},
		"for one pod":     {claim: func(c *corev1.PersistentVolumeClaim) { c.Spec.AccessModes[0] = corev1.ReadWriteOncePod }},
		"of many nodes":   {claim: func(c *corev1.PersistentVolumeClaim) { c.Spec.AccessModes[0] = corev1.ReadWriteMany }, want: "ReadWriteMany is not supported"},
		"a block device":  {claim: func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeMode = ptr.To(corev1.PersistentVolumeBlock) }, want: "volumeMode Block"},
		"by selector":     {claim: func(c *corev1.PersistentVolumeClaim) { c.Spec.Selector = &metav1.LabelSelector{} }, want: "spec.selector"},
		"of a snapshot":   {claim: func(c *corev1.PersistentVolumeClaim) { c.Spec.DataSource = &corev1.TypedLocalObjectReference{} }, want: "spec.dataSource"},
		"at once":         {class: func(c *storagev1.StorageClass) { c.VolumeBindingMode = ptr.To(storagev1.VolumeBindingImmediate) }, want: "WaitForFirstConsumer"},
		"with parameters": {class: func(c *storagev1.StorageClass) { c.Parameters = map[string]string{"path": "/etc"} }, want: `parameter "path"`},
	} {
		t.Run(name, func(t *testing.T) {
			claim, class := claim(), defaultClass()
			if c.claim != nil {
				c.claim(claim)
			}
			if c.class != nil {
				c.class(class)
			}
			if got := refusal(claim, class); (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
				t.Errorf("refused with %q, want %q", got, c.want)
			}
		})
	}
}

func TestNewVolumeSuitsItsClaimAndNodeOnly(t *testing.T) {
	node := func(name string) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{corev1.LabelHostname: name}}}
	}
	class := defaultClass()
	c := claim()
	c.Spec.StorageClassName = &class.Name
	v := newVolume(c, class, node("n1"), "/data/claims")
	if err := volumes.Satisfies(v, c); err != nil {
		t.Error(err)
	}
	if !volumes.Reaches(v, node("n1")) || volumes.Reaches(v, node("n2")) {
		t.Errorf("node affinity %+v", v.Spec.NodeAffinity)
	}
	if path, ok := storage.LocalPathOf(v, "n1", "/data/claims"); !ok || path != "/data/claims/pvc-c1" {
		t.Errorf("folder %q, %t", path, ok)
	}
	for what, change := range map[string]func(*corev1.PersistentVolume){
		"another node's": func(v *corev1.PersistentVolume) { v.Labels[names.LocalPathNode] = "n2" },
		"another path":   func(v *corev1.PersistentVolume) { v.Spec.Local.Path = "/etc" },
		"upwards":        func(v *corev1.PersistentVolume) { v.Name, v.Spec.Local.Path = "..", "/data" },
		"the top":        func(v *corev1.PersistentVolume) { v.Name, v.Spec.Local.Path = ".", "/data/claims" },
		"no folder":      func(v *corev1.PersistentVolume) { v.Spec.Local = nil },
	} {
		other := v.DeepCopy()
		change(other)
		if path, ok := storage.LocalPathOf(other, "n1", "/data/claims"); ok {
			t.Errorf("%s: %q is taken for its own", what, path)
		}
	}
}
