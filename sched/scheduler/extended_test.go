package scheduler

import (
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/schedtest"
)

const gpu = corev1.ResourceName("example.com/gpu")

// wantsGPUs has each container of the pod ask for so many, init containers first;
// a sidecar is an init container whose number is negative.
func wantsGPUs(name string, init, main []int64) *corev1.Pod {
	pod := schedtest.Pod(name).Obj()
	container := func(name string, n int64) corev1.Container {
		c := corev1.Container{Name: name}
		if n < 0 {
			c.RestartPolicy, n = ptr.To(corev1.ContainerRestartPolicyAlways), -n
		}
		c.Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("1m"), gpu: *resource.NewQuantity(n, resource.DecimalSI)}
		c.Resources.Limits = corev1.ResourceList{gpu: *resource.NewQuantity(n, resource.DecimalSI)}
		return c
	}
	pod.Spec.InitContainers, pod.Spec.Containers = nil, nil
	for i, n := range init {
		pod.Spec.InitContainers = append(pod.Spec.InitContainers, container(fmt.Sprintf("i%d", i), n))
	}
	for i, n := range main {
		pod.Spec.Containers = append(pod.Spec.Containers, container(fmt.Sprintf("c%d", i), n))
	}
	return pod
}

// TestExtendedRequests: what is asked for, and who has what of it.
func TestExtendedRequests(t *testing.T) {
	for name, c := range map[string]struct {
		init, main []int64
		want       string
	}{
		"one":                       {main: []int64{2}, want: "container-0-request-1=2; c0:container-0-request-1"},
		"two":                       {main: []int64{2, 1}, want: "container-0-request-1=2 container-1-request-1=1; c0:container-0-request-1 c1:container-1-request-1"},
		"none of one":               {main: []int64{0, 1}, want: "container-1-request-1=1; c1:container-1-request-1"},
		"init uses a later one's":   {init: []int64{1}, main: []int64{2}, want: "container-1-request-1=2; i0:container-1-request-1 c0:container-1-request-1"},
		"init needs more":           {init: []int64{3}, main: []int64{2}, want: "container-0-request-1=1 container-1-request-1=2; i0:container-1-request-1 c0:container-1-request-1 i0:container-0-request-1"},
		"inits share what is more":  {init: []int64{3, 5}, want: "container-1-request-1=5; i0:container-1-request-1 i1:container-1-request-1"},
		"a sidecar keeps its own":   {init: []int64{-1, 2}, main: []int64{1}, want: "container-0-request-1=1 container-1-request-1=1 container-2-request-1=1; i0:container-0-request-1 i1:container-2-request-1 c0:container-2-request-1 i1:container-1-request-1"},
		"a later sidecar's is used": {init: []int64{1, -1}, want: "container-1-request-1=1; i0:container-1-request-1 i1:container-1-request-1"},
	} {
		pod := wantsGPUs("p", c.init, c.main)
		requests, mappings := extendedRequests(pod, []string{string(gpu)}, map[corev1.ResourceName]string{gpu: "c"})
		var got, who []string
		total := int64(0)
		for _, r := range requests {
			got = append(got, fmt.Sprintf("%s=%d", r.Name, r.Exactly.Count))
			total += r.Exactly.Count
		}
		for _, m := range mappings {
			who = append(who, m.ContainerName+":"+m.RequestName)
		}
		if words := strings.Join(got, " ") + "; " + strings.Join(who, " "); words != c.want {
			t.Errorf("%s:\n%s\nwant\n%s", name, words, c.want)
		}
		if need := requests0(pod); total < need {
			t.Errorf("%s: %d devices for a pod that needs %d", name, total, need)
		}
	}
}

func requests0(pod *corev1.Pod) int64 { r := requests(pod); return r.of(gpu) }

// TestClassOfAResource: the newest class gives it, of equally old ones the first.
func TestClassOfAResource(t *testing.T) {
	class := func(name string, age int64) *resourcev1.DeviceClass {
		c := classOf(name)
		c.CreationTimestamp, c.Spec.ExtendedResourceName = metav1.NewTime(time.Unix(age, 0)), ptr.To(string(gpu))
		return c
	}
	v := withDevices(t, newSnapshot(), class("a", 1), class("c", 2), class("b", 2), classOf("d")).devices
	for name, want := range map[corev1.ResourceName]string{gpu: "b", "deviceclass.resource.kubernetes.io/a": "a", "deviceclass.resource.kubernetes.io/d": "d", "example.com/other": ""} {
		if got := v.classOf(name); got != want {
			t.Errorf("%s is given by %q, want %q", name, got, want)
		}
	}
}

// TestExtendedResourcesChooseNodes: the node "plugin" has the resource by a device
// plugin, "devices" by a driver, "bare" not at all.
func TestExtendedResourcesChooseNodes(t *testing.T) {
	class := classOf("c")
	class.Spec.ExtendedResourceName = ptr.To(string(gpu))
	world := func(t *testing.T, plugin string, devices int) *snapshot {
		var all []resourcev1.Device
		for i := range devices {
			all = append(all, device(fmt.Sprintf("x%d", i), 1, 0))
		}
		return withDevices(t, world([]*schedtest.NodeBuilder{schedtest.Node("plugin").Has(gpu, plugin), schedtest.Node("devices").Has(gpu, "0"), schedtest.Node("bare")}), class, sliceOf("devices", all))
	}
	decide := func(s *snapshot, pod *corev1.Pod) (p *podInfo, fit []string, why string) {
		p = newPodInfo(pod)
		v := runFilters(s, p)
		for _, n := range v.fit {
			fit = append(fit, n.name)
		}
		if len(fit) == 0 {
			if v.wokenBy&deviceChanged == 0 {
				t.Error("no change of devices wakes the pod")
			}
			why = v.explain()
		}
		return p, fit, why
	}
	for name, c := range map[string]struct {
		plugin  string
		devices int
		want    string
	}{
		"both":            {"2", 2, "plugin devices"},
		"the plugin":      {"2", 1, "plugin"},
		"the driver":      {"1", 2, "devices"},
		"too few of each": {"1", 1, ""},
	} {
		_, fit, why := decide(world(t, c.plugin, c.devices), wantsGPUs("p", nil, []int64{2}))
		if got := strings.Join(fit, " "); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		if c.want == "" && (!strings.Contains(why, "Insufficient example.com/gpu") || !strings.Contains(why, "too few devices for")) {
			t.Errorf("%s: %s", name, why)
		}
	}

	// Without the class it is a resource like any other.
	s := world(t, "1", 2)
	s.devices.byResource = map[corev1.ResourceName]string{}
	if _, fit, why := decide(s, wantsGPUs("p", nil, []int64{2})); len(fit) > 0 || !strings.Contains(why, "3 Insufficient example.com/gpu") {
		t.Errorf("without a class %v; %s", fit, why)
	}

	// What was chosen is taken for the next one, and a claim is to be made.
	s = world(t, "1", 3)
	p, _, _ := decide(s, wantsGPUs("p", nil, []int64{2}))
	choices := p.devices.choose(p.pod, s.nodes["devices"])
	if len(choices) != 1 || !choices[0].make || len(choices[0].mappings) != 1 || len(choices[0].allocation.Devices.Results) != 2 || !metav1.IsControlledBy(choices[0].claim, p.pod) {
		t.Fatalf("it chose %+v", choices)
	}
	if _, fit, _ := decide(s, wantsGPUs("q", nil, []int64{2})); len(fit) > 0 {
		t.Errorf("the next one fits %v", fit)
	}

	// The claim of an earlier attempt is used again if it asks for the same.
	made := choices[0].claim.DeepCopy()
	made.UID, made.ResourceVersion = "made", "1"
	s = world(t, "1", 3)
	s.devices.show(nil, made)
	p, fit, _ := decide(s, wantsGPUs("p", nil, []int64{2}))
	if choices = p.devices.choose(p.pod, s.nodes["devices"]); len(fit) != 1 || len(choices) != 1 || choices[0].make || choices[0].claim.UID != "made" || len(choices[0].mappings) != 1 {
		t.Errorf("with a claim that is there it fits %v and chose %+v", fit, choices)
	}
	s.devices.settle(made)
	other := made.DeepCopy()
	other.ResourceVersion, other.Spec.Devices.Requests[0].Exactly.Count = "2", 1
	s.devices.show(made, other)
	p, fit, why := decide(s, wantsGPUs("p", nil, []int64{2}))
	if astray := p.devices.givesBack(p.pod); len(fit) > 0 || astray == nil || astray.UID != "made" {
		t.Errorf("with a claim for other devices it fits %v; %s; %v is given back", fit, why, astray)
	}

	// A status that names a claim of before is cleared on a node that needs none.
	s = world(t, "2", 0)
	pod := wantsGPUs("p", nil, []int64{2})
	pod.Status.ExtendedResourceClaimStatus = &corev1.PodExtendedResourceClaimStatus{ResourceClaimName: "old"}
	p, _, _ = decide(s, pod)
	if choices = p.devices.choose(pod, s.nodes["plugin"]); len(choices) != 1 || !choices[0].clear {
		t.Errorf("on a node with a plugin it chose %+v", choices)
	}
	// What a claim gives is not taken from a node's plugin.
	pod.Spec.NodeName, pod.Status.ExtendedResourceClaimStatus.RequestMappings = "plugin", []corev1.ContainerExtendedResourceRequest{{ContainerName: "c0", ResourceName: string(gpu)}}
	s.setPod(pod)
	if got := s.nodes["plugin"].requested.of(gpu); got != 0 {
		t.Errorf("%d of the plugin's are taken", got)
	}
}
