package agenttest

import (
	"os"
	"slices"
	"sync"
)

// Mounter makes no mounts, and remembers which were asked for.
type Mounter struct {
	mu sync.Mutex
	at map[string]bool
}

// Hugetlbfs implements volume.Mounter.
func (m *Mounter) Hugetlbfs(target string, _ int64) error { return m.mount(target) }

// Tmpfs implements volume.Mounter.
func (m *Mounter) Tmpfs(target string, _ int64) error { return m.mount(target) }

// Bind implements volume.Mounter.
func (m *Mounter) Bind(_ *os.File, target string) error { return m.mount(target) }

func (m *Mounter) mount(target string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.at == nil {
		m.at = map[string]bool{}
	}
	m.at[target] = true
	return nil
}

// Unmount implements volume.Mounter.
func (m *Mounter) Unmount(target string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.at, target)
	return nil
}

// Mounted implements volume.Mounter.
func (m *Mounter) Mounted(dir string) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.at[dir], nil
}

// Below implements volume.Mounter.
func (m *Mounter) Below(dir string) ([]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for p := range m.at {
		if p == dir || len(p) > len(dir) && p[:len(dir)+1] == dir+"/" {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b string) int { return len(b) - len(a) })
	return out, nil
}
