package scheduler

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"golang.org/x/sync/errgroup"

	"github.com/clusterd/clusterd/sched/internal/volumes"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// TestGangIsCalledOff: when one pod of a gang cannot have its device, the others do not
// wait out theirs, nor their volumes: all give back what they hold, at once, though the
// driver writes conditions of its devices at the same time.
func TestGangIsCalledOff(t *testing.T) {
	x := newTable(t)
	x.node(schedtest.Node("a").Obj())
	resources := x.env.Informers.Resource().V1()
	var devices []resourcev1.Device
	for _, name := range []string{"x", "y"} {
		d := device(name, 1, 0)
		d.BindingConditions, d.BindingFailureConditions = []string{"Attached"}, []string{"Broken"}
		devices = append(devices, d)
	}
	for store, obj := range map[interface{ Add(any) error }]any{
		resources.DeviceClasses().Informer().GetStore():  classOf("c"),
		resources.ResourceSlices().Informer().GetStore(): sliceOf("a", devices),
	} {
		if err := store.Add(obj); err != nil {
			t.Fatal(err)
		}
	}
	claims := x.env.Client.ResourceV1().ResourceClaims(schedtest.Namespace)
	x.group(schedtest.Gang("a", 3))
	for i := range 2 {
		claim, err := claims.Create(t.Context(), claimOf(fmt.Sprint("q", i), exactly("r", 1)), metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		x.s.onResourceClaim(nil, claim)
		x.pod(nil, asks(schedtest.Pod(fmt.Sprint("a", i)).Group("a"), claim.Name).Obj())
	}
	x.pod(nil, schedtest.Pod("a2").Group("a").Obj())
	x.decide()
	x.want("all have a place", "a0 a1 a2")
	places := x.begun
	x.begun = nil
	for i := range places {
		if places[i].pod.Name != "a2" {
			continue
		}
		// It waits for a volume that is not made yet.
		volume := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{
			Namespace: schedtest.Namespace, Name: "v", UID: "v", ResourceVersion: "1", Annotations: map[string]string{volumes.SelectedNode: "a"},
		}}
		if err := x.env.Informers.Core().V1().PersistentVolumeClaims().Informer().GetStore().Add(volume); err != nil {
			t.Fatal(err)
		}
		places[i].volumes = []claimChoice{{claim: volume}}
	}
	over := make(chan struct{})
	go func() {
		var binds, waits errgroup.Group
		x.s.bindGroup(t.Context(), places, x.clock.Now(), &binds, &waits)
		_, _ = waits.Wait(), binds.Wait()
		close(over)
	}()
	live := func(name string) *resourcev1.ResourceClaim {
		t.Helper()
		claim, err := claims.Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return claim
	}
	schedtest.Eventually(t, func() string {
		for _, name := range []string{"q0", "q1"} {
			claim := live(name)
			if claim.Status.Allocation == nil {
				return name + " is not allocated"
			}
			x.s.onResourceClaim(claim, claim) // the watch
		}
		return ""
	})
	// The first write of each that gives devices back meets one of the driver's.
	met := map[string]bool{}
	x.env.Client.(*fake.Clientset).PrependReactor("update", "resourceclaims", func(action clienttesting.Action) (bool, runtime.Object, error) {
		claim := action.(clienttesting.UpdateAction).GetObject().(*resourcev1.ResourceClaim)
		if claim.Status.Allocation != nil || met[claim.Name] {
			return false, nil, nil
		}
		met[claim.Name] = true
		return true, nil, apierrors.NewConflict(resourcev1.Resource("resourceclaims"), claim.Name, errors.New("the driver was faster"))
	})
	broken := live("q0")
	broken = says(broken, broken.Status.Allocation.Devices.Results[0].Device, nil, "Broken")
	if _, err := claims.UpdateStatus(t.Context(), broken, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	x.s.onResourceClaim(broken, broken)
	select {
	case <-over: // no clock went on
	case <-time.After(time.Minute):
		t.Fatal("the others wait for their devices and volumes, though the gang cannot be bound")
	}
	for _, name := range []string{"q0", "q1"} {
		if c := live(name); c.Status.Allocation != nil || len(c.Status.ReservedFor) > 0 {
			t.Errorf("%s keeps %+v", name, c.Status)
		}
	}
	x.want("all have given their room back", "")
	for _, action := range x.env.Client.(*fake.Clientset).Actions() {
		if action.GetSubresource() == "binding" {
			t.Errorf("%v was asked for", action)
		}
	}
	// The reason is the broken device's, for all of them.
	x.later()
	for _, name := range []string{"q0", "q1"} {
		x.s.onResourceClaim(nil, live(name))
	}
	x.decide()
	if got := x.on(); got != "a0 a1 a2" {
		t.Errorf("tried again: on nodes are %q; %s", got, strings.Join([]string{x.why("a0"), x.why("a1")}, "; "))
	}
}
