package podmon

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/opencontainers/cgroups"
	"golang.org/x/sys/unix"
)

// watchOOM makes a container that is out of memory die as a whole on cgroup v1,
// as memory.oom.group does on version 2: there the kernel kills one process,
// and what is left of the container is in an undefined state. Without a
// memory limit, or when the container asks for it, it stays at one process.
func (s *Supervisor) watchOOM(c *container) {
	s.mu.Lock()
	spec := c.status.Container
	s.mu.Unlock()
	if cgroups.IsCgroup2UnifiedMode() || spec.Resources.MemoryLimit <= 0 || spec.OOMSingleProcess {
		return
	}
	m, err := s.containerCgroup(c)
	if err != nil {
		return
	}
	dir := m.Path("memory")
	events, err := oomEvents(dir)
	if err != nil {
		s.log.Warn("a container out of memory will not end as a whole", "id", c.id, "err", err)
		return
	}
	s.wg.Go(func() {
		defer events.Close()
		stop := context.AfterFunc(s.life, func() { _ = events.SetReadDeadline(past) })
		defer stop()
		// The removal of the cgroup is an event too, the last one.
		for count := make([]byte, 8); ; {
			if _, err := events.Read(count); err != nil {
				return
			}
			killed, err := waitOOMKill(dir, c.done)
			if err != nil {
				return
			}
			if !killed {
				continue // it was let live: the limit was raised, or memory freed
			}
			if err := killCgroup(m); err != nil {
				s.log.Warn("container out of memory did not end as a whole", "id", c.id, "err", err)
			}
			return
		}
	})
}

// oomEvents gives a file that can be read whenever a cgroup v1 is out of
// memory (cgroup-v1/memory.rst, section 10).
func oomEvents(dir string) (*os.File, error) {
	control, err := os.Open(filepath.Join(dir, "memory.oom_control"))
	if err != nil {
		return nil, err
	}
	defer control.Close() // the kernel holds what it needs
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("eventfd", err)
	}
	events := os.NewFile(uintptr(fd), "oom events")
	ask := fmt.Sprintf("%d %d", fd, control.Fd())
	if err := os.WriteFile(filepath.Join(dir, "cgroup.event_control"), []byte(ask), 0); err != nil {
		events.Close()
		return nil, err
	}
	return events, nil
}

// waitOOMKill waits a moment for the kernel to have killed a process: the event
// comes before. An error says that the cgroup is no more.
func waitOOMKill(dir string, done <-chan struct{}) (killed bool, err error) {
	for end, pause := time.Now().Add(5*time.Second), time.Millisecond; time.Now().Before(end); pause = min(2*pause, 50*time.Millisecond) {
		b, err := os.ReadFile(filepath.Join(dir, "memory.oom_control"))
		if err != nil {
			return false, err
		}
		if oomKills(string(b)) > 0 {
			return true, nil
		}
		select {
		case <-done:
			return false, os.ErrProcessDone
		case <-time.After(pause):
		}
	}
	return false, nil
}

// oomKills reads the line "oom_kill N" of memory.oom_control (Linux 4.13).
func oomKills(control string) int {
	for line := range strings.Lines(control) {
		if n, ok := strings.CutPrefix(line, "oom_kill "); ok {
			count, _ := strconv.Atoi(strings.TrimSpace(n))
			return count
		}
	}
	return 0
}
