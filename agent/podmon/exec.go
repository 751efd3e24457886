package podmon

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/opencontainers/runc/libcontainer"
	"golang.org/x/sys/unix"
)

// execution is one more process in a container. It belongs to the connection
// that asked for it: when that closes, the process is killed: its output and exit
// code have no reader any more.
type execution struct {
	id   string
	proc *process // leads a session and process group of its own

	mu  sync.Mutex // guards tty
	tty *os.File   // terminal's master; nil without and after the end

	done chan struct{} // closed when ended; exit is valid then
	exit exitStatus
}

// exec starts a process; files are its stdin, stdout and stderr as far as the
// flags say. With a terminal the second result is its master, the caller's.
func (s *Supervisor) exec(ctx context.Context, req api.Exec, files []*os.File) (*execution, *os.File, error) {
	c, err := s.runningContainer(req.ContainerID)
	if err != nil {
		return nil, nil, err
	}
	if c.lc == nil {
		return nil, nil, errorf(api.CodeInternal, "container %s was adopted without its state: nothing can be executed in it", c.id)
	}
	if len(req.Args) == 0 {
		return nil, nil, invalidf("exec in %s: no command", c.id)
	}
	if ctx.Err() != nil {
		return nil, nil, context.Cause(ctx)
	}
	s.mu.Lock()
	spec := c.status.Container
	s.mu.Unlock()
	p := &libcontainer.Process{
		Args: req.Args, Env: mergeEnv(spec.Env, req.Env), Cwd: req.Cwd,
		UID: int(spec.UID), GID: int(spec.GID), AdditionalGroups: ints(spec.ExtraGIDs),
		LogLevel: initLogLevel,
	}
	if p.Cwd == "" {
		p.Cwd = spec.Cwd
	}
	if p.Cwd == "" {
		p.Cwd = "/"
	}
	var con *console
	if req.TTY {
		if con, err = newConsole(); err != nil {
			return nil, nil, err
		}
		defer con.close()
		p.ConsoleSocket = con.child
	} else if err := giveFiles(p, req, files); err != nil {
		return nil, nil, err
	} else {
		cfg := c.lc.Config()
		uid, err := cfg.HostUID(p.UID)
		if err != nil {
			return nil, nil, err
		}
		if err := giveTo(uint32(uid), files...); err != nil {
			return nil, nil, err
		}
	}
	if err := c.lc.Start(p); err != nil {
		if done := c.ended(); done {
			return nil, nil, errorf(api.CodeNotRunning, "container %s has exited", c.id)
		}
		return nil, nil, errorf(api.CodeStartFailed, "%s", startErrorText(err))
	}
	e := &execution{done: make(chan struct{})}
	master, err := s.holdExec(e, p, con)
	if err != nil {
		_ = p.Signal(unix.SIGKILL)
		_, _ = p.Wait()
		return nil, nil, err
	}
	return e, master, nil
}

func giveFiles(p *libcontainer.Process, req api.Exec, files []*os.File) error {
	next := func(want bool) (*os.File, error) {
		if !want {
			return nil, nil
		}
		if len(files) == 0 {
			return nil, invalidf("exec in %s: fewer descriptors came than flags say", req.ContainerID)
		}
		f := files[0]
		files = files[1:]
		return f, makeBlocking(f)
	}
	stdin, err := next(req.HasStdin)
	if err != nil {
		return err
	}
	stdout, err := next(req.HasStdout)
	if err != nil {
		return err
	}
	stderr, err := next(req.HasStderr)
	if err != nil {
		return err
	}
	// A nil *os.File in the interface would not be a nil reader.
	if stdin != nil {
		p.Stdin = stdin
	}
	if stdout != nil {
		p.Stdout = stdout
	}
	if stderr != nil {
		p.Stderr = stderr
	}
	return nil
}

// makeBlocking is done to what becomes a program's stdio: a program that does
// not expect EAGAIN would take a slow reader or writer for an error. The client,
// if it is written in Go, made its pipes non-blocking at both ends; the mode
// belongs to each end, so the client's own keeps its.
func makeBlocking(f *os.File) error {
	rc, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var set error
	err = rc.Control(func(fd uintptr) { set = unix.SetNonblock(int(fd), false) })
	return errors.Join(err, set)
}

// holdExec takes hold of a started process and waits for its end. It gives a
// descriptor of the terminal's master for the client, if there is one.
func (s *Supervisor) holdExec(e *execution, p *libcontainer.Process, con *console) (master *os.File, err error) {
	pid, err := p.Pid()
	if err != nil {
		return nil, err
	}
	if e.proc, err = openProcess(pid, 0); err != nil {
		return nil, err
	}
	if con != nil {
		if e.tty, err = con.receive(); err == nil {
			master, err = dup(e.tty)
		}
		if err != nil {
			closeFiles(e.tty)
			e.proc.close()
			return nil, err
		}
	}
	s.orphans.own(pid)
	s.mu.Lock()
	s.execSeq++
	e.id = "exec-" + strconv.Itoa(os.Getpid()) + "-" + strconv.FormatUint(s.execSeq, 10)
	s.execs[e.id] = e
	s.mu.Unlock()
	s.link.keep(e.kept()) // for its end, should podmon be killed
	s.wg.Go(func() {
		if err := e.proc.exited(s.life); err != nil {
			return
		}
		e.exit = waitProcess(p, e.proc)
		s.orphans.disown(pid)
		s.link.drop(e.id)
		e.mu.Lock()
		closeFiles(e.tty)
		e.tty = nil
		e.mu.Unlock()
		close(e.done)
	})
	return master, nil
}

// endExec forgets an execution and kills it if it still runs, with the process
// group it leads.
func (s *Supervisor) endExec(e *execution) {
	s.mu.Lock()
	delete(s.execs, e.id)
	s.mu.Unlock()
	select {
	case <-e.done:
	default:
		e.proc.killGroup()
	}
	s.wg.Go(func() {
		select {
		case <-e.done:
			e.proc.close()
		case <-s.life.Done():
		}
	})
}

func (s *Supervisor) execution(id string) (*execution, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.execs[id]
	if e == nil {
		return nil, errorf(api.CodeNotFound, "no exec %s", id)
	}
	return e, nil
}

// resize sets the size of a container's or exec's terminal.
func (s *Supervisor) resize(req api.Resize) error {
	if e, err := s.execution(req.ID); err == nil {
		e.mu.Lock()
		defer e.mu.Unlock()
		return setSize(e.tty, req.Width, req.Height)
	}
	c, err := s.runningContainer(req.ID)
	if err != nil {
		return err
	}
	return c.io.resize(req.Width, req.Height)
}

func (c *container) ended() bool {
	select {
	case <-c.done:
		return true
	default:
		st, err := readProcStat(c.proc.pid)
		return err != nil || st.start != c.proc.start || st.state == 'Z' || st.state == 'X'
	}
}

// mergeEnv is base with the variables of more, which win.
func mergeEnv(base, more []string) []string {
	if len(more) == 0 {
		return base
	}
	set := map[string]bool{}
	for _, kv := range more {
		name, _, _ := strings.Cut(kv, "=")
		set[name] = true
	}
	out := make([]string, 0, len(base)+len(more))
	for _, kv := range base {
		if name, _, _ := strings.Cut(kv, "="); !set[name] {
			out = append(out, kv)
		}
	}
	return append(out, more...)
}
