package isolate

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/agent/podmon/api/frame"
)

// ControlFD is the program's descriptor of its connection to the process that started
// it.
const ControlFD = 3

// linger is how long the program is kept in memory after its last use.
const linger = 10 * time.Second

// maxMessage bounds one message of the program in bytes, unless the caller sets another
// bound on Conn.
const maxMessage = 256 << 10

// Config of a Runner.
type Config struct {
	// Program opens the program. Required.
	Program func() (*os.File, error)
	// Name is its name, argv[0]. Required.
	Name string
	// Cgroup is where the cgroups of its processes are made, such as /clusterd/images.
	// Required.
	Cgroup string
	// Memory bounds one process's cgroup in bytes, page cache included, and what its
	// heap aims at. Required.
	Memory int64
	// NoPageCache: what a process writes to files stays in memory, so its cgroup is
	// without a limit of memory.
	NoPageCache bool
	// Processes bounds the threads of one process; default 64.
	Processes int64
	// Logger is required.
	Logger *slog.Logger
}

// Runner starts the program. Methods may be called concurrently.
type Runner struct {
	cfg    Config
	starts chan func() // run by one thread
	done   chan struct{}
	waits  sync.WaitGroup // for children
	warned sync.Once

	mu      sync.Mutex // guards all below
	program *os.File   // nil: not in memory
	users   int
	timer   *time.Timer // closes program; nil: it is in use or closed
	running map[*Child]struct{}
	closed  bool
}

// ErrClosed is returned after Close.
var ErrClosed = errors.New("closed")

// New ends what a killed process has left in cgroups, and removes them. Close ends what New started.
func New(cfg Config) *Runner {
	if cfg.Processes == 0 {
		cfg.Processes = 64
	}
	sweep(cfg.Cgroup)
	r := &Runner{cfg: cfg, starts: make(chan func()), done: make(chan struct{}), running: map[*Child]struct{}{}}
	go func() {
		defer close(r.done)
		// A child ends with the thread that started it (PR_SET_PDEATHSIG). This one ends
		// with the process or by Close, and nothing else runs on it.
		runtime.LockOSThread()
		for start := range r.starts {
			start()
		}
	}()
	return r
}

// Close kills all children and waits for them.
func (r *Runner) Close() {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return
	}
	r.closed = true
	for c := range r.running {
		c.Kill()
	}
	r.mu.Unlock()
	r.waits.Wait()
	close(r.starts)
	<-r.done
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.timer != nil && r.timer.Stop() {
		_ = r.program.Close()
		r.program = nil
	}
}

// open gives the program, from memory if it is there; release is to be called once.
func (r *Runner) open() (*os.File, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, ErrClosed
	}
	if r.timer != nil {
		r.timer.Stop()
		r.timer = nil
	}
	if r.program == nil {
		f, err := r.cfg.Program()
		if err != nil {
			return nil, err
		}
		r.program = f
	}
	r.users++
	r.waits.Add(1)
	return r.program, nil
}

func (r *Runner) release() {
	defer r.waits.Done()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.users--; r.users > 0 {
		return
	}
	var t *time.Timer
	t = time.AfterFunc(linger, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.timer == t {
			_ = r.program.Close()
			r.program, r.timer = nil, nil
		}
	})
	r.timer = t
}

// Child is one process of the program.
type Child struct {
	// Conn is the connection to it, for the caller to close. What comes on it is not to
	// be trusted, and may be there to read when the child has ended.
	Conn *frame.Conn

	cmd    *exec.Cmd
	group  *group
	said   *head
	limit  int64
	done   chan struct{} // closed when it has ended
	err    error         // as Wait gives it, then
	exited bool
	mu     sync.Mutex // guards exited: no signal goes to a pid that is another's
}

// ExitError is a child that ended in another way than by exit code 0.
type ExitError struct {
	// Memory: it was killed, or gave up, for more memory than it may have.
	Memory bool
	Limit  int64 // of its memory
	// Machine: it was killed because the machine had no more memory, or what it shares a
	// limit with.
	Machine bool
	State   string
	Said    string // the first words of its standard error
}

func (e *ExitError) Error() string {
	if e.Memory {
		return fmt.Sprintf("it needed more than %d MiB of memory", e.Limit>>20)
	}
	if e.Machine {
		return "it was killed, as the machine has no more memory"
	}
	if e.Said != "" {
		return e.State + ": " + e.Said
	}
	return e.State
}

// Start starts the program for one job. stdin and stdout, either may be nil, stay the
// caller's. The child waits for messages on Conn; the caller calls Wait.
func (r *Runner) Start(job string, stdin, stdout *os.File) (*Child, error) {
	program, err := r.open()
	if err != nil {
		return nil, err
	}
	c, err := r.start(program, job, stdin, stdout)
	if err != nil {
		r.release()
		return nil, fmt.Errorf("start %s: %w", r.cfg.Name, err)
	}
	r.mu.Lock()
	r.running[c] = struct{}{}
	if r.closed {
		c.Kill()
	}
	r.mu.Unlock()
	go func() { // Close waits for it
		defer r.release()
		c.wait()
		r.mu.Lock()
		delete(r.running, c)
		r.mu.Unlock()
		if err := c.group.removeIfAny(); err != nil {
			r.cfg.Logger.Warn("a cgroup stays", "err", err)
		}
		close(c.done)
	}()
	return c, nil
}

func (r *Runner) start(program *os.File, job string, stdin, stdout *os.File) (_ *Child, err error) {
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	c := &Child{Conn: frame.NewConn(ours).Bound(maxMessage), said: &head{}, limit: r.cfg.Memory, done: make(chan struct{})}
	defer func() {
		if err != nil {
			_ = c.Conn.Close()
		}
	}()
	c.group = r.group()
	c.cmd = &exec.Cmd{
		Path: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), program.Fd()),
		Args: []string{r.cfg.Name, job},
		Dir:  "/",
		Env: []string{
			"GOMAXPROCS=1", "GOTRACEBACK=none",
			"GOMEMLIMIT=" + strconv.FormatInt(r.cfg.Memory/4*3, 10),
			"SSL_CERT_FILE=" + os.Getenv("SSL_CERT_FILE"), "SSL_CERT_DIR=" + os.Getenv("SSL_CERT_DIR"),
		},
		Stderr:     c.said,
		ExtraFiles: []*os.File{theirs},
		SysProcAttr: &syscall.SysProcAttr{
			// A group of its own, and not a session: the scheduler shares processors out by
			// sessions, and each child would have as much as clusterd.
			Setpgid: true, Pdeathsig: syscall.SIGKILL,
			Cloneflags: syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS,
		},
	}
	if stdin != nil {
		c.cmd.Stdin = stdin
	}
	if stdout != nil {
		c.cmd.Stdout = stdout
	}
	started := make(chan error)
	r.starts <- func() { started <- c.cmd.Start() }
	if err := <-started; err != nil {
		return nil, errors.Join(err, c.group.removeIfAny())
	}
	if c.group != nil {
		// Before it has anything to do: it waits for its first message.
		if err := c.group.add(c.cmd.Process.Pid); err != nil {
			c.Kill()
			_ = c.cmd.Wait()
			return nil, errors.Join(fmt.Errorf("into its cgroup: %w", err), c.group.removeIfAny())
		}
	}
	return c, nil
}

// group makes a cgroup for the next child. Where there can be none, the limit of the
// process itself has to do.
func (r *Runner) group() *group {
	memory := r.cfg.Memory
	if r.cfg.NoPageCache {
		memory = 0
	}
	g, err := makeGroup(filepath.Join(r.cfg.Cgroup, groupName()), memory, r.cfg.Processes)
	if err != nil {
		r.warned.Do(func() {
			r.cfg.Logger.Warn("no cgroup for processes that read images: only the memory of their heaps is bounded", "cgroup", r.cfg.Cgroup, "err", err)
		})
		return nil
	}
	return g
}

func (g *group) removeIfAny() error {
	if g == nil {
		return nil
	}
	return g.remove()
}

// MemoryLimit is what Spec.Memory is to be: where a cgroup bounds what is used, it only
// has to be out of its way, as what is mapped and not used counts.
func (c *Child) MemoryLimit() int64 {
	if c.group != nil && c.group.kills != "" {
		return 2 * c.limit
	}
	return c.limit
}

// LimitFiles bounds each file that the child writes from now on, in bytes.
func (c *Child) LimitFiles(size int64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.exited {
		return nil
	}
	if err := unix.Prlimit(c.cmd.Process.Pid, unix.RLIMIT_FSIZE, &unix.Rlimit{Cur: uint64(size), Max: uint64(size)}, nil); err != nil {
		return fmt.Errorf("limit files to %d bytes: %w", size, err)
	}
	return nil
}

// Done is closed when the child has ended.
func (c *Child) Done() <-chan struct{} { return c.done }

// Pid is the child's process ID.
func (c *Child) Pid() int { return c.cmd.Process.Pid }

// Kill ends the child; Wait still has to be called.
func (c *Child) Kill() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.exited {
		_ = c.cmd.Process.Kill()
	}
}

// Wait returns when the child has ended: nil or an *ExitError.
func (c *Child) Wait() error {
	<-c.done
	return c.err
}

func (c *Child) wait() {
	err := c.cmd.Wait()
	c.mu.Lock()
	c.exited = true
	c.mu.Unlock()
	if err == nil {
		return
	}
	said := c.said.String()
	killed, own := c.group.deaths()
	c.err = &ExitError{Memory: killed && own || outOfMemory(said), Machine: killed && !own, Limit: c.limit, State: c.cmd.ProcessState.String(), Said: firstLine(said)}
}

// outOfMemory knows how Go's runtime ends when the kernel gives no more. Parts of it do
// not expect that: it then follows a nil pointer on a stack of its own, which the
// program's code has none of.
func outOfMemory(said string) bool {
	return strings.Contains(said, "out of memory") || strings.Contains(said, "cannot allocate memory") ||
		strings.HasPrefix(said, "SIGSEGV") && strings.Contains(said, "goroutine 0 ")
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return line
}

// head keeps the first bytes that are written to it.
type head struct{ b []byte } // exec.Cmd writes from one goroutine, and is waited for

const headSize = 4 << 10

func (h *head) Write(p []byte) (int, error) {
	h.b = append(h.b, p[:min(len(p), headSize-len(h.b))]...)
	return len(p), nil
}

func (h *head) String() string { return string(h.b) }

// socketPair gives both ends of a connection.
func socketPair() (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("socketpair: %w", err)
	}
	theirs := os.NewFile(uintptr(fds[1]), "control")
	f := os.NewFile(uintptr(fds[0]), "control")
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	return c.(*net.UnixConn), theirs, nil
}

// Parent is the program's connection to the process that started it. It closes other
// descriptors that came with this process, and is to be called first.
func Parent() (*frame.Conn, error) {
	if err := closeInherited(); err != nil {
		return nil, err
	}
	f := os.NewFile(ControlFD, "control")
	if f == nil {
		return nil, errors.New("no connection to a parent")
	}
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("connection to the parent: %w", err)
	}
	u, ok := c.(*net.UnixConn)
	if !ok {
		return nil, errors.New("connection to the parent: not a unix socket")
	}
	return frame.NewConn(u), nil
}

// closeInherited closes what this process's parent had open for its children, on purpose
// or because its own parent did. What Go opens does not survive execve.
func closeInherited() error {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return err
	}
	for _, e := range list {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd <= ControlFD {
			continue
		}
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err == nil && flags&unix.FD_CLOEXEC == 0 {
			_ = unix.Close(fd)
		}
	}
	return nil
}
