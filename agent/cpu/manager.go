package cpu

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"

	"k8s.io/utils/cpuset"

	"github.com/clusterd/clusterd/durable"
)

// Config of a Manager.
type Config struct {
	// Topology is what the machine has; see Discover.
	Topology Topology
	// Reserved are never anybody's alone: the node's own programs, and pods
	// that share, always have them. At least one is required.
	Reserved cpuset.CPUSet
	// File keeps who has what, so that it holds across restarts. Required.
	File string
	// Shared: no container gets exclusive processors, and those that had some share them
	// again. The file is removed.
	Shared bool
}

// Manager knows which container has which processors. Its methods may be
// called concurrently and do not block but for writing the file.
type Manager struct {
	cfg Config

	mu   sync.Mutex
	held map[string]map[string]cpuset.CPUSet // pod UID → container → its own
}

// ErrNotEnough is returned by Assign when too few processors are free.
var ErrNotEnough = errors.New("not enough cpus available to satisfy request")

// fileVersion of the checkpoint; a newer one is refused.
const fileVersion = 1

// checkpoint is the file: {"version":1,"pods":{"UID":{"main":"2-3"}}}.
type checkpoint struct {
	Version int                          `json:"version"`
	Pods    map[string]map[string]string `json:"pods"`
}

// New reads what was assigned before. Assignments of processors that are gone
// or reserved by now are an error: the containers that have them run.
func New(cfg Config) (*Manager, error) {
	if cfg.Shared {
		if err := os.Remove(cfg.File); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("cpu: %w", err)
		}
		return &Manager{cfg: cfg}, nil
	}
	all := cfg.Topology.All()
	switch {
	case cfg.Reserved.IsEmpty():
		return nil, errors.New("cpu: no processor is reserved: at least one must stay for what shares")
	case !cfg.Reserved.IsSubsetOf(all):
		return nil, fmt.Errorf("cpu: reserved processors %s: this machine has %s", cfg.Reserved, all)
	}
	m := &Manager{cfg: cfg, held: map[string]map[string]cpuset.CPUSet{}}
	b, err := os.ReadFile(cfg.File)
	if errors.Is(err, fs.ErrNotExist) {
		return m, nil
	}
	if err != nil {
		return nil, fmt.Errorf("cpu: %w", err)
	}
	var c checkpoint
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, fmt.Errorf("cpu: %s: %w", cfg.File, err)
	}
	if c.Version != fileVersion {
		return nil, fmt.Errorf("cpu: %s has version %d, this program knows %d", cfg.File, c.Version, fileVersion)
	}
	taken := cfg.Reserved
	for uid, containers := range c.Pods {
		m.held[uid] = map[string]cpuset.CPUSet{}
		for name, s := range containers {
			set, err := cpuset.Parse(s)
			if err != nil {
				return nil, fmt.Errorf("cpu: %s: pod %s, container %s: %w", cfg.File, uid, name, err)
			}
			if !set.IsSubsetOf(all.Difference(taken)) {
				return nil, fmt.Errorf("cpu: container %s of pod %s has processors %s, but %s are reserved or others' and the machine has %s: drain the node, remove %s and start again",
					name, uid, set, taken, all, cfg.File)
			}
			taken = taken.Union(set)
			m.held[uid][name] = set
		}
	}
	return m, nil
}

// Assign gives the pod's containers as many processors as the map says, each
// its own. A pod that has some already keeps them. It gives all or, with
// ErrNotEnough, none.
func (m *Manager) Assign(uid string, want map[string]int) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held[uid] != nil || len(want) == 0 || m.cfg.Shared {
		return nil
	}
	free := m.shared().Difference(m.cfg.Reserved)
	total := 0
	for _, n := range want {
		total += n
	}
	if total > free.Size() {
		return fmt.Errorf("%w: requested %d, free %d", ErrNotEnough, total, free.Size())
	}
	// The pod's containers lie close to each other, too.
	pool := take(m.cfg.Topology, free, total)
	got := map[string]cpuset.CPUSet{}
	for _, name := range bySize(want) {
		got[name] = take(m.cfg.Topology, pool, want[name])
		pool = pool.Difference(got[name])
	}
	m.held[uid] = got
	if err := m.save(); err != nil {
		delete(m.held, uid)
		return err
	}
	return nil
}

// Release gives back what the pod had. When that cannot be written it is
// an error, and a restart before the next change finds the old assignment.
func (m *Manager) Release(uid string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.held[uid] == nil {
		return nil
	}
	delete(m.held, uid)
	return m.save()
}

// Allocatable are the processors that can be given to one container alone.
func (m *Manager) Allocatable() cpuset.CPUSet {
	if m.cfg.Shared {
		return cpuset.New()
	}
	return m.cfg.Topology.All().Difference(m.cfg.Reserved)
}

// Pods lists who has processors of their own.
func (m *Manager) Pods() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]string, 0, len(m.held))
	for uid := range m.held {
		out = append(out, uid)
	}
	return out
}

// Of gives the processors a container may run on; own tells whether no other
// may.
func (m *Manager) Of(uid, container string) (set cpuset.CPUSet, own bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if set, ok := m.held[uid][container]; ok {
		return set, true
	}
	return m.shared(), false
}

// shared is the processors that no container has exclusively. The caller holds mu.
func (m *Manager) shared() cpuset.CPUSet {
	out := m.cfg.Topology.All()
	for _, containers := range m.held {
		for _, set := range containers {
			out = out.Difference(set)
		}
	}
	return out
}

// save replaces the file. The caller holds mu.
func (m *Manager) save() error {
	c := checkpoint{Version: fileVersion, Pods: map[string]map[string]string{}}
	for uid, containers := range m.held {
		c.Pods[uid] = map[string]string{}
		for name, set := range containers {
			c.Pods[uid][name] = set.String()
		}
	}
	b, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return durable.ReplaceFile(m.cfg.File, b, 0o600)
}

// bySize orders names by what they want, the most first, then by name.
func bySize(want map[string]int) []string {
	return slices.SortedFunc(maps.Keys(want), func(a, b string) int {
		return cmp.Or(want[b]-want[a], strings.Compare(a, b))
	})
}
