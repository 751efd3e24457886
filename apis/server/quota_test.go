package server_test

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
)

// measured makes the quota and has it measured, as the loop does where nothing is used
// yet. It returns what reads how much of name is used.
func measured(t *testing.T, client kubernetes.Interface, hard corev1.ResourceList) (used func(name corev1.ResourceName) string) {
	t.Helper()
	ctx, quotas := t.Context(), client.CoreV1().ResourceQuotas("default")
	q := must[*corev1.ResourceQuota](t)(quotas.Create(ctx, &corev1.ResourceQuota{ObjectMeta: roleMeta("few"), Spec: corev1.ResourceQuotaSpec{Hard: hard}}, metav1.CreateOptions{}))
	q.Status = corev1.ResourceQuotaStatus{Hard: hard, Used: corev1.ResourceList{}}
	for name := range hard {
		q.Status.Used[name] = apiresource.MustParse("0")
	}
	must[*corev1.ResourceQuota](t)(quotas.UpdateStatus(ctx, q, metav1.UpdateOptions{}))
	return func(name corev1.ResourceName) string {
		t.Helper()
		now := must[*corev1.ResourceQuota](t)(quotas.Get(ctx, "few", metav1.GetOptions{}))
		quantity := now.Status.Used[name]
		return quantity.String()
	}
}

// counts makes objects until the quota has counted one: until admission has it in its
// cache, it counts nothing. Each of them takes step of the quota.
func counts(t *testing.T, used func() string, step string, create func(name string) error) {
	t.Helper()
	firsts := 0
	soon(t, "the quota counts", func() bool {
		firsts++
		if err := create(fmt.Sprint("first-", firsts)); err != nil && !apierrors.IsForbidden(err) {
			t.Fatal(err)
		}
		return used() != "0"
	})
	if used() != step {
		t.Fatalf("used after the first: %s, want %s", used(), step)
	}
}

// TestQuotaIsExact: 50 writers at once get what there is and nothing more, of objects
// and of the devices of a class.
func TestQuotaIsExact(t *testing.T) {
	features.Shows(t, 67)
	s := servertest.Start(t, nil)
	for _, test := range []struct {
		name   corev1.ResourceName
		kind   string // as a refusal names it
		each   int64  // how much of it an object takes
		create func(name string) error
	}{
		{"count/configmaps", "configmaps", 1, func(name string) error {
			_, err := s.Client.CoreV1().ConfigMaps("default").Create(t.Context(), configMap(name, nil), metav1.CreateOptions{})
			return err
		}},
		{"gpu.deviceclass.resource.k8s.io/devices", "resourceclaims.resource.k8s.io", 3, func(name string) error {
			claim := &resourcev1.ResourceClaim{ObjectMeta: meta(name)}
			claim.Spec.Devices.Requests = []resourcev1.DeviceRequest{
				{Name: "one", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: "gpu"}},
				{Name: "more", FirstAvailable: []resourcev1.DeviceSubRequest{{Name: "few", DeviceClassName: "gpu"}, {Name: "many", DeviceClassName: "gpu", Count: 2}}},
			}
			_, err := s.Client.ResourceV1().ResourceClaims("default").Create(t.Context(), claim, metav1.CreateOptions{})
			return err
		}},
	} {
		t.Run(string(test.name), func(t *testing.T) {
			all := 7 * test.each
			// What is left over is not enough for one more.
			usedOf := measured(t, s.Client, corev1.ResourceList{test.name: *apiresource.NewQuantity(all+test.each-1, apiresource.DecimalSI)})
			defer func() {
				if err := s.Client.CoreV1().ResourceQuotas("default").Delete(t.Context(), "few", metav1.DeleteOptions{}); err != nil {
					t.Error(err)
				}
			}()
			used := func() string { t.Helper(); return usedOf(test.name) }
			counts(t, used, fmt.Sprint(test.each), test.create)
			// lost are the requests that admission gave up on after ten seconds: each may
			// have been counted before.
			var made, lost atomic.Int64
			var writers sync.WaitGroup
			for i := range 50 {
				writers.Go(func() {
					for {
						err := test.create(fmt.Sprintf("c-%d", i))
						switch {
						case err == nil:
							made.Add(1)
							return
						case apierrors.IsForbidden(err) && strings.Contains(err.Error(), "exceeded quota"):
							return
						case apierrors.IsInternalError(err):
							lost.Add(1)
						case !apierrors.IsForbidden(err) && !apierrors.IsConflict(err):
							t.Errorf("writer %d: %v", i, err)
							return
						}
					}
				})
			}
			writers.Wait()
			if n := made.Load(); n > 6 || n+lost.Load() < 6 || used() != fmt.Sprint(all) {
				t.Errorf("%d of 50 writers made theirs, %d were lost, %s used; want 6 and %d", n, lost.Load(), used(), all)
			}
			err := test.create("late")
			want := fmt.Sprintf(`%s "late" is forbidden: exceeded quota: few, requested: %s=%d, used: %s=%d, limited: %s=%d`, test.kind, test.name, test.each, test.name, all, test.name, all+test.each-1)
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%v, want %s", err, want)
			}
		})
	}
}

// TestResizeIsHeldToBounds: what a running pod asks for more is held to the quota of its
// namespace and to its LimitRanges, and counted; that it asks for less is let pass.
func TestResizeIsHeldToBounds(t *testing.T) {
	features.Shows(t, 68)
	s := servertest.Start(t, nil)
	ctx, pods := t.Context(), s.Client.CoreV1().Pods("default")
	must[*corev1.LimitRange](t)(s.Client.CoreV1().LimitRanges("default").Create(ctx, &corev1.LimitRange{ObjectMeta: meta("bounds"), Spec: corev1.LimitRangeSpec{
		Limits: []corev1.LimitRangeItem{{Type: corev1.LimitTypeContainer, Max: corev1.ResourceList{"memory": apiresource.MustParse("1Gi")}}},
	}}, metav1.CreateOptions{}))
	used := measured(t, s.Client, corev1.ResourceList{"requests.cpu": apiresource.MustParse("1"), "limits.memory": apiresource.MustParse("4Gi")})
	name := ""
	counts(t, func() string { t.Helper(); return used("requests.cpu") }, "400m", func(n string) error {
		name = n
		p := pod(n)
		p.Spec.Containers[0].Resources = corev1.ResourceRequirements{
			Requests: corev1.ResourceList{"cpu": apiresource.MustParse("400m")}, Limits: corev1.ResourceList{"memory": apiresource.MustParse("512Mi")},
		}
		_, err := pods.Create(ctx, p, metav1.CreateOptions{})
		return err
	})
	if err := pods.Bind(ctx, binding(name, "n1"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct{ resources, refusal, cpu, memory string }{
		{`{"requests":{"cpu":"900m"}}`, "", "900m", "512Mi"},
		{`{"requests":{"cpu":"1100m"}}`, "exceeded quota: few, requested: requests.cpu=200m, used: requests.cpu=900m, limited: requests.cpu=1", "900m", "512Mi"},
		{`{"requests":{"memory":"1Gi"},"limits":{"memory":"1Gi"}}`, "", "900m", "1Gi"},
		{`{"limits":{"memory":"2Gi"}}`, "maximum memory usage per Container is 1Gi, but limit is 2Gi", "900m", "1Gi"},
		// The loop takes off what is asked for less.
		{`{"requests":{"cpu":"100m"}}`, "", "900m", "1Gi"},
	} {
		_, err := pods.Patch(ctx, name, types.StrategicMergePatchType, []byte(`{"spec":{"containers":[{"name":"main","resources":`+step.resources+`}]}}`), metav1.PatchOptions{}, "resize")
		if step.refusal == "" && err != nil || step.refusal != "" && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), step.refusal)) {
			t.Errorf("%s: %v, want %q", step.resources, err, step.refusal)
		}
		if cpu, memory := used("requests.cpu"), used("limits.memory"); cpu != step.cpu || memory != step.memory {
			t.Errorf("after %s %s and %s are used, want %s and %s", step.resources, cpu, memory, step.cpu, step.memory)
		}
	}
}
