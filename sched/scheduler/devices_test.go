package scheduler

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/structured"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/schedtest"
)

// at gives the claim a version.
func at(claim *resourcev1.ResourceClaim, version string) *resourcev1.ResourceClaim {
	claim = claim.DeepCopy()
	claim.ResourceVersion = version
	return claim
}

// TestDevicesAreCountedOnce: an allocation counts from its decision on, whether the
// watch or the answer comes first, until it is given back or its claim is gone.
func TestDevicesAreCountedOnce(t *testing.T) {
	id := structured.MakeDeviceID("d", "n", "x")
	pending := claimOf("q", exactly("r", 1))
	given := allocated(claimOf("q", exactly("r", 1)), "n", "x")
	type step struct {
		do   func(v *deviceView)
		want bool // the device is taken
		name string
	}
	show := func(old, claim *resourcev1.ResourceClaim, want bool) step {
		return step{func(v *deviceView) { v.show(old, claim) }, want, "show"}
	}
	wrote := func(claim *resourcev1.ResourceClaim, want bool) step {
		return step{func(v *deviceView) { v.wrote(claim) }, want, "wrote"}
	}
	assume := step{func(v *deviceView) { v.assume(pending, given.Status.Allocation) }, true, "assume"}
	settle := func(want bool) step {
		return step{func(v *deviceView) { v.settle(pending) }, want, "settle"}
	}
	another := claimOf("q", exactly("r", 1))
	another.UID = "another"
	for name, steps := range map[string][]step{
		"the answer first":             {show(nil, at(pending, "1"), false), assume, wrote(at(given, "3"), true), settle(true), show(at(pending, "1"), at(pending, "2"), true), show(at(pending, "2"), at(given, "3"), true), show(at(given, "3"), at(pending, "4"), false)},
		"the watch first":              {show(nil, at(pending, "1"), false), assume, show(at(pending, "1"), at(given, "3"), true), wrote(at(given, "3"), true), settle(true), show(at(given, "3"), nil, false)},
		"the write fails":              {show(nil, at(pending, "1"), false), assume, settle(false)},
		"gone before the answer":       {show(nil, at(pending, "1"), false), assume, show(at(pending, "1"), nil, true), wrote(at(given, "3"), true), settle(false)},
		"replaced before the answer":   {show(nil, at(pending, "1"), false), assume, show(at(pending, "1"), at(another, "4"), true), wrote(at(given, "3"), true), settle(false)},
		"found by a new leader":        {show(nil, at(given, "7"), true), show(at(given, "7"), nil, false)},
		"given back, told of too late": {show(nil, at(given, "7"), true), wrote(at(pending, "9"), false), show(at(given, "7"), at(given, "8"), false), show(at(given, "8"), at(pending, "9"), false)},
	} {
		t.Run(name, func(t *testing.T) {
			v := withDevices(t, newSnapshot()).devices
			for i, s := range steps {
				s.do(v)
				if got := v.taken.AllocatedDevices.Has(id); got != s.want || (v.holders[id].Len() == 1) != s.want {
					t.Fatalf("after step %d (%s) the device is taken: %t, held by %v", i+1, s.name, got, v.holders[id])
				}
			}
		})
	}
}

// TestHoldersOfOneDevice: it stays taken until the last of two claims gives it back.
func TestHoldersOfOneDevice(t *testing.T) {
	v := withDevices(t, newSnapshot()).devices
	a, b := allocated(claimOf("a", exactly("r", 1)), "n", "x"), allocated(claimOf("b", exactly("r", 1)), "n", "x")
	v.show(nil, a)
	if got := v.clash(a, a.Status.Allocation); got != "" {
		t.Errorf("alone, and it clashes: %s", got)
	}
	v.show(nil, b)
	if v.clash(a, a.Status.Allocation) != "d/n/x" || v.clash(b, b.Status.Allocation) != "d/n/x" {
		t.Error("no clash is found")
	}
	v.show(a, nil)
	if got := v.clash(b, b.Status.Allocation); got != "" || len(v.taken.AllocatedDevices) != 1 {
		t.Errorf("clash %q, taken %v", got, v.taken.AllocatedDevices)
	}
	v.show(b, nil)
	if len(v.taken.AllocatedDevices)+len(v.holders)+len(v.counted)+len(v.claims) != 0 {
		t.Errorf("something is left: %v %v %v", v.taken, v.holders, v.counted)
	}
}

// TestEarlierAlternativesAreBetter: of two nodes the one with the first of the
// alternatives is chosen.
func TestEarlierAlternativesAreBetter(t *testing.T) {
	request := resourcev1.DeviceRequest{Name: "r", FirstAvailable: []resourcev1.DeviceSubRequest{
		{Name: "large", DeviceClassName: "c", AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: 1, Selectors: selectors(`device.attributes["d"].size > 8`)},
		{Name: "any", DeviceClassName: "c", AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: 1},
	}}
	s := withDevices(t, world([]*schedtest.NodeBuilder{schedtest.Node("a"), schedtest.Node("b"), schedtest.Node("c")}), classOf("c"),
		sliceOf("a", deviceList(device("x", 1, 0))), sliceOf("b", deviceList(device("x", 9, 0))), sliceOf("c", deviceList(device("x", 1, 0))), claimOf("q", request))
	for range 20 {
		p := newPodInfo(asks(schedtest.Pod("p"), "q").Obj())
		v := runFilters(s, p)
		if len(v.fit) != 3 {
			t.Fatalf("%d nodes fit", len(v.fit))
		}
		if got := best(s, p, v.fit).name; got != "b" {
			t.Fatalf("%s is chosen", got)
		}
	}
}

// TestDevicesAndPreemption: nobody goes for a pod that lacks devices; one that
// lacks room where its device is has others go.
func TestDevicesAndPreemption(t *testing.T) {
	for name, c := range map[string]struct {
		taken bool
		want  string
	}{"no device": {taken: true}, "no room": {want: "b"}} {
		t.Run(name, func(t *testing.T) {
			s := withDevices(t, world([]*schedtest.NodeBuilder{schedtest.Node("a"), schedtest.Node("b")},
				schedtest.Pod("low-a").CPU("4").On("a").Priority(1), schedtest.Pod("low-b").CPU("4").On("b").Priority(1)),
				classOf("c"), sliceOf("b", deviceList(device("x", 1, 0))), claimOf("q", exactly("r", 1)))
			if c.taken {
				s.devices.show(nil, allocated(claimOf("other", exactly("r", 1)), "b", "x"))
			}
			p := newPodInfo(asks(schedtest.Pod("p").CPU("1").Priority(9), "q").Obj())
			if v := runFilters(s, p); len(v.fit) > 0 || v.blocked != "" {
				t.Fatalf("%+v", v)
			}
			got := ""
			if candidate := preempt(s, p, nil); candidate != nil {
				got = candidate.node.name
			}
			if got != c.want {
				t.Errorf("pods go on %q, want %q", got, c.want)
			}
		})
	}
}

// TestPodsWithoutClaimsAskNothing: no rule about devices is prepared for them.
func TestPodsWithoutClaimsAskNothing(t *testing.T) {
	s := withDevices(t, world([]*schedtest.NodeBuilder{schedtest.Node("a")}), classOf("c"))
	p := newPodInfo(schedtest.Pod("p").Obj())
	if runFilters(s, p); p.devices != nil || filterDevices(s, p) != nil || scoreDevices(s, p) != nil {
		t.Error("devices are looked at for a pod that has no claims")
	}
	if !s.devices.stale {
		t.Error("slices were listed for a pod that has no claims")
	}
}

// TestWhatOfAClaimWakes: changes that may help a pod, and those that cannot.
func TestWhatOfAClaimWakes(t *testing.T) {
	user := resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: "a", UID: "a"}
	plain, given := claimOf("q", exactly("r", 1)), allocated(claimOf("q", exactly("r", 1)), "n", "x")
	used, kept, deleted := given.DeepCopy(), given.DeepCopy(), given.DeepCopy()
	used.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{user}
	kept.Finalizers = []string{"f"}
	deleted.DeletionTimestamp = ptr.To(metav1.Now())
	for name, c := range map[string]struct {
		old, claim *resourcev1.ResourceClaim
		want       bool
	}{
		"made": {nil, plain, true}, "gone": {plain, nil, true}, "allocated": {plain, given, true}, "given back": {given, plain, true},
		"used by one more": {given, used, false}, "used by one less": {used, given, true}, "a finalizer": {given, kept, false}, "deleted": {given, deleted, true},
	} {
		if got := claimMatters(c.old, c.claim); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// TestNamesOfClaimsWakeThePod: a pod that waits for its claim is tried again when
// its status tells the name, though its spec is the same.
func TestNamesOfClaimsWakeThePod(t *testing.T) {
	before := schedtest.Pod("p").Obj()
	before.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To("t")}}
	queue, clock := newTestQueue(before)
	s := &scheduler{queue: queue, snapshot: newSnapshot()}
	withDevices(t, s.snapshot)
	if _, why := s.snapshot.devices.need(s.snapshot, newPodInfo(before)); why != `waiting for the resourceclaim of "gpu" to be made from resourceclaimtemplate "t"` {
		t.Errorf("it waits because %s", why)
	}
	take(t, queue, "p")
	queue.park(before.UID, deviceChanged)
	after := before.DeepCopy()
	after.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: ptr.To("p-gpu-1")}}
	s.onPod(before, after)
	clock.Step(firstBackoff)
	take(t, queue, "p")
	foreign := claimOf("p-gpu-1", exactly("r", 1))
	s.snapshot.devices.show(nil, foreign)
	if _, why := s.snapshot.devices.need(s.snapshot, newPodInfo(after)); why != `resourceclaim "p-gpu-1" was not made for pod "p" (the pod is not its owner)` {
		t.Errorf("of another's claim it says %s", why)
	}
}

// TestTheSearchEnds: a search that takes too long says so, and does not hold up
// others for longer.
func TestTheSearchEnds(t *testing.T) {
	s := withDevices(t, world([]*schedtest.NodeBuilder{schedtest.Node("a"), schedtest.Node("b")}), classOf("c"), sliceOf("a", deviceList(device("x", 1, 0))), claimOf("q", exactly("r", 1)))
	p := newPodInfo(asks(schedtest.Pod("p"), "q").Obj())
	var why string
	if p.devices, why = s.devices.need(s, p); why != "" {
		t.Fatal(why)
	}
	p.devices.spent = searchTime
	check := filterDevices(s, p)
	if reasons := check(s.nodes["a"]); len(reasons) != 1 || p.devices.fault == nil {
		t.Errorf("refused for %v, fault %v", reasons, p.devices.fault)
	}
	check(s.nodes["b"])
	if len(p.devices.answers) != 1 {
		t.Error("the search went on")
	}
}
