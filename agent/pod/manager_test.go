package pod_test

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/ptr"

	ocispec "github.com/google/go-containerregistry/pkg/v1"

	"github.com/clusterd/clusterd/agent/agenttest"
	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/object"
	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/agent/probe"
	"github.com/clusterd/clusterd/agent/runtime"
	"github.com/clusterd/clusterd/agent/volume"
	"github.com/clusterd/clusterd/e2e/features"
)

// node is a node with fakes below and a fake API above. All of its time is
// the test's bubble's.
type node struct {
	t       *testing.T
	dir     string
	api     *fake.Clientset
	runtime *agenttest.Runtime
	images  *agenttest.Images
	network *agenttest.Network
	events  *events
	cpus    pod.CPUs     // who has which processors; nil: nobody any
	statics staticSource // nil: there are no static pods
	pods    *pod.Manager
	stop    func()
}

// events collects what was told.
type events struct {
	mu   sync.Mutex
	list []string
}

func (e *events) has(sub string) bool { return e.count(sub) > 0 }

func (e *events) all() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.list)
}

func (e *events) count(sub string) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	n := 0
	for _, s := range e.list {
		if strings.Contains(s, sub) {
			n++
		}
	}
	return n
}

func newNode(t *testing.T, statics staticSource) *node {
	n := &node{
		t: t, dir: t.TempDir(), api: fake.NewClientset(), runtime: agenttest.NewRuntime(),
		network: &agenttest.Network{}, events: &events{}, statics: statics,
	}
	n.images = &agenttest.Images{Dir: filepath.Join(n.dir, "rootfs")}
	n.images.Add("app:1", ocispec.Config{Entrypoint: []string{"/app"}, Env: []string{"PATH=/bin"}})
	n.images.Add("app:2", ocispec.Config{Entrypoint: []string{"/app"}})
	n.start()
	return n
}

// start runs an agent; stop ends it and leaves the runtime as it is.
func (n *node) start() {
	ctx, cancel := context.WithCancel(n.t.Context())
	rec := record.NewFakeRecorder(1000)
	obj := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "uid-n1"}}
	obj.Status.Allocatable = v1.ResourceList{
		v1.ResourceCPU: resource.MustParse("2"), v1.ResourceMemory: resource.MustParse("4Gi"), v1.ResourcePods: resource.MustParse("110"),
	}
	obj.Status.Capacity = obj.Status.Allocatable
	var m *pod.Manager
	objects := object.New(n.api, func(uid types.UID, r object.Ref) { m.ObjectChanged(uid, r) })
	pods := filepath.Join(n.dir, "pods")
	prober := &probe.Prober{}
	cfg := pod.Config{
		NodeName: "n1", NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Node: func() *v1.Node { return obj },
		Client: n.api, Runtime: n.runtime, Images: n.images, Network: n.network, Objects: objects, Probes: prober, Recorder: rec,
		Volumes: volume.New(volume.Config{Dir: pods, Objects: objects, Mounter: &agenttest.Mounter{}, ImagePath: n.images.VolumePath}),
		PodDir:  pods, EndedDir: filepath.Join(n.dir, "ended"), LogDir: filepath.Join(n.dir, "log"), SweepLogs: true, CgroupRoot: "/clusterd-n1", ResolvConf: "/etc/resolv.conf",
		CPUs: n.cpus,
	}
	if n.statics != nil {
		cfg.Static = n.statics
	}
	m = pod.NewManager(cfg)
	prober.Exec = m
	n.pods = m
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case e := <-rec.Events:
				n.events.mu.Lock()
				n.events.list = append(n.events.list, e)
				n.events.mu.Unlock()
			case <-ctx.Done():
				return
			}
		}
	})
	wg.Go(func() {
		if err := m.Run(ctx); err != nil {
			n.t.Errorf("run: %v", err)
		}
	})
	n.stop = func() {
		cancel()
		objects.Close()
		wg.Wait()
	}
}

func (n *node) create(p *v1.Pod) {
	n.t.Helper()
	if _, err := n.api.CoreV1().Pods(p.Namespace).Create(n.t.Context(), p, metav1.CreateOptions{}); err != nil {
		n.t.Fatal(err)
	}
}

// get is the pod as the API has it, nil if it has none.
func (n *node) get(name string) *v1.Pod {
	n.t.Helper()
	p, err := n.api.CoreV1().Pods("default").Get(n.t.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		n.t.Fatal(err)
	}
	return p
}

// after lets some of the bubble's time pass.
func (n *node) after(d time.Duration) {
	time.Sleep(d) // the bubble's clock: no real time passes
	synctest.Wait()
}

// delete asks for a graceful deletion, as the API server does it.
func (n *node) delete(name string, grace int64) {
	n.t.Helper()
	p := n.get(name)
	now := metav1.NewTime(time.Now().Add(time.Duration(grace) * time.Second))
	p.DeletionTimestamp, p.DeletionGracePeriodSeconds = &now, &grace
	if _, err := n.api.CoreV1().Pods("default").Update(n.t.Context(), p, metav1.UpdateOptions{}); err != nil {
		n.t.Fatal(err)
	}
}

func testPod(name string, policy v1.RestartPolicy, containers ...v1.Container) *v1.Pod {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID("uid-" + name)}}
	p.Spec = v1.PodSpec{NodeName: "n1", RestartPolicy: policy, Containers: containers, TerminationGracePeriodSeconds: ptr.To(int64(30))}
	p.Status.Phase = v1.PodPending
	return p
}

// refuse answers as an API that is down.
func refuse(k8stesting.Action) (bool, kruntime.Object, error) {
	return true, nil, errors.New("connection refused")
}

func ctr(name string) v1.Container {
	return v1.Container{Name: name, Image: "app:1", ImagePullPolicy: v1.PullIfNotPresent}
}

func condition(p *v1.Pod, t v1.PodConditionType) v1.ConditionStatus {
	for _, c := range p.Status.Conditions {
		if c.Type == t {
			return c.Status
		}
	}
	return ""
}

// inBubble runs a test on a node in a bubble of its own time.
func inBubble(t *testing.T, fn func(n *node)) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, nil)
		defer func() { n.stop() }()
		synctest.Wait()
		fn(n)
	})
}

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

// TestRestartMatrix is FEATURES area N.
func TestRestartMatrix(t *testing.T) {
	tests := []struct {
		row      int // of FEATURES
		name     string
		policy   v1.RestartPolicy
		exits    []int // -1: keeps running
		phase    v1.PodPhase
		restarts []int32
	}{
		{221, "one, 0, Always", v1.RestartPolicyAlways, []int{0}, v1.PodRunning, []int32{1}},
		{222, "one, 0, OnFailure", v1.RestartPolicyOnFailure, []int{0}, v1.PodSucceeded, []int32{0}},
		{223, "one, 0, Never", v1.RestartPolicyNever, []int{0}, v1.PodSucceeded, []int32{0}},
		{224, "one, 1, Always", v1.RestartPolicyAlways, []int{1}, v1.PodRunning, []int32{1}},
		{225, "one, 1, OnFailure", v1.RestartPolicyOnFailure, []int{1}, v1.PodRunning, []int32{1}},
		{226, "one, 1, Never", v1.RestartPolicyNever, []int{1}, v1.PodFailed, []int32{0}},
		{227, "two, one 1, Always", v1.RestartPolicyAlways, []int{1, -1}, v1.PodRunning, []int32{1, 0}},
		{228, "two, one 1, OnFailure", v1.RestartPolicyOnFailure, []int{1, -1}, v1.PodRunning, []int32{1, 0}},
		{229, "two, one 1, Never", v1.RestartPolicyNever, []int{1, -1}, v1.PodRunning, []int32{0, 0}},
		{230, "two, both, Always", v1.RestartPolicyAlways, []int{0, 1}, v1.PodRunning, []int32{1, 1}},
		{231, "two, both, OnFailure", v1.RestartPolicyOnFailure, []int{0, 1}, v1.PodRunning, []int32{0, 1}},
		{232, "two, both, Never", v1.RestartPolicyNever, []int{0, 1}, v1.PodFailed, []int32{0, 0}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			features.ShowsWithDoubles(t, tt.row)
			inBubble(t, func(n *node) {
				var cs []v1.Container
				for i := range tt.exits {
					cs = append(cs, ctr("c"+string(rune('0'+i))))
				}
				n.create(testPod("p", tt.policy, cs...))
				n.after(200 * time.Millisecond)
				for i, code := range tt.exits {
					if code >= 0 {
						n.runtime.Exit(cs[i].Name, code)
					}
				}
				n.after(time.Second)
				p := n.get("p")
				if p.Status.Phase != tt.phase {
					t.Errorf("phase %s, want %s", p.Status.Phase, tt.phase)
				}
				for i, want := range tt.restarts {
					if got := p.Status.ContainerStatuses[i].RestartCount; got != want {
						t.Errorf("%s: %d restarts, want %d", cs[i].Name, got, want)
					}
				}
				if s, _ := n.runtime.Counts(); (s == 0) != (tt.phase != v1.PodRunning) {
					t.Errorf("%d sandboxes in phase %s", s, tt.phase)
				}
			})
		})
	}
}

func TestOOM(t *testing.T) {
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
		n.after(200 * time.Millisecond)
		n.runtime.OOM("a")
		n.after(time.Second)
		s := n.get("p").Status.ContainerStatuses[0]
		if l := s.LastTerminationState.Terminated; l == nil || l.Reason != "OOMKilled" || l.ExitCode != 137 || s.RestartCount != 1 || s.State.Running == nil {
			t.Errorf("status %+v", s)
		}
	})
}

func TestCrashLoop(t *testing.T) {
	inBubble(t, func(n *node) {
		n.runtime.OnStart = func(c api.Container) { go n.runtime.Exit(c.Name, 1) }
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
		starts := func() (k int) {
			for _, c := range n.runtime.Calls() {
				if c == "start a" {
					k++
				}
			}
			return k
		}
		n.after(time.Second)
		if got := starts(); got != 2 { // the first restart is at once
			t.Fatalf("%d starts", got)
		}
		s := n.get("p").Status.ContainerStatuses[0]
		if w := s.State.Waiting; w == nil || w.Reason != "CrashLoopBackOff" || !strings.Contains(w.Message, "back-off 10s restarting failed container=a") {
			t.Fatalf("state %+v", s.State)
		}
		if s.LastTerminationState.Terminated == nil || s.LastTerminationState.Terminated.ExitCode != 1 || n.get("p").Status.Phase != v1.PodRunning {
			t.Errorf("status %+v", s)
		}
		// Counted from the exit: each round begins a second after one.
		for i, wait := range []time.Duration{10, 20, 40, 80, 160, 300, 300} {
			n.after(wait*time.Second - 2*time.Second)
			if got := starts(); got != i+2 {
				t.Fatalf("%d starts before back-off %d s was over", got, wait)
			}
			n.after(2 * time.Second)
			if got := starts(); got != i+3 {
				t.Fatalf("%d starts after back-off %d s", got, wait)
			}
		}
		if !n.events.has("BackOff Back-off restarting failed container a") {
			t.Errorf("events %v", n.events.list)
		}
	})
}

func TestImageFaults(t *testing.T) {
	inBubble(t, func(n *node) {
		pulls := 0
		n.images.PullErr = func(context.Context, string) error {
			pulls++
			if pulls > 2 {
				return nil
			}
			return &image.PullError{Ref: "x", Reason: image.ReasonNotFound, Says: "manifest unknown", Err: errors.New("manifest unknown")}
		}
		c := ctr("a")
		c.Image = "missing:1"
		n.create(testPod("p", v1.RestartPolicyAlways, c))
		n.after(time.Second)
		w := n.get("p").Status.ContainerStatuses[0].State.Waiting
		if w == nil || w.Reason != "ErrImagePull" || !strings.Contains(w.Message, "manifest unknown") {
			t.Fatalf("waiting %+v", w)
		}
		n.after(3 * time.Second)
		w = n.get("p").Status.ContainerStatuses[0].State.Waiting
		if w == nil || w.Reason != "ImagePullBackOff" || !strings.Contains(w.Message, "manifest unknown") {
			t.Fatalf("waiting %+v", w)
		}
		n.after(10 * time.Second)
		if pulls != 2 {
			t.Fatalf("%d pulls", pulls)
		}
		n.after(21 * time.Second)
		if p := n.get("p"); p.Status.Phase != v1.PodRunning {
			t.Fatalf("phase %s", p.Status.Phase)
		}

		never := ctr("a")
		never.Image, never.ImagePullPolicy = "absent:1", v1.PullNever
		n.create(testPod("never", v1.RestartPolicyAlways, never))
		bad := ctr("a")
		bad.Image = "Bad Name"
		n.create(testPod("bad", v1.RestartPolicyAlways, bad))
		n.after(time.Second)
		if w := n.get("never").Status.ContainerStatuses[0].State.Waiting; w == nil || w.Reason != "ErrImageNeverPull" {
			t.Errorf("waiting %+v", w)
		}
		if w := n.get("bad").Status.ContainerStatuses[0].State.Waiting; w == nil || w.Reason != "InvalidImageName" {
			t.Errorf("waiting %+v", w)
		}
	})
}

// TestImageBrought: who waits for an image that is loaded by hand starts at
// once, whether it is in back-off, forbidden to pull or in a pull that hangs.
func TestImageBrought(t *testing.T) {
	tests := []struct {
		name   string
		policy v1.PullPolicy
		hangs  bool
		waits  string // reason before
		runs   bool
	}{
		{"back-off", v1.PullIfNotPresent, false, "ImagePullBackOff", true},
		{"never pull", v1.PullNever, false, "ErrImageNeverPull", true},
		{"pull hangs", v1.PullIfNotPresent, true, "ContainerCreating", true},
		{"always pull", v1.PullAlways, false, "ImagePullBackOff", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, func(n *node) {
				pulls := 0
				n.images.PullErr = func(ctx context.Context, ref string) error {
					pulls++
					if tt.hangs {
						<-ctx.Done()
						return ctx.Err()
					}
					return &image.PullError{Ref: ref, Reason: image.ReasonNotFound, Says: "manifest unknown", Err: errors.New("manifest unknown")}
				}
				c, other := ctr("a"), ctr("a")
				c.Image, c.ImagePullPolicy = "brought:1", tt.policy
				other.Image, other.ImagePullPolicy = "other:1", v1.PullIfNotPresent
				n.create(testPod("p", v1.RestartPolicyAlways, c))
				n.after(15 * time.Second) // the back-off after the second fault is 20 s
				if w := n.get("p").Status.ContainerStatuses[0].State.Waiting; w == nil || w.Reason != tt.waits {
					t.Fatalf("waiting %+v", w)
				}
				n.create(testPod("other", v1.RestartPolicyAlways, other))
				n.after(time.Second)
				before := pulls
				n.images.Add("brought:1", ocispec.Config{Entrypoint: []string{"/app"}})
				n.pods.ImagesChanged()
				n.after(500 * time.Millisecond)
				if got := n.get("p").Status.Phase == v1.PodRunning; got != tt.runs {
					t.Errorf("runs: %v, status %+v", got, n.get("p").Status)
				}
				if pulls != before {
					t.Errorf("%d further pulls", pulls-before)
				}
			})
		})
	}
}

// TestDeleteDuringPull is FEATURES row 194.
func TestDeleteDuringPull(t *testing.T) {
	inBubble(t, func(n *node) {
		n.images.PullErr = func(ctx context.Context, _ string) error { <-ctx.Done(); return ctx.Err() }
		c := ctr("a")
		c.Image = "slow:1"
		n.create(testPod("p", v1.RestartPolicyAlways, c))
		n.create(testPod("other", v1.RestartPolicyAlways, ctr("b")))
		n.after(2 * time.Second)
		w := n.get("p").Status.ContainerStatuses[0].State.Waiting
		if w == nil || !strings.Contains(w.Message, `Pulling image "slow:1" since`) {
			t.Errorf("waiting %+v", w)
		}
		if n.get("other").Status.Phase != v1.PodRunning {
			t.Error("the stuck pull stops another pod")
		}
		n.delete("p", 30)
		n.after(time.Second)
		if n.get("p") != nil {
			t.Error("still there")
		}
	})
}

func TestInitContainers(t *testing.T) {
	inBubble(t, func(n *node) {
		p := testPod("p", v1.RestartPolicyAlways, ctr("app"))
		side := ctr("side")
		side.RestartPolicy = ptr.To(v1.ContainerRestartPolicyAlways)
		p.Spec.InitContainers = []v1.Container{ctr("one"), side, ctr("two")}
		n.create(p)
		n.after(time.Second)
		if got := n.runtime.Calls(); !slices.Equal(got[1:], []string{"start one"}) {
			t.Fatalf("calls %v", got)
		}
		if p := n.get("p"); p.Status.Phase != v1.PodPending || condition(p, v1.PodInitialized) != v1.ConditionFalse {
			t.Errorf("status %+v", p.Status)
		}
		n.runtime.Exit("one", 0)
		n.after(time.Second)
		n.runtime.Exit("two", 1)
		n.after(time.Second)
		n.runtime.Exit("two", 0)
		n.after(time.Second)
		if got := n.runtime.Calls(); !slices.Equal(got[1:], []string{"start one", "start side", "start two", "start two", "start app"}) {
			t.Fatalf("calls %v", got)
		}
		if p := n.get("p"); p.Status.Phase != v1.PodRunning || condition(p, v1.PodInitialized) != v1.ConditionTrue || condition(p, v1.PodReady) != v1.ConditionTrue {
			t.Errorf("status %+v", p.Status)
		}
		n.runtime.Exit("side", 0) // comes back by itself
		n.after(time.Second)
		if s := n.get("p").Status.InitContainerStatuses[1]; s.State.Running == nil || s.RestartCount != 1 {
			t.Errorf("sidecar %+v", s)
		}
	})
}

// TestSidecarEndsLast: the pod is done when its app is; the sidecar follows.
func TestSidecarEndsLast(t *testing.T) {
	inBubble(t, func(n *node) {
		p := testPod("p", v1.RestartPolicyNever, ctr("app"))
		side := ctr("side")
		side.RestartPolicy = ptr.To(v1.ContainerRestartPolicyAlways)
		p.Spec.InitContainers = []v1.Container{side}
		n.create(p)
		n.after(time.Second)
		n.runtime.Exit("app", 0)
		n.after(time.Second)
		if p := n.get("p"); p.Status.Phase != v1.PodSucceeded {
			t.Errorf("phase %s", p.Status.Phase)
		}
		if !slices.Contains(n.runtime.Calls(), "signal side 15") {
			t.Errorf("calls %v", n.runtime.Calls())
		}
	})
}

func TestInitFailsForGood(t *testing.T) {
	inBubble(t, func(n *node) {
		p := testPod("p", v1.RestartPolicyNever, ctr("app"))
		p.Spec.InitContainers = []v1.Container{ctr("one")}
		n.create(p)
		n.after(time.Second)
		n.runtime.Exit("one", 3)
		n.after(time.Second)
		if p := n.get("p"); p.Status.Phase != v1.PodFailed || p.Status.InitContainerStatuses[0].State.Terminated.ExitCode != 3 {
			t.Errorf("status %+v", p.Status)
		}
		if slices.Contains(n.runtime.Calls(), "start app") {
			t.Error("app was started")
		}
	})
}

// TestPauseDies is FEATURES row 201.
func TestPauseDies(t *testing.T) {
	features.ShowsWithDoubles(t, 199, 257)
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a"), ctr("b")))
		n.after(time.Second)
		// One dead container concerns itself alone …
		n.runtime.Exit("b", 0)
		n.after(time.Second)
		if s := n.get("p").Status.ContainerStatuses; s[0].RestartCount != 0 || s[1].RestartCount != 1 {
			t.Errorf("status %+v", s)
		}
		// … a dead sandbox all of them.
		was := n.get("p").Status.PodIP
		n.runtime.KillPause("p")
		n.after(15 * time.Second)
		p := n.get("p")
		if p.Status.Phase != v1.PodRunning || p.Status.PodIP == was ||
			p.Status.ContainerStatuses[0].RestartCount != 1 || p.Status.ContainerStatuses[1].RestartCount != 2 {
			t.Errorf("status %+v", p.Status)
		}
		if !slices.Contains(n.runtime.Calls(), "sandbox p 1") {
			t.Errorf("calls %v", n.runtime.Calls())
		}
	})
}

// TestImageChange is FEATURES row 200.
func TestImageChange(t *testing.T) {
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a"), ctr("b")))
		n.after(time.Second)
		p := n.get("p")
		p.Spec.Containers[0].Image = "app:2"
		if _, err := n.api.CoreV1().Pods("default").Update(t.Context(), p, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		n.after(time.Second)
		s := n.get("p").Status.ContainerStatuses
		if s[0].RestartCount != 1 || s[0].Image != "app:2" || s[0].State.Running == nil || s[1].RestartCount != 0 {
			t.Errorf("status %+v", s)
		}
	})
}

// TestAgentRestart: a new agent takes up what it finds, and starts nothing.
func TestAgentRestart(t *testing.T) {
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a"), ctr("b")))
		n.create(testPod("gone", v1.RestartPolicyAlways, ctr("c")))
		n.after(time.Second)
		id := n.get("p").Status.ContainerStatuses[0].ContainerID
		calls := len(n.runtime.Calls())
		n.stop()
		n.runtime.Exit("b", 7) // while nobody looks
		if err := n.api.CoreV1().Pods("default").Delete(t.Context(), "gone", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		n.start()
		n.after(5 * time.Second)
		p := n.get("p")
		if p.Status.ContainerStatuses[0].ContainerID != id || p.Status.ContainerStatuses[0].RestartCount != 0 {
			t.Errorf("a was touched: %+v", p.Status.ContainerStatuses[0])
		}
		b := p.Status.ContainerStatuses[1]
		if b.RestartCount != 1 || b.LastTerminationState.Terminated == nil || b.LastTerminationState.Terminated.ExitCode != 7 {
			t.Errorf("b: %+v", b)
		}
		for _, c := range n.runtime.Calls()[calls:] {
			if strings.HasPrefix(c, "sandbox") || c == "start a" {
				t.Errorf("call %q after the restart", c)
			}
		}
		if s, _ := n.runtime.Counts(); s != 1 {
			t.Errorf("%d sandboxes: the orphan was not removed", s)
		}
	})
}

// TestSeen: before the API's list is known the manager says so, and from that
// moment on every pod of it is found, with what runs.
func TestSeen(t *testing.T) {
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
		n.after(time.Second)
		n.stop()
		answers := make(chan struct{})
		n.api.PrependReactor("list", "pods", func(k8stesting.Action) (bool, kruntime.Object, error) {
			<-answers
			return false, nil, nil
		})
		n.start()
		synctest.Wait()
		select {
		case <-n.pods.Seen():
			t.Error("seen, but the API has not answered")
		default:
		}
		close(answers)
		<-n.pods.Seen()
		v, ok := n.pods.Find("default", "p", "")
		if !ok {
			t.Fatal("not found")
		}
		if c := v.Containers["a"]; !c.Running || c.Exited == nil {
			t.Errorf("container %+v", c)
		}
	})
}

// TestSourcesSeenGuard is FEATURES row 188: with the API down nothing is
// killed.
func TestSourcesSeenGuard(t *testing.T) {
	features.ShowsWithDoubles(t, 188)
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
		n.after(time.Second)
		n.stop()
		down := n.api
		n.api = fake.NewClientset()
		n.api.PrependReactor("list", "pods", refuse)
		n.start()
		n.after(5 * time.Minute)
		if s, c := n.runtime.Counts(); s != 1 || c != 1 {
			t.Errorf("%d sandboxes, %d containers with the API down", s, c)
		}
		n.api = down
	})
}

// TestReboot: nothing runs any more; the pods are made again.
func TestReboot(t *testing.T) {
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
		n.create(testPod("job", v1.RestartPolicyNever, ctr("b")))
		n.after(time.Second)
		n.stop()
		n.runtime.Forget()
		n.start()
		n.after(5 * time.Second)
		p := n.get("p")
		s := p.Status.ContainerStatuses[0]
		if p.Status.Phase != v1.PodRunning || s.RestartCount != 1 || s.LastTerminationState.Terminated == nil || s.LastTerminationState.Terminated.Reason != "ContainerStatusUnknown" {
			t.Errorf("status %+v", s)
		}
		if j := n.get("job"); j.Status.Phase != v1.PodFailed {
			t.Errorf("job is %s: a lost container of policy Never must not run again", j.Status.Phase)
		}
	})
}

// TestVanished: a container that podmon no longer knows is replaced, though
// its exit event was lost (FEATURES row 189).
func TestVanished(t *testing.T) {
	features.ShowsWithDoubles(t, 189)
	inBubble(t, func(n *node) {
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
		n.after(time.Second)
		n.runtime.Forget()
		n.after(3 * time.Minute)
		if p := n.get("p"); p.Status.Phase != v1.PodRunning || p.Status.ContainerStatuses[0].RestartCount != 1 {
			t.Errorf("status %+v", p.Status)
		}
		n.runtime.Break() // the stream is opened again
		n.after(time.Second)
		n.runtime.Exit("a", 1)
		n.after(time.Minute)
		if p := n.get("p"); p.Status.ContainerStatuses[0].RestartCount != 2 {
			t.Errorf("status %+v", p.Status.ContainerStatuses[0])
		}
	})
}

func TestDeadline(t *testing.T) {
	inBubble(t, func(n *node) {
		p := testPod("p", v1.RestartPolicyAlways, ctr("a"))
		p.Spec.ActiveDeadlineSeconds = ptr.To(int64(5))
		n.create(p)
		n.after(4 * time.Second)
		if n.get("p").Status.Phase != v1.PodRunning {
			t.Error("not running")
		}
		n.after(3 * time.Second)
		if p := n.get("p"); p.Status.Phase != v1.PodFailed || p.Status.Reason != "DeadlineExceeded" {
			t.Errorf("status %+v", p.Status)
		}
	})
}

func TestGraceAndKill(t *testing.T) {
	inBubble(t, func(n *node) {
		n.runtime.IgnoreTerm = func(api.Container) bool { return true }
		c := ctr("a")
		c.Lifecycle = &v1.Lifecycle{PreStop: &v1.LifecycleHandler{Exec: &v1.ExecAction{Command: []string{"bye"}}}}
		n.create(testPod("p", v1.RestartPolicyAlways, c))
		n.after(time.Second)
		n.delete("p", 20)
		n.after(19 * time.Second)
		if n.get("p") == nil {
			t.Fatal("gone before its grace period was over")
		}
		if got := n.runtime.Execs(); len(got) != 1 || got[0][0] != "bye" {
			t.Errorf("preStop: %v", got)
		}
		n.after(3 * time.Second)
		if p := n.get("p"); p != nil {
			t.Fatalf("still there: %+v", p.Status)
		}
		calls := n.runtime.Calls()
		if i, j := slices.Index(calls, "signal a 15"), slices.Index(calls, "signal a 9"); i < 0 || j < i {
			t.Errorf("calls %v", calls)
		}

		n.create(testPod("q", v1.RestartPolicyAlways, ctr("b"))) // a shorter grace period cuts a longer one
		n.after(time.Second)
		n.delete("q", 600)
		n.after(time.Second)
		n.delete("q", 1)
		n.after(3 * time.Second)
		if n.get("q") != nil {
			t.Error("still there")
		}
	})
}

// TestSlowEndIsNamed: whatever the end of a pod waits for is in its status after
// a second, and holds up no other pod.
func TestSlowEndIsNamed(t *testing.T) {
	inBubble(t, func(n *node) {
		n.runtime.IgnoreTerm = func(c api.Container) bool { return c.Name != "quick" }
		n.runtime.ExecFn = func(ctx context.Context, _ api.Exec, _ runtime.ExecIO) (int, error) {
			<-ctx.Done()
			return 0, ctx.Err()
		}
		n.network.SlowDetach = 10 * time.Second
		hooked := ctr("hooked")
		hooked.Lifecycle = &v1.Lifecycle{PreStop: &v1.LifecycleHandler{Exec: &v1.ExecAction{Command: []string{"hangs"}}}}
		n.create(testPod("p", v1.RestartPolicyAlways, hooked, ctr("deaf")))
		n.create(testPod("other", v1.RestartPolicyAlways, ctr("quick")))
		n.after(time.Second)
		says := func(want ...string) {
			t.Helper()
			p := n.get("p")
			if p == nil {
				t.Fatal("the pod is gone")
			}
			if p.Status.Reason != "Stopping" {
				t.Errorf("reason %q", p.Status.Reason)
			}
			for _, w := range want {
				if !strings.Contains(p.Status.Message, w) {
					t.Errorf("message %q does not say %q", p.Status.Message, w)
				}
			}
		}
		n.delete("p", 20)
		n.delete("other", 20)
		n.after(2 * time.Second)
		says("Stopping container hooked: running its preStop hook since ", ", at most until ",
			"Stopping container deaf: waiting for it to end after its stop signal since ")
		if p := n.get("other"); p.Status.Phase != v1.PodSucceeded && p.Status.Phase != v1.PodFailed {
			t.Errorf("the other pod is held up: %+v", p.Status)
		}
		n.after(22 * time.Second)
		says("Detaching its network since ")
		if p := n.get("p"); p.Status.Phase != v1.PodFailed || strings.Contains(p.Status.Message, "Stopping container") {
			t.Errorf("status %+v", p.Status)
		}
		n.after(10 * time.Second)
		if n.get("p") != nil || n.get("other") != nil {
			t.Error("still there")
		}

		// A pod that goes on says it without a reason, which would take the
		// place of its phase in lists.
		sick := ctr("sick")
		sick.LivenessProbe = &v1.Probe{ProbeHandler: v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{"false"}}}, PeriodSeconds: 1, TimeoutSeconds: 1, FailureThreshold: 1}
		p := testPod("goes-on", v1.RestartPolicyAlways, sick)
		p.Spec.TerminationGracePeriodSeconds = ptr.To(int64(60))
		n.create(p)
		n.after(10 * time.Second)
		if st := n.get("goes-on").Status; st.Reason != "" || !strings.Contains(st.Message, "Stopping container sick: waiting for it to end") || st.Phase != v1.PodRunning {
			t.Errorf("%s, reason %q, message %q", st.Phase, st.Reason, st.Message)
		}
	})
}

func TestPostStart(t *testing.T) {
	features.ShowsWithDoubles(t, 293)
	inBubble(t, func(n *node) {
		release := make(chan int)
		n.runtime.ExecFn = func(ctx context.Context, e api.Exec, _ runtime.ExecIO) (int, error) {
			select {
			case code := <-release:
				return code, nil
			case <-ctx.Done():
				return 0, ctx.Err()
			}
		}
		c := ctr("a")
		c.Lifecycle = &v1.Lifecycle{PostStart: &v1.LifecycleHandler{Exec: &v1.ExecAction{Command: []string{"hi"}}}}
		n.create(testPod("p", v1.RestartPolicyAlways, c))
		n.after(5 * time.Second)
		if s := n.get("p").Status.ContainerStatuses[0]; s.State.Running != nil {
			t.Errorf("running before postStart has ended: %+v", s)
		} else if w := s.State.Waiting; w == nil || !strings.Contains(w.Message, "Running the postStart hook since ") {
			t.Errorf("the hook is not named: %+v", s.State)
		}
		release <- 0
		n.after(time.Second)
		if s := n.get("p").Status.ContainerStatuses[0]; s.State.Running == nil || !s.Ready {
			t.Errorf("status %+v", s)
		}
		n.runtime.Exit("a", 0)
		n.after(time.Second)
		release <- 1
		n.after(time.Second)
		if !n.events.has("FailedPostStartHook") {
			t.Errorf("events %v", n.events.list)
		}
		if !slices.Contains(n.runtime.Calls(), "signal a 15") {
			t.Errorf("calls %v", n.runtime.Calls())
		}
	})
}

// TestHooks: hooks that sleep are waited for, but none longer than the pod's
// grace period; one that fails is told and stops nothing.
func TestHooks(t *testing.T) {
	inBubble(t, func(n *node) {
		hook := func(name string, grace int64, post, pre *v1.LifecycleHandler) {
			c := ctr(name)
			c.Lifecycle = &v1.Lifecycle{PostStart: post, PreStop: pre}
			p := testPod(name, v1.RestartPolicyNever, c)
			p.Spec.TerminationGracePeriodSeconds = &grace
			n.create(p)
		}
		tcp := &v1.LifecycleHandler{TCPSocket: &v1.TCPSocketAction{}}
		sleep := func(s int64) *v1.LifecycleHandler { return &v1.LifecycleHandler{Sleep: &v1.SleepAction{Seconds: s}} }
		hook("tcp", 30, nil, tcp)
		hook("nap", 30, sleep(2), sleep(3))
		hook("none", 30, sleep(0), sleep(0))
		hook("long", 30, nil, sleep(20))
		n.after(time.Second)
		if s := n.get("nap").Status.ContainerStatuses[0]; s.State.Running != nil {
			t.Errorf("running before its postStart sleep is over: %+v", s)
		}
		n.after(5 * time.Second)
		for _, name := range []string{"tcp", "nap", "none", "long"} {
			if s := n.get(name).Status.ContainerStatuses[0]; s.State.Running == nil {
				t.Errorf("%s: %+v", name, s.State)
			}
		}
		for name, grace := range map[string]int64{"tcp": 30, "nap": 30, "none": 30, "long": 5} {
			n.delete(name, grace)
		}
		n.after(time.Second)
		if n.get("none") != nil || n.get("tcp") != nil {
			t.Error("a pod waits for a hook that is over")
		}
		n.after(time.Second)
		if n.get("nap") == nil {
			t.Error("the sleep before the stop was not waited for")
		}
		n.after(2 * time.Second)
		if n.get("nap") != nil || n.get("long") == nil {
			t.Error("a sleep of 3 s lasts longer, or one of 20 s ends before its pod's 5 s are over")
		}
		n.after(3 * time.Second)
		if n.get("long") != nil {
			t.Error("a sleep of 20 s outlasts its pod's 5 s")
		}
		for _, e := range []string{"PreStopHook failed: sleep of 20 s did not end within 5s", "PreStopHook failed: tcpSocket is not supported"} {
			if !n.events.has(e) {
				t.Errorf("no event %q in %v", e, n.events.list)
			}
		}
	})
}

// TestRestartCountGrows: five failures of a liveness probe are five restarts,
// each later than the one before it.
func TestRestartCountGrows(t *testing.T) {
	features.ConformsWithDoubles(t, 327)
	inBubble(t, func(n *node) {
		n.runtime.ExecFn = func(context.Context, api.Exec, runtime.ExecIO) (int, error) { return 1, nil }
		c := ctr("a")
		c.LivenessProbe = &v1.Probe{ProbeHandler: v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{"well"}}}, PeriodSeconds: 1, TimeoutSeconds: 1, FailureThreshold: 1, SuccessThreshold: 1}
		n.create(testPod("p", v1.RestartPolicyAlways, c))
		last, began, waits := int32(0), time.Now(), []time.Duration(nil)
		for last < 5 && time.Since(began) < 20*time.Minute {
			n.after(time.Second)
			st := n.get("p").Status.ContainerStatuses
			if len(st) == 0 || st[0].RestartCount == last {
				continue
			}
			if st[0].RestartCount != last+1 {
				t.Fatalf("restart count %d comes after %d", st[0].RestartCount, last)
			}
			last++
			waits = append(waits, time.Since(began))
			began = time.Now()
		}
		if last != 5 || !slices.IsSorted(waits) {
			t.Errorf("%d restarts, after %v", last, waits)
		}
	})
}

func TestProbes(t *testing.T) {
	inBubble(t, func(n *node) {
		var mu sync.Mutex
		codes := map[string]int{"live": 0, "ready": 1}
		set := func(k string, v int) { mu.Lock(); codes[k] = v; mu.Unlock() }
		n.runtime.ExecFn = func(_ context.Context, e api.Exec, _ runtime.ExecIO) (int, error) {
			mu.Lock()
			defer mu.Unlock()
			return codes[e.Args[0]], nil
		}
		c := ctr("a")
		p := func(cmd string) *v1.Probe {
			return &v1.Probe{ProbeHandler: v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{cmd}}}, PeriodSeconds: 5, TimeoutSeconds: 1, FailureThreshold: 2, SuccessThreshold: 1}
		}
		c.LivenessProbe, c.ReadinessProbe = p("live"), p("ready")
		n.create(testPod("p", v1.RestartPolicyAlways, c))
		n.after(2 * time.Second)
		if n.get("p").Status.ContainerStatuses[0].Ready {
			t.Error("ready before its probe")
		}
		set("ready", 0)
		n.after(6 * time.Second)
		if p := n.get("p"); !p.Status.ContainerStatuses[0].Ready || condition(p, v1.PodReady) != v1.ConditionTrue {
			t.Errorf("status %+v", p.Status)
		}
		set("ready", 1)
		n.after(11 * time.Second)
		if n.get("p").Status.ContainerStatuses[0].Ready {
			t.Error("ready though its probe failed twice")
		}
		set("live", 1)
		n.after(12 * time.Second)
		if s := n.get("p").Status.ContainerStatuses[0]; s.RestartCount != 1 {
			t.Errorf("status %+v", s)
		}
		for _, e := range []string{"Unhealthy Readiness probe failed", "Unhealthy Liveness probe failed", "Killing Container a failed liveness probe, will be restarted"} {
			if !n.events.has(e) {
				t.Errorf("no event %q in %v", e, n.events.list)
			}
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

// TestExitEvents: a container's end is told as an event, however it came.
func TestExitEvents(t *testing.T) {
	features.ShowsWithDoubles(t, 220)
	inBubble(t, func(n *node) {
		n.runtime.IgnoreTerm = func(c api.Container) bool { return c.Name == "deaf" }
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a"), ctr("deaf")))
		n.after(time.Second)
		n.runtime.Exit("a", 3)
		n.after(time.Second) // restarted at once
		n.runtime.Exit("a", 0)
		n.after(20 * time.Second)
		n.runtime.Exit("a", 139)
		n.after(time.Minute)
		n.runtime.OOM("a")
		n.after(2 * time.Minute)
		n.delete("p", 5)
		n.after(10 * time.Second)
		for event, times := range map[string]int{
			"Warning Exited Container a exited with code 3":                               1,
			"Normal Exited Container a exited with code 0":                                1,
			"Warning Exited Container a was ended by signal 11 (SIGSEGV)":                 1,
			"Warning OOMKilling Container a was killed: it used more memory than its":     1,
			"Warning BackOff Back-off restarting failed container a in pod p_default":     3, // the first restart is at once
			"Normal Killing Stopping container a":                                         1,
			"Warning Killed Container deaf was killed: it had not ended within its grace": 1,
			" Exited ": 3, // none for the stop that was obeyed
		} {
			if got := n.events.count(event); got != times {
				t.Errorf("event %q %d times, want %d", event, got, times)
			}
		}
		if t.Failed() {
			t.Log(strings.Join(n.events.list, "\n"))
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

// TestDamagedImage: a container that does not start because its image has
// become incomplete on disk gets the image anew.
func TestDamagedImage(t *testing.T) {
	inBubble(t, func(n *node) {
		whole := false
		n.images.Damaged = func(string) bool { return !whole }
		n.images.PullErr = func(context.Context, string) error { whole = true; return nil }
		n.runtime.StartErr = func(api.Container) (string, error) {
			if whole {
				return "", nil
			}
			return `exec: "/app": stat /app: no such file or directory`, nil
		}
		n.create(testPod("p", v1.RestartPolicyAlways, ctr("a")))
		n.after(time.Minute)
		p := n.get("p")
		if s := p.Status.ContainerStatuses[0]; s.State.Running == nil || s.RestartCount != 1 {
			t.Errorf("status %+v", s)
		}
		for _, e := range []string{"ImageDamaged Image will be pulled again", "Pulling image"} {
			if !n.events.has(e) {
				t.Errorf("no event %q in %v", e, n.events.list)
			}
		}
	})
}

// TestImageStopSignal: an agent that found the container knows the stop signal
// of its image all the same.
func TestImageStopSignal(t *testing.T) {
	inBubble(t, func(n *node) {
		n.images.Add("app:quit", ocispec.Config{Entrypoint: []string{"/app"}, StopSignal: "SIGUSR1"})
		c := ctr("a")
		c.Image = "app:quit"
		n.create(testPod("p", v1.RestartPolicyAlways, c))
		n.after(time.Second)
		n.stop()
		n.start()
		n.after(time.Second)
		if got := n.get("p").Status.ContainerStatuses[0].StopSignal; got == nil || *got != v1.SIGUSR1 {
			t.Errorf("the status tells of stop signal %v", got)
		}
		n.delete("p", 30)
		n.after(time.Second)
		if !slices.Contains(n.runtime.Calls(), "signal a 10") {
			t.Errorf("calls %v", n.runtime.Calls())
		}
	})
}
