package dra

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/agent/plugin"
	"github.com/clusterd/clusterd/durable"
)

// record is what is known on disk of one claim. It is written before a driver is
// asked for anything, and goes after all of them have taken the claim back. The
// one in memory is never changed, but exchanged for another.
type record struct {
	Version int `json:"version"` // 1

	Namespace string    `json:"namespace"`
	Name      string    `json:"name"`
	UID       types.UID `json:"uid"`
	// Pods are those that use the claim, or are about to.
	Pods []types.UID `json:"pods"`
	// Drivers are those that have devices in the claim, by name.
	Drivers map[string]share `json:"drivers"`
	// Boot is the start of the machine in which it was written: what drivers have
	// prepared in another one has to be prepared again.
	Boot string `json:"boot,omitempty"`
}

// share is what one driver has to do with a claim.
type share struct {
	// Called: the driver was asked to prepare the claim, or is about to be.
	Called bool `json:"called,omitempty"`
	// Prepared: it has done so, or none is needed.
	Prepared bool `json:"prepared,omitempty"`
	// Unprepares: it has to take the claim back.
	Unprepares bool `json:"unprepares,omitempty"`
	// Allocated are the devices that the claim has for itself alone.
	Allocated []string `json:"allocated,omitempty"` // POOL/DEVICE
	// Devices are the driver's answer.
	Devices []device `json:"devices,omitempty"`
}

// device is one that a driver has prepared.
type device struct {
	Requests []string `json:"requests,omitempty"` // empty: all of the claim's
	Pool     string   `json:"pool"`
	Name     string   `json:"name"`
	Share    string   `json:"share,omitempty"` // of a device that several claims have parts of
	CDI      []string `json:"cdi,omitempty"`
}

func (r *record) clone() *record {
	out := *r
	out.Pods, out.Drivers = slices.Clone(r.Pods), maps.Clone(r.Drivers)
	return &out
}

// forget makes drivers be asked again, before the claim is used and at its end. It
// reports whether that changed anything.
func (r *record) forget() (changed bool) {
	for name, s := range r.Drivers {
		if s.Called && s.Prepared {
			s.Prepared, s.Devices, changed = false, nil, true
			r.Drivers[name] = s
		}
	}
	return changed
}

// allocatedAs reports whether two records of one claim have the same devices: a
// claim that is given up and used again keeps its UID.
func (r *record) allocatedAs(o *record) bool {
	return maps.EqualFunc(r.Drivers, o.Drivers, func(a, b share) bool { return slices.Equal(a.Allocated, b.Allocated) })
}

// prepared reports whether all drivers have prepared the claim.
func (r *record) prepared() bool {
	for _, s := range r.Drivers {
		if !s.Prepared {
			return false
		}
	}
	return true
}

func (m *Manager) path(uid types.UID) string {
	return filepath.Join(m.cfg.Dir, string(uid)+".json")
}

// keep notes a record, on disk first.
func (m *Manager) keep(r *record) error {
	r.Version, r.Boot = 1, plugin.BootID()
	if err := checkUID(r.UID); err != nil {
		return err
	}
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(m.cfg.Dir, 0o750); err != nil {
		return err
	}
	if err := durable.ReplaceFile(m.path(r.UID), data, 0o600); err != nil {
		return fmt.Errorf("record of ResourceClaim %s/%s: %w", r.Namespace, r.Name, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.records[r.UID] = r
	return nil
}

// drop forgets a record, on disk first.
func (m *Manager) drop(uid types.UID) error {
	if err := os.Remove(m.path(uid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := durable.SyncDir(m.cfg.Dir); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.records, uid)
	return nil
}

// checkUID refuses what would lead out of the directory of records.
func checkUID(uid types.UID) error {
	if uid == "" || uid == "." || uid == ".." || strings.ContainsAny(string(uid), "/\x00") {
		return fmt.Errorf("UID %q of a ResourceClaim: not a name of a file", uid)
	}
	return nil
}

// load reads the records of former runs, once.
func (m *Manager) load() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.loaded {
		return nil
	}
	entries, err := os.ReadDir(m.cfg.Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("records of ResourceClaims: %w", err)
	}
	for _, e := range entries {
		path := filepath.Join(m.cfg.Dir, e.Name())
		if strings.HasPrefix(e.Name(), ".") { // what a crash has left of a write
			if err := os.Remove(path); err != nil {
				return fmt.Errorf("records of ResourceClaims: %w", err)
			}
			continue
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("records of ResourceClaims: %w", err)
		}
		r := &record{}
		if err := json.Unmarshal(data, r); err != nil {
			return fmt.Errorf("record %s: %w", path, err)
		}
		if r.Version != 1 || m.path(r.UID) != path {
			return fmt.Errorf("record %s is of version %d and claim %q: not one that this clusterd can have written; see which claims its driver has prepared before you remove it", path, r.Version, r.UID)
		}
		if r.Boot != plugin.BootID() {
			r.forget()
		}
		m.records[r.UID] = r
	}
	m.loaded = true
	return nil
}

// get is the record of a claim, nil: there is none.
func (m *Manager) get(uid types.UID) *record {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.records[uid]
}

// of are the records that which holds for, in the order of their names.
func (m *Manager) of(which func(*record) bool) []*record {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []*record
	for _, uid := range slices.Sorted(maps.Keys(m.records)) {
		if r := m.records[uid]; which(r) {
			out = append(out, r)
		}
	}
	return out
}

// usedBy are the records of a pod.
func (m *Manager) usedBy(pod types.UID) []*record {
	return m.of(func(r *record) bool { return slices.Contains(r.Pods, pod) })
}

// Held reports whether something is prepared for the pod, or may be. An agent
// that cannot read its records takes it for so.
func (m *Manager) Held(pod types.UID) bool {
	return m.load() != nil || len(m.usedBy(pod)) > 0
}

// Pods are those that something is prepared for, or may be.
func (m *Manager) Pods() ([]types.UID, error) {
	if err := m.load(); err != nil {
		return nil, err
	}
	seen := map[types.UID]bool{}
	for _, r := range m.of(func(*record) bool { return true }) {
		for _, uid := range r.Pods {
			seen[uid] = true
		}
	}
	return slices.Sorted(maps.Keys(seen)), nil
}

func sorted(claims []types.UID) []types.UID {
	out := slices.Sorted(slices.Values(claims))
	return slices.Compact(out)
}
