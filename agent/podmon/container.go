package podmon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/opencontainers/runc/libcontainer"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Internal states of a container; api knows only running and exited.
//
//	starting ──ok──▶ running ──ends, output drained──▶ exited ──remove──▶ gone
//	    └──────────cannot be started (StartError)──────▶─┘
const (
	stateStarting = api.StateStarting
	stateRunning  = api.StateRunning
	stateExited   = api.StateExited
)

// startFailedCode is the exit code of what could not be started.
const startFailedCode = 128

// container is one container's record, kept until removed.
type container struct {
	id string

	// Guarded by Supervisor.mu.
	state   string
	status  api.ContainerStatus
	start   uint64 // start time of the first process, see procStat
	gaveUp  string // why a start that hung was ended
	removed bool

	// Written before state becomes running, then constant.
	proc *process
	lc   *libcontainer.Container
	reap func() // lets go of the ended process; called once, after its end is on record
	io   *stdio

	done chan struct{} // closed when exited: output drained, cgroup removed, saved
}

func (s *Supervisor) containerPath(id string, more ...string) string {
	return filepath.Join(append([]string{s.cfg.Dir, containerDir, id}, more...)...)
}

// startContainer creates and starts one container. What the user got wrong (no
// such command, no such directory) is no error here but an exited container
// with StartError.
func (s *Supervisor) startContainer(ctx context.Context, spec api.Container) (api.ContainerStatus, error) {
	if err := validContainer(spec); err != nil {
		return api.ContainerStatus{}, err
	}
	// Errors in the node's files or the spec are returned before anything is
	// made: they do not count as a run of the container.
	if _, err := seccompFilter(&spec); err != nil {
		return api.ContainerStatus{}, err
	}
	if _, err := capabilities(&spec); err != nil {
		return api.ContainerStatus{}, err
	}
	sb, err := s.runningSandbox(spec.SandboxID)
	if err != nil {
		return api.ContainerStatus{}, err
	}
	if err := s.fence.refuses(sb.status.Sandbox.PodUID); err != nil {
		return api.ContainerStatus{}, err
	}
	c := &container{
		id: spec.ID, state: stateStarting, done: make(chan struct{}),
		status: api.ContainerStatus{Container: spec},
	}
	if err := s.reserveContainer(c); err != nil {
		return api.ContainerStatus{}, err
	}
	if err := s.launchInTime(ctx, c, sb); err != nil {
		return api.ContainerStatus{}, err
	}
	if c.proc != nil && c.proc.dead() {
		// The answer is how it ended, not that it ran a moment ago.
		select {
		case <-c.done:
		case <-time.After(drainTime):
		}
	}
	s.mu.Lock()
	st := brief(c.status)
	s.mu.Unlock()
	return st, nil
}

// brief leaves out of a status what can be long and who asked for the container
// knows.
func brief(st api.ContainerStatus) api.ContainerStatus {
	shorten(&st.Container)
	return st
}

func shorten(c *api.Container) {
	c.Args, c.Env, c.Mounts, c.Devices, c.Volumes = nil, nil, nil, nil, nil
}

// recordStart moves a starting container on: to running, or to exited with the
// reason.
func (s *Supervisor) recordStart(c *container, startErr error) {
	s.mu.Lock()
	now := time.Now().UnixNano()
	c.status.StartedAt = now
	if startErr == nil {
		c.state, c.status.State = stateRunning, api.StateRunning
		c.status.Pid, c.start = c.proc.pid, c.proc.start
	} else {
		c.state, c.status.State = stateExited, api.StateExited
		c.status.FinishedAt, c.status.ExitCode = now, startFailedCode
		c.status.StartError = cmp.Or(c.gaveUp, startErrorText(startErr))
		shorten(&c.status.Container) // nothing is executed in it
	}
	st := brief(c.status)
	s.mu.Unlock()
	if err := s.saveContainer(c); err != nil {
		s.log.Warn("container state not saved", "id", c.id, "err", err)
	}
	if startErr != nil {
		s.log.Info("container cannot be started", "id", c.id, "name", st.Container.Name, "err", startErr)
		close(c.done)
		s.events.send(api.Event{Kind: "containerExited", ID: c.id, Container: &st})
		return
	}
	point("container: on record")
	if s.life.Err() != nil {
		c.io.release() // podmon's end has passed it by: it was not running yet
	}
	s.events.send(api.Event{Kind: "containerStarted", ID: c.id, Container: &st})
	s.watchContainer(c)
	s.watchOOM(c)
}

func validContainer(spec api.Container) error {
	if err := validID(spec.ID); err != nil {
		return err
	}
	if err := validID(spec.SandboxID); err != nil {
		return fmt.Errorf("sandbox: %w", err)
	}
	switch {
	case spec.ID == spec.SandboxID:
		return invalidf("container and sandbox have the same id %q", spec.ID)
	case len(spec.Args) == 0:
		return invalidf("container %s: no command", spec.Name)
	case !filepath.IsAbs(spec.Rootfs):
		return invalidf("container %s: root file system %q is not an absolute path", spec.Name, spec.Rootfs)
	case spec.LogPath != "" && !filepath.IsAbs(spec.LogPath):
		return invalidf("container %s: log path %q is not absolute", spec.Name, spec.LogPath)
	}
	for _, m := range spec.Mounts {
		if !filepath.IsAbs(m.Destination) {
			return invalidf("container %s: mount point %q is not an absolute path", spec.Name, m.Destination)
		}
	}
	return validHooks(spec)
}

func (s *Supervisor) reserveContainer(c *container) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return errorf(api.CodeBusy, "podmon is shutting down")
	}
	if _, ok := s.containers[c.id]; ok {
		return errorf(api.CodeExists, "container %s exists", c.id)
	}
	total := c.strings()
	for _, other := range s.containers {
		if other.status.Container.SandboxID == c.status.Container.SandboxID {
			total += other.strings()
		}
	}
	if total > maxPodStrings {
		return invalidf("container %s: with it, arguments and environments of the pod's running containers have %d bytes, a pod may have %d: use volumes instead", c.status.Container.Name, total, maxPodStrings)
	}
	s.containers[c.id] = c
	return nil
}

// maxPodStrings bounds what the records of a pod's containers keep of arguments
// and environments: records are in memory, and of all pods in one place.
const maxPodStrings = 16 << 20

// strings is how many bytes the container's arguments and environment have.
func (c *container) strings() (n int) {
	for _, s := range c.status.Container.Args {
		n += len(s)
	}
	for _, s := range c.status.Container.Env {
		n += len(s)
	}
	return n
}

// launch starts the process; on an error it leaves nothing running.
// ctx is the client's; limit is the start's, and ends hooks that are run meanwhile.
func (s *Supervisor) launch(ctx, limit context.Context, c *container, sb *sandbox) (err error) {
	spec := &c.status.Container
	if err := os.Mkdir(s.containerPath(c.id), 0o711); err != nil {
		return err
	}
	// First of all a record: a successor then knows what to clean up.
	if err := s.saveContainer(c); err != nil {
		return err
	}
	point("container: begun")
	cfg, err := s.containerConfig(spec, sb)
	if err != nil {
		return err
	}
	if err := s.writeBundle(spec); err != nil {
		return err
	}
	if c.io, err = s.newStdio(c, &sb.status.Sandbox); err != nil {
		return err
	}
	defer func() {
		c.io.closeChild()
		if err != nil {
			c.io.drain(drainTime) // the program may have run, and said why it would not
		}
	}()
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	ownTree := takeCgroupTree(cfg)
	if c.lc, err = libcontainer.Create(filepath.Join(s.cfg.Dir, runcStateDir), c.id, cfg); err != nil {
		return err
	}
	point("container: created")
	p := &libcontainer.Process{
		Args: spec.Args, Env: spec.Env, Cwd: spec.Cwd,
		UID: int(spec.UID), GID: int(spec.GID), AdditionalGroups: ints(spec.ExtraGIDs),
		Init: true, LogLevel: initLogLevel,
	}
	if p.Cwd == "" {
		p.Cwd = "/"
	}
	if err := s.runProcess(limit, c, p, ownTree); err != nil {
		if derr := c.lc.Destroy(); derr != nil {
			s.log.Warn("failed start not cleaned up", "id", c.id, "err", derr)
		}
		s.poststop(c)
		return err
	}
	return nil
}

// runProcess runs the container's first process. It takes hold of it before the
// program runs, which may end at once: while it is owned its number is no other's,
// and its exit code stays. What it writes is read before its poststart hooks run.
// With cgroupTree it mounts /sys/fs/cgroup, see takeCgroupTree.
func (s *Supervisor) runProcess(limit context.Context, c *container, p *libcontainer.Process, cgroupTree bool) error {
	console, err := c.io.attachTo(p)
	if err != nil {
		return err
	}
	if console != nil {
		defer console.close()
	}
	if err := c.lc.Start(p); err != nil {
		return err
	}
	point("container: init waits")
	pid, err := p.Pid()
	if err != nil {
		return err // it has not been started
	}
	s.orphans.own(pid)
	held, err := openProcess(pid, 0)
	if err == nil && cgroupTree {
		err = mountCgroupTree(pid, !c.status.Container.Privileged)
	}
	point("container: cgroups mounted")
	if err == nil {
		err = c.lc.Exec()
	}
	if err == nil {
		awaitProgram(pid)
		point("container: program runs")
		if console != nil {
			err = c.io.setTerminal(console)
		}
	}
	if err == nil {
		c.io.start(&s.wg)
		err = s.runHooks(limit, c, api.HookPoststart, specs.StateRunning, pid, false)
	}
	if err != nil {
		if held != nil {
			_ = held.signal(unix.SIGKILL)
			held.close()
		} else {
			_ = p.Signal(unix.SIGKILL) // the number is its own: it is reaped below
		}
		_, _ = p.Wait()
		s.orphans.disown(pid)
		return err
	}
	c.proc = held
	c.reap = func() { waitProcess(p, c.proc) }
	s.link.keep(c.kept())
	return nil
}

// initName is what libcontainer's init calls itself (proc_pid_comm(5)) until it
// has become the user's program.
const initName = "runc:[2:INIT]"

// awaitProgram waits until init has become the user's program, or has ended:
// after it is released it still has to close its files, and the kernel may refuse
// to run the program. It polls, since the kernel has no notification of
// an execve; the first looks are nanosleep(2)s apart, as timers of Go's wait a
// millisecond at least.
func awaitProgram(pid int) {
	deadline := time.Now().Add(5 * time.Second)
	for pause := 50 * time.Microsecond; time.Now().Before(deadline); pause += pause / 8 {
		comm, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/comm")
		if err != nil || strings.TrimSpace(string(comm)) != initName {
			return
		}
		if st, err := readProcStat(pid); err != nil || st.state == 'Z' {
			return
		}
		if pause < time.Millisecond {
			ts := unix.NsecToTimespec(int64(pause))
			_ = unix.Nanosleep(&ts, nil) // shorter is as good
			continue
		}
		pause = min(pause, 5*time.Millisecond)
		time.Sleep(pause)
	}
}

// waitProcess collects the status of a process that libcontainer started and
// that has ended, and lets go of what libcontainer holds for it.
func waitProcess(p *libcontainer.Process, held *process) exitStatus {
	ps, _ := p.Wait() // its error only repeats that the exit code is not 0
	if ps == nil {
		return held.nonChildExit()
	}
	return waitStatus(unix.WaitStatus(ps.Sys().(syscall.WaitStatus)))
}

// watchContainer waits for the container's end and records it.
func (s *Supervisor) watchContainer(c *container) {
	s.wg.Go(func() {
		if err := c.proc.exited(s.life); err != nil {
			return // podmon ends; the container does not
		}
		at := time.Now()
		point("container: ended")
		s.finishContainer(c, c.proc.nonChildExit(), at)
	})
}

// finishContainer cleans up behind an ended container and tells of its end,
// after its last line of output is in the log.
func (s *Supervisor) finishContainer(c *container, st exitStatus, at time.Time) {
	if !c.ownPIDNamespace() {
		// Those it left behind would live on; with a namespace of its own the
		// kernel has killed them.
		s.killLeftovers(c)
	}
	oom := s.oomKilled(c, st)
	if c.io != nil {
		c.io.drain(drainTime)
	}
	if c.lc != nil {
		if err := c.lc.Destroy(); err != nil {
			s.log.Warn("cgroup or state of an ended container stays", "id", c.id, "err", err)
		}
	} else if m, err := s.containerCgroup(c); err == nil {
		_ = removeCgroupTree(m)
	}
	point("container: cgroup removed")
	s.poststop(c)
	s.mu.Lock()
	c.state, c.status.State = stateExited, api.StateExited
	c.status.Pid = 0
	c.status.FinishedAt = at.UnixNano()
	c.status.ExitCode, c.status.Signal, c.status.Lost = st.code, st.signal, st.lost
	c.status.OOMKilled = oom
	shorten(&c.status.Container) // nothing is executed in it any more
	event := c.status
	s.mu.Unlock()
	if err := s.saveContainer(c); err != nil {
		s.log.Warn("container state not saved", "id", c.id, "err", err)
	}
	point("container: end on record")
	if c.proc != nil {
		c.reap()
		s.orphans.disown(c.proc.pid)
		s.link.drop(c.id)
		c.proc.close()
	}
	close(c.done)
	s.events.send(api.Event{Kind: "containerExited", ID: c.id, Container: &event})
}

func (c *container) ownPIDNamespace() bool {
	if c.lc == nil {
		return false
	}
	cfg := c.lc.Config()
	return cfg.Namespaces.IsPrivate("NEWPID")
}

func (s *Supervisor) killLeftovers(c *container) {
	m, err := s.containerCgroup(c)
	if err == nil {
		err = killCgroup(m)
	}
	if err != nil {
		s.log.Warn("processes of an ended container stay", "id", c.id, "err", err)
	}
}

// oomKilled tells whether running out of memory ended the container: the kernel
// killed something in its cgroup, and it did not end well.
func (s *Supervisor) oomKilled(c *container, st exitStatus) bool {
	if st.code == 0 {
		return false
	}
	m, err := s.containerCgroup(c)
	if err != nil {
		return false
	}
	n, err := m.OOMKillCount()
	return err == nil && n > 0
}

// killContainer kills a container and waits until it has ended.
func (s *Supervisor) killContainer(ctx context.Context, c *container) error {
	deadline := time.NewTimer(15 * time.Second)
	defer deadline.Stop()
	for again := time.NewTicker(100 * time.Millisecond); ; {
		s.mu.Lock()
		running := c.state == stateRunning
		s.mu.Unlock()
		if running {
			_ = c.proc.signal(unix.SIGKILL)
		}
		select {
		case <-c.done:
			again.Stop()
			return nil
		case <-again.C: // it may have been starting
			continue
		case <-deadline.C:
			again.Stop()
			return errorf(api.CodeBusy, "container %s does not end after SIGKILL", c.id)
		case <-ctx.Done():
			again.Stop()
			return context.Cause(ctx)
		}
	}
}

// removeContainer forgets an exited container. It is idempotent.
func (s *Supervisor) removeContainer(id string) error {
	s.mu.Lock()
	c := s.containers[id]
	busy := c != nil && c.state != stateExited
	s.mu.Unlock()
	if c == nil {
		return nil
	}
	if busy {
		return errorf(api.CodeBusy, "container %s is still running", id)
	}
	<-c.done // closed right after the state became exited
	if err := os.RemoveAll(s.containerPath(id)); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c.removed = true
	delete(s.containers, id)
	return nil
}

// runningContainer finds a container to signal, execute in or attach to.
func (s *Supervisor) runningContainer(id string) (*container, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.containers[id]
	if c == nil || c.state == stateStarting {
		return nil, errorf(api.CodeNotFound, "no container %s", id)
	}
	if c.state != stateRunning {
		return nil, errorf(api.CodeNotRunning, "container %s has exited", id)
	}
	return c, nil
}

// startErrorText keeps of libcontainer's error what a user can act on.
func startErrorText(err error) string {
	text := err.Error()
	for _, prefix := range []string{
		"unable to start container process: ",
		"error during container init: ",
		"error executing setns process: ",
	} {
		text = strings.TrimPrefix(text, prefix)
	}
	return text
}

// signal sends a signal to a container's or sandbox's first process, or to all
// of a container's.
func (s *Supervisor) signal(req api.Signal) error {
	if req.Signal <= 0 || req.Signal > 64 {
		return invalidf("signal %d does not exist", req.Signal)
	}
	sig := unix.Signal(req.Signal)
	s.mu.Lock()
	sb := s.sandboxes[req.ID]
	var pause *process
	if sb != nil && sb.status.State == api.StateRunning {
		pause = sb.pause
	}
	s.mu.Unlock()
	if sb != nil {
		if pause == nil {
			return errorf(api.CodeNotRunning, "sandbox %s is not running", req.ID)
		}
		return notRunning(req.ID, pause.signal(sig))
	}
	c, err := s.runningContainer(req.ID)
	if err != nil {
		return err
	}
	if !req.All {
		return notRunning(c.id, c.proc.signal(sig))
	}
	m, err := s.containerCgroup(c)
	if err != nil {
		return err
	}
	if sig == unix.SIGKILL {
		return killCgroup(m)
	}
	pids, err := m.GetAllPids()
	if err != nil {
		return fmt.Errorf("processes of container %s: %w", c.id, err)
	}
	for _, pid := range pids {
		_ = unix.Kill(pid, sig)
	}
	return nil
}

func notRunning(id string, err error) error {
	if errors.Is(err, os.ErrProcessDone) {
		return errorf(api.CodeNotRunning, "%s has exited", id)
	}
	return err
}

func ints(in []uint32) []int {
	out := make([]int, len(in))
	for i, v := range in {
		out[i] = int(v)
	}
	return out
}
