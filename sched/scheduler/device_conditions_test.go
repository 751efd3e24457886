package scheduler

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/schedtest"
)

// says has the driver write conditions of a device of the claim: "A" is True,
// "!A" False.
func says(claim *resourcev1.ResourceClaim, device string, share *types.UID, conditions ...string) *resourcev1.ResourceClaim {
	status := resourcev1.AllocatedDeviceStatus{Driver: "d", Pool: "a", Device: device}
	if share != nil {
		status.ShareID = ptr.To(string(*share))
	}
	for _, c := range conditions {
		name, not := strings.CutPrefix(c, "!")
		value := metav1.ConditionTrue
		if not {
			value = metav1.ConditionFalse
		}
		status.Conditions = append(status.Conditions, metav1.Condition{Type: name, Status: value, Reason: "Because", Message: "so it is"})
	}
	claim.Status.Devices = append(claim.Status.Devices, status)
	return claim
}

func TestWhatDevicesLack(t *testing.T) {
	share := ptr.To(types.UID("s"))
	given := func() *resourcev1.ResourceClaim {
		claim := allocated(claimOf("q", exactly("r", 2)), "a", "x", "y")
		x := &claim.Status.Allocation.Devices.Results[0]
		x.BindingConditions, x.BindingFailureConditions = []string{"Attached", "Warm"}, []string{"Broken"}
		return claim
	}
	shared := func() *resourcev1.ResourceClaim {
		claim := given()
		claim.Status.Allocation.Devices.Results[0].ShareID = share
		return claim
	}
	const of = "device d/a/x of resourceclaim q lacks "
	for name, c := range map[string]struct {
		claim  *resourcev1.ResourceClaim
		lacks  string
		failed bool
	}{
		"not allocated":           {claim: claimOf("q", exactly("r", 1))},
		"no conditions asked for": {claim: allocated(claimOf("q", exactly("r", 1)), "a", "x")},
		"nothing said":            {claim: given(), lacks: of + "Attached, Warm"},
		"one said":                {claim: says(given(), "x", nil, "Attached"), lacks: of + "Warm"},
		"one denied":              {claim: says(given(), "x", nil, "Attached", "!Warm"), lacks: of + "Warm"},
		"said of another":         {claim: says(given(), "y", nil, "Attached", "Warm"), lacks: of + "Attached, Warm"},
		"ready":                   {claim: says(given(), "x", nil, "Attached", "Warm", "!Broken")},
		"broken":                  {claim: says(given(), "x", nil, "Attached", "Warm", "Broken"), failed: true},
		"said of another's share": {claim: says(shared(), "x", nil, "Attached", "Warm"), lacks: of + "Attached, Warm"},
		"said of the share":       {claim: says(shared(), "x", share, "Attached", "Warm")},
	} {
		lacks, failed := unready(c.claim)
		if lacks != c.lacks || errors.Is(failed, errDeviceFailed) != c.failed {
			t.Errorf("%s: %q, %v", name, lacks, failed)
		}
		if awaits(c.claim) != (c.lacks != "" || c.failed) {
			t.Errorf("%s: awaits is %v", name, awaits(c.claim))
		}
	}
}

// conditional is a pod whose claim was given a device with conditions, on its way
// to its node.
type conditional struct {
	*table
	done chan error
	said *record.FakeRecorder
}

func newConditional(t *testing.T) *conditional {
	x := &conditional{table: newTable(t), done: make(chan error, 1), said: record.NewFakeRecorder(100)}
	for profile := range x.s.events {
		x.s.events[profile] = x.said
	}
	x.node(schedtest.Node("a").Obj())
	resources := x.env.Informers.Resource().V1()
	slow := device("x", 1, 0)
	slow.BindingConditions, slow.BindingFailureConditions, slow.BindsToNode = []string{"Attached"}, []string{"Broken"}, ptr.To(true)
	for store, obj := range map[interface{ Add(any) error }]any{
		resources.DeviceClasses().Informer().GetStore():  classOf("c"),
		resources.ResourceSlices().Informer().GetStore(): sliceOf("a", deviceList(slow)),
	} {
		if err := store.Add(obj); err != nil {
			t.Fatal(err)
		}
	}
	claim, err := x.env.Client.ResourceV1().ResourceClaims(schedtest.Namespace).Create(t.Context(), claimOf("q", exactly("r", 1)), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	x.s.onResourceClaim(nil, claim)
	x.pod(nil, asks(schedtest.Pod("p"), "q").Obj())
	return x
}

// begin decides about the pod and writes what it needs, beside the test.
func (x *conditional) begin() {
	x.t.Helper()
	x.decide()
	if len(x.begun) != 1 {
		x.t.Fatalf("the pod has no node: %s", x.why("p"))
	}
	place := x.begun[0]
	x.begun = nil
	go func() {
		err := x.s.prepare(context.WithoutCancel(x.t.Context()), place)
		if err != nil {
			x.s.unbound(x.t.Context(), place.pod, place.node, err)
		}
		x.done <- err
	}()
}

func (x *conditional) live() *resourcev1.ResourceClaim {
	x.t.Helper()
	claim, err := x.env.Client.ResourceV1().ResourceClaims(schedtest.Namespace).Get(x.t.Context(), "q", metav1.GetOptions{})
	if err != nil {
		x.t.Fatal(err)
	}
	return claim
}

// shown waits for the allocation to be written, changes it and shows it.
func (x *conditional) shown(change func(*resourcev1.ResourceClaim)) {
	x.t.Helper()
	for deadline := time.Now().Add(time.Minute); x.live().Status.Allocation == nil; {
		if time.Now().After(deadline) {
			x.t.Fatal("the claim is not allocated")
		}
		time.Sleep(time.Millisecond)
	}
	claim := x.live()
	change(claim)
	claim, err := x.env.Client.ResourceV1().ResourceClaims(schedtest.Namespace).UpdateStatus(x.t.Context(), claim, metav1.UpdateOptions{})
	if err != nil {
		x.t.Fatal(err)
	}
	x.s.onResourceClaim(claim, claim)
}

// waits fails the test if the pod does not say that it waits for its device.
func (x *conditional) waits() {
	x.t.Helper()
	for said := ""; !strings.Contains(said, "WaitForDevices"); {
		select {
		case said = <-x.said.Events:
		case err := <-x.done:
			x.t.Fatalf("it does not wait: %v", err)
		case <-time.After(time.Minute):
			x.t.Fatal("it does not say that it waits")
		}
	}
}

// late lets so much time pass, again and again: it says that it waits before it sets
// its timer.
func (x *conditional) late(d time.Duration) error {
	x.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		x.clock.Step(d)
		select {
		case err := <-x.done:
			return err
		default:
		}
		if time.Now().After(deadline) {
			x.t.Fatal("it waits for ever")
		}
	}
}

func TestPodWaitsForItsDevice(t *testing.T) {
	x := newConditional(t)
	x.begin()
	x.shown(func(claim *resourcev1.ResourceClaim) {
		r := claim.Status.Allocation.Devices.Results[0]
		if len(r.BindingConditions) != 1 || len(r.BindingFailureConditions) != 1 || claim.Status.Allocation.AllocationTimestamp == nil {
			t.Errorf("the allocation does not name the conditions: %+v", claim.Status.Allocation)
		}
	})
	x.waits()
	x.shown(func(claim *resourcev1.ResourceClaim) { says(claim, "x", nil, "!Attached") })
	x.shown(func(claim *resourcev1.ResourceClaim) {
		claim.Status.Devices = nil
		says(claim, "x", nil, "Attached")
	})
	if err := <-x.done; err != nil {
		t.Fatal(err)
	}
	if c := x.live(); c.Status.Allocation == nil || len(c.Status.ReservedFor) != 1 {
		t.Errorf("%+v", c.Status)
	}
}

// TestDeviceIsNotReady: what failed, or came to nothing in time, is given back, and
// the pod tried again.
func TestDeviceIsNotReady(t *testing.T) {
	for name, want := range map[string]error{"broken": errDeviceFailed, "late": errDeviceLate} {
		t.Run(name, func(t *testing.T) {
			x := newConditional(t)
			x.begin()
			x.shown(func(*resourcev1.ResourceClaim) {})
			x.waits()
			var err error
			if name == "broken" {
				x.shown(func(claim *resourcev1.ResourceClaim) { says(claim, "x", nil, "Attached", "Broken") })
				err = <-x.done
			} else {
				err = x.late(conditionTimeout)
			}
			if !errors.Is(err, want) || !strings.Contains(err.Error(), "d/a/x of resourceclaim q") {
				t.Fatalf("%v, want %v", err, want)
			}
			if c := x.live(); c.Status.Allocation != nil || len(c.Status.ReservedFor)+len(c.Status.Devices) != 0 {
				t.Errorf("it was not given back: %+v", c.Status)
			}
			x.s.onResourceClaim(nil, x.live())
			x.later()
			x.begin()
			x.shown(func(claim *resourcev1.ResourceClaim) { says(claim, "x", nil, "Attached") })
			if err := <-x.done; err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestNextLeaderWaits: an allocation of a former leader binds no pod before its
// device is ready, and its time began when that one made it.
func TestNextLeaderWaits(t *testing.T) {
	x := newConditional(t)
	claim := x.live()
	claim.Status.Allocation = allocated(claimOf("q", exactly("r", 1)), "a", "x").Status.Allocation
	claim.Status.Allocation.Devices.Results[0].BindingConditions = []string{"Attached"}
	claim.Status.Allocation.AllocationTimestamp = ptr.To(metav1.NewTime(x.clock.Now().Add(time.Minute - conditionTimeout)))
	claim.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: "p", UID: schedtest.Pod("p").P.UID}}
	written, err := x.env.Client.ResourceV1().ResourceClaims(schedtest.Namespace).UpdateStatus(t.Context(), claim, metav1.UpdateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	x.s.onResourceClaim(claim, written)
	x.begin()
	x.waits()
	if err := x.late(time.Minute); !errors.Is(err, errDeviceLate) {
		t.Fatal(err)
	}
}

// TestPodGoesWhileItWaits: nothing is given back for it, which is its claim's to do.
func TestPodGoesWhileItWaits(t *testing.T) {
	x := newConditional(t)
	x.begin()
	x.shown(func(*resourcev1.ResourceClaim) {})
	x.waits()
	x.pod(asks(schedtest.Pod("p"), "q").Obj(), nil)
	x.shown(func(*resourcev1.ResourceClaim) {})
	if err := <-x.done; !errors.Is(err, errGone) {
		t.Fatal(err)
	}
}
