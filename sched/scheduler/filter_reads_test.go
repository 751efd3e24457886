package scheduler

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/volumes"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// elsewhere is what of a Node is in none of nodeParts.
const elsewhere change = 0

// otherwise changes one part of a Node, each time in another way until it returns
// false.
func otherwise(part change, n *corev1.Node, way int) bool {
	switch part {
	case nodeSpec:
		switch way {
		case 0:
			n.Spec.Unschedulable = !n.Spec.Unschedulable
		case 1:
			n.Spec.Taints = append(slices.Clone(n.Spec.Taints), corev1.Taint{Key: "more", Effect: corev1.TaintEffectNoSchedule})
		case 2:
			n.Spec.Taints = nil
		}
		return way <= 2
	case nodeLabels:
		n.Labels = maps.Clone(n.Labels)
		switch way {
		case 0:
			n.Labels = map[string]string{"other": "yes"}
		case 1:
			n.Labels["disk"], n.Labels["zone"] = "ssd", "1"
		case 2:
			n.Labels["zone"] = "2"
		}
		return way <= 2
	case nodeAllocatable:
		n.Status.Allocatable = corev1.ResourceList{corev1.ResourcePods: resource.MustParse("9"), corev1.ResourceCPU: resource.MustParse([]string{"1m", "900"}[way%2])}
		return way <= 1
	}
	was := n.DeepCopy()
	fill(reflect.ValueOf(n).Elem())
	n.Name, n.Labels, n.Spec.Taints, n.Spec.Unschedulable, n.Status.Allocatable, n.DeletionTimestamp = was.Name, was.Labels, was.Spec.Taints, was.Spec.Unschedulable, was.Status.Allocatable, nil
	return way == 0
}

// fill sets every field that has no value, those of fields too.
func fill(v reflect.Value) {
	if !v.CanSet() {
		return
	}
	switch v.Kind() {
	case reflect.String:
		v.SetString("filled")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int32, reflect.Int64:
		v.SetInt(7)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0))
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key)
		fill(value)
		v.SetMapIndex(key, value)
	case reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i))
		}
	}
}

// reading is a pod before nodes where a rule has something to say.
type reading struct {
	nodes  []*schedtest.NodeBuilder
	placed []*schedtest.PodBuilder
	pod    *schedtest.PodBuilder
	more   func(*snapshot) // volumes and devices
}

// readings are such that each rule refuses a node in one of them, and that each part
// of a Node that a rule looks at decides in one.
func readings(t *testing.T) []reading {
	node, pod := schedtest.Node, schedtest.Pod
	nodes := func(n ...*schedtest.NodeBuilder) []*schedtest.NodeBuilder { return n }
	pods := func(p ...*schedtest.PodBuilder) []*schedtest.PodBuilder { return p }
	three := func() []*schedtest.NodeBuilder {
		return nodes(node("a").Label("zone", "1").Label("disk", "ssd"), node("b").Label("zone", "1"), node("c").Label("zone", "2").Taint("k", "v", corev1.TaintEffectNoSchedule))
	}
	honours := pod("p").Label("app", "x").Spread("zone", 1, corev1.DoNotSchedule, "app", "x")
	honours.P.Spec.TopologySpreadConstraints[0].NodeTaintsPolicy = ptr.To(corev1.NodeInclusionPolicyHonor)
	uses := func(p *schedtest.PodBuilder, claim string) *schedtest.PodBuilder {
		p.P.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: claim}}}}
		return p
	}
	zoned := sliceOf("", deviceList(device("x", 1, 0)), func(s *resourcev1.ResourceSliceSpec) {
		s.NodeName, s.Pool.Name = nil, "net"
		s.NodeSelector = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "zone", Operator: corev1.NodeSelectorOpIn, Values: []string{"1"}}}}}}
	})
	return []reading{
		{nodes: nodes(node("a").Cordon(), node("b")), pod: pod("p")},
		{nodes: three(), pod: pod("p").Select("disk", "ssd")},
		{nodes: nodes(node("a").Has("cpu", "2"), node("b").Has("cpu", "500m")), pod: pod("p").CPU("1")},
		{nodes: three(), placed: pods(pod("x").On("a").HostPort(80)), pod: pod("p").HostPort(80)},
		{nodes: three(), placed: pods(pod("x").On("a").Label("app", "x")), pod: pod("p").Apart("zone", "app", "x")},
		{nodes: three(), placed: pods(pod("x").On("a").Label("app", "x")), pod: pod("p").Together("zone", "app", "x")},
		{nodes: append(three(), node("d").Label("zone", "3")), placed: pods(pod("x").On("a").Label("app", "x"), pod("y").On("b").Label("app", "x")), pod: honours},
		{nodes: three(), placed: pods(uses(pod("other"), "alone").On("a")), pod: uses(pod("p"), "alone"), more: withClaims(t)},
		{nodes: three(), pod: uses(pod("p"), "there"), more: withClaims(t)},
		{nodes: three(), placed: pods(uses(pod("other"), "first").On("a")), pod: uses(pod("p"), "second"), more: withClaims(t)},
		{nodes: three(), pod: asks(pod("p"), "q"), more: func(s *snapshot) { withDevices(t, s, classOf("c"), zoned, claimOf("q", exactly("r", 1))) }},
	}
}

// withClaims gives a snapshot the claim "alone", which is for one pod, "there", whose
// volume is on nodes with SSDs, and two of a driver that takes one volume on node a.
func withClaims(t *testing.T) func(*snapshot) {
	factory := informers.NewSharedInformerFactory(fake.NewSimpleClientset(), 0)
	core, storage := factory.Core().V1(), factory.Storage().V1()
	const driver = "disks.example.com"
	for name, change := range map[string]func(*corev1.PersistentVolumeClaim, *corev1.PersistentVolume){
		"alone": func(c *corev1.PersistentVolumeClaim, _ *corev1.PersistentVolume) {
			c.Spec.AccessModes = []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOncePod}
		},
		"there": func(_ *corev1.PersistentVolumeClaim, v *corev1.PersistentVolume) {
			v.Spec.NodeAffinity = &corev1.VolumeNodeAffinity{Required: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
				MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "disk", Operator: corev1.NodeSelectorOpIn, Values: []string{"ssd"}}},
			}}}}
		},
		"first":  func(*corev1.PersistentVolumeClaim, *corev1.PersistentVolume) {},
		"second": func(*corev1.PersistentVolumeClaim, *corev1.PersistentVolume) {},
	} {
		c := &corev1.PersistentVolumeClaim{
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: schedtest.Namespace, Annotations: map[string]string{volumes.BindCompleted: "yes"}},
			Spec:       corev1.PersistentVolumeClaimSpec{AccessModes: []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}, VolumeName: name},
			Status:     corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimBound},
		}
		v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PersistentVolumeSpec{
			PersistentVolumeSource: corev1.PersistentVolumeSource{CSI: &corev1.CSIPersistentVolumeSource{Driver: driver, VolumeHandle: name}},
		}}
		change(c, v)
		for _, err := range []error{add(c, core.PersistentVolumeClaims().Informer().GetStore().Add), add(v, core.PersistentVolumes().Informer().GetStore().Add)} {
			if err != nil {
				t.Fatal(err)
			}
		}
	}
	one := &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{{Name: driver, NodeID: "a", Allocatable: &storagev1.VolumeNodeResources{Count: ptr.To(int32(1))}}}}}
	if err := add(one, storage.CSINodes().Informer().GetStore().Add); err != nil {
		t.Fatal(err)
	}
	return func(s *snapshot) {
		s.storage = &storageView{
			claims: core.PersistentVolumeClaims().Lister(), volumes: core.PersistentVolumes().Lister(), classes: storage.StorageClasses().Lister(),
			csiNodes: storage.CSINodes().Lister(), csiDrivers: storage.CSIDrivers().Lister(), capacities: storage.CSIStorageCapacities().Lister(),
		}
	}
}

// says is what a rule says of each node, in the order of the nodes; nil: nothing, as
// the rule does not concern the pod. change, if not nil, is made to one node before.
func (r reading) says(t *testing.T, f *Filter, at int, change func(*corev1.Node)) []string {
	t.Helper()
	s := newSnapshot()
	for i, b := range r.nodes {
		n := b.Obj().DeepCopy()
		if i == at && change != nil {
			change(n)
		}
		s.setNode(n)
	}
	for _, b := range r.placed {
		s.setPod(b.Obj())
	}
	p := newPodInfo(r.pod.Obj())
	if r.more != nil {
		r.more(s)
	}
	var blocked string
	if p.storage, blocked, _ = s.storage.need(s, p.pod); blocked != "" {
		t.Fatal(blocked)
	}
	if p.devices, blocked = s.devices.need(s, p); blocked != "" {
		t.Fatal(blocked)
	}
	check := f.prepare(s, p)
	if check == nil {
		return nil
	}
	says := []string{}
	for _, b := range r.nodes {
		says = append(says, fmt.Sprint(check(s.nodes[b.Obj().Name])))
	}
	return says
}

// readBy finds the parts of a Node on which the words of a rule depend, and whether it
// refuses any node at all.
func readBy(t *testing.T, f *Filter) (parts change, other, refuses bool) {
	t.Helper()
	all := []change{elsewhere}
	for _, p := range nodeParts {
		all = append(all, p.change)
	}
	for _, r := range readings(t) {
		plain := r.says(t, f, 0, nil)
		for _, words := range plain {
			refuses = refuses || words != "[]"
		}
		for _, part := range all {
			for at := range r.nodes {
				for way := 0; ; way++ {
					more := true
					says := r.says(t, f, at, func(n *corev1.Node) { more = otherwise(part, n, way) })
					if !more {
						break
					}
					if !slices.Equal(says, plain) {
						parts |= part
						other = other || part == elsewhere
					}
				}
			}
		}
	}
	return parts, other, refuses
}

// TestFiltersReadWhatTheyDeclare: a rule's words depend on the parts of a Node that it
// declares, and on no others. A pod that was refused waits for a change of one of
// those: with a part missing it would wait for good. (The rule of spread looked at
// taints, and no change of them woke its pods.)
func TestFiltersReadWhatTheyDeclare(t *testing.T) {
	for i := range filters {
		f := &filters[i]
		parts, other, refuses := readBy(t, f)
		if !refuses {
			t.Errorf("%s refuses nothing: add a reading in which it does", f.Name)
		}
		if parts != f.reads {
			t.Errorf("%s reads the parts %b of a Node and declares %b", f.Name, parts, f.reads)
		}
		if other {
			t.Errorf("%s reads what is in none of nodeParts: add it there", f.Name)
		}
	}
	// What is found of rules that declare nothing.
	for name, tt := range map[string]struct {
		refuses func(*nodeInfo) bool
		parts   change
		other   bool
	}{
		"taints":      {refuses: func(n *nodeInfo) bool { return len(n.node.Spec.Taints) > 0 }, parts: nodeSpec},
		"the zone":    {refuses: func(n *nodeInfo) bool { return n.labels()["zone"] == "2" }, parts: nodeLabels},
		"room":        {refuses: func(n *nodeInfo) bool { return n.allocatable.cpu < 1000 }, parts: nodeAllocatable},
		"the kernel":  {refuses: func(n *nodeInfo) bool { return n.node.Status.NodeInfo.KernelVersion == "" }, other: true},
		"annotations": {refuses: func(n *nodeInfo) bool { return len(n.node.Annotations) == 0 }, other: true},
	} {
		parts, other, refuses := readBy(t, &Filter{Name: name, prepare: func(*snapshot, *podInfo) func(*nodeInfo) []string {
			return func(n *nodeInfo) []string {
				if tt.refuses(n) {
					return []string{name}
				}
				return nil
			}
		}})
		if parts != tt.parts || other != tt.other || !refuses {
			t.Errorf("of a rule on %s it is found that it reads %b (other parts: %t) and refuses: %t", name, parts, other, refuses)
		}
	}
}
