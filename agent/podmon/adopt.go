package podmon

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/opencontainers/runc/libcontainer"
	"golang.org/x/sys/unix"
)

// bootID names this boot of the machine: process numbers and start times of
// another mean nothing.
var bootID = sync.OnceValue(func() string {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
})

// adoptAll takes over what a former podmon left: sandboxes and containers that
// still run go on, those that have ended are kept with what is known. The error is
// that the machine has no more files or memory for it: podmon must not go on then,
// as if what it cannot look at were not there.
func (s *Supervisor) adoptAll() error {
	for _, dir := range []string{sandboxesDir, containerDir} {
		if _, err := os.ReadDir(filepath.Join(s.cfg.Dir, dir)); short(err) {
			return fmt.Errorf("adopt: %w", err)
		}
	}
	for _, id := range dirNames(filepath.Join(s.cfg.Dir, sandboxesDir)) {
		if err := s.adoptSandbox(id); short(err) {
			return fmt.Errorf("adopt sandbox %s: %w", id, err)
		} else if err != nil {
			s.log.Warn("former sandbox dropped", "id", id, "err", err)
		}
	}
	for id, sb := range s.sandboxes {
		if !sb.ready { // killed while it was being made: its client has had no answer
			if err := s.dropSandbox(sb); err != nil {
				s.log.Warn("half-made sandbox stays", "id", id, "err", err)
			}
		}
	}
	for _, id := range dirNames(filepath.Join(s.cfg.Dir, containerDir)) {
		if err := s.adoptContainer(id); short(err) {
			return fmt.Errorf("adopt container %s: %w", id, err)
		} else if err != nil {
			s.log.Warn("former container dropped", "id", id, "err", err)
		}
	}
	// libcontainer's state of what is not ours any more.
	for _, id := range dirNames(filepath.Join(s.cfg.Dir, runcStateDir)) {
		s.mu.Lock()
		c := s.containers[id]
		ours := c != nil && c.proc != nil // one that ends meanwhile is cleaned up behind by its watcher
		s.mu.Unlock()
		if !ours {
			s.destroyLeftover(id)
		}
	}
	return nil
}

// short reports whether the machine lacks what another try may find.
func short(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}

func dirNames(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	var out []string
	for _, e := range entries {
		if e.IsDir() && validID(e.Name()) == nil {
			out = append(out, e.Name())
		}
	}
	return out
}

func (s *Supervisor) adoptSandbox(id string) error {
	var f sandboxFile
	if err := readState(s.sandboxPath(id, "sandbox.json"), &f); short(err) {
		return err
	} else if err != nil {
		// endStrayPauses ends its pause.
		_ = unix.Unmount(s.sandboxPath(id, "shm"), unix.MNT_DETACH)
		return errors.Join(err, os.RemoveAll(s.sandboxPath(id)))
	}
	sb := &sandbox{status: f.Status, start: f.Start, ready: true, exited: make(chan struct{})}
	s.sandboxes[id] = sb
	if sb.start == 0 {
		sb.ready = false
		return nil
	}
	if sb.status.State == api.StateRunning && f.BootID == bootID() {
		p, err := openProcess(sb.status.Pid, sb.start)
		if err == nil {
			sb.pause = p
			s.watchSandbox(sb, p.nonChildExit)
			return nil
		}
		if !errors.Is(err, os.ErrProcessDone) {
			return err
		}
	}
	sb.status.State, sb.status.Pid = api.StateExited, 0
	close(sb.exited)
	return s.saveSandbox(sb)
}

func (s *Supervisor) adoptContainer(id string) error {
	var f containerFile
	if err := readState(s.containerPath(id, "container.json"), &f); short(err) {
		return err
	} else if err != nil {
		s.destroyLeftover(id)
		s.endCgroupsNamed(id)
		return errors.Join(err, os.RemoveAll(s.containerPath(id)))
	}
	c := &container{id: id, state: f.State, status: f.Status, start: f.Start, done: make(chan struct{})}
	s.containers[id] = c
	switch {
	case c.state == stateExited:
		close(c.done)
		return nil
	case c.state == stateStarting:
		s.destroyLeftover(id)
		s.endCgroupsNamed(id) // before it has a state, libcontainer's init is there alone
		c.state, c.status.State = stateExited, api.StateExited
		c.status.StartedAt = time.Now().UnixNano()
		c.status.FinishedAt, c.status.ExitCode = c.status.StartedAt, startFailedCode
		c.status.StartError = "podmon ended while the container was being started"
		if !slices.ContainsFunc(c.status.Container.Hooks, func(h api.Hook) bool { return h.When == api.HookPoststop }) {
			close(c.done)
			return s.saveContainer(c)
		}
		// Its hooks take their time, for which podmon's clients would wait. The record
		// on disk stays: should podmon be killed meanwhile, the next one runs them.
		s.wg.Go(func() {
			s.poststop(c)
			if err := s.saveContainer(c); err != nil {
				s.log.Warn("container state not saved", "id", id, "err", err)
			}
			close(c.done)
		})
		return nil
	}
	if f.BootID == bootID() {
		// Running, or a zombie that the keeper has kept: its end is then
		// recorded like any other's.
		p, err := openProcessDead(c.status.Pid, c.start)
		if err == nil {
			return s.adoptRunning(c, p)
		}
		if !errors.Is(err, os.ErrProcessDone) {
			return err
		}
		// It ended and was not kept. Its cgroup may still say whether it was OOM killed.
		c.lc, _ = libcontainer.Load(filepath.Join(s.cfg.Dir, runcStateDir), id)
	}
	s.finishContainer(c, lostExit, time.Now())
	return nil
}

// adoptRunning goes on with a container that outlived its podmon.
func (s *Supervisor) adoptRunning(c *container, p *process) error {
	c.proc = p
	c.reap = p.reapIfOurs
	var err error
	if c.lc, err = libcontainer.Load(filepath.Join(s.cfg.Dir, runcStateDir), c.id); short(err) {
		return err
	} else if err != nil {
		s.log.Warn("adopted container cannot be executed in", "id", c.id, "err", err)
	}
	if c.io, err = s.adoptStdio(c); short(err) {
		return err
	} else if err != nil {
		s.log.Warn("adopted container's output is lost", "id", c.id, "err", err)
	}
	s.orphans.own(p.pid)
	s.link.keep(c.kept())
	c.io.start(&s.wg)
	s.watchContainer(c)
	s.watchOOM(c)
	s.log.Info("container adopted", "id", c.id, "pid", p.pid)
	return nil
}

// adoptStdio opens a container's output again, by name, and takes its input or
// terminal from the keeper. What the keeper did not hold ended with the former
// podmon.
func (s *Supervisor) adoptStdio(c *container) (*stdio, error) {
	k := s.link.take(c.id)
	defer k.close()
	spec := &c.status.Container
	sio := &stdio{dir: s.containerPath(c.id), spec: spec}
	var err error
	if sio.log, err = openLog(spec.LogPath, spec.LogMaxBytes, spec.LogMaxFiles, s.log); err != nil {
		sio.log, _ = openLog("", 0, 0, s.log)
	}
	if spec.TTY {
		if sio.tty = k.take(keptTTY); sio.tty != nil {
			sio.outputs = []*output{{name: "stdout", r: sio.tty}}
		}
		return sio, err
	}
	sio.stdin = k.take(keptStdin)
	for _, name := range []string{"stdout", "stderr"} {
		err = errors.Join(err, sio.openOutput(name))
	}
	return sio, err
}

// destroyLeftover ends and cleans up a libcontainer container without record.
func (s *Supervisor) destroyLeftover(id string) {
	dir := filepath.Join(s.cfg.Dir, runcStateDir)
	lc, err := libcontainer.Load(dir, id)
	if err != nil {
		// No state file: it never came to have a process.
		_ = os.RemoveAll(filepath.Join(dir, id))
		return
	}
	_ = lc.Signal(unix.SIGKILL)
	deadline := time.Now().Add(5 * time.Second)
	for time.Now().Before(deadline) {
		if st, err := lc.Status(); err != nil || st == libcontainer.Stopped {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	if err := lc.Destroy(); err != nil {
		s.log.Warn("former container's leftovers stay", "id", id, "err", err)
	}
}
