package deviceplugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/agent/plugin"
	"github.com/clusterd/clusterd/durable"
)

// checkpoint is who has what, as it is on disk.
type checkpoint struct {
	Version int `json:"version"` // 1
	// Boot is the start of the machine in which it was written. What had devices in
	// another one runs no more.
	Boot string `json:"boot,omitempty"`
	// Resources are those that a plugin has ever reported, sorted: what is asked for
	// of others is not this package's.
	Resources []string `json:"resources,omitempty"`
	// Pods are those that have devices: UID → container → resource.
	Pods map[types.UID]map[string]map[string]allocation `json:"pods,omitempty"`
}

// allocation is what one container has of one resource.
type allocation struct {
	IDs   []string `json:"ids"`
	Nodes []int64  `json:"nodes,omitempty"` // of memory that they are near to
	// Before: the plugin wants to know when the container starts.
	Before bool `json:"before,omitempty"`
	// Done: the plugin has said what the container needs.
	Done    bool              `json:"done,omitempty"`
	Env     map[string]string `json:"env,omitempty"`
	Mounts  []mount           `json:"mounts,omitempty"`
	Devices []node            `json:"devices,omitempty"`
	CDI     []string          `json:"cdi,omitempty"`
}

type mount struct {
	Source      string `json:"source"`
	Destination string `json:"destination"`
	ReadOnly    bool   `json:"readOnly,omitempty"`
}

type node struct {
	Source      string `json:"source"`
	Destination string `json:"destination"`
	Access      string `json:"access,omitempty"`
}

// load reads the checkpoint, once.
func (m *Manager) load() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.loaded {
		return nil
	}
	data, err := os.ReadFile(m.cfg.File)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		m.state = checkpoint{}
	case err != nil:
		return fmt.Errorf("devices of device plugins: %w", err)
	default:
		var c checkpoint
		if err := json.Unmarshal(data, &c); err != nil {
			return fmt.Errorf("devices of device plugins: %s: %w", m.cfg.File, err)
		}
		if c.Version != 1 {
			return fmt.Errorf("devices of device plugins: %s is of version %d, this clusterd reads 1: drain the node before you remove it", m.cfg.File, c.Version)
		}
		if boot := plugin.BootID(); c.Boot != "" && boot != "" && c.Boot != boot {
			c.Pods = nil
		}
		m.state = c
	}
	if m.state.Pods == nil {
		m.state.Pods = map[types.UID]map[string]map[string]allocation{}
	}
	m.loaded = true
	return nil
}

// save writes the checkpoint. The caller holds mu.
func (m *Manager) save() error {
	m.state.Version, m.state.Boot = 1, plugin.BootID()
	data, err := json.Marshal(m.state)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(m.cfg.File), 0o750); err != nil {
		return err
	}
	if err := durable.ReplaceFile(m.cfg.File, data, 0o600); err != nil {
		return fmt.Errorf("devices of device plugins: %w", err)
	}
	return nil
}

// know notes that a resource is one of plugins. The caller holds mu.
func (m *Manager) know(name string) error {
	i, found := slices.BinarySearch(m.state.Resources, name)
	if found {
		return nil
	}
	before := m.state.Resources
	m.state.Resources = slices.Insert(slices.Clone(before), i, name)
	if err := m.save(); err != nil {
		m.state.Resources = before
		return err
	}
	return nil
}

// put notes what a container has of a resource, on disk too; nil: nothing.
func (m *Manager) put(pod types.UID, container, name string, a *allocation) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	before, had := m.state.Pods[pod][container][name]
	m.set(pod, container, name, a)
	err := m.save()
	if err != nil {
		var undo *allocation
		if had {
			undo = &before
		}
		m.set(pod, container, name, undo)
	}
	return err
}

// set is put in memory alone. The caller holds mu.
func (m *Manager) set(pod types.UID, container, name string, a *allocation) {
	if a != nil {
		if m.state.Pods[pod] == nil {
			m.state.Pods[pod] = map[string]map[string]allocation{}
		}
		if m.state.Pods[pod][container] == nil {
			m.state.Pods[pod][container] = map[string]allocation{}
		}
		m.state.Pods[pod][container][name] = *a
		return
	}
	delete(m.state.Pods[pod][container], name)
	if len(m.state.Pods[pod][container]) == 0 {
		delete(m.state.Pods[pod], container)
	}
	if len(m.state.Pods[pod]) == 0 {
		delete(m.state.Pods, pod)
	}
}

// get is what a container has of a resource.
func (m *Manager) get(pod types.UID, container, name string) (allocation, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	a, ok := m.state.Pods[pod][container][name]
	return a, ok
}
