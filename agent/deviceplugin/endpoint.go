package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/clusterd/clusterd/agent/plugin"
	"github.com/clusterd/clusterd/apis/core"
)

// endpoint is a plugin that has registered. Its fields below devices are guarded
// by Manager.mu.
type endpoint struct {
	resource string
	socket   string
	conn     *grpc.ClientConn
	client   api.DevicePluginClient
	options  *api.DevicePluginOptions
	stop     context.CancelFunc

	devices  map[string]*api.Device // as last reported, by ID
	reported bool                   // they have been reported at all
	stopped  time.Time              // when it went; zero: it is here
}

// healthy are the IDs of the devices that may be used, sorted; of a plugin that
// has gone none.
func (p *endpoint) healthy() []string {
	if !p.stopped.IsZero() {
		return nil
	}
	var out []string
	for _, id := range slices.Sorted(maps.Keys(p.devices)) {
		if p.devices[id].GetHealth() == api.Healthy {
			out = append(out, id)
		}
	}
	return out
}

// nodesOf are the memory nodes that devices are near to.
func (p *endpoint) nodesOf(ids []string) []int64 {
	var out []int64
	for _, id := range ids {
		for _, n := range p.devices[id].GetTopology().GetNodes() {
			out = append(out, n.GetID())
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// SocketName is what plugins look for in their directory.
const SocketName = "kubelet.sock"

// serve answers plugins that register until ctx ends.
func (m *Manager) serve(ctx context.Context) error {
	if err := os.MkdirAll(m.cfg.Dir, 0o750); err != nil {
		return fmt.Errorf("folder of device plugins: %w", err)
	}
	socket := filepath.Join(m.cfg.Dir, SocketName)
	// Of an agent that was killed. Plugins register again when it is made again.
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("device plugins: %w", err)
	}
	// A socket's address has 107 bytes, and data directories may lie deep.
	dir, err := os.Open(m.cfg.Dir)
	if err != nil {
		return fmt.Errorf("device plugins: %w", err)
	}
	defer dir.Close()
	ln, err := net.Listen("unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), SocketName))
	if err != nil {
		return fmt.Errorf("device plugins: listen at %s: %w", socket, err)
	}
	if err := os.Chmod(socket, 0o600); err != nil {
		ln.Close()
		return fmt.Errorf("device plugins: %w", err)
	}
	srv := grpc.NewServer()
	api.RegisterRegistrationServer(srv, registrar{m: m})
	done := make(chan error, 1)
	go func() { done <- srv.Serve(ln) }()
	select {
	case err := <-done:
		return fmt.Errorf("device plugins: %w", err)
	case <-ctx.Done():
	}
	srv.Stop()
	<-done
	return nil
}

// registrar answers at the kubelet's socket.
type registrar struct {
	api.UnimplementedRegistrationServer
	m *Manager
}

// Register takes a plugin that serves in the same directory.
func (r registrar) Register(ctx context.Context, q *api.RegisterRequest) (*api.Empty, error) {
	name := q.GetEndpoint()
	if name == "" || name != filepath.Base(name) || name == SocketName {
		return nil, status.Errorf(codes.InvalidArgument, "endpoint %q: the name of a socket in %s is required", name, r.m.cfg.Dir)
	}
	err := r.m.take(ctx, q.GetResourceName(), filepath.Join(r.m.cfg.Dir, name), []string{q.GetVersion()}, q.GetOptions())
	if err != nil {
		klog.FromContext(ctx).Info("Device plugin is refused", "resource", q.GetResourceName(), "err", err)
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	return &api.Empty{}, nil
}

// Register implements plugin.Handler, for plugins that register as others do.
func (m *Manager) Register(ctx context.Context, p plugin.Info) error {
	return m.take(ctx, p.Name, p.Endpoint, p.Versions, nil)
}

// Deregister implements plugin.Handler.
func (m *Manager) Deregister(p plugin.Info) {
	m.mu.Lock()
	one := m.plugins[p.Name]
	m.mu.Unlock()
	if one != nil && one.socket == p.Endpoint {
		one.stop()
	}
}

// Settled implements plugin.Handler.
func (m *Manager) Settled() {}

// take begins to serve a plugin, in the place of one of its resource.
func (m *Manager) take(ctx context.Context, name, socket string, versions []string, options *api.DevicePluginOptions) error {
	if !slices.Contains(versions, api.Version) {
		return fmt.Errorf("resource %s: the plugin speaks %q, this node %q", name, versions, api.Version)
	}
	if !core.IsExtended(v1.ResourceName(name)) {
		return fmt.Errorf("resource %q: not the name of an extended resource, such as example.com/gpu", name)
	}
	conn, err := plugin.Dial(socket, callTimeout)
	if err != nil {
		return err
	}
	p := &endpoint{resource: name, socket: socket, conn: conn, client: api.NewDevicePluginClient(conn), options: options, devices: map[string]*api.Device{}}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ctx == nil || m.ctx.Err() != nil {
		_ = conn.Close()
		return errors.New("the node's agent does not run")
	}
	if err := m.know(name); err != nil {
		_ = conn.Close()
		return err
	}
	if before := m.plugins[name]; before != nil {
		before.stop()
		p.devices, p.reported = before.devices, before.reported // until it tells its own
	}
	run, stop := context.WithCancel(m.ctx)
	p.stop = stop
	m.plugins[name] = p
	m.wg.Go(func() {
		defer stop()
		err := m.follow(run, p)
		_ = conn.Close()
		m.gone(run, p, err)
	})
	klog.FromContext(ctx).Info("Device plugin has registered", "resource", name)
	return nil
}

// follow takes what the plugin tells of its devices, until it ends.
func (m *Manager) follow(ctx context.Context, p *endpoint) error {
	// Asked of every plugin: one that does not begin to serve in time has gone.
	options, err := p.client.GetDevicePluginOptions(ctx, &api.Empty{}, grpc.WaitForReady(true))
	switch code := status.Code(err); {
	case code == codes.Unavailable || code == codes.DeadlineExceeded || code == codes.Canceled:
		return err
	case p.options == nil && err != nil && code != codes.Unimplemented:
		return err
	case p.options == nil:
		m.mu.Lock()
		p.options = options
		m.mu.Unlock()
	}
	stream, err := p.client.ListAndWatch(ctx, &api.Empty{}, grpc.WaitForReady(true))
	if err != nil {
		return err
	}
	for first := true; ; first = false {
		list, err := stream.Recv()
		if err != nil {
			return err
		}
		devices := map[string]*api.Device{}
		for _, d := range list.GetDevices() {
			devices[d.GetID()] = d
		}
		m.mu.Lock()
		same := !first && maps.EqualFunc(p.devices, devices, func(a, b *api.Device) bool { return a.GetHealth() == b.GetHealth() })
		p.devices, p.reported = devices, true
		m.mu.Unlock()
		if !same {
			m.changed()
		}
	}
}

// gone notes that a plugin has ended. Its devices are no longer given, and after
// a while no longer counted, unless it registers again.
func (m *Manager) gone(ctx context.Context, p *endpoint, why error) {
	m.mu.Lock()
	current := m.plugins[p.resource] == p
	p.stopped = time.Now()
	run := m.ctx
	m.mu.Unlock()
	if !current || run.Err() != nil {
		return
	}
	klog.FromContext(ctx).Info("Device plugin has gone", "resource", p.resource, "err", why)
	m.changed()
	m.wg.Go(func() { m.forgetLater(run, m.cfg.ForgetAfter) })
}
