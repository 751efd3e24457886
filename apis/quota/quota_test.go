package quota

import (
	"math"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"
)

func list(pairs ...string) corev1.ResourceList {
	l := corev1.ResourceList{}
	for i := 0; i < len(pairs); i += 2 {
		l[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
	}
	return l
}

func pod(phase corev1.PodPhase, requests, limits corev1.ResourceList) *corev1.Pod {
	return &corev1.Pod{
		Spec:   corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{Requests: requests, Limits: limits}}}},
		Status: corev1.PodStatus{Phase: phase},
	}
}

func exactly(class string, mode resourcev1.DeviceAllocationMode, count int64) resourcev1.DeviceRequest {
	return resourcev1.DeviceRequest{Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: class, AllocationMode: mode, Count: count}}
}

func claim(requests ...resourcev1.DeviceRequest) *resourcev1.ResourceClaim {
	return &resourcev1.ResourceClaim{Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: requests}}}
}

func TestUsed(t *testing.T) {
	classed := pod(corev1.PodRunning, list("cpu", "1", "memory", "1Gi"), list("memory", "2Gi"))
	classed.Spec.PriorityClassName = "high"
	now := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	going := func(ago time.Duration) *corev1.Pod { // with a grace of half a minute
		p := pod(corev1.PodRunning, list("cpu", "4"), nil)
		p.DeletionTimestamp, p.DeletionGracePeriodSeconds = ptr.To(metav1.NewTime(now.Add(-ago))), ptr.To[int64](30)
		return p
	}
	overdue := going(time.Minute)
	deadline := pod(corev1.PodRunning, list("cpu", "250m"), nil)
	deadline.Spec.ActiveDeadlineSeconds = ptr.To[int64](60)
	deadline.Spec.Containers[0].Resources.Requests["example.com/gpu"] = resource.MustParse("2")
	deadline.Spec.Containers[0].Resources.Requests["deviceclass.resource.kubernetes.io/gpu"] = resource.MustParse("3")
	objects := map[schema.GroupResource][]runtime.Object{
		corev1.Resource("pods"): {classed, deadline, pod(corev1.PodPending, nil, nil), overdue, pod(corev1.PodSucceeded, list("cpu", "8", "example.com/gpu", "4"), nil)},
		corev1.Resource("services"): {
			&corev1.Service{Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeClusterIP, Ports: make([]corev1.ServicePort, 3)}},
			&corev1.Service{Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeNodePort, Ports: make([]corev1.ServicePort, 2)}},
			&corev1.Service{Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Ports: make([]corev1.ServicePort, 1)}},
			&corev1.Service{Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, AllocateLoadBalancerNodePorts: ptr.To(false), Ports: []corev1.ServicePort{{NodePort: 30001}, {}, {NodePort: 30002}}}},
		},
		corev1.Resource("persistentvolumeclaims"): {&corev1.PersistentVolumeClaim{Spec: corev1.PersistentVolumeClaimSpec{
			StorageClassName: ptr.To("gold"), Resources: corev1.VolumeResourceRequirements{Requests: list("storage", "5Gi")},
		}}},
		resourceClaims: {
			claim(exactly("gpu", resourcev1.DeviceAllocationModeExactCount, 2), exactly("gpu", resourcev1.DeviceAllocationModeExactCount, 1), exactly("nic", resourcev1.DeviceAllocationModeExactCount, 1)),
			claim(resourcev1.DeviceRequest{FirstAvailable: []resourcev1.DeviceSubRequest{
				{DeviceClassName: "gpu", AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: 1},
				{DeviceClassName: "gpu", AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: 4},
				{DeviceClassName: "nic", AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: 8},
			}}, exactly("nic", resourcev1.DeviceAllocationModeExactCount, 1)),
			claim(exactly("fpga", resourcev1.DeviceAllocationModeAll, 0)),
		},
		{Group: "apps", Resource: "deployments"}: {&metav1.PartialObjectMetadata{}, &metav1.PartialObjectMetadata{}},
		corev1.Resource("secrets"):               {&metav1.PartialObjectMetadata{}},
	}
	for _, test := range []struct {
		name       string
		hard, want corev1.ResourceList
		scopes     []corev1.ResourceQuotaScope
		selector   *corev1.ScopeSelector
	}{
		{name: "pods", hard: list("pods", "9", "count/pods", "9", "requests.cpu", "9", "cpu", "9", "requests.memory", "9Gi", "limits.memory", "9Gi"),
			want: list("pods", "3", "count/pods", "5", "requests.cpu", "1250m", "cpu", "1250m", "requests.memory", "1Gi", "limits.memory", "2Gi")},
		{name: "services", hard: list("services", "9", "services.nodeports", "9", "services.loadbalancers", "9"),
			want: list("services", "4", "services.nodeports", "5", "services.loadbalancers", "2")},
		{name: "claims", hard: list("persistentvolumeclaims", "9", "requests.storage", "9Gi", "gold.storageclass.storage.k8s.io/requests.storage", "9Gi", "silver.storageclass.storage.k8s.io/requests.storage", "9Gi"),
			want: list("persistentvolumeclaims", "1", "requests.storage", "5Gi", "gold.storageclass.storage.k8s.io/requests.storage", "5Gi", "silver.storageclass.storage.k8s.io/requests.storage", "0")},
		{name: "numbers", hard: list("count/deployments.apps", "9", "secrets", "9"), want: list("count/deployments.apps", "2", "secrets", "1")},
		{name: "devices", hard: list("count/resourceclaims.resource.k8s.io", "9", "gpu.deviceclass.resource.k8s.io/devices", "9", "nic.deviceclass.resource.k8s.io/devices", "9", "fpga.deviceclass.resource.k8s.io/devices", "99", "other.deviceclass.resource.k8s.io/devices", "9"),
			want: list("count/resourceclaims.resource.k8s.io", "3", "gpu.deviceclass.resource.k8s.io/devices", "7", "nic.deviceclass.resource.k8s.io/devices", "10", "fpga.deviceclass.resource.k8s.io/devices", "32", "other.deviceclass.resource.k8s.io/devices", "0")},
		{name: "devices of one class alone", hard: list("gpu.deviceclass.resource.k8s.io/devices", "9"), want: list("gpu.deviceclass.resource.k8s.io/devices", "7")},
		{name: "devices by extended resources", hard: list("requests.example.com/gpu", "9", "requests.deviceclass.resource.kubernetes.io/gpu", "9"),
			want: list("requests.example.com/gpu", "2", "requests.deviceclass.resource.kubernetes.io/gpu", "3")},
		{name: "best effort", hard: list("pods", "9"), scopes: []corev1.ResourceQuotaScope{corev1.ResourceQuotaScopeBestEffort}, want: list("pods", "1")},
		{name: "terminating", hard: list("pods", "9"), scopes: []corev1.ResourceQuotaScope{corev1.ResourceQuotaScopeTerminating}, want: list("pods", "1")},
		{name: "by class", hard: list("pods", "9", "cpu", "9"), want: list("pods", "1", "cpu", "1"), selector: &corev1.ScopeSelector{MatchExpressions: []corev1.ScopedResourceSelectorRequirement{
			{ScopeName: corev1.ResourceQuotaScopePriorityClass, Operator: corev1.ScopeSelectorOpIn, Values: []string{"high", "higher"}}}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			q := &corev1.ResourceQuota{Spec: corev1.ResourceQuotaSpec{Hard: test.hard, Scopes: test.scopes, ScopeSelector: test.selector}}
			got, err := Used(q, Resources(test.hard), func(r schema.GroupResource, _ string) ([]runtime.Object, error) { return objects[r], nil }, func() time.Time { return now })
			if err != nil {
				t.Fatal(err)
			}
			if len(got) != len(test.want) {
				t.Errorf("%v", got)
			}
			for name, want := range test.want {
				if have := got[name]; have.Cmp(want) != 0 {
					t.Errorf("%s: %s, want %s", name, have.String(), want.String())
				}
			}
		})
	}
}

// TestClaimsByClass: the scope VolumeAttributesClass counts the claims of classes, and one
// that changes its class for both.
func TestClaimsByClass(t *testing.T) {
	claim := func(size, spec, current, target string) *corev1.PersistentVolumeClaim {
		c := &corev1.PersistentVolumeClaim{}
		c.Spec.Resources.Requests = list("storage", size)
		if spec != "" {
			c.Spec.VolumeAttributesClassName = &spec
		}
		if current != "" {
			c.Status.CurrentVolumeAttributesClassName = &current
		}
		if target != "" {
			c.Status.ModifyVolumeStatus = &corev1.ModifyVolumeStatus{TargetVolumeAttributesClassName: target}
		}
		return c
	}
	claimsOf := []runtime.Object{
		claim("1Gi", "", "", ""), claim("2Gi", "gold", "gold", ""), claim("4Gi", "silver", "silver", ""), claim("8Gi", "gold", "silver", "gold"), claim("16Gi", "lead", "", ""),
	}
	for _, test := range []struct {
		operator       corev1.ScopeSelectorOperator
		values         []string
		claims, amount string
	}{
		{"Exists", nil, "4", "30Gi"}, {"DoesNotExist", nil, "1", "1Gi"},
		{"In", []string{"gold"}, "2", "10Gi"}, {"In", []string{"silver", "lead"}, "3", "28Gi"}, {"In", []string{"tin"}, "0", "0"},
		{"NotIn", []string{"gold"}, "4", "29Gi"}, {"NotIn", []string{"gold", "silver", "lead"}, "1", "1Gi"},
	} {
		q := &corev1.ResourceQuota{Spec: corev1.ResourceQuotaSpec{Hard: list("persistentvolumeclaims", "99", "requests.storage", "99Gi"), ScopeSelector: &corev1.ScopeSelector{
			MatchExpressions: []corev1.ScopedResourceSelectorRequirement{{ScopeName: corev1.ResourceQuotaScopeVolumeAttributesClass, Operator: test.operator, Values: test.values}}}}}
		got, err := Used(q, Resources(q.Spec.Hard), func(schema.GroupResource, string) ([]runtime.Object, error) { return claimsOf, nil }, time.Now)
		if err != nil {
			t.Fatal(err)
		}
		for name, want := range list("persistentvolumeclaims", test.claims, "requests.storage", test.amount) {
			if have := got[name]; have.Cmp(want) != 0 {
				t.Errorf("%s %q: %s of %s, want %s", test.operator, test.values, have.String(), name, want.String())
			}
		}
	}
	scoped := corev1.ScopedResourceSelectorRequirement{ScopeName: corev1.ResourceQuotaScopeVolumeAttributesClass, Operator: corev1.ScopeSelectorOpIn, Values: []string{"gold"}}
	q := &corev1.ResourceQuota{Spec: corev1.ResourceQuotaSpec{Hard: list("persistentvolumeclaims", "1"), ScopeSelector: &corev1.ScopeSelector{MatchExpressions: []corev1.ScopedResourceSelectorRequirement{scoped}}},
		Status: corev1.ResourceQuotaStatus{Hard: list("persistentvolumeclaims", "1")}}
	c := claims{counted: counted{resource: corev1.Resource("persistentvolumeclaims")}}
	for i, want := range []bool{false, true, false, true, false} {
		if match, err := c.Matches(q, claimsOf[i]); err != nil || match != want {
			t.Errorf("admission holds claim %d to the quota: %t, %v, want %t", i, match, err, want)
		}
		if scopes, err := c.MatchingScopes(claimsOf[i], []corev1.ScopedResourceSelectorRequirement{scoped}); err != nil || (len(scopes) == 1) != want {
			t.Errorf("scopes of claim %d: %v, %v", i, scopes, err)
		}
	}
	if left, err := c.UncoveredQuotaScopes([]corev1.ScopedResourceSelectorRequirement{scoped}, nil); err != nil || len(left) != 1 {
		t.Errorf("a limited class that no quota covers: %v, %v", left, err)
	}
}

func TestConstraints(t *testing.T) {
	p := pods{counted: counted{resource: corev1.Resource("pods")}}
	required := []corev1.ResourceName{"pods", "requests.cpu", "limits.memory"}
	if err := p.Constraints(required, pod("", list("cpu", "1"), list("memory", "1Gi"))); err != nil {
		t.Error(err)
	}
	err := p.Constraints(required, pod("", nil, list("memory", "1Gi")))
	if err == nil || !strings.Contains(err.Error(), "must specify requests.cpu for: main") {
		t.Error(err)
	}
}

// TestOverdue: a pod counts until its grace has passed after the moment at which it was
// to be gone, as with Kubernetes.
func TestOverdue(t *testing.T) {
	now := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	for _, test := range []struct {
		ago   time.Duration
		grace *int64
		want  bool
	}{
		{-10 * time.Second, ptr.To[int64](30), false},
		{29 * time.Second, ptr.To[int64](30), false},
		{31 * time.Second, ptr.To[int64](30), true},
		{time.Hour, nil, false},
		{time.Hour, ptr.To[int64](math.MaxInt64), false},
	} {
		p := pod(corev1.PodRunning, nil, nil)
		p.DeletionTimestamp, p.DeletionGracePeriodSeconds = ptr.To(metav1.NewTime(now.Add(-test.ago))), test.grace
		if got := overdue(p, now); got != test.want {
			t.Errorf("%s after its end, grace %v: %t", test.ago, test.grace, got)
		}
	}
}
