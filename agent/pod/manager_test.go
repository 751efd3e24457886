package pod_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	k8stesting "k8s.io/client-go/testing"

	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/features"
)

func TestPodRunsAndIsDeleted(t *testing.T) {
	features.ShowsWithDoubles(t, 255)
	inBubble(t, func(n *node) {
		n.create(testPod("web", v1.RestartPolicyAlways, ctr("a"), ctr("b")))
		n.after(200 * time.Millisecond)
		p := n.get("web")
		if p.Status.Phase != v1.PodRunning || condition(p, v1.PodReady) != v1.ConditionTrue {
			t.Fatalf("phase %s, conditions %v", p.Status.Phase, p.Status.Conditions)
		}
		if p.Status.PodIP != "10.42.0.2" || p.Status.HostIP != "192.0.2.1" || p.Status.QOSClass != v1.PodQOSBestEffort {
			t.Errorf("status %+v", p.Status)
		}
		if got := n.runtime.Calls(); !slices.Equal(got, []string{"sandbox web 0", "start a", "start b"}) {
			t.Errorf("calls %v", got)
		}
		for _, e := range []string{"Pulled Container image", "Created", "Started"} {
			if !n.events.has(e) {
				t.Errorf("no event %q in %v", e, n.events.list)
			}
		}
		n.delete("web", 30)
		n.after(time.Second)
		if p := n.get("web"); p != nil {
			t.Fatalf("still there: %+v", p.Status)
		}
		if s, c := n.runtime.Counts(); s+c > 0 {
			t.Errorf("left: %d sandboxes, %d containers", s, c)
		}
		if n.network.Attached() != 0 {
			t.Error("network still attached")
		}
		if m, _ := n.images.Mounts(); len(m) > 0 {
			t.Errorf("mounted: %v", m)
		}
		for _, d := range []string{"pods", "log"} {
			if e, _ := os.ReadDir(filepath.Join(n.dir, d)); len(e) > 0 {
				t.Errorf("%s: %v", d, e)
			}
		}
		if !slices.Contains(n.runtime.Calls(), "signal a 15") {
			t.Errorf("no SIGTERM: %v", n.runtime.Calls())
		}
		// Each of the runtime's acts is an event, in the order of the acts; images
		// are looked for side by side.
		var acts []string
		for _, e := range n.events.all() {
			switch reason := strings.Fields(e)[1]; reason {
			case "Pulled":
				if len(acts) == 0 || acts[0] != "Pulled" {
					acts = append(acts, reason)
				}
			default:
				acts = append(acts, reason)
			}
		}
		if got := strings.Join(acts, " "); got != "Pulled Created Started Created Started Killing Killing" || n.events.count("Pulled") != 2 {
			t.Errorf("events: %s", got)
		}
	})
}

// TestMissingConfig: a pod that names a ConfigMap that is not there starts as
// soon as it is (FEATURES row 251).
func TestMissingConfig(t *testing.T) {
	inBubble(t, func(n *node) {
		c := ctr("a")
		c.Env = []v1.EnvVar{{Name: "X", ValueFrom: &v1.EnvVarSource{ConfigMapKeyRef: &v1.ConfigMapKeySelector{LocalObjectReference: v1.LocalObjectReference{Name: "cm"}, Key: "x"}}}}
		n.create(testPod("p", v1.RestartPolicyAlways, c))
		n.after(time.Second)
		w := n.get("p").Status.ContainerStatuses[0].State.Waiting
		if w == nil || w.Reason != "CreateContainerConfigError" || w.Message != `configmap "cm" not found` {
			t.Fatalf("waiting %+v", w)
		}
		_, err := n.api.CoreV1().ConfigMaps("default").Create(t.Context(), &v1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "cm", Namespace: "default"}, Data: map[string]string{"x": "1"}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		n.after(200 * time.Millisecond)
		if p := n.get("p"); p.Status.Phase != v1.PodRunning {
			t.Errorf("status %+v", p.Status.ContainerStatuses[0])
		}
	})
}

func TestAdmission(t *testing.T) {
	inBubble(t, func(n *node) {
		c := ctr("a")
		c.Resources.Requests = v1.ResourceList{v1.ResourceCPU: resource.MustParse("1500m")}
		n.create(testPod("one", v1.RestartPolicyAlways, c))
		n.after(time.Second)
		n.create(testPod("two", v1.RestartPolicyAlways, c))
		n.after(time.Second)
		p := n.get("two")
		if p.Status.Phase != v1.PodFailed || p.Status.Reason != "OutOfcpu" || !strings.Contains(p.Status.Message, "requested: 1500, used: 1500, capacity: 2000") {
			t.Errorf("status %+v", p.Status)
		}
		n.delete("one", 1)
		n.after(3 * time.Second)
		n.create(testPod("three", v1.RestartPolicyAlways, c))
		n.after(time.Second)
		if p := n.get("three"); p.Status.Phase != v1.PodRunning {
			t.Errorf("status %+v", p.Status)
		}
	})
}

// TestPlaceIsFreeWhenThePodHasEnded: the scheduler gives a pod's place away when
// it reads the terminal phase. A successor used to be refused with OutOfcpu
// while the sandbox was still being removed.
func TestPlaceIsFreeWhenThePodHasEnded(t *testing.T) {
	inBubble(t, func(n *node) {
		n.network.SlowDetach = 10 * time.Second
		c := ctr("a")
		c.Resources.Requests = v1.ResourceList{v1.ResourceCPU: resource.MustParse("1500m")}
		n.create(testPod("one", v1.RestartPolicyAlways, c))
		n.after(time.Second)
		n.delete("one", 1)
		n.after(3 * time.Second)
		if p := n.get("one"); p == nil || p.Status.Phase != v1.PodFailed && p.Status.Phase != v1.PodSucceeded {
			t.Fatalf("the ended pod is %+v, want a terminal phase while its sandbox is removed", p)
		}
		n.create(testPod("two", v1.RestartPolicyAlways, c))
		n.after(time.Second)
		if p := n.get("two"); p.Status.Phase != v1.PodRunning {
			t.Errorf("the successor is %s: %s", p.Status.Phase, p.Status.Message)
		}
	})
}

// TestNetworkNotReady is FEATURES row 198.
func TestNetworkNotReady(t *testing.T) {
	features.ShowsWithDoubles(t, 198, 276)
	inBubble(t, func(n *node) {
		n.network.SetErr(podstate.ErrNetworkNotReady)
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
		host := testPod("host", v1.RestartPolicyAlways, ctr("b"))
		host.Spec.HostNetwork = true
		n.create(host)
		n.after(time.Minute)
		if got := n.get("host").Status.Phase; got != v1.PodRunning {
			t.Errorf("a pod on the host's network is %s", got)
		}
		if slices.Contains(n.runtime.Calls(), "start a") {
			t.Errorf("a container was started without a sandbox: %v", n.runtime.Calls())
		}
		if !n.events.has("NetworkNotReady") {
			t.Errorf("events %v", n.events.list)
		}
		n.network.SetErr(nil)
		n.pods.PokeAll()
		n.after(200 * time.Millisecond)
		if p := n.get("p"); p.Status.Phase != v1.PodRunning {
			t.Errorf("status %+v", p.Status)
		}
	})
}

// TestFaultsAreToldAgain: a fault that goes on is among the pod's events
// whenever somebody looks, and not with every attempt.
func TestFaultsAreToldAgain(t *testing.T) {
	inBubble(t, func(n *node) {
		p := testPod("p", v1.RestartPolicyAlways, ctr("a"))
		p.Spec.Volumes = []v1.Volume{{Name: "c", VolumeSource: v1.VolumeSource{ConfigMap: &v1.ConfigMapVolumeSource{LocalObjectReference: v1.LocalObjectReference{Name: "missing"}}}}}
		n.create(p)
		c := ctr("b")
		c.EnvFrom = []v1.EnvFromSource{{ConfigMapRef: &v1.ConfigMapEnvSource{LocalObjectReference: v1.LocalObjectReference{Name: "missing"}}}}
		n.create(testPod("q", v1.RestartPolicyAlways, c))
		n.after(12 * time.Minute)
		for _, event := range []string{"FailedMount ", `Failed Error: configmap "missing" not found`} {
			if got := n.events.count(event); got != 3 {
				t.Errorf("event %q %d times in 12 minutes, want 3", event, got)
			}
		}
	})
}

func TestStartError(t *testing.T) {
	inBubble(t, func(n *node) {
		n.runtime.StartErr = func(api.Container) (string, error) { return `exec: "/nope": no such file or directory`, nil }
		n.create(testPod("p", v1.RestartPolicyNever, ctr("a")))
		n.after(time.Second)
		p := n.get("p")
		s := p.Status.ContainerStatuses[0].State.Terminated
		if p.Status.Phase != v1.PodFailed || s == nil || s.Reason != "ContainerCannotRun" || s.ExitCode != 128 || !strings.Contains(s.Message, "/nope") {
			t.Errorf("status %+v", p.Status)
		}
	})
}

// TestStatusWritesHoldUpNothing: with an API that takes no status, containers
// start and are restarted all the same.
func TestStatusWritesHoldUpNothing(t *testing.T) {
	features.ShowsWithDoubles(t, 219)
	inBubble(t, func(n *node) {
		n.api.PrependReactor("update", "pods", func(a k8stesting.Action) (bool, kruntime.Object, error) {
			if a.GetSubresource() == "status" {
				return refuse(a)
			}
			return false, nil, nil
		})
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
		n.after(time.Second)
		n.runtime.Exit("a", 1)
		n.after(time.Second)
		starts := slices.DeleteFunc(n.runtime.Calls(), func(s string) bool { return s != "start a" })
		if len(starts) != 2 {
			t.Errorf("calls %v", n.runtime.Calls())
		}
	})
}

// TestMetrics: the names are part of the interface, and both count.
func TestMetrics(t *testing.T) {
	features.ShowsWithDoubles(t, 203, 204)
	registry := prometheus.NewRegistry()
	registry.MustRegister(pod.Metrics()...)
	count := func() map[string]uint64 {
		families, err := registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		out := map[string]uint64{}
		for _, f := range families {
			out[f.GetName()] = f.GetMetric()[0].GetHistogram().GetSampleCount()
		}
		return out
	}
	before := count()
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a"), ctr("b")))
		n.after(time.Second)
	})
	after := count()
	for _, name := range []string{"kubelet_pod_start_duration_seconds", "kubelet_containers_per_pod_count"} {
		if after[name] != before[name]+1 {
			t.Errorf("%s: %d samples, want %d", name, after[name], before[name]+1)
		}
	}
	for _, name := range []string{"kubelet_pod_worker_duration_seconds", "kubelet_pod_status_sync_duration_seconds"} {
		if after[name] <= before[name] {
			t.Errorf("%s: %d samples before a pod's start, %d after", name, before[name], after[name])
		}
	}
}
