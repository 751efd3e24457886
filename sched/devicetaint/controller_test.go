package devicetaint

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/schedtest"
)

const ns = schedtest.Namespace

// run runs the loop on the cluster until the test ends.
func run(t *testing.T, c *schedtest.Cluster) {
	t.Helper()
	env := loop.Env{Client: c.Client, Clock: clock.RealClock{}, Informers: informers.NewSharedInformerFactory(c.Client, 0), Events: loop.NewEvents(c.Client, clock.RealClock{})}
	l, err := New(env)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	env.Informers.StartWithContext(ctx)
	wg.Go(func() {
		if err := l.Run(ctx); err != nil {
			t.Errorf("the loop ended with %v", err)
		}
	})
	wg.Go(func() {
		if err := env.Events.Run(ctx); err != nil {
			t.Errorf("events ended with %v", err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait(); env.Informers.Shutdown() })
}

// holder is a pod on a node, with a claim of its name that has the device.
func holder(name, device string, tolerations ...resourcev1.DeviceToleration) (*corev1.Pod, *resourcev1.ResourceClaim) {
	pod := schedtest.Pod(name).On("n1")
	pod.P.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: &name}}
	claim := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name}}
	claim.Status.Allocation = &resourcev1.AllocationResult{Devices: resourcev1.DeviceAllocationResult{Results: []resourcev1.DeviceRequestAllocationResult{
		{Request: "r", Driver: "d", Pool: "n1", Device: device, Tolerations: tolerations},
	}}}
	claim.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{{Resource: "pods", Name: name, UID: pod.P.UID}}
	return pod.Obj(), claim
}

// left are the names of the pods that are there and not being deleted.
func left(t *testing.T, c *schedtest.Cluster) (out []string) {
	t.Helper()
	list, err := c.Client.CoreV1().Pods(ns).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range list.Items {
		if list.Items[i].DeletionTimestamp == nil {
			out = append(out, list.Items[i].Name)
		}
	}
	slices.Sort(out)
	return out
}

func stay(t *testing.T, c *schedtest.Cluster, want ...string) {
	t.Helper()
	schedtest.Eventually(t, func() string {
		if got := left(t, c); !slices.Equal(got, want) {
			return fmt.Sprintf("%v are left, want %v", got, want)
		}
		return ""
	})
}

// TestPodsLeaveTaintedDevices: by a rule, by the driver's slice, and after the
// time that is tolerated; a pod that tolerates it, one without a node and one of
// another device stay.
func TestPodsLeaveTaintedDevices(t *testing.T) {
	c := schedtest.New(t)
	for _, who := range []struct {
		name, device string
		seconds      *int64
		tolerates    bool
	}{{name: "a", device: "x"}, {name: "b", device: "y"}, {name: "for-ever", device: "x", tolerates: true}, {name: "long", device: "x", tolerates: true, seconds: ptr.To[int64](3600)},
		{name: "short", device: "x", tolerates: true, seconds: ptr.To[int64](1)}, {name: "unbound", device: "x"}} {
		var some []resourcev1.DeviceToleration
		if who.tolerates {
			some = append(some, tolerates(who.seconds))
		}
		pod, claim := holder(who.name, who.device, some...)
		if who.name == "unbound" {
			pod.Spec.NodeName = ""
		}
		if err := c.Client.Tracker().Add(pod); err != nil {
			t.Fatal(err)
		}
		claim.UID = pod.UID + "-claim"
		if err := c.Client.Tracker().Add(claim); err != nil {
			t.Fatal(err)
		}
	}
	run(t, c)
	everybody := []string{"a", "b", "for-ever", "long", "short", "unbound"}
	api := c.Client.ResourceV1()

	// With no effect its status says what the rule would do.
	rule := ruleOf("r", "x", resourcev1.DeviceTaintEffectNone, nil)
	rule.UID, rule.Generation = "", 0
	rule, err := api.DeviceTaintRules().Create(t.Context(), rule, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	says := func(reason, words string) func() string {
		return func() string {
			now, err := api.DeviceTaintRules().Get(t.Context(), "r", metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			for _, condition := range now.Status.Conditions {
				if condition.Reason == reason && strings.Contains(condition.Message, words) {
					rule = now
					return ""
				}
			}
			return fmt.Sprintf("conditions %+v, want %s: …%s…", now.Status.Conditions, reason, words)
		}
	}
	schedtest.Eventually(t, says("NoEffect", "3 pods in 1 namespace would be evicted"))
	if got := left(t, c); !slices.Equal(got, everybody) {
		t.Fatalf("%v are left of %v", got, everybody)
	}

	rule.Spec.Taint.Effect, rule.Spec.Taint.TimeAdded, rule.Generation = resourcev1.DeviceTaintEffectNoExecute, ptr.To(metav1.Now()), 2
	if rule, err = api.DeviceTaintRules().Update(t.Context(), rule, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	stay(t, c, "b", "for-ever", "long", "unbound")
	gone, err := c.Client.CoreV1().Pods(ns).Get(t.Context(), "a", metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	if condition := pods.Condition(gone, corev1.DisruptionTarget); err == nil && (condition == nil || condition.Reason != "DeletionByDeviceTaintManager" || !strings.Contains(condition.Message, "DeviceTaintRule r")) {
		t.Errorf("the condition of a is %+v", condition)
	}
	schedtest.Eventually(t, says("PodsPendingEviction", "1 pod in 1 namespace"))

	// The driver says the same of y.
	slice := &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: "s"}, Spec: resourcev1.ResourceSliceSpec{
		Driver: "d", NodeName: ptr.To("n1"), Pool: resourcev1.ResourcePool{Name: "n1", Generation: 1, ResourceSliceCount: 1},
		Devices: []resourcev1.Device{{Name: "y", Taints: []resourcev1.DeviceTaint{{Key: "k", Effect: resourcev1.DeviceTaintEffectNoExecute, TimeAdded: ptr.To(metav1.Now())}}}},
	}}
	if _, err := api.ResourceSlices().Create(t.Context(), slice, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	stay(t, c, "for-ever", "long", "unbound")

	// One that gets its node has to go, too.
	err = c.Client.CoreV1().Pods(ns).Bind(t.Context(), &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "unbound"}, Target: corev1.ObjectReference{Name: "n1"}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	stay(t, c, "for-ever", "long")
}

// TestOldSlices: a device is what the newest generation of its pool says.
func TestOldSlices(t *testing.T) {
	c := schedtest.New(t)
	pod, claim := holder("p", "x")
	for i, tainted := range []bool{true, false} {
		slice := &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("s%d", i)}, Spec: resourcev1.ResourceSliceSpec{
			Driver: "d", Pool: resourcev1.ResourcePool{Name: "n1", Generation: int64(i), ResourceSliceCount: 1}, Devices: []resourcev1.Device{{Name: "x"}},
		}}
		if tainted {
			slice.Spec.Devices[0].Taints = []resourcev1.DeviceTaint{{Key: "k", Effect: resourcev1.DeviceTaintEffectNoExecute, TimeAdded: ptr.To(metav1.NewTime(time.Unix(1, 0)))}}
		}
		if err := c.Client.Tracker().Add(slice); err != nil {
			t.Fatal(err)
		}
	}
	other, otherClaim := holder("q", "z")
	for _, err := range []error{c.Client.Tracker().Add(pod), c.Client.Tracker().Add(claim), c.Client.Tracker().Add(other), c.Client.Tracker().Add(otherClaim)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	run(t, c)
	if _, err := c.Client.ResourceV1().DeviceTaintRules().Create(t.Context(), ruleOf("r", "z", resourcev1.DeviceTaintEffectNoExecute, at(1)), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	stay(t, c, "p") // when q has gone the loop has looked at the claims of p, too
}
