package sched

import (
	"fmt"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/schedtest"
)

var claimsResource = resourcev1.SchemeGroupVersion.WithResource("resourceclaims")

// gpus are a class, and so many devices of it on the node n1.
func gpus(n int) []runtime.Object {
	slice := &resourcev1.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: "n1-gpus"},
		Spec:       resourcev1.ResourceSliceSpec{Driver: "gpu.example.com", NodeName: ptr.To("n1"), Pool: resourcev1.ResourcePool{Name: "n1", ResourceSliceCount: 1}},
	}
	for i := range n {
		slice.Spec.Devices = append(slice.Spec.Devices, resourcev1.Device{Name: fmt.Sprintf("gpu-%d", i)})
	}
	return []runtime.Object{&resourcev1.DeviceClass{ObjectMeta: metav1.ObjectMeta{Name: "gpu"}}, slice, gpuTemplate()}
}

func oneGPU() resourcev1.ResourceClaimSpec {
	return resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{Requests: []resourcev1.DeviceRequest{{Name: "gpu", Exactly: &resourcev1.ExactDeviceRequest{
		DeviceClassName: "gpu", AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: 1,
	}}}}}
}

func gpuTemplate() *resourcev1.ResourceClaimTemplate {
	return &resourcev1.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: schedtest.Namespace, Name: "gpu"}, Spec: resourcev1.ResourceClaimTemplateSpec{Spec: oneGPU()}}
}

func gpuClaim(name string) *resourcev1.ResourceClaim {
	return &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: schedtest.Namespace, Name: name}, Spec: oneGPU()}
}

// gpuPod has a GPU of its own by the template, or the claims that are named.
func gpuPod(name string, claims ...string) *corev1.Pod {
	p := schedtest.Pod(name)
	for _, claim := range claims {
		p.P.Spec.ResourceClaims = append(p.P.Spec.ResourceClaims, corev1.PodResourceClaim{Name: claim, ResourceClaimName: ptr.To(claim)})
	}
	if len(claims) == 0 {
		p.P.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To("gpu")}}
	}
	return p.Obj()
}

// state is who has what.
type deviceState struct {
	node    map[string]string   // by pod
	holders map[string][]string // claims by device
	users   map[string][]string // pods by claim
	why     map[string]string   // why a pod has no node
}

func devicesNow(t *testing.T, c *schedtest.Cluster) deviceState {
	t.Helper()
	s := deviceState{map[string]string{}, map[string][]string{}, map[string][]string{}, map[string]string{}}
	claims, err := c.Client.ResourceV1().ResourceClaims(schedtest.Namespace).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for i := range claims.Items {
		claim := &claims.Items[i]
		if a := claim.Status.Allocation; a != nil {
			for _, r := range a.Devices.Results {
				s.holders[r.Device] = append(s.holders[r.Device], claim.Name)
			}
		}
		for _, user := range claim.Status.ReservedFor {
			s.users[claim.Name] = append(s.users[claim.Name], user.Name)
		}
	}
	for _, pod := range listPods(t, c) {
		s.node[pod.Name] = pod.Spec.NodeName
		for _, condition := range pod.Status.Conditions {
			if condition.Type == corev1.PodScheduled {
				s.why[pod.Name] = condition.Message
			}
		}
	}
	return s
}

// bound counts the pods with a node; twice names a device that two claims have.
func (s deviceState) bound() (n int, twice string) {
	for _, node := range s.node {
		if node != "" {
			n++
		}
	}
	for device, claims := range s.holders {
		if len(claims) > 1 {
			twice = fmt.Sprintf("%s is allocated to %v", device, claims)
		}
	}
	return n, twice
}

// TestOneDeviceTwoPods: one pod gets it, the other one says why not, and gets it
// when the first one has gone.
func TestOneDeviceTwoPods(t *testing.T) {
	c := cluster(t, 3, append(gpus(1), gpuPod("a"), gpuPod("b"))...)
	defer leader(t, c)()
	var first string
	schedtest.Eventually(t, func() string {
		s := devicesNow(t, c)
		n, twice := s.bound()
		first = "a"
		second := "b"
		if s.node["b"] != "" {
			first, second = "b", "a"
		}
		want := fmt.Sprintf("0/3 nodes are available: 3 node(s) had too few devices for request \"gpu\" of resourceclaim %q: 1 of class \"gpu\".", claimNameOf(t, c, second))
		if n != 1 || twice != "" || s.node[first] != "n1" || s.why[second] != want {
			return fmt.Sprintf("%+v %s", s, twice)
		}
		return ""
	})
	if err := c.Client.CoreV1().Pods(schedtest.Namespace).Delete(t.Context(), first, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	second := map[string]string{"a": "b", "b": "a"}[first]
	schedtest.Eventually(t, func() string {
		s := devicesNow(t, c)
		if n, twice := s.bound(); n != 1 || twice != "" || s.node[second] != "n1" {
			return fmt.Sprintf("after %s went: %+v %s", first, s, twice)
		}
		return ""
	})
}

// claimNameOf is the claim that was made for the pod.
func claimNameOf(t *testing.T, c *schedtest.Cluster, pod string) string {
	p, err := c.Client.CoreV1().Pods(schedtest.Namespace).Get(t.Context(), pod, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Status.ResourceClaimStatuses) == 0 {
		return ""
	}
	return ptr.Deref(p.Status.ResourceClaimStatuses[0].ResourceClaimName, "")
}

// TestSharedClaim: many pods with one claim land where its device is, and each of
// them is in its list of users.
func TestSharedClaim(t *testing.T) {
	objects := append(gpus(2), gpuClaim("shared"))
	for i := range 12 {
		objects = append(objects, gpuPod(fmt.Sprintf("p%d", i), "shared"))
	}
	c := cluster(t, 3, objects...)
	defer leader(t, c)()
	schedtest.Eventually(t, func() string {
		s := devicesNow(t, c)
		if n, twice := s.bound(); n != 12 || twice != "" || len(s.users["shared"]) != 12 || len(s.holders) != 1 {
			return fmt.Sprintf("%d pods are bound, users %v, holders %v %s", n, s.users, s.holders, twice)
		}
		for pod, node := range s.node {
			if node != "n1" {
				t.Errorf("%s is on %s", pod, node)
			}
		}
		return ""
	})
}

// TestLeaderChangesWhileDevicesAreGiven: many pods, few devices, and a new leader
// every few allocations. No device is ever had twice, and all get their turn.
func TestLeaderChangesWhileDevicesAreGiven(t *testing.T) {
	objects := gpus(4)
	for i := range 12 {
		objects = append(objects, gpuPod(fmt.Sprintf("p%02d", i)))
	}
	c := cluster(t, 2, objects...)
	var mu sync.Mutex
	var faults []string
	given := make(chan struct{}, 1000)
	c.Client.PrependReactor("update", "resourceclaims", func(action clienttesting.Action) (bool, runtime.Object, error) {
		claim := action.(clienttesting.UpdateAction).GetObject().(*resourcev1.ResourceClaim)
		if action.GetSubresource() != "status" || claim.Status.Allocation == nil {
			return false, nil, nil
		}
		// Only the truth counts, at the moment of the write.
		all, err := c.Client.Tracker().List(claimsResource, resourcev1.SchemeGroupVersion.WithKind("ResourceClaim"), schedtest.Namespace)
		if err != nil {
			return true, nil, err
		}
		for _, other := range all.(*resourcev1.ResourceClaimList).Items {
			if a := other.Status.Allocation; a != nil && other.Name != claim.Name && a.Devices.Results[0].Device == claim.Status.Allocation.Devices.Results[0].Device {
				mu.Lock()
				faults = append(faults, fmt.Sprintf("%s is given to %s while %s has it", a.Devices.Results[0].Device, claim.Name, other.Name))
				mu.Unlock()
			}
		}
		given <- struct{}{}
		return false, nil, nil
	})
	for left, round := 12, 0; left > 0; round++ {
		if round > 100 {
			t.Fatalf("%d pods are left after %d leaders: %+v", left, round, devicesNow(t, c))
		}
		stop := leader(t, c)
		schedtest.Eventually(t, func() string { // it has done something
			if n, _ := devicesNow(t, c).bound(); n == 0 && len(given) == 0 {
				return fmt.Sprintf("no device is given any more: %+v", devicesNow(t, c))
			}
			return ""
		})
		stop()
		for len(given) > 0 {
			<-given
		}
		// Whoever has a device has finished with it.
		for _, pod := range listPods(t, c) {
			if pod.Spec.NodeName == "" {
				continue
			}
			if err := c.Client.CoreV1().Pods(schedtest.Namespace).Delete(t.Context(), pod.Name, *metav1.NewDeleteOptions(0)); err != nil {
				t.Fatal(err)
			}
			left--
			// There is no collector of garbage on the fake server.
			if err := c.Client.ResourceV1().ResourceClaims(schedtest.Namespace).Delete(t.Context(), claimNameOfPod(&pod), metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
				t.Fatal(err)
			}
		}
	}
	mu.Lock()
	defer mu.Unlock()
	for _, fault := range faults {
		t.Error(fault)
	}
}

func claimNameOfPod(pod *corev1.Pod) string {
	if len(pod.Status.ResourceClaimStatuses) == 0 {
		return ""
	}
	return ptr.Deref(pod.Status.ResourceClaimStatuses[0].ResourceClaimName, "")
}

// TestLostAnswers: the server stores what it is asked to and the answer does not
// arrive, or it does not store it. The device is given once.
func TestLostAnswers(t *testing.T) {
	for _, stored := range []bool{true, false} {
		t.Run(fmt.Sprintf("stored=%t", stored), func(t *testing.T) {
			c := cluster(t, 2, append(gpus(1), gpuPod("a"), gpuPod("b"))...)
			var mu sync.Mutex
			lost := 0
			c.Client.PrependReactor("update", "resourceclaims", func(action clienttesting.Action) (bool, runtime.Object, error) {
				claim := action.(clienttesting.UpdateAction).GetObject().(*resourcev1.ResourceClaim)
				mu.Lock()
				defer mu.Unlock()
				if action.GetSubresource() != "status" || claim.Status.Allocation == nil || lost >= 2 {
					return false, nil, nil
				}
				lost++
				if stored && lost == 1 {
					old, err := c.Client.Tracker().Get(claimsResource, claim.Namespace, claim.Name)
					if err != nil || old.(*resourcev1.ResourceClaim).ResourceVersion != claim.ResourceVersion {
						return true, nil, apierrors.NewConflict(claimsResource.GroupResource(), claim.Name, fmt.Errorf("%v", err))
					}
					written := claim.DeepCopy()
					written.ResourceVersion += "0"
					if err := c.Client.Tracker().Update(claimsResource, written, claim.Namespace); err != nil {
						return true, nil, err
					}
				}
				return true, nil, apierrors.NewTimeoutError("lost", 1)
			})
			defer leader(t, c)()
			schedtest.Eventually(t, func() string {
				s := devicesNow(t, c)
				if n, twice := s.bound(); n != 1 || twice != "" || len(s.holders) != 1 {
					return fmt.Sprintf("%+v %s", s, twice)
				}
				return ""
			})
		})
	}
}

// TestTwoLeadersGiveOneDevice: another leader's write, of another claim, comes
// just before ours. The pod is not bound to a device that somebody else has.
func TestTwoLeadersGiveOneDevice(t *testing.T) {
	theirs := gpuClaim("theirs")
	c := cluster(t, 2, append(gpus(2), theirs, gpuPod("a"))...)
	var once sync.Once
	var clashed string
	c.Client.PrependReactor("update", "resourceclaims", func(action clienttesting.Action) (bool, runtime.Object, error) {
		claim := action.(clienttesting.UpdateAction).GetObject().(*resourcev1.ResourceClaim)
		if action.GetSubresource() != "status" || claim.Status.Allocation == nil {
			return false, nil, nil
		}
		var err error
		once.Do(func() {
			clashed = claim.Status.Allocation.Devices.Results[0].Device
			var old runtime.Object
			if old, err = c.Client.Tracker().Get(claimsResource, schedtest.Namespace, "theirs"); err != nil {
				return
			}
			other := old.DeepCopyObject().(*resourcev1.ResourceClaim)
			other.Status.Allocation = claim.Status.Allocation.DeepCopy()
			other.Status.ReservedFor = []resourcev1.ResourceClaimConsumerReference{{APIGroup: "example.com", Resource: "others", Name: "o", UID: "o"}}
			err = c.Client.Tracker().Update(claimsResource, other, schedtest.Namespace)
		})
		return err != nil, nil, err
	})
	defer leader(t, c)()
	schedtest.Eventually(t, func() string {
		s := devicesNow(t, c)
		if n, twice := s.bound(); n != 1 || twice != "" || len(s.holders) != 2 {
			return fmt.Sprintf("%+v %s", s, twice)
		}
		return ""
	})
	if s := devicesNow(t, c); len(s.holders[clashed]) != 1 || s.holders[clashed][0] != "theirs" {
		t.Errorf("%s is allocated to %v, want the claim that was first", clashed, s.holders[clashed])
	}
}

// TestDevicesThatTheNodeCannotUse: the claim has a device on a node that is full,
// which nobody else uses; the pod gets another device elsewhere.
func TestDevicesThatTheNodeCannotUse(t *testing.T) {
	claim := gpuClaim("q")
	claim.Finalizers = []string{resourcev1.Finalizer}
	claim.Status.Allocation = &resourcev1.AllocationResult{
		Devices: resourcev1.DeviceAllocationResult{Results: []resourcev1.DeviceRequestAllocationResult{{Request: "gpu", Driver: "gpu.example.com", Pool: "n1", Device: "gpu-0"}}},
		NodeSelector: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchFields: []corev1.NodeSelectorRequirement{{
			Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{"n1"},
		}}}}},
	}
	full := schedtest.Pod("full").CPU("4").On("n1").Obj()
	pod := gpuPod("a", "q")
	pod.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: full.Spec.Containers[0].Resources.Requests[corev1.ResourceCPU]}
	elsewhere := gpus(1)[1].(*resourcev1.ResourceSlice)
	elsewhere.Name, elsewhere.Spec.NodeName, elsewhere.Spec.Pool.Name = "n2-gpus", ptr.To("n2"), "n2"
	c := cluster(t, 2, append(gpus(1), elsewhere, claim, full, pod)...)
	defer leader(t, c)()
	schedtest.Eventually(t, func() string {
		if s := devicesNow(t, c); s.node["a"] != "n2" {
			return fmt.Sprintf("%+v", s)
		}
		return ""
	})
}

// TestExtendedResourcesByDevices: pods that ask for a resource which a class names
// get a claim each, also after a binding was refused; the device is given back
// when the pod has gone.
func TestExtendedResourcesByDevices(t *testing.T) {
	objects := gpus(1)
	objects[0].(*resourcev1.DeviceClass).Spec.ExtendedResourceName = ptr.To("example.com/gpu")
	pod := func(name string) *corev1.Pod {
		p := schedtest.Pod(name).Obj()
		one := corev1.ResourceList{"example.com/gpu": *resource.NewQuantity(1, resource.DecimalSI)}
		p.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: one, Limits: one}
		return p
	}
	c := cluster(t, 2, append(objects, pod("a"), pod("b"))...)
	var mu sync.Mutex
	refused := false
	c.Client.PrependReactor("create", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		mu.Lock()
		defer mu.Unlock()
		if action.GetSubresource() != "binding" || refused {
			return false, nil, nil
		}
		refused = true
		return true, nil, apierrors.NewInternalError(fmt.Errorf("refused once"))
	})
	defer leader(t, c)()
	for _, last := range []bool{false, true} {
		var with, without string
		schedtest.Eventually(t, func() string {
			s := devicesNow(t, c)
			n, twice := s.bound()
			if n != 1 || twice != "" || len(s.holders["gpu-0"]) != 1 {
				return fmt.Sprintf("%+v %s", s, twice)
			}
			for _, p := range listPods(t, c) {
				if p.Spec.NodeName == "" {
					without = p.Name
					continue
				}
				with = p.Name
				claim, status := s.holders["gpu-0"][0], p.Status.ExtendedResourceClaimStatus
				if p.Spec.NodeName != "n1" || status == nil || status.ResourceClaimName != claim || len(status.RequestMappings) != 1 ||
					status.RequestMappings[0].ContainerName != p.Spec.Containers[0].Name || len(s.users[claim]) != 1 || s.users[claim][0] != p.Name {
					return fmt.Sprintf("%s is on %q with %+v; %+v", p.Name, p.Spec.NodeName, status, s)
				}
			}
			if !last && (without == "" || s.why[without] == "") {
				return fmt.Sprintf("%q waits without a reason", without)
			}
			return ""
		})
		if err := c.Client.CoreV1().Pods(schedtest.Namespace).Delete(t.Context(), with, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	schedtest.Eventually(t, func() string {
		if s := devicesNow(t, c); len(s.holders) > 0 || len(s.users) > 0 { // the fake server has no collector of garbage
			return fmt.Sprintf("after the pods have gone: %+v", s)
		}
		return ""
	})
}

// TestGangSharesAClaim: the pods of a gang share a claim that has no devices yet.
// The node whose devices are tried first may have no room for all of them. A write
// for another claim of one of them is refused once: all is taken back, and tried again.
func TestGangSharesAClaim(t *testing.T) {
	objects := append(gpus(1), gpuClaim("shared"), gpuClaim("own"), schedtest.Gang("g", 3))
	other := objects[1].DeepCopyObject().(*resourcev1.ResourceSlice)
	other.Name, other.Spec.NodeName, other.Spec.Pool.Name = "n2-gpus", ptr.To("n2"), "n2"
	other.Spec.Devices = []resourcev1.Device{{Name: "other-0"}, {Name: "other-1"}}
	objects = append(objects, other)
	for i := range 3 {
		p := schedtest.Pod(fmt.Sprintf("p%d", i)).Group("g").CPU("1")
		p.P.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu", ResourceClaimName: ptr.To("shared")}}
		if i == 0 {
			p.P.Spec.ResourceClaims = append(p.P.Spec.ResourceClaims, corev1.PodResourceClaim{Name: "own", ResourceClaimName: ptr.To("own")})
		}
		objects = append(objects, p.Obj())
	}
	// n1 has room for one of them and is emptier by share; n2 has room for all.
	nodes := []runtime.Object{
		schedtest.Node("n1").Has("cpu", "2").Obj(), schedtest.Node("n2").Has("cpu", "16").Obj(), schedtest.Pod("filler").CPU("12").On("n2").Obj(),
	}
	c := cluster(t, 0, append(objects, nodes...)...)
	var mu sync.Mutex
	refused, back := false, false
	c.Client.PrependReactor("update", "resourceclaims", func(action clienttesting.Action) (bool, runtime.Object, error) {
		claim := action.(clienttesting.UpdateAction).GetObject().(*resourcev1.ResourceClaim)
		mu.Lock()
		defer mu.Unlock()
		back = back || refused && claim.Name == "shared" && claim.Status.Allocation == nil && len(claim.Status.ReservedFor) == 0
		if claim.Name != "own" || claim.Status.Allocation == nil || refused {
			return false, nil, nil
		}
		refused = true
		return true, nil, apierrors.NewForbidden(claimsResource.GroupResource(), claim.Name, fmt.Errorf("once"))
	})
	defer leader(t, c)()
	schedtest.Eventually(t, func() string {
		s := devicesNow(t, c)
		for i := range 3 {
			if s.node[fmt.Sprintf("p%d", i)] != "n2" {
				return fmt.Sprintf("%+v", s)
			}
		}
		if len(s.users["shared"]) != 3 || len(s.users["own"]) != 1 || len(s.holders["other-0"]) != 1 || len(s.holders["other-1"]) != 1 || len(s.holders) != 2 {
			return fmt.Sprintf("%+v", s)
		}
		mu.Lock()
		defer mu.Unlock()
		if !refused || !back {
			t.Errorf("a write was refused: %t; the shared claim was given back then: %t", refused, back)
		}
		return ""
	})
}
