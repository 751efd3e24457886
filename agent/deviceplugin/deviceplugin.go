// Package deviceplugin implements the kubelet's side of the device plugin protocol
// (k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1): plugins report the devices of a
// resource, such as "example.com/gpu", and their health. It reports them in the node
// status, allocates devices to containers, and calls Allocate of the plugin.
//
// An allocation is recorded on disk before the plugin is called. Running containers keep
// theirs, whatever happens to the plugin.
//
// On disk: Config.Dir/kubelet.sock, where plugins register, beside their own
// sockets; Config.File, see checkpoint.
package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/agent/cdi"
	"github.com/clusterd/clusterd/agent/plugin"
)

const (
	// callTimeout bounds one call to a plugin. The caller may give it less.
	callTimeout = 30 * time.Second
	// forgetAfter is for how long the devices of a plugin that has gone are counted
	// in the node's capacity. It is upstream's.
	forgetAfter = 5 * time.Minute
)

// Config of a Manager.
type Config struct {
	// Dir is where plugins look for a kubelet's socket and have theirs. Required.
	Dir string
	// File holds who has what. Required.
	File string
	// CDIDirs hold the descriptions of devices that plugins name; default
	// cdi.DefaultDirs.
	CDIDirs []string
	// Changed is called when the node has other devices than before, or some are
	// free again. It must not block. Optional.
	Changed func()
	// ForgetAfter is forgetAfter by default.
	ForgetAfter time.Duration
}

// Manager knows the node's device plugins and who has which device. Its methods
// may be called concurrently.
type Manager struct {
	cfg   Config
	busy  plugin.Locks   // by resource: who chooses of its devices
	wg    sync.WaitGroup // plugins
	start time.Time

	mu      sync.Mutex // guards all below
	ctx     context.Context
	plugins map[string]*endpoint // by resource
	state   checkpoint
	loaded  bool
}

// New returns a Manager; it starts nothing.
func New(cfg Config) (*Manager, error) {
	if cfg.Dir == "" || cfg.File == "" {
		return nil, errors.New("deviceplugin: Dir and File are required")
	}
	if cfg.CDIDirs == nil {
		cfg.CDIDirs = cdi.DefaultDirs
	}
	if cfg.ForgetAfter == 0 {
		cfg.ForgetAfter = forgetAfter
	}
	return &Manager{cfg: cfg, start: time.Now(), plugins: map[string]*endpoint{}}, nil
}

func (m *Manager) changed() {
	if m.cfg.Changed != nil {
		m.cfg.Changed()
	}
}

// Run serves plugins until ctx ends; they are forgotten then.
func (m *Manager) Run(ctx context.Context) error {
	if err := m.load(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer m.wg.Wait()
	defer cancel()
	m.mu.Lock()
	m.ctx = ctx
	m.mu.Unlock()
	m.wg.Go(func() { m.forgetLater(ctx, m.cfg.ForgetAfter) })
	return m.serve(ctx)
}

// forgetLater has the node's status written again when plugins that have gone by
// now are no longer counted.
func (m *Manager) forgetLater(ctx context.Context, after time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(after):
		m.changed()
	}
}

// Resources are what the node has of each resource that a plugin has ever reported
// of, and what of it pods may have. What is not known, since the agent has just
// started, is left out.
func (m *Manager) Resources() (capacity, allocatable v1.ResourceList) {
	if m.load() != nil {
		return nil, nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	capacity, allocatable = v1.ResourceList{}, v1.ResourceList{}
	for _, name := range m.state.Resources {
		all, healthy := 0, 0
		switch p := m.plugins[name]; {
		case (p == nil || !p.reported) && time.Since(m.start) < m.cfg.ForgetAfter:
			continue
		case p == nil || !p.stopped.IsZero() && time.Since(p.stopped) >= m.cfg.ForgetAfter:
		default:
			all, healthy = len(p.devices), len(p.healthy())
		}
		capacity[v1.ResourceName(name)] = *resource.NewQuantity(int64(all), resource.DecimalSI)
		allocatable[v1.ResourceName(name)] = *resource.NewQuantity(int64(healthy), resource.DecimalSI)
	}
	return capacity, allocatable
}

// Devices are some of a resource.
type Devices struct {
	Resource string
	IDs      []string
	Nodes    []int64 // of memory that they are near to
}

// Of are the devices that a container has.
func (m *Manager) Of(pod types.UID, container string) []Devices {
	if m.load() != nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []Devices
	got := m.state.Pods[pod][container]
	for _, name := range slices.Sorted(maps.Keys(got)) {
		out = append(out, Devices{name, got[name].IDs, got[name].Nodes})
	}
	return out
}

// Allocatable are the devices that containers can have, whether some have them
// or not.
func (m *Manager) Allocatable() []Devices {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []Devices
	for _, name := range slices.Sorted(maps.Keys(m.plugins)) {
		p := m.plugins[name]
		if ids := p.healthy(); len(ids) > 0 {
			out = append(out, Devices{name, ids, p.nodesOf(ids)})
		}
	}
	return out
}

// Held reports whether the pod has devices. A node that cannot read who has which
// takes it for so.
func (m *Manager) Held(pod types.UID) bool {
	if m.load() != nil {
		return true
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.state.Pods[pod]) > 0
}

// Pods are those that have devices.
func (m *Manager) Pods() ([]types.UID, error) {
	if err := m.load(); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Sorted(maps.Keys(m.state.Pods)), nil
}

// Unprepare gives back what the pod has. Plugins are not asked: the protocol has
// no such call.
func (m *Manager) Unprepare(_ context.Context, pod types.UID) error {
	if err := m.load(); err != nil {
		return err
	}
	m.mu.Lock()
	before, had := m.state.Pods[pod]
	var err error
	if had {
		delete(m.state.Pods, pod)
		if err = m.save(); err != nil {
			m.state.Pods[pod] = before
		}
	}
	m.mu.Unlock()
	if err != nil {
		return err
	}
	if had {
		m.changed()
	}
	return nil
}

// notRegistered says that a plugin is missing.
func notRegistered(name string) error {
	return fmt.Errorf("%s: its device plugin is not registered on this node: run it here (usually a DaemonSet); the pod goes on when it has registered", name)
}
