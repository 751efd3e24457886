package dra

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	v1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	drabeta "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/plugin"
	"github.com/clusterd/clusterd/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

const gpus, nics = "gpu.example.com", "nic.example.com"

// fakeDriver is a driver of devices; it can be made to fail, to hang and to be
// gone. Each claim gets the device that its name says.
type fakeDriver struct {
	dra.UnimplementedDRAPluginServer
	t              *testing.T
	root, name     string
	instance       string // tells its sockets from those of another of its name
	services       []string
	registrationOK chan error // what it was told, each time

	mu       sync.Mutex // guards all below
	server   *grpc.Server
	calls    []call
	running  int               // calls
	faults   map[string]string // by claim name
	hang     map[string]chan struct{}
	prepared map[string]bool // by claim UID
}

// call is one that a driver has got.
type call struct {
	method string
	claims []string // names, sorted
}

func newDriver(b *bench, name string, services ...string) *fakeDriver {
	if len(services) == 0 {
		services = []string{dra.DRAPluginService}
	}
	d := &fakeDriver{
		t: b.T, root: b.root, name: name, services: services, registrationOK: make(chan error, 99),
		faults: map[string]string{}, hang: map[string]chan struct{}{}, prepared: map[string]bool{},
	}
	b.Cleanup(d.kill)
	return d
}

func (d *fakeDriver) sockets() (own, register string) {
	return filepath.Join(d.root, "plugins", d.name+d.instance, "dra.sock"), filepath.Join(d.root, "plugins_registry", d.name+d.instance+"-reg.sock")
}

func (d *fakeDriver) start() {
	d.t.Helper()
	own, register := d.sockets()
	server := grpc.NewServer()
	dra.RegisterDRAPluginServer(server, d)
	drabeta.RegisterDRAPluginServer(server, drabeta.V1ServerWrapper{DRAPluginServer: d})
	registration.RegisterRegistrationServer(server, &registrar{d: d, endpoint: own})
	for _, path := range []string{own, register} {
		if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
			d.t.Fatal(err)
		}
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			d.t.Fatal(err)
		}
		l, err := net.Listen("unix", path)
		if err != nil {
			d.t.Fatal(err)
		}
		l.(*net.UnixListener).SetUnlinkOnClose(false) // as after kill -9
		go func() { _ = server.Serve(l) }()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.server = server
}

// kill ends the driver at once; its sockets stay.
func (d *fakeDriver) kill() {
	d.mu.Lock()
	server := d.server
	d.server = nil
	for method := range d.hang {
		d.resumeLocked(method)
	}
	d.mu.Unlock()
	if server != nil {
		server.Stop()
	}
}

// remove ends the driver and removes its sockets.
func (d *fakeDriver) remove() {
	d.kill()
	own, register := d.sockets()
	_, _ = os.Remove(own), os.Remove(register)
}

func (d *fakeDriver) hangIn(method string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.hang[method] = make(chan struct{})
}

func (d *fakeDriver) resume(method string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.resumeLocked(method)
}

func (d *fakeDriver) resumeLocked(method string) {
	if c := d.hang[method]; c != nil {
		close(c)
		delete(d.hang, method)
	}
}

// fail makes calls for a claim fail; "": no more.
func (d *fakeDriver) fail(claim, why string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.faults[claim] = why
}

func (d *fakeDriver) got(method string) []call {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(d.calls), func(c call) bool { return c.method != method })
}

func (d *fakeDriver) holds() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.prepared)
}

// busy says how many calls are under way.
func (d *fakeDriver) busy() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.running
}

// enter notes a call that is under way until leave.
func (d *fakeDriver) enter() (leave func()) {
	add := func(n int) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.running += n
	}
	add(1)
	return func() { add(-1) }
}

// begin notes a call and waits if it is to hang.
func (d *fakeDriver) begin(ctx context.Context, method string, claims []*dra.Claim) error {
	one := call{method: method}
	for _, c := range claims {
		one.claims = append(one.claims, c.Name)
	}
	slices.Sort(one.claims)
	d.mu.Lock()
	d.calls = append(d.calls, one)
	hang := d.hang[method]
	d.mu.Unlock()
	if hang == nil {
		return nil
	}
	select {
	case <-hang:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (d *fakeDriver) NodePrepareResources(ctx context.Context, q *dra.NodePrepareResourcesRequest) (*dra.NodePrepareResourcesResponse, error) {
	defer d.enter()()
	if err := d.begin(ctx, "prepare", q.Claims); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	out := &dra.NodePrepareResourcesResponse{Claims: map[string]*dra.NodePrepareResourceResponse{}}
	for _, c := range q.Claims {
		if why := d.faults[c.Name]; why != "" {
			out.Claims[c.Uid] = &dra.NodePrepareResourceResponse{Error: why}
			continue
		}
		d.prepared[c.Uid] = true
		out.Claims[c.Uid] = &dra.NodePrepareResourceResponse{Devices: []*dra.Device{
			{RequestNames: []string{"main"}, PoolName: "pool", DeviceName: "dev-" + c.Name, CdiDeviceIds: []string{d.name + "/dev=" + c.Name}},
			{RequestNames: []string{"side/small"}, PoolName: "pool", DeviceName: "side-" + c.Name, CdiDeviceIds: []string{d.name + "/dev=side-" + c.Name}},
		}}
	}
	return out, nil
}

func (d *fakeDriver) NodeUnprepareResources(ctx context.Context, q *dra.NodeUnprepareResourcesRequest) (*dra.NodeUnprepareResourcesResponse, error) {
	defer d.enter()()
	if err := d.begin(ctx, "unprepare", q.Claims); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	out := &dra.NodeUnprepareResourcesResponse{Claims: map[string]*dra.NodeUnprepareResourceResponse{}}
	for _, c := range q.Claims {
		out.Claims[c.Uid] = &dra.NodeUnprepareResourceResponse{Error: d.faults[c.Name]}
		if d.faults[c.Name] == "" {
			delete(d.prepared, c.Uid)
		}
	}
	return out, nil
}

// registrar serves the registration of the driver.
type registrar struct {
	registration.UnimplementedRegistrationServer
	d        *fakeDriver
	endpoint string
}

func (r *registrar) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.DRAPlugin, Name: r.d.name, Endpoint: r.endpoint, SupportedVersions: r.d.services}, nil
}

func (r *registrar) NotifyRegistrationStatus(_ context.Context, s *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	var err error
	if !s.PluginRegistered {
		err = errors.New(s.Error)
	}
	select {
	case r.d.registrationOK <- err:
	default:
	}
	return &registration.RegistrationStatusResponse{}, nil
}

// bench is a node.
type bench struct {
	*testing.T
	root, dir string
	client    *fake.Clientset
	grace     time.Duration
	m         *Manager
	stop      func()
}

func setup(t *testing.T, objects ...runtime.Object) *bench {
	t.Helper()
	dir, err := os.MkdirTemp("", "dra") // short: a socket's path is
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	b := &bench{T: t, root: filepath.Join(dir, "k"), dir: filepath.Join(dir, "claims"), client: fake.NewClientset(objects...), grace: time.Hour}
	b.run()
	t.Cleanup(func() { b.stop() })
	return b
}

// run starts a manager in the place of the last one.
func (b *bench) run() {
	b.Helper()
	plugins := plugin.New(b.root)
	node := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{v1.LabelHostname: "n1"}}}
	b.m = New(Config{Client: b.client, NodeName: "n1", Node: func() *v1.Node { return node }, Plugins: plugins, Dir: b.dir, DriverGrace: b.grace})
	ctx, cancel := context.WithCancel(b.Context())
	var wg sync.WaitGroup
	for _, run := range []func(context.Context) error{b.m.Run, plugins.Run} {
		wg.Go(func() {
			if err := run(ctx); err != nil {
				b.Error(err)
			}
		})
	}
	b.stop = func() { cancel(); wg.Wait() }
}

// driver starts a driver and waits until it has registered and answers.
func (b *bench) driver(name string, services ...string) *fakeDriver {
	b.Helper()
	d := newDriver(b, name, services...)
	d.start()
	b.answers(name)
	return d
}

func (b *bench) answers(name string) {
	b.Helper()
	b.until("driver "+name+" answers", func() bool {
		_, absent := b.m.drivers.absent(name, time.Now())
		return !absent
	})
}

// until waits for a condition, for as long as a busy machine may need.
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

// claim is one that is allocated on n1 and reserved for pods; each driver has
// the device of the claim's name.
func claim(name string, drivers []string, pods ...string) *resourcev1.ResourceClaim {
	c := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: name, UID: types.UID("uid-" + name)}}
	c.Status.Allocation = &resourcev1.AllocationResult{NodeSelector: &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{MatchFields: []v1.NodeSelectorRequirement{{Key: "metadata.name", Operator: v1.NodeSelectorOpIn, Values: []string{"n1"}}}}}}}
	for _, d := range drivers {
		c.Status.Allocation.Devices.Results = append(c.Status.Allocation.Devices.Results, resourcev1.DeviceRequestAllocationResult{Request: "main", Driver: d, Pool: "pool", Device: "dev-" + name})
	}
	for _, p := range pods {
		c.Status.ReservedFor = append(c.Status.ReservedFor, resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: p, UID: types.UID(p)})
	}
	return c
}

// pod uses claims, by their names.
func pod(name string, claims ...string) *v1.Pod {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: name, UID: types.UID(name)}}
	c := v1.Container{Name: "app"}
	for _, claim := range claims {
		p.Spec.ResourceClaims = append(p.Spec.ResourceClaims, v1.PodResourceClaim{Name: claim, ResourceClaimName: ptr.To(claim)})
		c.Resources.Claims = append(c.Resources.Claims, v1.ResourceClaim{Name: claim})
	}
	p.Spec.Containers = []v1.Container{c}
	return p
}

// refuse answers as an API that is down.
func refuse(k8stesting.Action) (bool, runtime.Object, error) {
	return true, nil, errors.New("connection refused")
}
