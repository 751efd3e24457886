package schedtest_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/schedtest"
)

// TestLineDevices: pods with a device each, by a template, against the real
// server; the claims go with their pods, and the slices with their node.
func TestLineDevices(t *testing.T) {
	l := newLine(t)
	ctx, resources := t.Context(), l.client.ResourceV1()
	node, err := l.client.CoreV1().Nodes().Get(ctx, "n2", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := resources.DeviceClasses().Create(ctx, &resourcev1.DeviceClass{
		ObjectMeta: metav1.ObjectMeta{Name: "gpu"},
		Spec:       resourcev1.DeviceClassSpec{Selectors: []resourcev1.DeviceSelector{{CEL: &resourcev1.CELDeviceSelector{Expression: `device.driver == "gpu.example.com"`}}}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := resources.ResourceSlices().Create(ctx, &resourcev1.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "n2-gpus", OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}}},
		Spec: resourcev1.ResourceSliceSpec{
			Driver: "gpu.example.com", NodeName: ptr.To("n2"), Pool: resourcev1.ResourcePool{Name: "n2", ResourceSliceCount: 1},
			Devices: []resourcev1.Device{{Name: "gpu-0"}, {Name: "gpu-1"}},
		},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	template := &resourcev1.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Name: "gpu", Namespace: ns}}
	template.Spec.Spec.Devices.Requests = []resourcev1.DeviceRequest{{Name: "gpu", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: "gpu"}}}
	if _, err := resources.ResourceClaimTemplates(ns).Create(ctx, template, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		pod := schedtest.Pod(fmt.Sprintf("p%d", i))
		pod.P.Namespace, pod.P.UID = ns, ""
		pod.P.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To("gpu")}}
		pod.P.Spec.Containers[0].Resources.Claims = []corev1.ResourceClaim{{Name: "gpu"}}
		if _, err := l.client.CoreV1().Pods(ns).Create(ctx, pod.Obj(), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	// holders are pods that run, by the device that their claim has.
	holders := func() (map[string]string, int, string) {
		list, err := resources.ResourceClaims(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return nil, 0, err.Error()
		}
		out := map[string]string{}
		for i := range list.Items {
			claim := &list.Items[i]
			a := claim.Status.Allocation
			if a == nil {
				continue
			}
			if len(a.Devices.Results) != 1 || len(claim.Status.ReservedFor) != 1 {
				return nil, 0, fmt.Sprintf("%s: %+v", claim.Name, claim.Status)
			}
			user := claim.Status.ReservedFor[0].Name
			pod, err := l.client.CoreV1().Pods(ns).Get(ctx, user, metav1.GetOptions{})
			if err != nil {
				return nil, 0, err.Error()
			}
			if pod.Spec.NodeName != "n2" || pod.Status.Phase != corev1.PodRunning {
				return nil, 0, fmt.Sprintf("%s is %s on %q", user, pod.Status.Phase, pod.Spec.NodeName)
			}
			if other := out[a.Devices.Results[0].Device]; other != "" {
				t.Fatalf("%s and %s have %s", other, user, a.Devices.Results[0].Device)
			}
			out[a.Devices.Results[0].Device] = user
		}
		return out, len(list.Items), ""
	}
	var have map[string]string
	schedtest.Eventually(t, func() string {
		got, claims, fault := holders()
		if have = got; fault != "" || len(have) != 2 || claims != 3 {
			return fmt.Sprintf("%v of %d claims; %s", have, claims, fault)
		}
		return ""
	})
	first := have["gpu-0"]
	if err := l.client.CoreV1().Pods(ns).Delete(ctx, first, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	schedtest.Eventually(t, func() string {
		got, claims, fault := holders()
		if fault != "" || len(got) != 2 || claims != 2 || got["gpu-0"] == first {
			return fmt.Sprintf("after %s went: %v of %d claims; %s", first, got, claims, fault)
		}
		return ""
	})
	// A rule taints gpu-1: its pod is evicted, and nothing tolerates the taint.
	second := have["gpu-1"]
	if _, err := resources.DeviceTaintRules().Create(ctx, &resourcev1.DeviceTaintRule{
		ObjectMeta: metav1.ObjectMeta{Name: "hot"},
		Spec: resourcev1.DeviceTaintRuleSpec{
			DeviceSelector: &resourcev1.DeviceTaintSelector{Driver: ptr.To("gpu.example.com"), Device: ptr.To("gpu-1")},
			Taint:          resourcev1.DeviceTaint{Key: "example.com/hot", Effect: resourcev1.DeviceTaintEffectNoExecute},
		},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	schedtest.Eventually(t, func() string {
		got, _, fault := holders()
		rule, err := resources.DeviceTaintRules().Get(ctx, "hot", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if _, err := l.client.CoreV1().Pods(ns).Get(ctx, second, metav1.GetOptions{}); !apierrors.IsNotFound(err) || got["gpu-1"] != "" || len(rule.Status.Conditions) != 1 || rule.Spec.Taint.TimeAdded == nil {
			return fmt.Sprintf("after the taint: %v; %s; %s is there: %v; the rule is %+v", got, fault, second, err, rule)
		}
		return ""
	})
	for i := range 3 {
		if err := l.client.CoreV1().Pods(ns).Delete(ctx, fmt.Sprintf("p%d", i), metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			t.Fatal(err)
		}
	}
	if err := l.client.CoreV1().Nodes().Delete(ctx, "n2", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	schedtest.Eventually(t, func() string {
		claims, err := resources.ResourceClaims(ns).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err.Error()
		}
		slices, err := resources.ResourceSlices().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err.Error()
		}
		if len(claims.Items)+len(slices.Items) > 0 {
			return fmt.Sprintf("%d claims and %d slices are left", len(claims.Items), len(slices.Items))
		}
		return ""
	})
}

// TestLineExtendedResources: pods that ask for a resource which a class names,
// against the real server; by the class's own name, too.
func TestLineExtendedResources(t *testing.T) {
	l := newLine(t)
	ctx, resources := t.Context(), l.client.ResourceV1()
	if _, err := resources.DeviceClasses().Create(ctx, &resourcev1.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "gpu"}, Spec: resourcev1.DeviceClassSpec{ExtendedResourceName: ptr.To("example.com/gpu")}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := resources.ResourceSlices().Create(ctx, &resourcev1.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "n2-gpus"},
		Spec: resourcev1.ResourceSliceSpec{
			Driver: "gpu.example.com", NodeName: ptr.To("n2"), Pool: resourcev1.ResourcePool{Name: "n2", ResourceSliceCount: 1},
			Devices: []resourcev1.Device{{Name: "gpu-0"}, {Name: "gpu-1"}},
		},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for i, name := range []corev1.ResourceName{"example.com/gpu", "deviceclass.resource.kubernetes.io/gpu"} {
		pod := schedtest.Pod(fmt.Sprintf("p%d", i))
		pod.P.Namespace, pod.P.UID = ns, ""
		pod.P.Spec.Containers[0].Resources.Limits = corev1.ResourceList{name: resource.MustParse("1")}
		if _, err := l.client.CoreV1().Pods(ns).Create(ctx, pod.Obj(), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	schedtest.Eventually(t, func() string {
		for i := range 2 {
			pod, err := l.client.CoreV1().Pods(ns).Get(ctx, fmt.Sprintf("p%d", i), metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			status := pod.Status.ExtendedResourceClaimStatus
			if pod.Spec.NodeName != "n2" || pod.Status.Phase != corev1.PodRunning || status == nil || len(status.RequestMappings) != 1 {
				return fmt.Sprintf("%s is %s on %q, %+v, %+v", pod.Name, pod.Status.Phase, pod.Spec.NodeName, status, pod.Status.Conditions)
			}
			claim, err := resources.ResourceClaims(ns).Get(ctx, status.ResourceClaimName, metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			if claim.Status.Allocation == nil || claim.Status.Allocation.Devices.Results[0].Request != status.RequestMappings[0].RequestName || len(claim.Status.ReservedFor) != 1 {
				return fmt.Sprintf("claim %+v of %+v", claim, status)
			}
		}
		return ""
	})
	for i := range 2 {
		if err := l.client.CoreV1().Pods(ns).Delete(ctx, fmt.Sprintf("p%d", i), metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	schedtest.Eventually(t, func() string {
		claims, err := resources.ResourceClaims(ns).List(ctx, metav1.ListOptions{})
		if err != nil || len(claims.Items) > 0 {
			return fmt.Sprintf("%d claims are left, %v", len(claims.Items), err)
		}
		return ""
	})
}
