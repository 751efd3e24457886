package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/utils/ptr"

	podmon "github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const gpu = "example.com/gpu"

// fakePlugin is a device plugin; it can be made to fail and to be gone.
type fakePlugin struct {
	api.UnimplementedDevicePluginServer
	t       *testing.T
	dir     string
	options *api.DevicePluginOptions

	mu        sync.Mutex // guards all below
	server    *grpc.Server
	devices   []*api.Device
	told      chan struct{} // closed when devices change
	fault     error         // of Allocate
	prefers   []string
	allocated [][]string
	started   [][]string // PreStartContainer
}

func (p *fakePlugin) socket() string { return filepath.Join(p.dir, "gpu.sock") }

// start serves the plugin and registers it.
func (p *fakePlugin) start() error {
	if err := os.Remove(p.socket()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	l, err := net.Listen("unix", p.socket())
	if err != nil {
		return err
	}
	server := grpc.NewServer()
	api.RegisterDevicePluginServer(server, p)
	go func() { _ = server.Serve(l) }()
	p.mu.Lock()
	p.server = server
	p.mu.Unlock()
	return p.register(&api.RegisterRequest{Version: api.Version, Endpoint: "gpu.sock", ResourceName: gpu, Options: p.options})
}

func (p *fakePlugin) register(q *api.RegisterRequest) error {
	conn, err := grpc.NewClient("unix://"+filepath.Join(p.dir, SocketName), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = api.NewRegistrationClient(conn).Register(p.t.Context(), q, grpc.WaitForReady(true))
	return err
}

func (p *fakePlugin) kill() {
	p.mu.Lock()
	server := p.server
	p.server = nil
	p.mu.Unlock()
	if server != nil {
		server.Stop()
	}
}

// has tells of devices: "a", or "-a" for one that is not healthy.
func (p *fakePlugin) has(ids ...string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.devices = nil
	for i, id := range ids {
		d := &api.Device{ID: strings.TrimPrefix(id, "-"), Health: api.Healthy, Topology: &api.TopologyInfo{Nodes: []*api.NUMANode{{ID: int64(i % 2)}}}}
		if d.ID != id {
			d.Health = api.Unhealthy
		}
		p.devices = append(p.devices, d)
	}
	if p.told != nil {
		close(p.told)
	}
	p.told = make(chan struct{})
}

func (p *fakePlugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return p.options, nil
}

func (p *fakePlugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	for {
		p.mu.Lock()
		devices, next := p.devices, p.told
		p.mu.Unlock()
		if err := stream.Send(&api.ListAndWatchResponse{Devices: devices}); err != nil {
			return err
		}
		select {
		case <-next:
		case <-stream.Context().Done():
			return nil
		}
	}
}

func (p *fakePlugin) GetPreferredAllocation(_ context.Context, q *api.PreferredAllocationRequest) (*api.PreferredAllocationResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return &api.PreferredAllocationResponse{ContainerResponses: []*api.ContainerPreferredAllocationResponse{{DeviceIDs: p.prefers}}}, nil
}

func (p *fakePlugin) Allocate(_ context.Context, q *api.AllocateRequest) (*api.AllocateResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fault != nil {
		return nil, p.fault
	}
	out := &api.AllocateResponse{}
	for _, c := range q.ContainerRequests {
		p.allocated = append(p.allocated, c.DevicesIds)
		out.ContainerResponses = append(out.ContainerResponses, &api.ContainerAllocateResponse{
			Envs:    map[string]string{"GPUS": strings.Join(c.DevicesIds, ","), "HOME": "/gpu"},
			Mounts:  []*api.Mount{{HostPath: "/opt/gpu", ContainerPath: "/gpu", ReadOnly: true}},
			Devices: []*api.DeviceSpec{{HostPath: "/dev/null", ContainerPath: "/dev/gpu", Permissions: "rw"}},
		})
	}
	return out, nil
}

func (p *fakePlugin) PreStartContainer(_ context.Context, q *api.PreStartContainerRequest) (*api.PreStartContainerResponse, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.started = append(p.started, q.DevicesIds)
	return &api.PreStartContainerResponse{}, nil
}

// bench is a node with a plugin.
type bench struct {
	*testing.T
	dir    string
	forget time.Duration
	m      *Manager
	plugin *fakePlugin
	stop   func()
}

func setup(t *testing.T, devices ...string) *bench {
	t.Helper()
	dir, err := os.MkdirTemp("", "dp") // short: a socket's path is
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	b := &bench{T: t, dir: dir, forget: time.Hour}
	b.plugin = &fakePlugin{t: t, dir: dir, options: &api.DevicePluginOptions{}}
	b.plugin.has(devices...)
	b.run()
	t.Cleanup(func() { b.stop() })
	t.Cleanup(b.plugin.kill)
	b.register()
	return b
}

// register starts the plugin and waits until its devices are counted.
func (b *bench) register() {
	b.Helper()
	b.until("the node listens", func() bool {
		b.m.mu.Lock()
		defer b.m.mu.Unlock()
		return b.m.ctx != nil
	})
	if err := b.plugin.start(); err != nil {
		b.Fatal(err)
	}
	b.until("its devices are told", func() bool {
		b.m.mu.Lock()
		defer b.m.mu.Unlock()
		p := b.m.plugins[gpu]
		return p != nil && p.reported && p.stopped.IsZero()
	})
}

// run starts a manager in the place of the last one.
func (b *bench) run() {
	b.Helper()
	m, err := New(Config{Dir: b.dir, File: filepath.Join(b.dir, "state", "plugins.json"), ForgetAfter: b.forget})
	if err != nil {
		b.Fatal(err)
	}
	b.m = m
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := m.Run(ctx); err != nil {
			b.Error(err)
		}
	}()
	b.stop = func() { cancel(); <-done }
}

func (b *bench) until(what string, cond func() bool) {
	b.Helper()
	deadline := time.Now().Add(2 * time.Minute)
	for !cond() {
		if time.Now().After(deadline) {
			b.Fatalf("it does not come to it that %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// counts are what the node tells: "all/healthy", "" if it tells nothing.
func (b *bench) counts() string {
	all, healthy := b.m.Resources()
	if _, ok := all[gpu]; !ok {
		return ""
	}
	a, h := all[gpu], healthy[gpu]
	return fmt.Sprintf("%d/%d", a.Value(), h.Value())
}

func container(name string, n int64) v1.Container {
	c := v1.Container{Name: name}
	if n > 0 {
		c.Resources.Limits = v1.ResourceList{gpu: *resource.NewQuantity(n, resource.DecimalSI), "example.com/other": resource.MustParse("1")}
	}
	return c
}

func pod(name string, containers ...v1.Container) *v1.Pod {
	return &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: name, UID: types.UID(name)}, Spec: v1.PodSpec{Containers: containers}}
}

// ids are the devices that a container has.
func (b *bench) ids(pod, container string) []string {
	for _, d := range b.m.Of(types.UID(pod), container) {
		if d.Resource == gpu {
			return d.IDs
		}
	}
	return nil
}

func TestDevicesOfPods(t *testing.T) {
	b := setup(t, "g0", "g1", "-g2", "g3")
	b.until("the node counts them", func() bool { return b.counts() == "4/3" })
	first := pod("p1", container("a", 1), container("b", 1), container("none", 0))
	for range 2 {
		if err := b.m.Prepare(t.Context(), first); err != nil {
			t.Fatal(err)
		}
	}
	if a, c := b.ids("p1", "a"), b.ids("p1", "b"); !slices.Equal(a, []string{"g0"}) || !slices.Equal(c, []string{"g1"}) || len(b.plugin.allocated) != 2 {
		t.Errorf("%v, %v, asked for %v", a, c, b.plugin.allocated)
	}
	err := b.m.Prepare(t.Context(), pod("p2", container("a", 2)))
	if err == nil || !strings.Contains(err.Error(), gpu+": 2 devices are asked for, 1 healthy ones are free") || b.m.Held("p2") {
		t.Errorf("more than there is: %v", err)
	}
	c := podmon.Container{Env: []string{"HOME=/mine"}, Mounts: []podmon.Mount{{Source: "/x", Destination: "/gpu"}}}
	if err := b.m.Inject(t.Context(), first, &first.Spec.Containers[0], &c); err != nil {
		t.Fatal(err)
	}
	want := podmon.Container{
		Env: []string{"HOME=/mine", "GPUS=g0"}, Mounts: []podmon.Mount{{Source: "/opt/gpu", Destination: "/gpu", ReadOnly: true}},
		Volumes: []podmon.DeviceVolume{{Source: "/dev/null", Destination: "/dev/gpu", Access: "rw"}},
	}
	if diff := cmp.Diff(want, c); diff != "" {
		t.Error(diff)
	}
	c = podmon.Container{}
	if err := b.m.Inject(t.Context(), first, &first.Spec.Containers[2], &c); err != nil || !cmp.Equal(c, podmon.Container{}) {
		t.Errorf("a container that asks for none: %v, %+v", err, c)
	}
	if err := b.m.Unprepare(t.Context(), "p1"); err != nil || b.m.Held("p1") {
		t.Error(err)
	}
	if err := b.m.Prepare(t.Context(), pod("p2", container("a", 3))); err != nil {
		t.Error(err)
	}
	if got := b.ids("p2", "a"); !slices.Equal(got, []string{"g0", "g1", "g3"}) {
		t.Errorf("%v", got)
	}
	if all := b.m.Allocatable(); len(all) != 1 || !slices.Equal(all[0].IDs, []string{"g0", "g1", "g3"}) || !slices.Equal(all[0].Nodes, []int64{0, 1}) {
		t.Errorf("%+v", all)
	}
}

// What init containers have had is for those that start after they have ended.
func TestDevicesOfInitContainers(t *testing.T) {
	b := setup(t, "g0", "g1", "g2")
	p := pod("p", container("app", 2))
	side := container("side", 1)
	side.RestartPolicy = ptr.To(v1.ContainerRestartPolicyAlways)
	p.Spec.InitContainers = []v1.Container{container("first", 1), side, container("second", 2)}
	if err := b.m.Prepare(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	side1, app := b.ids("p", "side"), b.ids("p", "app")
	if len(side1) != 1 || len(app) != 2 || slices.Contains(app, side1[0]) {
		t.Errorf("the sidecar has %v, the app %v", side1, app)
	}
}

func TestPluginThatFails(t *testing.T) {
	b := setup(t, "g0")
	b.plugin.mu.Lock()
	b.plugin.fault = errors.New("it burns")
	b.plugin.mu.Unlock()
	p := pod("p", container("a", 1))
	if err := b.m.Prepare(t.Context(), p); err == nil || !strings.Contains(err.Error(), gpu) || !strings.Contains(err.Error(), "it burns") || b.m.Held("p") {
		t.Errorf("%v, held: %t", err, b.m.Held("p"))
	}
	b.plugin.mu.Lock()
	b.plugin.fault = nil
	b.plugin.mu.Unlock()
	if err := b.m.Prepare(t.Context(), p); err != nil {
		t.Error(err)
	}
}

func TestWhatAPluginPrefers(t *testing.T) {
	b := setup(t, "g0", "g1", "g2")
	b.plugin.kill()
	b.plugin.options = &api.DevicePluginOptions{GetPreferredAllocationAvailable: true, PreStartRequired: true}
	b.register()
	for _, c := range []struct{ prefers, want []string }{
		{[]string{"g2"}, []string{"g2"}},
		{[]string{"g2"}, []string{"g0"}}, // another's by now
		{[]string{"g9"}, []string{"g1"}}, // nothing that there is
	} {
		b.plugin.mu.Lock()
		b.plugin.prefers = c.prefers
		b.plugin.mu.Unlock()
		name := "p-" + c.want[0]
		if err := b.m.Prepare(t.Context(), pod(name, container("a", 1))); err != nil {
			t.Fatal(err)
		}
		if got := b.ids(name, "a"); !slices.Equal(got, c.want) {
			t.Errorf("prefers %v: %v, want %v", c.prefers, got, c.want)
		}
	}
	p := pod("p-g2", container("a", 1))
	if err := b.m.Inject(t.Context(), p, &p.Spec.Containers[0], &podmon.Container{}); err != nil || len(b.plugin.started) != 1 || !slices.Equal(b.plugin.started[0], []string{"g2"}) {
		t.Errorf("%v, told of starts with %v", err, b.plugin.started)
	}
}

// The agent is killed: its pods keep their devices, and the plugin registers
// again when it finds the new socket.
func TestAgentThatComesBack(t *testing.T) {
	b := setup(t, "g0", "g1")
	p := pod("p", container("a", 1))
	if err := b.m.Prepare(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	b.stop()
	b.run()
	if b.counts() != "" {
		t.Errorf("told before it is known: %s", b.counts())
	}
	if err := b.m.Prepare(t.Context(), p); err != nil || !slices.Equal(b.ids("p", "a"), []string{"g0"}) {
		t.Errorf("%v, %v", err, b.ids("p", "a"))
	}
	if err := b.m.Prepare(t.Context(), pod("q", container("a", 1))); err == nil || !strings.Contains(err.Error(), "is not registered on this node") {
		t.Errorf("without its plugin: %v", err)
	}
	if pods, err := b.m.Pods(); err != nil || !slices.Equal(pods, []types.UID{"p"}) {
		t.Errorf("%v, %v", pods, err)
	}
	b.plugin.kill()
	b.register()
	if err := b.m.Prepare(t.Context(), pod("q", container("a", 1))); err != nil || !slices.Equal(b.ids("q", "a"), []string{"g1"}) {
		t.Errorf("%v, %v", err, b.ids("q", "a"))
	}
}

// TestAgentKilledInAllocate: devices that were chosen and not yet allocated are free
// for the pod that they were chosen for.
func TestAgentKilledInAllocate(t *testing.T) {
	b := setup(t, "g0")
	p := pod("p", container("a", 1))
	if err := b.m.put(p.UID, "a", gpu, &allocation{IDs: []string{"g0"}}); err != nil {
		t.Fatal(err)
	}
	if err := b.m.Prepare(t.Context(), p); err != nil || !slices.Equal(b.ids("p", "a"), []string{"g0"}) {
		t.Errorf("%v, %v", err, b.ids("p", "a"))
	}
}

func TestPluginThatGoes(t *testing.T) {
	b := setup(t, "g0", "g1")
	b.plugin.has("-g0", "g1")
	b.until("one is not healthy", func() bool { return b.counts() == "2/1" })
	b.plugin.kill()
	b.until("none can be had", func() bool { return b.counts() == "2/0" })
	if err := b.m.Prepare(t.Context(), pod("p", container("a", 1))); err == nil || !strings.Contains(err.Error(), "run it here") {
		t.Errorf("%v", err)
	}
	b.m.mu.Lock()
	b.m.plugins[gpu].stopped = time.Now().Add(-2 * b.forget)
	b.m.mu.Unlock()
	if got := b.counts(); got != "0/0" {
		t.Errorf("long after: %s", got)
	}
	b.plugin.has("g0", "g1", "g2")
	b.register()
	b.until("it is back", func() bool { return b.counts() == "3/3" })
}

func TestRegistrationsThatAreRefused(t *testing.T) {
	b := setup(t)
	for want, q := range map[string]*api.RegisterRequest{
		"v1alpha":      {Version: "v1alpha", Endpoint: "x.sock", ResourceName: gpu},
		`"cpu"`:        {Version: api.Version, Endpoint: "x.sock", ResourceName: "cpu"},
		"../x.sock":    {Version: api.Version, Endpoint: "../x.sock", ResourceName: gpu},
		"kubelet.sock": {Version: api.Version, Endpoint: SocketName, ResourceName: gpu},
	} {
		if err := b.plugin.register(q); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s in it", err, want)
		}
	}
}

func TestCheckpointThatIsDamaged(t *testing.T) {
	file := filepath.Join(t.TempDir(), "plugins.json")
	for _, text := range []string{"{", `{"version":2}`} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		m, err := New(Config{Dir: t.TempDir(), File: file})
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Run(t.Context()); err == nil || !strings.Contains(err.Error(), file) || !m.Held("p") {
			t.Errorf("%s: %v", text, err)
		}
	}
	if _, err := New(Config{}); err == nil {
		t.Error("an empty configuration passed")
	}
}
