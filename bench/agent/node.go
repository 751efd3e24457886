package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	ocispec "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent"
	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podnetwork"
	"github.com/clusterd/clusterd/agent/runtime"
)

const (
	boxImage = "bench.local/box:1"
	timeout  = time.Minute
)

// node is an agent with all that it needs.
type node struct {
	dir     string
	cgroup  string
	api     *fake.Clientset
	runtime *runtime.Client
	images  *image.Store
	starts  *starts
	agent   *agent.Agent
	boxTar  []byte // the image of every pod
	stop    func() error
}

// newNode brings a node up and waits until it is ready for pods.
func newNode(ctx context.Context, podmon string) (_ *node, err error) {
	n := &node{starts: &starts{pods: map[string]*started{}, names: map[string]string{}}, cgroup: fmt.Sprintf("/clusterd-bench-%d", os.Getpid())}
	// The deprecation is for what this one leaves out, server-side apply. The
	// other one builds a REST mapper at each update, which would be a third of
	// what is measured here.
	n.api = fake.NewSimpleClientset()
	if n.dir, err = os.MkdirTemp("", "clusterd-bench-agent-"); err != nil {
		return nil, err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	if n.boxTar, err = boxTar(ctx, n.dir); err != nil {
		return nil, fmt.Errorf("image: %w", err)
	}
	if n.images, err = image.Open(image.Config{Dir: filepath.Join(n.dir, "images"), Logger: log}); err != nil {
		return nil, err
	}
	if _, err := n.images.Load(ctx, bytes.NewReader(n.boxTar)); err != nil {
		return nil, err
	}
	n.runtime, err = runtime.Start(ctx, runtime.Config{Dir: filepath.Join(n.dir, "podmon"), PodmonPath: podmon, CgroupRoot: n.cgroup, Logger: log})
	if err != nil {
		return nil, err
	}
	// What the cluster does: a new node gets its pod range.
	n.api.PrependReactor("create", "nodes", func(a k8stesting.Action) (bool, kruntime.Object, error) {
		a.(k8stesting.CreateAction).GetObject().(*v1.Node).Spec.PodCIDR = "10.99.0.0/20"
		return false, nil, nil
	})
	ip := netip.MustParseAddr("192.0.2.1")
	network, err := podnetwork.New(podnetwork.Config{NodeName: "n1", NodeIPs: []netip.Addr{ip}, Client: n.api, Dir: filepath.Join(n.dir, "net"), Ready: 8, Logger: log})
	if err != nil {
		return nil, err
	}
	a, err := agent.New(agent.Config{
		NodeName: "n1", NodeIPs: []netip.Addr{ip}, DataDir: n.dir, CgroupRoot: n.cgroup, Client: n.api, MaxPods: 500,
		Runtime: timed{n.runtime, n.starts}, Images: n.images, Network: network, Version: "v1.37.0-bench",
	})
	if err != nil {
		return nil, err
	}
	n.agent = a
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	go func() { ended <- a.Run(run) }() // ends in stop
	n.stop = func() error { cancel(); return <-ended }
	ready := func() bool { ok, _ := network.Ready(); return ok }
	return n, await(ctx, "pod network", ready)
}

// end removes all that newNode made.
func (n *node) end() error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	errs := []error{n.stop(), n.runtime.Shutdown(ctx, true), n.runtime.Close()}
	mounts, err := n.images.Mounts()
	errs = append(errs, err)
	for _, id := range mounts {
		errs = append(errs, n.images.Unmount(ctx, id))
	}
	n.images.Close()
	pinned, _ := filepath.Glob(filepath.Join(n.dir, "net", "netns", "*"))
	for _, p := range pinned { // of pods that an interrupted run left
		_ = unix.Unmount(p, unix.MNT_DETACH)
	}
	err = await(ctx, "end of the node's cgroups", func() bool { return removeCgroup(n.cgroup) }) // podmon itself may still be in one
	return errors.Join(append(errs, err, os.RemoveAll(n.dir))...)
}

// up binds a pod to the node and waits until its container runs. The time is
// from the moment the API has the pod.
func (n *node) up(ctx context.Context, name string) (time.Duration, error) {
	return n.upWith(ctx, name, func(*v1.Container) {})
}

// upWith is up with a container that differs.
func (n *node) upWith(ctx context.Context, name string, differ func(*v1.Container)) (time.Duration, error) {
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID("uid-" + name)},
		Spec: v1.PodSpec{NodeName: "n1", RestartPolicy: v1.RestartPolicyAlways, TerminationGracePeriodSeconds: ptr.To(int64(1)),
			Containers: []v1.Container{{Name: "box", Image: boxImage, ImagePullPolicy: v1.PullIfNotPresent}}},
		Status: v1.PodStatus{Phase: v1.PodPending},
	}
	differ(&pod.Spec.Containers[0])
	began := time.Now()
	if _, err := n.api.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{}); err != nil {
		return 0, err
	}
	at, err := n.starts.wait(ctx, name)
	return at.Sub(began), err
}

// settle waits until the API has the pod ready: the next pod must not be
// measured together with this one's status.
func (n *node) settle(ctx context.Context, name string) error {
	return await(ctx, name+" ready in the API", func() bool {
		p, err := n.api.CoreV1().Pods("default").Get(ctx, name, metav1.GetOptions{})
		return err == nil && slices.ContainsFunc(p.Status.Conditions, func(c v1.PodCondition) bool {
			return c.Type == v1.PodReady && c.Status == v1.ConditionTrue
		})
	})
}

func (n *node) hears(ctx context.Context, name string) error {
	return logHas(ctx, filepath.Join(n.dir, "log", "pods", "default_"+name+"_*", "box", "*.log"))
}

// down asks for a pod's deletion and waits until the API has no such pod.
func (n *node) down(ctx context.Context, name string) (time.Duration, error) {
	pods := n.api.CoreV1().Pods("default")
	began := time.Now()
	err := await(ctx, "end of "+name, func() bool {
		p, err := pods.Get(ctx, name, metav1.GetOptions{})
		if err == nil && p.DeletionTimestamp == nil {
			// As the API server marks it; the API in memory may lose the mark
			// to a status written at the same time.
			p.DeletionTimestamp, p.DeletionGracePeriodSeconds = ptr.To(metav1.NewTime(began.Add(time.Second))), ptr.To(int64(1))
			_, err = pods.Update(ctx, p, metav1.UpdateOptions{})
		}
		return apierrors.IsNotFound(err)
	})
	return time.Since(began), err
}

// exec runs true in the pod's container.
func (n *node) exec(ctx context.Context, name string) (time.Duration, error) {
	id := n.starts.of(name).container
	began := time.Now()
	code, err := n.runtime.Exec(ctx, api.Exec{ContainerID: id, Args: []string{"/bin/box", "true"}}, runtime.ExecIO{})
	if err != nil {
		return 0, fmt.Errorf("exec: %w", err)
	}
	if code != 0 {
		return 0, fmt.Errorf("exec: exit code %d", code)
	}
	return time.Since(began), nil
}

// cpu is this process's, which is the agent and the API in memory, and that of
// podmon and the pods.
func (n *node) cpu() (time.Duration, error) {
	own, err := ownCPU()
	if err != nil {
		return 0, err
	}
	theirs, err := cgroupCPU(n.cgroup)
	return own + theirs, err
}

// asked is how many probes the agent has sent.
func (n *node) asked() (sum float64, err error) {
	w := httptest.NewRecorder()
	n.agent.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics/probes", nil))
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(w.Body)
	if err != nil {
		return 0, err
	}
	for _, m := range families["prober_probe_total"].GetMetric() {
		sum += m.GetCounter().GetValue()
	}
	return sum, nil
}

func (n *node) pss() (float64, error) { return cgroupPSS(n.cgroup) }

// await asks every few milliseconds, with an end. The figures of pod_down are
// as coarse as that.
func await(ctx context.Context, what string, holds func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for !holds() {
		if err := sleep(ctx, 3*time.Millisecond); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
	}
	return nil
}

// starts notes when each pod's container was running.
type starts struct {
	mu    sync.Mutex          // guards all below
	pods  map[string]*started // by name
	names map[string]string   // sandbox ID → pod name
}

type started struct {
	done      chan struct{} // closed when the container runs; then the rest is set
	at        time.Time
	container string
}

// of finds or makes a pod's entry.
func (t *starts) of(name string) *started {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.pods[name] == nil {
		t.pods[name] = &started{done: make(chan struct{})}
	}
	return t.pods[name]
}

// wait returns when the pod's container was running.
func (t *starts) wait(ctx context.Context, name string) (time.Time, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	s := t.of(name)
	select {
	case <-s.done:
		return s.at, nil
	case <-ctx.Done():
		return time.Time{}, fmt.Errorf("start of %s: %w", name, ctx.Err())
	}
}

// sandbox notes whose a sandbox is; pod tells.
func (t *starts) sandbox(id, name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.names[id] = name
}

func (t *starts) pod(sandbox string) string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.names[sandbox]
}

// timed is the runtime with a stopwatch.
type timed struct {
	agent.Runtime
	starts *starts
}

func (r timed) CreateSandbox(ctx context.Context, s api.Sandbox) (api.SandboxStatus, error) {
	r.starts.sandbox(s.ID, s.Name)
	return r.Runtime.CreateSandbox(ctx, s)
}

func (r timed) StartContainer(ctx context.Context, c api.Container) (api.ContainerStatus, error) {
	st, err := r.Runtime.StartContainer(ctx, c)
	if err == nil && st.StartError == "" {
		s := r.starts.of(r.starts.pod(c.SandboxID))
		s.at, s.container = time.Now(), c.ID
		close(s.done) // a pod of a benchmark starts once
	}
	return st, err
}

// boxTar builds the tests' small program and what probes ask, and packs them
// as an image.
func boxTar(ctx context.Context, dir string) ([]byte, error) {
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	for _, d := range []string{"bin/", "etc/", "tmp/", "proc/", "sys/", "dev/"} {
		if err := w.WriteHeader(&tar.Header{Name: d, Typeflag: tar.TypeDir, Mode: 0o755}); err != nil {
			return nil, err
		}
	}
	for name, pkg := range map[string]string{"box": "agent/runtime/testdata/box", "app": "bench/agent/app"} {
		file := filepath.Join(dir, name)
		cmd := exec.CommandContext(ctx, "go", "build", "-ldflags", "-s -w", "-o", file, "github.com/clusterd/clusterd/"+pkg)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("go build: %w: %s", err, out)
		}
		program, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		if err := w.WriteHeader(&tar.Header{Name: "bin/" + name, Mode: 0o755, Size: int64(len(program))}); err != nil {
			return nil, err
		}
		if _, err = w.Write(program); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return imageTar(boxImage, layer.Bytes(), "/bin/box", "sleep")
}

// imageTar packs one layer as an image, in the form of `docker save`.
func imageTar(ref string, layer []byte, entrypoint ...string) ([]byte, error) {
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer)), nil })
	if err != nil {
		return nil, err
	}
	img, err := mutate.AppendLayers(empty.Image, l)
	if err != nil {
		return nil, err
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	img, err = mutate.ConfigFile(img, &ocispec.ConfigFile{OS: "linux", Architecture: goruntime.GOARCH, RootFS: cfg.RootFS,
		Config: ocispec.Config{Entrypoint: entrypoint}})
	if err != nil {
		return nil, err
	}
	tag, err := name.NewTag(ref)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	err = tarball.Write(tag, img, &out)
	return out.Bytes(), err
}
