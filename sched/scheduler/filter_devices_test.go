package scheduler

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/schedtest"
)

// sliceOf offers devices of the driver "d" on a node; change may say otherwise.
func sliceOf(node string, devices []resourcev1.Device, change ...func(*resourcev1.ResourceSliceSpec)) *resourcev1.ResourceSlice {
	s := &resourcev1.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "slice-" + node},
		Spec:       resourcev1.ResourceSliceSpec{Driver: "d", NodeName: &node, Pool: resourcev1.ResourcePool{Name: node, ResourceSliceCount: 1}, Devices: slices.Clone(devices)},
	}
	for _, f := range change {
		f(&s.Spec)
	}
	return s
}

// device has the attributes size and numa.
func device(name string, size, numa int64) resourcev1.Device {
	return resourcev1.Device{Name: name, Attributes: map[resourcev1.QualifiedName]resourcev1.DeviceAttribute{"size": {IntValue: &size}, "numa": {IntValue: &numa}}}
}

func deviceList(d ...resourcev1.Device) []resourcev1.Device { return d }

func classOf(name string, expressions ...string) *resourcev1.DeviceClass {
	return &resourcev1.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: resourcev1.DeviceClassSpec{Selectors: selectors(expressions...)}}
}

func selectors(expressions ...string) (out []resourcev1.DeviceSelector) {
	for _, e := range expressions {
		out = append(out, resourcev1.DeviceSelector{CEL: &resourcev1.CELDeviceSelector{Expression: e}})
	}
	return out
}

// exactly asks for n devices of the class "c".
func exactly(name string, n int64, expressions ...string) resourcev1.DeviceRequest {
	return resourcev1.DeviceRequest{Name: name, Exactly: &resourcev1.ExactDeviceRequest{
		DeviceClassName: "c", AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: n, Selectors: selectors(expressions...),
	}}
}

func claimOf(name string, requests ...resourcev1.DeviceRequest) *resourcev1.ResourceClaim {
	return &resourcev1.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: schedtest.Namespace, Name: name, UID: types.UID("uid-" + name), ResourceVersion: "1"},
		Spec:       resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: requests}},
	}
}

// allocated has the claim's first request hold the devices of a node.
func allocated(claim *resourcev1.ResourceClaim, node string, devices ...string) *resourcev1.ResourceClaim {
	a := &resourcev1.AllocationResult{NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{
		MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{node}}},
	}}}}
	for _, d := range devices {
		a.Devices.Results = append(a.Devices.Results, resourcev1.DeviceRequestAllocationResult{Request: claim.Spec.Devices.Requests[0].Name, Driver: "d", Pool: node, Device: d})
	}
	claim.Status.Allocation = a
	return claim
}

// asks has the pod use claims by their names.
func asks(p *schedtest.PodBuilder, claims ...string) *schedtest.PodBuilder {
	for _, name := range claims {
		p.P.Spec.ResourceClaims = append(p.P.Spec.ResourceClaims, corev1.PodResourceClaim{Name: name, ResourceClaimName: ptr.To(name)})
	}
	return p
}

// withDevices gives the snapshot what the objects say.
func withDevices(t *testing.T, s *snapshot, objects ...runtime.Object) *snapshot {
	t.Helper()
	resources := informers.NewSharedInformerFactory(fake.NewSimpleClientset(), 0).Resource().V1()
	s.devices = newDeviceView(resources.DeviceClasses().Lister(), resources.ResourceSlices().Lister(), resources.DeviceTaintRules().Lister())
	for _, obj := range objects {
		var err error
		switch o := obj.(type) {
		case *resourcev1.DeviceClass:
			err = resources.DeviceClasses().Informer().GetStore().Add(o)
		case *resourcev1.ResourceSlice:
			err = resources.ResourceSlices().Informer().GetStore().Add(o)
		case *resourcev1.DeviceTaintRule:
			err = resources.DeviceTaintRules().Informer().GetStore().Add(o)
		case *resourcev1.ResourceClaim:
			s.devices.show(nil, o)
		default:
			t.Fatalf("no place for %T", obj)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// TestDevicesChooseNodes looks at which of the nodes a and b (both of zone 1), and c
// (of zone 2) a pod with the claim "q" may get.
func TestDevicesChooseNodes(t *testing.T) {
	all := deviceList(device("x", 1, 0), device("y", 2, 0), device("z", 2, 1))
	objs := func(o ...runtime.Object) []runtime.Object { return o }
	everyDevice := func(name string) resourcev1.DeviceRequest {
		return resourcev1.DeviceRequest{Name: name, Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: "c", AllocationMode: resourcev1.DeviceAllocationModeAll}}
	}
	change := func(c *resourcev1.ResourceClaim, f func(*resourcev1.ResourceClaim)) *resourcev1.ResourceClaim {
		f(c)
		return c
	}
	admin := func(c *resourcev1.ResourceClaim) { c.Spec.Devices.Requests[0].Exactly.AdminAccess = ptr.To(true) }
	tolerates := func(c *resourcev1.ResourceClaim) {
		c.Spec.Devices.Requests[0].Exactly.Tolerations = []resourcev1.DeviceToleration{{Key: "k", Operator: resourcev1.DeviceTolerationOpExists}}
	}
	rule := func(selector *resourcev1.DeviceTaintSelector, effect resourcev1.DeviceTaintEffect) *resourcev1.DeviceTaintRule {
		return &resourcev1.DeviceTaintRule{ObjectMeta: metav1.ObjectMeta{Name: "r"}, Spec: resourcev1.DeviceTaintRuleSpec{DeviceSelector: selector, Taint: resourcev1.DeviceTaint{Key: "k", Effect: effect}}}
	}
	onZone := func(s *resourcev1.ResourceSliceSpec) {
		s.NodeName, s.Pool.Name = nil, "net"
		s.NodeSelector = &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "zone", Operator: corev1.NodeSelectorOpIn, Values: []string{"1"}}}}}}
	}
	everywhere := func(s *resourcev1.ResourceSliceSpec) { s.NodeName, s.AllNodes, s.Pool.Name = nil, ptr.To(true), "net" }
	ofTwo := func(s *resourcev1.ResourceSliceSpec) { s.Pool.ResourceSliceCount = 2 }
	class := classOf("c")
	either := resourcev1.DeviceRequest{Name: "r", FirstAvailable: []resourcev1.DeviceSubRequest{
		{Name: "big", DeviceClassName: "c", AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: 1, Selectors: selectors(`device.attributes["d"].size > 8`)},
		{Name: "two", DeviceClassName: "c", AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: 2},
	}}
	sameNUMA := func(c *resourcev1.ResourceClaim) {
		c.Spec.Devices.Constraints = []resourcev1.DeviceConstraint{{MatchAttribute: ptr.To(resourcev1.FullyQualifiedName("d/numa"))}}
	}
	halves := func(s *resourcev1.ResourceSliceSpec) { // two devices of which only one can be had at a time
		for i := range s.Devices {
			s.Devices[i].ConsumesCounters = []resourcev1.DeviceCounterConsumption{{CounterSet: "m", Counters: map[string]resourcev1.Counter{"memory": {Value: resource.MustParse("6Gi")}}}}
		}
		s.Pool.ResourceSliceCount = 2
	}
	counters := sliceOf("b", nil, func(s *resourcev1.ResourceSliceSpec) {
		s.Pool.ResourceSliceCount = 2
		s.SharedCounters = []resourcev1.CounterSet{{Name: "m", Counters: map[string]resourcev1.Counter{"memory": {Value: resource.MustParse("8Gi")}}}}
	})
	counters.Name = "counters"
	shared := deviceList(resourcev1.Device{Name: "s", AllowMultipleAllocations: ptr.To(true), Capacity: map[resourcev1.QualifiedName]resourcev1.DeviceCapacity{"memory": {
		Value: resource.MustParse("8Gi"), RequestPolicy: &resourcev1.CapacityRequestPolicy{Default: ptr.To(resource.MustParse("1Gi")), ValidRange: &resourcev1.CapacityRequestPolicyRange{Min: ptr.To(resource.MustParse("1Gi"))}},
	}}})
	memory := func(q string) func(*resourcev1.ResourceClaim) {
		return func(c *resourcev1.ResourceClaim) {
			c.Spec.Devices.Requests[0].Exactly.Capacity = &resourcev1.CapacityRequirements{Requests: map[resourcev1.QualifiedName]resource.Quantity{"memory": resource.MustParse(q)}}
		}
	}
	sharer := allocated(claimOf("other", exactly("r", 1)), "b", "s")
	sharer.Status.Allocation.Devices.Results[0].ShareID = ptr.To(types.UID("share"))
	sharer.Status.Allocation.Devices.Results[0].ConsumedCapacity = map[resourcev1.QualifiedName]resource.Quantity{"memory": resource.MustParse("5Gi")}

	for name, c := range map[string]struct {
		objects []runtime.Object
		labels  map[string]string // of the namespace
		fit     string            // names of nodes, or
		why     string            // the explanation, or its beginning up to "…"
		each    string            // what is said of the node b
	}{
		"no claim":         {why: `0/3 nodes are available: resourceclaim "q" not found.`},
		"no class":         {objects: objs(claimOf("q", exactly("r", 1))), why: `0/3 nodes are available: deviceclass "c" of request "r" of resourceclaim "q" not found.`},
		"being deleted":    {objects: objs(class, change(claimOf("q", exactly("r", 1)), func(c *resourcev1.ResourceClaim) { c.DeletionTimestamp = ptr.To(metav1.Now()) })), why: `0/3 nodes are available: resourceclaim "q" is being deleted.`},
		"of a node":        {objects: objs(class, sliceOf("b", all), claimOf("q", exactly("r", 1))), fit: "b"},
		"of a zone":        {objects: objs(class, sliceOf("net", all, onZone), claimOf("q", exactly("r", 1))), fit: "a b"},
		"of all":           {objects: objs(class, sliceOf("net", all, everywhere), claimOf("q", exactly("r", 3))), fit: "a b c"},
		"as many as named": {objects: objs(class, sliceOf("b", all), sliceOf("c", all[:1]), claimOf("q", exactly("r", 3))), fit: "b"},
		"too many": {
			objects: objs(class, sliceOf("b", all), claimOf("q", exactly("r", 4))),
			why:     `0/3 nodes are available: 3 node(s) had too few devices for request "r" of resourceclaim "q": 4 of class "c".`,
			each:    `DynamicResources: node(s) had too few devices for request "r" of resourceclaim "q": 4 of class "c" (3 match, 0 in use, 0 tainted)`,
		},
		"class's selector":          {objects: objs(classOf("c", `device.attributes["d"].size == 2`), sliceOf("b", all), sliceOf("c", all[:2]), claimOf("q", exactly("r", 2))), fit: "b"},
		"request's selector":        {objects: objs(class, sliceOf("b", all), sliceOf("c", all[:2]), claimOf("q", exactly("r", 1, `device.attributes["d"].numa == 1`))), fit: "b"},
		"driver of another name":    {objects: objs(classOf("c", `device.driver == "e"`), sliceOf("b", all), claimOf("q", exactly("r", 1))), why: `0/3 nodes are available: 3 node(s) had too few devices…`},
		"an error in a selector":    {objects: objs(class, sliceOf("b", all), claimOf("q", exactly("r", 1, `device.attributes["d"].nosuch == 1`))), why: `0/3 nodes are available: claim default/q: selector #0 on device d/b/x: CEL runtime error: no such key: nosuch…`},
		"a selector that is no CEL": {objects: objs(class, sliceOf("b", all), claimOf("q", exactly("r", 1, `device.`))), why: `0/3 nodes are available: claim default/q: selector #0: CEL compile error: …`},
		"in use": {
			objects: objs(class, sliceOf("b", all), claimOf("q", exactly("r", 2)), allocated(claimOf("other", exactly("r", 2)), "b", "x", "y")),
			why:     `0/3 nodes are available: 3 node(s) had too few devices for request "r" of resourceclaim "q": 2 of class "c".`,
			each:    `DynamicResources: node(s) had too few devices for request "r" of resourceclaim "q": 2 of class "c" (3 match, 2 in use, 0 tainted)`,
		},
		"all":                       {objects: objs(class, sliceOf("b", all), sliceOf("c", all), claimOf("q", everyDevice("r")), allocated(claimOf("other", exactly("r", 1)), "c", "x")), fit: "b"},
		"all of a pool in part":     {objects: objs(class, sliceOf("b", all, ofTwo), sliceOf("c", all), claimOf("q", everyDevice("r"))), why: `0/3 nodes are available: claim default/q, request r: asks for all devices, but resource pool d/b is currently being updated.`},
		"of a pool in part":         {objects: objs(class, sliceOf("b", all, ofTwo), claimOf("q", exactly("r", 1))), why: `0/3 nodes are available: 3 node(s) had too few devices for request "r"…`, each: `…(0 match, 0 in use, 0 tainted, incomplete: pool d/b has 1 of 2 ResourceSlices)`},
		"first available":           {objects: objs(class, sliceOf("b", all), sliceOf("c", all[:1]), claimOf("q", either)), fit: "b"},
		"none available":            {objects: objs(class, sliceOf("b", all[:1]), claimOf("q", either)), why: `0/3 nodes are available: 3 node(s) had too few devices for request "r" of resourceclaim "q": 1 of class "c" or 2 of class "c".`},
		"alike":                     {objects: objs(class, sliceOf("b", all[:2]), sliceOf("c", all[1:]), change(claimOf("q", exactly("r", 2)), sameNUMA)), fit: "b"},
		"alike nowhere":             {objects: objs(class, sliceOf("b", all[1:]), change(claimOf("q", exactly("r", 2)), sameNUMA)), why: `0/3 nodes are available: 1 node(s) cannot give all requests of resourceclaim "q" devices at once…`},
		"tainted":                   {objects: objs(class, sliceOf("b", all), rule(&resourcev1.DeviceTaintSelector{}, resourcev1.DeviceTaintEffectNoSchedule), claimOf("q", exactly("r", 1))), why: `0/3 nodes are available: 3 node(s) had too few…`, each: `…(3 match, 0 in use, 3 tainted)`},
		"tainted, tolerated":        {objects: objs(class, sliceOf("b", all), rule(&resourcev1.DeviceTaintSelector{}, resourcev1.DeviceTaintEffectNoSchedule), change(claimOf("q", exactly("r", 1)), tolerates)), fit: "b"},
		"tainted in part":           {objects: objs(class, sliceOf("b", all), sliceOf("c", all), rule(&resourcev1.DeviceTaintSelector{Pool: ptr.To("c"), Device: ptr.To("x")}, resourcev1.DeviceTaintEffectNoExecute), claimOf("q", exactly("r", 3))), fit: "b"},
		"tainted by no selector":    {objects: objs(class, sliceOf("b", all), rule(nil, resourcev1.DeviceTaintEffectNoSchedule), claimOf("q", exactly("r", 1))), fit: "b"},
		"a taint of no effect":      {objects: objs(class, sliceOf("b", all), rule(&resourcev1.DeviceTaintSelector{}, resourcev1.DeviceTaintEffectNone), claimOf("q", exactly("r", 1))), fit: "b"},
		"admin, not allowed":        {objects: objs(class, sliceOf("b", all), change(claimOf("q", exactly("r", 1)), admin)), why: `0/3 nodes are available: request "r" of resourceclaim "q" has adminAccess, for which namespace "default" needs the label resource.kubernetes.io/admin-access=true.`},
		"admin":                     {objects: objs(class, sliceOf("b", all), change(claimOf("q", exactly("r", 3)), admin), allocated(claimOf("other", exactly("r", 3)), "b", "x", "y", "z")), labels: map[string]string{resourcev1.DRAAdminNamespaceLabelKey: "true"}, fit: "b"},
		"allocated":                 {objects: objs(allocated(claimOf("q", exactly("r", 1)), "c", "x")), fit: "c"},
		"allocated, to two":         {objects: objs(allocated(claimOf("q", exactly("r", 1)), "c", "x"), allocated(claimOf("other", exactly("r", 1)), "c", "x")), why: `0/3 nodes are available: device d/c/x of resourceclaim "q" is allocated to another claim, too…`},
		"counters":                  {objects: objs(class, sliceOf("b", all[:2], halves), counters, claimOf("q", exactly("r", 1))), fit: "b"},
		"counters, used up":         {objects: objs(class, sliceOf("b", all[:2], halves), counters, claimOf("q", exactly("r", 1)), allocated(claimOf("other", exactly("r", 1)), "b", "x")), why: `0/3 nodes are available: 1 node(s) cannot give all requests…`},
		"counters, overdrawn":       {objects: objs(class, sliceOf("b", all[:2], halves), counters, allocated(claimOf("q", exactly("r", 1)), "b", "x"), allocated(claimOf("other", exactly("r", 1)), "b", "y")), why: `0/3 nodes are available: device d/b/x of resourceclaim "q" is allocated to another claim, too…`},
		"a share":                   {objects: objs(class, sliceOf("b", shared), sharer, change(claimOf("q", exactly("r", 1)), memory("3Gi"))), fit: "b"},
		"a share that is too large": {objects: objs(class, sliceOf("b", shared), sharer, change(claimOf("q", exactly("r", 1)), memory("4Gi"))), why: `0/3 nodes are available: 1 node(s) cannot give all requests…`},
		"used by all that may": {objects: objs(change(allocated(claimOf("q", exactly("r", 1)), "c", "x"), func(c *resourcev1.ResourceClaim) {
			for i := range resourcev1.ResourceClaimReservedForMaxSize {
				c.Status.ReservedFor = append(c.Status.ReservedFor, resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: fmt.Sprint(i), UID: types.UID(fmt.Sprint(i))})
			}
		})), why: `0/3 nodes are available: resourceclaim "q" is reserved for 256 pods, the most it can be.`},
	} {
		t.Run(name, func(t *testing.T) {
			s := withDevices(t, world([]*schedtest.NodeBuilder{
				schedtest.Node("a").Label("zone", "1"), schedtest.Node("b").Label("zone", "1"), schedtest.Node("c").Label("zone", "2"),
			}), c.objects...)
			s.setNamespace(schedtest.Namespace, labels.Set(c.labels))
			p := newPodInfo(asks(schedtest.Pod("p"), "q").Obj())
			v := runFilters(s, p)
			var fit []string
			for _, n := range []string{"a", "b", "c"} {
				for _, f := range v.fit {
					if f.name == n {
						fit = append(fit, n)
					}
				}
			}
			if got := strings.Join(fit, " "); got != c.fit {
				t.Errorf("fits %q, want %q; %s", got, c.fit, v.explain())
			}
			begins := func(got, want string) bool {
				before, after, cut := strings.Cut(want, "…")
				return got == want || cut && strings.HasPrefix(got, before) && strings.HasSuffix(got, after)
			}
			if c.fit != "" {
				return
			}
			if got := v.explain(); !begins(got, c.why) && !strings.HasPrefix(got, strings.TrimSuffix(c.why, "…")) {
				t.Errorf("explains\n%s, want\n%s", got, c.why)
			}
			if v.wokenBy&deviceChanged == 0 {
				t.Error("devices do not wake the pod")
			}
			if c.each == "" {
				return
			}
			for line := range strings.Lines(whyEach(s, p)) {
				if of, rest, _ := strings.Cut(strings.TrimSpace(line), ": "); of == "b" && !begins(rest, c.each) {
					t.Errorf("of b it is said\n%s, want\n%s", rest, c.each)
				}
			}
		})
	}
}
