package scheduler

import (
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

// TestVolumesChooseNodes looks at which nodes a pod with the claim "c" may get.
func TestVolumesChooseNodes(t *testing.T) {
	claim := func(change ...func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
		c := &corev1.PersistentVolumeClaim{
			ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: schedtest.Namespace, UID: "c1", Annotations: map[string]string{}},
			Spec: corev1.PersistentVolumeClaimSpec{
				AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: ptr.To("k"),
				Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")}},
			},
		}
		for _, f := range change {
			f(c)
		}
		return c
	}
	bound := func(c *corev1.PersistentVolumeClaim) {
		c.Annotations[volumes.BindCompleted], c.Spec.VolumeName, c.Status.Phase = "yes", "v", corev1.ClaimBound
	}
	onB := &corev1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: "v"}, Status: corev1.PersistentVolumeStatus{Phase: corev1.VolumeAvailable},
		Spec: corev1.PersistentVolumeSpec{
			AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, StorageClassName: "k",
			Capacity: corev1.ResourceList{corev1.ResourceStorage: resource.MustParse("1Gi")},
			NodeAffinity: &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "disk", Operator: corev1.NodeSelectorOpIn, Values: []string{"b"}}},
			}}}},
		},
	}
	inZone := func(zones string) *corev1.PersistentVolume {
		v := onB.DeepCopy()
		v.Spec.NodeAffinity, v.Labels = nil, map[string]string{corev1.LabelTopologyZone: zones}
		return v
	}
	class := func(provisioner string, mode storagev1.VolumeBindingMode) *storagev1.StorageClass {
		return &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: "k"}, Provisioner: provisioner, VolumeBindingMode: &mode}
	}
	waits, byHand := class("p", storagev1.VolumeBindingWaitForFirstConsumer), class(volumes.NoProvisioner, storagev1.VolumeBindingWaitForFirstConsumer)
	exclusive := func(c *corev1.PersistentVolumeClaim) { bound(c); c.Spec.AccessModes[0] = corev1.ReadWriteOncePod }
	for name, c := range map[string]struct {
		claim  *corev1.PersistentVolumeClaim
		volume *corev1.PersistentVolume
		class  *storagev1.StorageClass
		used   bool
		fit    string
		why    string
	}{
		"no claim":            {why: `0/2 nodes are available: persistentvolumeclaim "c" not found.`},
		"bound":               {claim: claim(bound), volume: onB, fit: "b"},
		"bound, in a zone":    {claim: claim(bound), volume: inZone("z1"), fit: "b"},
		"bound, in two zones": {claim: claim(bound), volume: inZone("z1__z2"), fit: "a b"},
		"bound, in no zone":   {claim: claim(bound), volume: inZone("z3"), why: "0/2 nodes are available: 2 node(s) had no available volume zone."},
		"its volume is gone":  {claim: claim(bound), why: `0/2 nodes are available: persistentvolumeclaim "c" bound to non-existent persistentvolume "v".`},
		"immediate":           {claim: claim(), class: class("p", storagev1.VolumeBindingImmediate), why: `0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims: "c" has no volume yet.`},
		"a free volume":       {claim: claim(), volume: onB, class: byHand, fit: "b"},
		"none is made":        {claim: claim(), class: byHand, why: "0/2 nodes are available: 2 node(s) didn't find available persistent volumes to bind."},
		"one is made":         {claim: claim(), class: waits, fit: "a b"},
		"one is made, there":  {claim: claim(func(c *corev1.PersistentVolumeClaim) { c.Annotations[volumes.SelectedNode] = "a" }), class: waits, fit: "a"},
		"being deleted":       {claim: claim(bound, func(c *corev1.PersistentVolumeClaim) { c.DeletionTimestamp = ptr.To(metav1.Now()) }), volume: onB, why: `0/2 nodes are available: persistentvolumeclaim "c" is being deleted.`},
		"for one pod":         {claim: claim(exclusive), volume: onB, fit: "b"},
		"for one pod, in use": {claim: claim(exclusive), volume: onB, used: true, why: "0/2 nodes are available: 2 node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod access mode."},
	} {
		t.Run(name, func(t *testing.T) {
			factory := informers.NewSharedInformerFactory(fake.NewSimpleClientset(), 0)
			core, classes := factory.Core().V1(), factory.Storage().V1().StorageClasses()
			for _, err := range []error{
				add(c.claim, core.PersistentVolumeClaims().Informer().GetStore().Add),
				add(c.volume, core.PersistentVolumes().Informer().GetStore().Add),
				add(c.class, classes.Informer().GetStore().Add),
			} {
				if err != nil {
					t.Fatal(err)
				}
			}
			user := func(name string) *schedtest.PodBuilder {
				p := schedtest.Pod(name)
				p.P.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}}}}
				return p
			}
			var placed []*schedtest.PodBuilder
			if c.used {
				placed = append(placed, user("other").On("a"))
			}
			s := world([]*schedtest.NodeBuilder{schedtest.Node("a").Label(corev1.LabelTopologyZone, "z2"), schedtest.Node("b").Label("disk", "b").Label(corev1.LabelFailureDomainBetaZone, "z1")}, placed...)
			s.storage = &storageView{claims: core.PersistentVolumeClaims().Lister(), volumes: core.PersistentVolumes().Lister(), classes: classes.Lister()}
			v := runFilters(s, newPodInfo(user("p").Obj()))
			fit := map[string]bool{}
			for _, n := range v.fit {
				fit[n.name] = true
			}
			if fit["a"] != (c.fit == "a" || c.fit == "a b") || fit["b"] != (c.fit == "b" || c.fit == "a b") {
				t.Errorf("fits %v, want %q; %s", fit, c.fit, v.explain())
			}
			if c.fit == "" && v.explain() != c.why {
				t.Errorf("explains\n%s, want\n%s", v.explain(), c.why)
			}
		})
	}
}

// A pod displaces one of lower priority that uses its claim, which is for one pod. It
// was said that no node could help.
func TestClaimForOnePodIsTakenFromALesserPod(t *testing.T) {
	factory := informers.NewSharedInformerFactory(fake.NewSimpleClientset(), 0)
	core := factory.Core().V1()
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: schedtest.Namespace, Annotations: map[string]string{volumes.BindCompleted: "yes"}},
		Spec:       corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}, VolumeName: "v"},
		Status:     corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound},
	}
	for _, err := range []error{
		add(claim, core.PersistentVolumeClaims().Informer().GetStore().Add),
		add(&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "v"}}, core.PersistentVolumes().Informer().GetStore().Add),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	user := func(name string, priority int32) *schedtest.PodBuilder {
		p := schedtest.Pod(name).Priority(priority)
		p.P.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}}}}
		return p
	}
	for _, tt := range []struct {
		holder int32
		want   string // the node on which it makes room
	}{{1, "b"}, {9, ""}, {20, ""}} {
		s := world([]*schedtest.NodeBuilder{schedtest.Node("a"), schedtest.Node("b"), schedtest.Node("c")},
			schedtest.Pod("a0").On("a").Priority(0), user("holder", tt.holder).On("b"), schedtest.Pod("b0").On("b").Priority(0))
		s.storage = &storageView{claims: core.PersistentVolumeClaims().Lister(), volumes: core.PersistentVolumes().Lister(), classes: factory.Storage().V1().StorageClasses().Lister()}
		p := newPodInfo(user("p", 9).Obj())
		v := runFilters(s, p)
		if len(v.fit) > 0 || v.blocked != "" || v.wokenBy&podGone == 0 {
			t.Fatalf("holder of priority %d: %+v", tt.holder, v)
		}
		c, got := preempt(s, p, nil), ""
		if c != nil {
			got = c.node.name
			if len(c.victims) != 1 || c.victims[0].pod.Name != "holder" {
				t.Errorf("holder of priority %d: %d victims", tt.holder, len(c.victims))
			}
		}
		if got != tt.want {
			t.Errorf("holder of priority %d: room on %q, want %q", tt.holder, got, tt.want)
		}
	}
}

// add puts an object into a store, if there is one.
func add[T any](obj *T, store func(any) error) error {
	if obj == nil {
		return nil
	}
	return store(obj)
}
