package quota

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/clusterd/clusterd/leaktest"
	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/schedtest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// TestCountedAgain: what admission counted for requests that failed afterwards is
// taken back, though no object changes.
func TestCountedAgain(t *testing.T) {
	hard := corev1.ResourceList{corev1.ResourcePods: resource.MustParse("5")}
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "few", ResourceVersion: "1"}, Spec: corev1.ResourceQuotaSpec{Hard: hard}}
	client := fake.NewSimpleClientset(quota, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}})
	clock := clocktesting.NewFakeClock(time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC))
	env := loop.Env{Client: client, Informers: informers.NewSharedInformerFactory(client, 0), Events: loop.NewEvents(client, clock), Clock: clock}
	l := New(env, nil)
	ctx, cancel := context.WithCancel(t.Context())
	env.Informers.StartWithContext(ctx)
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		env.Informers.Shutdown()
	})
	quotas := client.CoreV1().ResourceQuotas("ns")
	used := func(want int64) {
		t.Helper()
		schedtest.Eventually(t, func() string {
			q, err := quotas.Get(ctx, "few", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if got, ok := q.Status.Used[corev1.ResourcePods]; !ok || got.Value() != want {
				clock.Step(resync) // past the time for a recount, and for a sum that went down to settle
				return fmt.Sprintf("%s pods are used, want %d", got.String(), want)
			}
			return ""
		})
	}
	used(1)
	// Admission counts three more, which are never made.
	q, err := quotas.Get(ctx, "few", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	q.ResourceVersion = "7"
	q.Status.Used = corev1.ResourceList{corev1.ResourcePods: resource.MustParse("4")}
	if _, err := quotas.UpdateStatus(ctx, q, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	used(1)
}

// TestWhatGoesIsTakenOff: a claim to devices that goes, and a pod that is resized to less,
// wake the quotas of their namespace.
func TestWhatGoesIsTakenOff(t *testing.T) {
	const gpus = "gpu.deviceclass.resource.k8s.io/devices"
	hard := corev1.ResourceList{gpus: resource.MustParse("9"), corev1.ResourceRequestsCPU: resource.MustParse("9")}
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "few", ResourceVersion: "1"}, Spec: corev1.ResourceQuotaSpec{Hard: hard}}
	claim := func(name string) *resourcev1.ResourceClaim {
		return &resourcev1.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
			Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{
				{Name: "all", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: "gpu", AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: 2}},
			}}},
		}
	}
	pod := schedtest.Pod("p").CPU("2").Obj()
	pod.Namespace = "ns"
	client := fake.NewSimpleClientset(quota, claim("a"), claim("b"), pod)
	clock := clocktesting.NewFakeClock(time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC))
	env := loop.Env{Client: client, Informers: informers.NewSharedInformerFactory(client, 0), Events: loop.NewEvents(client, clock), Clock: clock}
	l := New(env, nil)
	ctx, cancel := context.WithCancel(t.Context())
	env.Informers.StartWithContext(ctx)
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		env.Informers.Shutdown()
	})
	before := clock.Now()
	used := func(name corev1.ResourceName, want int64) {
		t.Helper()
		schedtest.Eventually(t, func() string {
			q, err := client.CoreV1().ResourceQuotas("ns").Get(ctx, "few", metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			if got, ok := q.Status.Used[name]; !ok || got.Value() != want {
				if clock.Since(before) < recount-2*settled { // not by a recount that was due anyway
					clock.Step(settled / 4)
				}
				return fmt.Sprintf("%s of %s are used, want %d", got.String(), name, want)
			}
			return ""
		})
	}
	used(gpus, 4)
	used(corev1.ResourceRequestsCPU, 2)
	if err := client.ResourceV1().ResourceClaims("ns").Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	used(gpus, 2)
	before = clock.Now()
	smaller := pod.DeepCopy()
	smaller.Generation++
	smaller.Spec.Containers[0].Resources.Requests[corev1.ResourceCPU] = resource.MustParse("1")
	if _, err := client.CoreV1().Pods("ns").Update(ctx, smaller, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	used(corev1.ResourceRequestsCPU, 1)
}

// TestVersion: a kind is counted in a version that serves it; that it cannot be told is
// not that there are none.
func TestVersion(t *testing.T) {
	client := fake.NewSimpleClientset()
	widget := []metav1.APIResource{{Name: "widgets", Kind: "Widget", Namespaced: true}}
	client.Resources = []*metav1.APIResourceList{
		{GroupVersion: "example.com/v2", APIResources: []metav1.APIResource{{Name: "gadgets", Kind: "Gadget", Namespaced: true}}},
		{GroupVersion: "example.com/v1beta1", APIResources: widget},
	}
	c := &controller{client: client}
	for resource, want := range map[string]string{"gadgets": "v2", "widgets": "v1beta1", "others": ""} {
		if got, err := c.version(schema.GroupResource{Group: "example.com", Resource: resource}); err != nil || got != want {
			t.Errorf("%s: %q, %v, want %q", resource, got, err, want)
		}
	}
	if got, err := c.version(schema.GroupResource{Group: "none.example.com", Resource: "widgets"}); err != nil || got != "" {
		t.Errorf("a group that is not there: %q, %v", got, err)
	}
	client.PrependReactor("get", "resource", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("its server is down")
	})
	if got, err := c.version(schema.GroupResource{Group: "example.com", Resource: "widgets"}); err == nil {
		t.Errorf("unknown, and taken for %q", got)
	}
}
