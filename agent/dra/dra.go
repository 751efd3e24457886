// Package dra calls the device drivers of this node (dynamic resource allocation,
// resource.k8s.io): NodePrepareResources before the sandbox of a pod is created, and
// NodeUnprepareResources after its containers have ended for good. Drivers register as
// plugins do (package plugin). Each call is recorded on disk before it is made, so that
// everything is unprepared after a crash.
//
// It does not allocate devices: the allocation is read from the API.
//
// On disk: DIR/CLAIM-UID.json, see record.
package dra

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/clusterd/clusterd/agent/cdi"
	"github.com/clusterd/clusterd/agent/plugin"
)

const (
	// callTimeout bounds one call to a driver. The caller may give it less.
	callTimeout = 45 * time.Second
	// callsAtOnce bounds the calls under way to one driver: who comes later waits
	// for that driver alone.
	callsAtOnce = 8
	// driverGrace is how long a driver that has gone, or has not come after the start,
	// is waited for before what it offers on this node is deleted. It is upstream's.
	driverGrace = 30 * time.Second
)

// Config of a Manager. All fields are required but those with a default.
type Config struct {
	Client   kubernetes.Interface
	NodeName string
	// Node is this node's object as last known, never nil: its labels say whether
	// an allocation is for it.
	Node func() *v1.Node
	// Plugins is where drivers register. Its creator runs it.
	Plugins *plugin.Registry
	// Dir holds the records.
	Dir string
	// CDIDirs hold the descriptions of devices that drivers name; default
	// cdi.DefaultDirs.
	CDIDirs []string
	// Changed is called when a driver has come, so that who waits for it tries
	// again. It must not block. Optional.
	Changed func()
	// DriverGrace is driverGrace by default, CallTimeout callTimeout.
	DriverGrace, CallTimeout time.Duration
}

// Manager knows the node's drivers and what they have prepared. Its methods may
// be called concurrently.
type Manager struct {
	cfg     Config
	drivers drivers
	busy    plugin.Locks // by the UID of a claim
	slices  sliceGC

	mu      sync.Mutex // guards all below
	records map[types.UID]*record
	loaded  bool
}

// New returns a Manager; it starts nothing.
func New(cfg Config) *Manager {
	if cfg.DriverGrace == 0 {
		cfg.DriverGrace = driverGrace
	}
	if cfg.CallTimeout == 0 {
		cfg.CallTimeout = callTimeout
	}
	if cfg.CDIDirs == nil {
		cfg.CDIDirs = cdi.DefaultDirs
	}
	m := &Manager{cfg: cfg, records: map[types.UID]*record{}}
	m.slices = sliceGC{client: cfg.Client, node: cfg.NodeName, after: cfg.DriverGrace, drivers: &m.drivers, wake: make(chan struct{}, 1)}
	m.drivers = drivers{timeout: cfg.CallTimeout, byName: map[string][]*driver{}, changed: m.changed}
	cfg.Plugins.Handle(registration.DRAPlugin, &m.drivers)
	return m
}

// changed is called when a driver has come or gone.
func (m *Manager) changed() {
	m.slices.poke()
	if m.cfg.Changed != nil {
		m.cfg.Changed()
	}
}

// Run deletes what drivers offer that are no more, until ctx ends; drivers are
// forgotten then.
func (m *Manager) Run(ctx context.Context) error {
	if err := m.load(); err != nil {
		return err
	}
	defer m.drivers.close()
	m.slices.run(ctx)
	return nil
}

// lock takes the locks of claims, always in one order; unlock must be called
// once if err is nil.
func (m *Manager) lock(ctx context.Context, claims []types.UID) (unlock func(), err error) {
	var held []func()
	unlock = func() {
		for _, u := range held {
			u()
		}
	}
	for _, uid := range sorted(claims) {
		u, err := m.busy.Lock(ctx, string(uid))
		if err != nil {
			unlock()
			return nil, fmt.Errorf("another pod has the ResourceClaim %s prepared or taken back: %w", uid, err)
		}
		held = append(held, u)
	}
	return unlock, nil
}

// errStopped is the answer to drivers that register while the agent stops.
var errStopped = errors.New("the node's agent stops")
