package agent_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	ocispec "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/remotecommand"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent"
	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/image/registry"
	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/agent/podnetwork"
	"github.com/clusterd/clusterd/agent/pressure"
	"github.com/clusterd/clusterd/agent/runtime"
	"github.com/clusterd/clusterd/agent/shutdown"
	"github.com/clusterd/clusterd/agent/users"
	"github.com/clusterd/clusterd/leaktest"
)

// Root tests run the agent over real containers, images and networks, below
// an API in memory. The test process goes on in a network namespace of its
// own, so that nothing of the machine's network is touched.
const inNamespace = "CLUSTERD_AGENT_TEST_NETNS"

var programs string // folder with podmon and app

func TestMain(m *testing.M) {
	if os.Getenv("CLUSTERD_ROOT") == "" || os.Geteuid() != 0 {
		leaktest.Main(m) // ends the process
	}
	if os.Getenv(inNamespace) == "" {
		dir, err := os.MkdirTemp("", "agent-test")
		if err == nil {
			err = build(dir)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
		cmd.Env = append(os.Environ(), inNamespace+"="+dir)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
		err = cmd.Run()
		os.RemoveAll(dir)
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(cmd.ProcessState.ExitCode())
	}
	programs = os.Getenv(inNamespace)
	lo, err := netlink.LinkByName("lo")
	if err == nil {
		err = netlink.LinkSetUp(lo)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func build(dir string) error {
	run := func(cgo string, args ...string) error {
		cmd := exec.Command("go", append([]string{"build"}, args...)...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED="+cgo)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("go build %s: %w\n%s", strings.Join(args, " "), err, out)
		}
		return nil
	}
	if err := run("1", "-tags", "seccomp netgo osusergo runc_nocriu", "-ldflags", "-s -w -linkmode external -extldflags -static",
		"-o", filepath.Join(dir, "podmon"), "../cmd/podmon"); err != nil {
		return err
	}
	return run("0", "-ldflags", "-s -w", "-o", filepath.Join(dir, "app"), "./testdata/app")
}

func needRoot(t testing.TB) {
	t.Helper()
	if os.Getenv("CLUSTERD_ROOT") == "" {
		t.Skip("needs root and containers: CLUSTERD_ROOT=1 go test ./agent -run Root")
	}
	if os.Geteuid() != 0 {
		t.Fatal("CLUSTERD_ROOT is set, but this is not root")
	}
}

// machine is a node: what survives the agent is made once, the agent can be
// stopped and started again.
type machine struct {
	t       testing.TB
	dir     string
	cgroup  string
	api     *fake.Clientset
	runtime *runtime.Client
	images  *image.Store
	// plain are the settings that name a registry of the test's, see plainHTTP.
	plain   atomic.Pointer[registry.Settings]
	agent   *agent.Agent
	stop    func()
	server  *httptest.Server
	limits  []pressure.Threshold // of the node; how full this machine is must not matter, so none
	cpus    pod.CPUs             // who has which processors; nil: nobody any
	imageGC agent.ImageGC
	cdi     []string   // folders of devices' descriptions; nil: the machine's
	disk    string     // mount options of a tmpfs for images; "": they are on the disk of all
	watch   *stopwatch // of benchmarks, else nil

	shutdown []shutdown.Period // nil: shutdowns are not held up

	timeout time.Duration // of eventually
}

// plainHTTP makes the machine speak to a registry without TLS.
func (m *machine) plainHTTP(host string) {
	m.t.Helper()
	settings, err := registry.Parse(fmt.Appendf(nil, "registries: {%q: {plainHTTP: true}}", host))
	if err != nil {
		m.t.Fatal(err)
	}
	m.plain.Store(settings)
}

const appImage = "example.com/app:1"

func newMachine(t testing.TB) *machine { return newTimedMachine(t, nil) }

func newTimedMachine(t testing.TB, watch *stopwatch) *machine {
	t.Helper()
	return newMachineWith(t, &machine{watch: watch})
}

// newMachineWith makes a machine of what m says of it.
func newMachineWith(t testing.TB, m *machine) *machine {
	t.Helper()
	needRoot(t)
	m.t, m.timeout, m.dir, m.api = t, 3*time.Minute, t.TempDir(), fake.NewClientset()
	m.cgroup = fmt.Sprintf("/agenttest-%d-%d", os.Getpid(), time.Now().UnixNano())
	var err error
	if m.disk != "" {
		if err := os.Mkdir(filepath.Join(m.dir, "images"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount("images", filepath.Join(m.dir, "images"), "tmpfs", 0, m.disk); err != nil {
			t.Fatal(err)
		}
	}
	if m.images, err = image.Open(image.Config{Dir: filepath.Join(m.dir, "images"), Registries: m.plain.Load, Logger: slog.New(slog.DiscardHandler)}); err != nil {
		t.Fatal(err)
	}
	if _, err := m.images.Load(t.Context(), bytes.NewReader(appTar(t))); err != nil {
		t.Fatal(err)
	}
	// What the cluster does: a new node gets its pod range.
	give := func(a k8stesting.Action) (bool, kruntime.Object, error) {
		a.(k8stesting.CreateAction).GetObject().(*v1.Node).Spec.PodCIDR = "10.99.0.0/24"
		return false, nil, nil
	}
	m.api.PrependReactor("create", "nodes", give)
	m.api.PrependReactor("update", "pods", m.updateStatus)
	m.connect()
	m.start()
	t.Cleanup(m.end)
	return m
}

// updateStatus writes a pod's status and nothing else, as a server does. The API
// in memory would write the whole object: a mark for deletion that the writer
// has not seen yet was gone. It runs under the lock of the API in memory.
func (m *machine) updateStatus(a k8stesting.Action) (bool, kruntime.Object, error) {
	if a.GetSubresource() != "status" {
		return false, nil, nil
	}
	told := a.(k8stesting.UpdateAction).GetObject().(*v1.Pod)
	now, err := m.api.Tracker().Get(a.GetResource(), told.Namespace, told.Name)
	if err != nil {
		return true, nil, err
	}
	p := now.(*v1.Pod).DeepCopy()
	p.Status = told.Status
	return true, p, m.api.Tracker().Update(a.GetResource(), p, p.Namespace)
}

func (m *machine) connect() {
	m.t.Helper()
	var err error
	if m.runtime, err = runtime.Start(context.Background(), m.runtimeConfig()); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) runtimeConfig() runtime.Config {
	return runtime.Config{
		Dir: filepath.Join(m.dir, "podmon"), PodmonPath: filepath.Join(programs, "podmon"), CgroupRoot: m.cgroup, Logger: slog.New(slog.DiscardHandler),
	}
}

// start runs an agent over what there is.
func (m *machine) start() {
	m.t.Helper()
	network, err := podnetwork.New(podnetwork.Config{NodeName: "n1", NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Client: m.api, Dir: filepath.Join(m.dir, "net"), Ready: m.networksAhead(), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		m.t.Fatal(err)
	}
	a, err := agent.New(agent.Config{
		NodeName: "n1", NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, DataDir: m.dir, CgroupRoot: m.cgroup,
		Client: m.api, Runtime: m.wrapRuntime(), Images: m.wrapImages(), Network: m.wrapNetwork(network), Version: "v1.37.0-test",
		ClusterDNS: []netip.Addr{netip.MustParseAddr("10.96.0.10")},
		UserIDs:    users.DefaultIDRange,
		CDIDirs:    m.cdi,
		Shutdown:   m.shutdown,
		CPUs:       m.cpus, LocalStoragePeriod: 200 * time.Millisecond, Eviction: append([]pressure.Threshold{}, m.limits...), ImageGC: m.imageGC, LogLinks: filepath.Join(m.dir, "links"),
	})
	if err != nil {
		m.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := a.Run(ctx); err != nil {
			m.t.Errorf("agent: %v", err)
		}
	})
	m.agent, m.server = a, httptest.NewServer(a.Handler())
	m.stop = func() {
		m.server.Close()
		cancel()
		wg.Wait()
	}
}

// networksAhead is how many networks are kept ready: where speed is measured as
// many as clusterd keeps, elsewhere none, as tests count what there is.
func (m *machine) networksAhead() int {
	if m.watch != nil {
		return 8
	}
	return 0
}

// end removes all pods and checks that nothing is left.
func (m *machine) end() {
	m.t.Helper()
	ctx := context.Background()
	list, err := m.api.CoreV1().Pods("default").List(ctx, metav1.ListOptions{})
	if err != nil {
		m.t.Error(err)
	}
	for i := range list.Items {
		err := m.api.CoreV1().Pods("default").Delete(ctx, list.Items[i].Name, metav1.DeleteOptions{})
		if err != nil && !apierrors.IsNotFound(err) { // the agent may have ended one meanwhile
			m.t.Error(err)
		}
	}
	m.eventually("end of all pods", func() bool {
		s, c, err := m.runtime.List(ctx)
		return err == nil && len(s)+len(c) == 0
	})
	m.eventually("empty folders", func() bool {
		pods, _ := os.ReadDir(filepath.Join(m.dir, "pods"))
		mounts, _ := m.images.Mounts()
		spaces, _ := os.ReadDir(filepath.Join(m.dir, "net", "netns"))
		links, _ := os.ReadDir(filepath.Join(m.dir, "links"))
		return len(pods)+len(mounts)+len(links) == 0 && len(spaces) <= m.networksAhead()
	})
	m.stop()
	if spaces, _ := os.ReadDir(filepath.Join(m.dir, "net", "netns")); len(spaces) > 0 {
		m.t.Errorf("network namespaces are left: %v", spaces)
	}
	if err := m.runtime.Shutdown(ctx, true); err != nil {
		m.t.Error(err)
	}
	m.runtime.Close()
	m.images.Close()
	if m.disk != "" {
		if err := unix.Unmount(filepath.Join(m.dir, "images"), 0); err != nil {
			m.t.Error(err)
		}
	}
	for _, pattern := range []string{"/sys/fs/cgroup/*", "/sys/fs/cgroup"} { // v1, v2
		if left, _ := filepath.Glob(pattern + m.cgroup); len(left) > 0 {
			m.t.Errorf("left cgroups: %q", left)
		}
	}
	if b, _ := os.ReadFile("/proc/self/mountinfo"); bytes.Contains(b, []byte(m.dir+"/")) {
		for l := range strings.Lines(string(b)) {
			if strings.Contains(l, m.dir+"/") {
				m.t.Errorf("left mounted: %s", l)
			}
		}
	}
}

func (m *machine) eventually(what string, holds func() bool) {
	m.t.Helper()
	deadline := time.Now().Add(m.timeout)
	for !holds() {
		if time.Now().After(deadline) {
			for _, v := range m.podStatuses() {
				m.t.Log(v)
			}
			m.t.Fatalf("%s did not come in %s", what, m.timeout)
		}
		<-time.After(5 * time.Millisecond)
	}
}

func (m *machine) podStatuses() []string {
	list, err := m.api.CoreV1().Pods("").List(context.Background(), metav1.ListOptions{})
	if err != nil {
		return []string{err.Error()}
	}
	var out []string
	for _, p := range list.Items {
		b, _ := json.Marshal(p.Status)
		out = append(out, p.Name+": "+string(b))
	}
	if events, err := m.api.CoreV1().Events("").List(context.Background(), metav1.ListOptions{}); err == nil {
		for _, e := range events.Items {
			out = append(out, e.InvolvedObject.Name+" "+e.Reason+": "+e.Message)
		}
	}
	return out
}

func (m *machine) create(p *v1.Pod) {
	m.t.Helper()
	if _, err := m.api.CoreV1().Pods(p.Namespace).Create(m.t.Context(), p, metav1.CreateOptions{}); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) get(name string) *v1.Pod {
	p, err := m.api.CoreV1().Pods("default").Get(context.Background(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		m.t.Fatal(err)
	}
	return p
}

// ready waits until the pod is ready and returns it.
func (m *machine) ready(name string) *v1.Pod {
	m.t.Helper()
	var p *v1.Pod
	m.eventually("pod "+name+" ready", func() bool {
		p = m.get(name)
		for _, c := range p.Status.Conditions {
			if c.Type == v1.PodReady && c.Status == v1.ConditionTrue {
				return true
			}
		}
		return false
	})
	return p
}

// call asks the agent's handler.
func (m *machine) call(path string) (int, string) {
	m.t.Helper()
	res, err := http.Get(m.server.URL + path)
	if err != nil {
		m.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		m.t.Fatal(err)
	}
	return res.StatusCode, string(b)
}

// fetch asks the app in a pod, over the pod network, as soon as it listens.
func (m *machine) fetch(p *v1.Pod, path string) string {
	m.t.Helper()
	var body []byte
	m.eventually("answer of "+p.Name, func() bool {
		res, err := (&http.Client{Timeout: 20 * time.Second}).Get("http://" + p.Status.PodIP + ":8080" + path)
		if err != nil {
			return false
		}
		defer res.Body.Close()
		body, err = io.ReadAll(res.Body)
		return err == nil
	})
	return string(body)
}

func appTar(t testing.TB) []byte {
	t.Helper()
	app, err := os.ReadFile(filepath.Join(programs, "app"))
	if err != nil {
		t.Fatal(err)
	}
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	for _, d := range []string{"bin/", "etc/", "tmp/", "data/", "proc/", "sys/", "dev/"} {
		if err := w.WriteHeader(&tar.Header{Name: d, Typeflag: tar.TypeDir, Mode: 0o777}); err != nil {
			t.Fatal(err)
		}
	}
	for name, data := range map[string][]byte{
		"bin/app": app, "etc/passwd": []byte("root:x:0:0::/:\nworker:x:1234:2345::/:\n"), "etc/group": []byte("root:x:0:\nextra:x:77:worker\n"),
	} {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o755, Size: int64(len(data))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(layer.Bytes())), nil })
	if err != nil {
		t.Fatal(err)
	}
	img, err := mutate.AppendLayers(empty.Image, l)
	if err == nil {
		img, err = mutate.ConfigFile(img, &ocispec.ConfigFile{OS: "linux", Architecture: goarch(), RootFS: must(img.ConfigFile()).RootFS,
			Config: ocispec.Config{Entrypoint: []string{"/bin/app"}, Cmd: []string{"serve", "8080"}, Env: []string{"FROM_IMAGE=yes", "PATH=/bin"}}})
	}
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	ref, err := name.NewTag(appImage)
	if err == nil {
		err = tarball.Write(ref, img, &out)
	}
	if err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func newPod(name string, containers ...v1.Container) *v1.Pod {
	return &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID("uid-" + name), Labels: map[string]string{"app": name}},
		Spec: v1.PodSpec{NodeName: "n1", RestartPolicy: v1.RestartPolicyAlways, Containers: containers,
			TerminationGracePeriodSeconds: ptr.To(int64(10)), DNSPolicy: v1.DNSClusterFirst},
		Status: v1.PodStatus{Phase: v1.PodPending},
	}
}

func app(name string, args ...string) v1.Container {
	return v1.Container{Name: name, Image: appImage, Args: args, ImagePullPolicy: v1.PullIfNotPresent}
}

// delete asks for a graceful deletion, as the API server would.
func (m *machine) delete(name string, grace int64) {
	m.t.Helper()
	m.eventually("mark for deletion", func() bool { // the agent writes too
		p := m.get(name)
		p.DeletionTimestamp = ptr.To(metav1.NewTime(time.Now().Add(time.Duration(grace) * time.Second)))
		p.DeletionGracePeriodSeconds = &grace
		_, err := m.api.CoreV1().Pods("default").Update(m.t.Context(), p, metav1.UpdateOptions{})
		return err == nil
	})
}

// exec runs a command through the handler, as kubectl does.
func (m *machine) exec(podName, container string, in io.Reader, command ...string) (string, int) {
	m.t.Helper()
	q := url.Values{"command": command, "output": {"1"}, "error": {"1"}}
	if in != nil {
		q.Set("input", "1")
	}
	u := must(url.Parse(m.server.URL + "/exec/default/" + podName + "/" + container + "?" + q.Encode()))
	ex, err := remotecommand.NewSPDYExecutor(&rest.Config{Host: m.server.URL}, "POST", u)
	if err != nil {
		m.t.Fatal(err)
	}
	var out, errs bytes.Buffer
	ctx, cancel := context.WithTimeout(m.t.Context(), 30*time.Second)
	defer cancel()
	err = ex.StreamWithContext(ctx, remotecommand.StreamOptions{Stdin: in, Stdout: &out, Stderr: &errs})
	var exit interface{ ExitStatus() int }
	if errors.As(err, &exit) {
		return out.String(), exit.ExitStatus()
	}
	if err != nil {
		m.t.Errorf("exec %v: %v", command, err)
	}
	return out.String(), 0
}

func (m *machine) pids() []int {
	m.t.Helper()
	_, cs, err := m.runtime.List(context.Background())
	if err != nil {
		m.t.Fatal(err)
	}
	var out []int
	for _, c := range cs {
		out = append(out, c.Pid)
	}
	return out
}
