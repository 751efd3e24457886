// Package podmon is the helper that owns a node's containers. It starts them
// with libcontainer, holds their output and exit codes, and answers the agent
// over a unix socket. It runs apart from clusterd, so that clusterd may be
// killed, restarted and upgraded without a container noticing.
//
// It decides nothing about pods: what to run, when to restart and what to
// mount is the agent's. It knows no Kubernetes type.
package podmon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"golang.org/x/sys/unix"
)

// Config of a Supervisor.
type Config struct {
	// Dir holds the socket and everything that must outlive this process.
	// Required, absolute; the local file system must know FIFOs.
	Dir string
	// CgroupRoot is the cgroup below which podmon puts itself, so that it is
	// not stopped together with clusterd's. Empty: it stays where it is.
	CgroupRoot string
	// StartLimit is how long the start of a container may take; default 45 s,
	// which is less than a client waits.
	StartLimit time.Duration
	// Link is podmon's end of the connection to its keeper, taken over; nil:
	// there is none, and what ends while no podmon is there is lost.
	Link *os.File
	// Args are podmon's own arguments, for a keeper made of it; used with Link.
	Args   []string
	Logger *slog.Logger // required
}

// Names in Config.Dir.
const (
	socketName = "podmon.sock"
	lockName   = "podmon.lock"

	keeperLockName = "keeper.lock"
	pidName        = "podmon.pid"      // for people and tests; nothing relies on it
	liveDir        = "live"            // a tmpfs: the state of processes
	sandboxesDir   = "live/sandboxes"  // <id>/sandbox.json, <id>/shm
	containerDir   = "live/containers" // <id>/container.json, <id>/stdin, stdout, stderr (FIFOs)
	runcStateDir   = "live/state"      // libcontainer's own
	fenceName      = "live/fence.json" // see fenceFile
	emptyDir       = "empty"           // where the empty mount namespace is made
)

// Supervisor owns the containers of one state directory.
type Supervisor struct {
	cfg     Config
	log     *slog.Logger
	lock    *os.File // flock: one supervisor per directory
	ln      *net.UnixListener
	nowhere *os.File // empty mount namespace that every pause joins
	moves   *os.File // see favorMoves; nil: not had
	events  hub
	orphans *orphanReaper
	link    *link // nil without a keeper
	pauses  *pauseMaker
	fence   *fence
	stop    context.CancelCauseFunc

	// life is done when the supervisor ends; what must not outlive it waits
	// for it. wg counts every goroutine.
	life context.Context
	wg   sync.WaitGroup

	mu         sync.Mutex // guards what follows; held for no blocking call
	sandboxes  map[string]*sandbox
	containers map[string]*container
	execs      map[string]*execution
	execSeq    uint64
	attached   int  // attachments under way
	closing    bool // Shutdown or Upgrade has begun: no new sandbox or container

	replaced chan struct{} // closed by Upgrade: what belongs to connections ends
}

// Why podmon ends by itself.
var (
	errShutdown = errors.New("shutdown was asked for")
	errReplaced = errorf(api.CodeReplaced, "podmon was replaced by another program, and what belonged to this connection has ended: try again")
)

// New takes the state directory over from a former supervisor, if there was one:
// the containers it left are known when New returns. It fails while another
// supervisor lives.
func New(cfg Config) (_ *Supervisor, err error) {
	if !filepath.IsAbs(cfg.Dir) {
		return nil, fmt.Errorf("state folder %q is not an absolute path", cfg.Dir)
	}
	if err := makeDirs(cfg.Dir, "", emptyDir, liveDir); err != nil {
		return nil, err
	}
	life, stop := context.WithCancelCause(context.Background())
	s := &Supervisor{
		cfg: cfg, log: cfg.Logger, life: life, stop: stop,
		sandboxes:  map[string]*sandbox{},
		containers: map[string]*container{},
		execs:      map[string]*execution{},
		replaced:   make(chan struct{}),
	}
	s.orphans = newOrphanReaper()
	s.pauses = &pauseMaker{s: s}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	if cfg.Link != nil {
		if s.link, err = newLink(cfg.Link, cfg.Args); err != nil {
			return nil, err
		}
	}
	if s.lock, err = lockFile(filepath.Join(cfg.Dir, lockName)); err != nil {
		return nil, err
	}
	if err := mountLive(cfg.Dir); err != nil {
		return nil, fmt.Errorf("cannot mount a tmpfs for the state of containers, which holds what Secrets gave their environments, below %s: clusterd needs the rights of root and Linux 5.8 or newer: %w", cfg.Dir, err)
	}
	if err := makeDirs(cfg.Dir, sandboxesDir, containerDir, runcStateDir); err != nil {
		return nil, err
	}
	if err := checkState(cfg.Dir); err != nil { // dropping it would end the containers it describes
		return nil, err
	}
	if _, err := cgroupHierarchies(); err != nil { // no container could be made, limited or ended
		return nil, fmt.Errorf("%w: mount the machine's cgroups at %s, or start clusterd where they are seen (`ip netns exec` hides them, `nsenter --net` does not)", err, cgroupMountpoint)
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("become reaper of orphans: %w", err)
	}
	if s.link == nil { // else the keeper has
		if err := enterCgroup(cfg.CgroupRoot); err != nil {
			s.log.Warn("podmon stays in its parent's cgroup", "err", err)
		}
	}
	if s.moves, err = favorMoves(); err != nil {
		// An older kernel, or one without cgroup v1: starts take longer.
		s.log.Info("moving processes between cgroups stays slow", "err", err)
	}
	if s.nowhere, err = emptyMountNamespace(filepath.Join(cfg.Dir, emptyDir)); err != nil {
		return nil, fmt.Errorf("make empty mount namespace: %w", err)
	}
	if s.fence, err = newFence(s); err != nil {
		return nil, err
	}
	if err := s.adoptAll(); err != nil {
		return nil, err // the keeper starts another podmon
	}
	s.link.rest()
	s.endStrayPauses()
	if err := os.WriteFile(filepath.Join(cfg.Dir, pidName), []byte(strconv.Itoa(os.Getpid())+"\n"), 0o600); err != nil {
		return nil, err
	}
	if s.ln, err = listen(filepath.Join(cfg.Dir, socketName)); err != nil {
		return nil, err
	}
	return s, nil
}

// Run serves until ctx is done or a client asks for shutdown. Containers stay.
func (s *Supervisor) Run(ctx context.Context) error {
	defer s.close()
	context.AfterFunc(ctx, func() { s.stop(context.Cause(ctx)) })
	s.wg.Go(func() { s.orphans.run(s.life) })
	s.wg.Go(s.fence.run)
	if s.link != nil {
		watching := make(chan struct{})
		go func() {
			defer close(watching)
			s.watchKeeper()
		}()
		defer func() {
			s.link.conn.Close()
			<-watching
		}()
		s.link.send(linkMessage{Op: linkServing})
	}
	conns := s.serve()
	s.log.Info("podmon serves", "dir", s.cfg.Dir, "pid", os.Getpid(),
		"sandboxes", len(s.sandboxes), "containers", len(s.containers))
	<-s.life.Done()
	s.ln.Close() // removes the socket: the next supervisor makes its own
	conns.closeAll()
	s.releaseContainers()
	s.waitForAll()
	if errors.Is(context.Cause(s.life), errShutdown) {
		s.link.send(linkMessage{Op: linkOver})
	}
	switch cause := context.Cause(s.life); {
	case errors.Is(cause, errShutdown), errors.Is(cause, errReplaced), errors.Is(cause, context.Canceled):
		return nil
	default:
		return cause
	}
}

// waitForAll waits for every goroutine; for a successor that is waiting not
// without end, as one may hold a start that hangs in the kernel.
func (s *Supervisor) waitForAll() {
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.wg.Wait()
	}()
	var limit <-chan time.Time
	if errors.Is(context.Cause(s.life), errReplaced) {
		limit = time.After(endTime)
	}
	select {
	case <-done:
	case <-limit:
		s.log.Warn("podmon ends with work under way")
	}
}

// releaseContainers stops copying output; what is not read now waits for the
// next supervisor.
func (s *Supervisor) releaseContainers() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.containers {
		if c.state == stateRunning && c.io != nil {
			c.io.release()
		}
	}
}

// close releases what New took. Goroutines have ended or were never started.
func (s *Supervisor) close() {
	s.stop(context.Canceled)
	if s.ln != nil {
		s.ln.Close()
	}
	s.pauses.close()
	if s.fence != nil {
		s.fence.timer.Close()
	}
	if s.nowhere != nil {
		s.nowhere.Close()
	}
	if s.moves != nil {
		s.moves.Close()
	}
	if s.lock != nil {
		s.lock.Close()
	}
}

// lockFile takes the lock, waiting a little for a supervisor that is ending.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	deadline := time.Now().Add(3 * time.Second)
	for {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(deadline) {
			f.Close()
			return nil, fmt.Errorf("another podmon holds %s: %w", path, err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func listen(path string) (*net.UnixListener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	// The directory is not open to others until the mode is right.
	tmp := path + ".new"
	os.Remove(tmp)
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: tmp, Net: "unix"})
	if err != nil {
		return nil, err
	}
	ln.SetUnlinkOnClose(false)
	if err = os.Chmod(tmp, 0o600); err == nil {
		err = os.Rename(tmp, path)
	}
	if err != nil {
		ln.Close()
		return nil, err
	}
	return ln, nil
}

// validID accepts what may name a directory and a cgroup.
func validID(id string) error {
	ok := len(id) > 0 && len(id) <= 200 && id[0] != '.'
	for i := 0; ok && i < len(id); i++ {
		c := id[i]
		ok = c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.'
	}
	if !ok {
		return invalidf("id %q: letters, digits, '-', '_' and '.' are allowed, at most 200, the first not a dot", id)
	}
	return nil
}

func errorf(code, format string, args ...any) *api.Error {
	return &api.Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

func invalidf(format string, args ...any) *api.Error {
	return errorf(api.CodeInvalid, format, args...)
}
