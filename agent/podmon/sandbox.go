package podmon

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"golang.org/x/sys/unix"
)

// sandbox is one pause process and what the pod's containers share with it.
//
//	reserved ──start──▶ running ──pause ends──▶ exited
//	    └──────────────────┴──remove──┴──▶ gone
type sandbox struct {
	op     sync.Mutex // one create or remove at a time; taken before Supervisor.mu
	saving sync.Mutex // one write of the record at a time; taken before Supervisor.mu

	// Guarded by Supervisor.mu.
	status  api.SandboxStatus
	ready   bool // create has succeeded: others may see it
	removed bool

	// Written by create or adopt before the sandbox is used.
	pause  *process
	start  uint64
	exited chan struct{} // closed when the pause has ended and status says so
}

const pauseTime = 30 * time.Second // within which a pause is ready, on a busy machine

const procDir = "/proc/" // where the pause's own open directory is, see pause.c

const pauseOOMScore = -998 // the last to be killed for memory, with its pod's processes

func (s *Supervisor) sandboxPath(id string, more ...string) string {
	return filepath.Join(append([]string{s.cfg.Dir, sandboxesDir, id}, more...)...)
}

// createSandbox starts the pause of a new pod.
func (s *Supervisor) createSandbox(ctx context.Context, spec api.Sandbox) (api.SandboxStatus, error) {
	if err := validSandbox(spec); err != nil {
		return api.SandboxStatus{}, err
	}
	if err := s.fence.refuses(spec.PodUID); err != nil {
		return api.SandboxStatus{}, err
	}
	sb := &sandbox{status: api.SandboxStatus{Sandbox: spec, State: api.StateExited, CreatedAt: time.Now().UnixNano()}, exited: make(chan struct{})}
	sb.op.Lock()
	defer sb.op.Unlock()
	if err := s.reserveSandbox(sb); err != nil {
		return api.SandboxStatus{}, err
	}
	if err := s.startSandbox(ctx, sb); err != nil {
		if derr := s.dropSandbox(sb); derr != nil {
			s.log.Warn("half-made sandbox stays until it is removed", "id", spec.ID, "err", derr)
		}
		return api.SandboxStatus{}, fmt.Errorf("sandbox of pod %s/%s: %w", spec.Namespace, spec.Name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return sb.status, nil
}

func validSandbox(spec api.Sandbox) error {
	if err := validID(spec.ID); err != nil {
		return err
	}
	if err := validCgroup(spec.CgroupParent); err != nil {
		return err
	}
	if spec.NetNS != "" && !isHostPath(spec.NetNS) {
		return invalidf("network namespace %q: want an absolute path", spec.NetNS)
	}
	if err := validUsers(spec); err != nil {
		return err
	}
	if len(spec.Hostname) > 64 {
		return invalidf("host name %q is longer than 64 bytes", spec.Hostname)
	}
	if spec.HostPID && spec.SharePID {
		return invalidf("hostPID and shareProcessNamespace exclude each other")
	}
	for name := range spec.Sysctls {
		if _, err := sysctlFile(name, spec); err != nil {
			return err
		}
	}
	return nil
}

// sysctlFile gives the file of a sysctl that belongs to one of the sandbox's
// own namespaces; any other would change the node.
func sysctlFile(name string, spec api.Sandbox) (string, error) {
	rel := strings.ReplaceAll(name, ".", "/")
	if strings.Contains(name, "/") { // the other spelling: slashes separate, dots are literal
		rel = name
	}
	if rel == "" || path.Clean("/"+rel) != "/"+rel {
		return "", invalidf("sysctl %q is not a name", name)
	}
	switch {
	case strings.HasPrefix(rel, "net/"):
		if spec.NetNS == "" {
			return "", invalidf("sysctl %q cannot be set for a pod in the host's network namespace", name)
		}
	case strings.HasPrefix(rel, "kernel/shm"), strings.HasPrefix(rel, "kernel/msg"), rel == "kernel/sem", strings.HasPrefix(rel, "fs/mqueue/"):
		if spec.HostIPC {
			return "", invalidf("sysctl %q cannot be set for a pod in the host's IPC namespace", name)
		}
	default:
		return "", invalidf("sysctl %q does not belong to a pod's namespaces", name)
	}
	return procDir + "sys/" + rel, nil
}

func (s *Supervisor) reserveSandbox(sb *sandbox) error {
	id := sb.status.Sandbox.ID
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closing {
		return errorf(api.CodeBusy, "podmon is shutting down")
	}
	if _, ok := s.sandboxes[id]; ok {
		return errorf(api.CodeExists, "sandbox %s exists", id)
	}
	s.sandboxes[id] = sb
	return nil
}

// startSandbox leaves cleaning up after an error to dropSandbox.
func (s *Supervisor) startSandbox(ctx context.Context, sb *sandbox) error {
	spec := &sb.status.Sandbox
	if err := os.Mkdir(s.sandboxPath(spec.ID), 0o711); err != nil {
		return err
	}
	if err := s.saveSandbox(sb); err != nil { // before anything a successor must clean up
		return err
	}
	point("sandbox: begun")
	pod, err := cgroupManager(spec.CgroupParent, spec.PodResources)
	if err != nil {
		return fmt.Errorf("pod cgroup: %w", err)
	}
	if err := pod.Apply(-1); err != nil {
		return fmt.Errorf("pod cgroup: %w", err)
	}
	podRes := resources(spec.PodResources)
	podRes.SkipDevices = true
	if err := pod.Set(podRes); err != nil {
		return fmt.Errorf("pod cgroup limits: %w", err)
	}
	if !spec.HostIPC {
		if err := mountShm(s.sandboxPath(spec.ID, "shm"), spec.Users); err != nil {
			return err
		}
	}
	pid, link, err := s.startPause(ctx, spec)
	if err != nil {
		return err
	}
	defer link.Close()
	if sb.pause, err = openProcess(pid, 0); err != nil {
		return err
	}
	setOOMScore(pid, pauseOOMScore)
	s.mu.Lock()
	sb.status.Pid, sb.start = pid, sb.pause.start
	sb.status.State = api.StateRunning
	s.mu.Unlock()
	s.watchSandbox(sb, sb.pause.reap)
	point("sandbox: pause ready")
	if err := s.saveSandbox(sb); err != nil {
		return err
	}
	point("sandbox: on record")
	if _, err := link.Write([]byte{1}); err != nil {
		return fmt.Errorf("pause: %w", err)
	}
	point("sandbox: kept")
	s.mu.Lock()
	defer s.mu.Unlock()
	sb.ready = true
	return nil
}

// mountShm makes a pod's shared memory, which belongs to the pod's root.
func mountShm(dir string, users *api.IDRange) error {
	if err := os.Mkdir(dir, 0o711); err != nil {
		return err
	}
	options := fmt.Sprintf("mode=1777,size=67108864,uid=%d,gid=%[1]d", hostID(users, 0))
	if err := unix.Mount("shm", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, options); err != nil {
		return fmt.Errorf("mount shared memory: %w", err)
	}
	return nil
}

// startPause has a pause made (see pause/pause.c) in its namespaces and waits
// until it says that it is ready. It ends by itself when link, which is the
// caller's to close, is closed before a byte was written to it: until a
// successor could find it in a record, it does not outlive podmon.
func (s *Supervisor) startPause(ctx context.Context, spec *api.Sandbox) (pid int, link *os.File, err error) {
	ours, theirs, err := messagePair("pause")
	if err != nil {
		return 0, nil, err
	}
	defer theirs.Close()
	defer func() {
		if err != nil {
			ours.Close()
		}
	}()
	req := pauseRequest{pod: spec.Namespace + "/" + spec.Name, link: theirs}
	if spec.NetNS != "" {
		if req.netns, err = os.Open(spec.NetNS); err != nil {
			return 0, nil, fmt.Errorf("network namespace: %w", err)
		}
		defer req.netns.Close()
		req.hostname = spec.Hostname
		req.flags |= unix.CLONE_NEWUTS // a pod on the host's network has the host's name
	}
	if spec.Users != nil {
		if req.userns, err = ownerOf(req.netns); err != nil {
			return 0, nil, err
		}
		defer req.userns.Close()
	}
	if !spec.HostIPC {
		req.flags |= unix.CLONE_NEWIPC
	}
	if spec.SharePID {
		req.flags |= unix.CLONE_NEWPID
	}
	for name, value := range spec.Sysctls {
		file, err := sysctlFile(name, *spec)
		if err != nil {
			return 0, nil, err
		}
		req.sysctls = append(req.sysctls, strings.TrimPrefix(file, procDir)+"="+value)
	}
	child, err := s.pauses.fork(req)
	if err != nil {
		theirs.Close()
		return 0, nil, cmp.Or(lastWords(ours), err)
	}
	s.orphans.own(child)
	defer func() {
		if err != nil {
			_ = unix.Kill(child, unix.SIGKILL) // a child not waited for keeps its number
			_, _ = unix.Wait4(child, nil, 0, nil)
			s.orphans.disown(child)
		}
	}()
	point("sandbox: pause started")
	theirs.Close()
	ctx, cancel := context.WithTimeout(ctx, pauseTime)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = ours.SetReadDeadline(past) })
	defer stop()
	said := make([]byte, 4096)
	n, err := ours.Read(said) // one message, or its end
	switch {
	case ctx.Err() != nil:
		return 0, nil, fmt.Errorf("pause does not become ready: %w", context.Cause(ctx))
	case err != nil && !errors.Is(err, io.EOF):
		return 0, nil, fmt.Errorf("pause: %w", err)
	case string(said[:n]) != "ok":
		return 0, nil, fmt.Errorf("pause: %s", cmp.Or(string(said[:n]), "exited without output"))
	}
	if spec.Users != nil {
		if err = checkUsers(child, *spec.Users); err != nil {
			return 0, nil, err
		}
	}
	return child, ours, nil
}

// lastWords reads what a go-between, which has ended, could not do; nil: it has
// said nothing.
func lastWords(link *os.File) error {
	said := make([]byte, 4096)
	_ = link.SetReadDeadline(time.Now().Add(time.Second))
	if n, err := link.Read(said); err == nil && n > 0 {
		return fmt.Errorf("pause: %s", said[:n])
	}
	return nil
}

// messagePair makes two connected descriptors that keep messages apart: ours,
// whose reads can be given a deadline, and one for a child, which blocks.
func messagePair(name string) (ours, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socket pair: %w", err)
	}
	theirs = os.NewFile(uintptr(fds[1]), name)
	if err := unix.SetNonblock(fds[0], true); err != nil {
		unix.Close(fds[0])
		theirs.Close()
		return nil, nil, err
	}
	return os.NewFile(uintptr(fds[0]), name), theirs, nil
}

// watchSandbox notes when the pause ends.
func (s *Supervisor) watchSandbox(sb *sandbox, status func() exitStatus) {
	s.orphans.own(sb.pause.pid)
	s.wg.Go(func() {
		if err := sb.pause.exited(s.life); err != nil {
			return // podmon ends; the pause does not
		}
		status()
		s.orphans.disown(sb.pause.pid)
		s.mu.Lock()
		sb.status.State, sb.status.Pid = api.StateExited, 0
		st := sb.status
		s.mu.Unlock()
		if err := s.saveSandbox(sb); err != nil && !errors.Is(err, os.ErrNotExist) {
			s.log.Warn("sandbox state not saved", "id", st.Sandbox.ID, "err", err)
		}
		close(sb.exited)
		s.events.send(api.Event{Kind: "sandboxExited", ID: st.Sandbox.ID, Sandbox: &st})
	})
}

// removeSandbox ends everything of the pod and forgets it. It is idempotent.
func (s *Supervisor) removeSandbox(ctx context.Context, id string) error {
	s.mu.Lock()
	sb := s.sandboxes[id]
	s.mu.Unlock()
	if sb == nil {
		return nil
	}
	sb.op.Lock()
	defer sb.op.Unlock()
	s.mu.Lock()
	gone := sb.removed
	s.mu.Unlock()
	if gone {
		return nil
	}
	for _, c := range s.containersOf(id) {
		if err := s.killContainer(ctx, c); err != nil {
			return err
		}
		if err := s.removeContainer(c.id); err != nil {
			return err
		}
	}
	return s.dropSandbox(sb)
}

func (s *Supervisor) containersOf(sandboxID string) []*container {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*container
	for _, c := range s.containers {
		if c.status.Container.SandboxID == sandboxID {
			out = append(out, c)
		}
	}
	return out
}

// dropSandbox takes away all that createSandbox may have made, in any state it
// may have been left in. On an error the sandbox is kept, for another try.
func (s *Supervisor) dropSandbox(sb *sandbox) error {
	spec := sb.status.Sandbox
	if sb.pause != nil {
		_ = sb.pause.signal(unix.SIGKILL)
		select {
		case <-sb.exited:
		case <-time.After(10 * time.Second):
			return errorf(api.CodeBusy, "pause %d does not end after SIGKILL", sb.pause.pid)
		}
	}
	if s.lastInPod(sb) {
		pod, err := cgroupManager(spec.CgroupParent, api.Resources{})
		if err != nil {
			return err
		}
		if !removeIdleCgroup(pod) {
			if err := errors.Join(killCgroup(pod), removeCgroupTree(pod)); err != nil {
				return fmt.Errorf("remove pod's cgroup: %w", err)
			}
		}
	}
	point("sandbox: cgroups removed")
	shm := s.sandboxPath(spec.ID, "shm")
	if err := unix.Unmount(shm, unix.MNT_DETACH); err != nil && err != unix.ENOENT && err != unix.EINVAL {
		return fmt.Errorf("unmount shared memory: %w", err)
	}
	if err := os.RemoveAll(s.sandboxPath(spec.ID)); err != nil {
		return err
	}
	s.mu.Lock()
	sb.removed = true
	delete(s.sandboxes, spec.ID)
	s.mu.Unlock()
	if sb.pause != nil {
		sb.pause.close()
	}
	return nil
}

// lastInPod tells whether no other sandbox uses the pod's cgroup: while a pod's
// broken sandbox is replaced, two do.
func (s *Supervisor) lastInPod(sb *sandbox) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, other := range s.sandboxes {
		if other != sb && other.status.Sandbox.CgroupParent == sb.status.Sandbox.CgroupParent {
			return false
		}
	}
	return true
}

// runningSandbox finds a sandbox for a container to be started in.
func (s *Supervisor) runningSandbox(id string) (*sandbox, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sb := s.sandboxes[id]
	if sb == nil {
		return nil, errorf(api.CodeNotFound, "no sandbox %s", id)
	}
	if sb.status.State != api.StateRunning {
		return nil, errorf(api.CodeNotRunning, "sandbox %s is not running", id)
	}
	return sb, nil
}

func (sb *sandbox) nsPath(kind string) string {
	return "/proc/" + strconv.Itoa(sb.pause.pid) + "/ns/" + kind
}

// list gives every sandbox and container, oldest first; starting: also those
// containers whose start has not ended.
func (s *Supervisor) list(starting bool) ([]api.SandboxStatus, []api.ContainerStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sandboxes := make([]api.SandboxStatus, 0, len(s.sandboxes))
	for _, sb := range s.sandboxes {
		if sb.ready {
			sandboxes = append(sandboxes, sb.status)
		}
	}
	containers := make([]api.ContainerStatus, 0, len(s.containers))
	for _, c := range s.containers {
		if c.state == stateStarting && !starting {
			continue
		}
		st := brief(c.status)
		st.State = c.state
		containers = append(containers, st)
	}
	slices.SortFunc(sandboxes, func(a, b api.SandboxStatus) int { return int(a.CreatedAt - b.CreatedAt) })
	slices.SortFunc(containers, func(a, b api.ContainerStatus) int { return int(a.StartedAt - b.StartedAt) })
	return sandboxes, containers
}
