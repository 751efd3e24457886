package csi

import (
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// load reads the records of former runs, once.
func (m *Manager) load() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.loaded {
		return nil
	}
	all, err := m.paths.read()
	if err != nil {
		return err
	}
	for _, r := range all {
		m.records[r.key()] = &entry{record: *r}
	}
	m.loaded = true
	return nil
}

// entry is the record of the key, nil: there is none.
func (m *Manager) entry(key recordKey) *entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.records[key]
}

// entries are the records that which holds for.
func (m *Manager) entries(which func(*entry) bool) []*entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []*entry
	for _, e := range m.records {
		if which(e) {
			out = append(out, e)
		}
	}
	return out
}

// keep notes a record, on disk first.
func (m *Manager) keep(e *entry) error {
	if err := m.paths.write(&e.record); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.records[e.key()] = e
	return nil
}

// drop forgets a record, on disk first.
func (m *Manager) drop(e *entry) error {
	if err := m.paths.forget(&e.record); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.records, e.key())
	return nil
}

// Pods are those that drivers have something mounted for.
func (m *Manager) Pods() ([]types.UID, error) {
	if err := m.load(); err != nil {
		return nil, err
	}
	seen := map[types.UID]bool{}
	var out []types.UID
	for _, e := range m.entries(func(*entry) bool { return true }) {
		if !seen[e.UID] {
			seen[e.UID] = true
			out = append(out, e.UID)
		}
	}
	return out, nil
}

// InUse are the attached volumes that pods of this node use, or are about to:
// they must not be detached.
func (m *Manager) InUse() []v1.UniqueVolumeName {
	if m.load() != nil {
		return nil
	}
	var out []v1.UniqueVolumeName
	for _, e := range m.entries(func(e *entry) bool { return e.Attach }) {
		if name := e.unique(); !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	slices.Sort(out)
	return out
}
