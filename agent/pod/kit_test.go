package pod_test

import (
	"context"
	"errors"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

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
	"github.com/clusterd/clusterd/agent/object"
	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/agent/probe"
	"github.com/clusterd/clusterd/agent/volume"
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
	slow    time.Duration // what each event takes the one who tells it
	// read is what reading the Node from the API takes, which gives it its newest
	// label; 0: the Node is always the newest.
	read    time.Duration
	labels  sync.Mutex
	cpus    pod.CPUs     // who has which processors; nil: nobody any
	devices pod.Devices  // nil: there are none
	statics staticSource // nil: there are no static pods
	verify  pod.ImageVerification
	alone   chan []*v1.Pod // pods to start without the API; nil: there are none
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

func newNode(t *testing.T, statics staticSource, options ...func(*node)) *node {
	n := &node{
		t: t, dir: t.TempDir(), api: fake.NewClientset(), runtime: agenttest.NewRuntime(),
		network: &agenttest.Network{}, events: &events{}, statics: statics,
	}
	n.images = &agenttest.Images{Dir: filepath.Join(n.dir, "rootfs")}
	n.images.Add("app:1", ocispec.Config{Entrypoint: []string{"/app"}, Env: []string{"PATH=/bin"}})
	n.images.Add("app:2", ocispec.Config{Entrypoint: []string{"/app"}})
	for _, o := range options {
		o(n)
	}
	n.start()
	return n
}

// slowRecorder has time pass in the middle of what a bubble would do in no time.
type slowRecorder struct {
	record.EventRecorder
	takes time.Duration
}

func (r slowRecorder) Eventf(obj kruntime.Object, kind, reason, format string, args ...any) {
	time.Sleep(r.takes)
	r.EventRecorder.Eventf(obj, kind, reason, format, args...)
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
		Client: n.api, Runtime: n.runtime, Images: n.images, Network: n.network, Objects: objects, Probes: prober, Recorder: slowRecorder{rec, n.slow},
		Volumes: volume.New(volume.Config{Dir: pods, Objects: objects, Mounter: &agenttest.Mounter{}, ImagePath: n.images.VolumePath}),
		PodDir:  pods, EndedDir: filepath.Join(n.dir, "ended"), LogDir: filepath.Join(n.dir, "log"), SweepLogs: true, CgroupRoot: "/clusterd-n1", ResolvConf: "/etc/resolv.conf",
		Unconfirmed: n.alone, CPUs: n.cpus, Devices: n.devices, Verify: n.verify,
	}
	if n.read > 0 {
		latest := obj
		cfg.Node = func() *v1.Node { n.labels.Lock(); defer n.labels.Unlock(); return latest }
		cfg.ReadNode = func(ctx context.Context) {
			select {
			case <-time.After(n.read):
			case <-ctx.Done():
				return
			}
			n.labels.Lock()
			defer n.labels.Unlock()
			latest = obj.DeepCopy()
			latest.Labels = map[string]string{"disk": "ssd"}
		}
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
func inBubble(t *testing.T, fn func(n *node)) { inBubbleOf(t, func(*node) {}, fn) }

// inBubbleOf is inBubble on a node that option has changed before it starts.
func inBubbleOf(t *testing.T, option, fn func(n *node)) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, nil, option)
		defer func() { n.stop() }()
		synctest.Wait()
		fn(n)
	})
}
