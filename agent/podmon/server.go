package podmon

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podmon/api/frame"
)

// conns are the open connections.
type conns struct {
	mu     sync.Mutex
	open   map[*frame.Conn]struct{}
	closed bool
}

func (c *conns) add(fc *frame.Conn) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return false
	}
	c.open[fc] = struct{}{}
	return true
}

func (c *conns) remove(fc *frame.Conn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.open, fc)
	fc.Close()
}

func (c *conns) closeAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	for fc := range c.open {
		fc.Close()
	}
}

// serve accepts connections until the listener is closed.
func (s *Supervisor) serve() *conns {
	all := &conns{open: map[*frame.Conn]struct{}{}}
	s.wg.Go(func() {
		for {
			c, err := s.ln.AcceptUnix()
			if err != nil {
				if s.life.Err() == nil && !errors.Is(err, net.ErrClosed) {
					s.stop(err)
				}
				return
			}
			fc := frame.NewConn(c)
			if !all.add(fc) {
				fc.Close()
				continue
			}
			s.wg.Go(func() {
				defer all.remove(fc)
				s.serveConn(fc)
			})
		}
	})
	return all
}

// session is one client's connection. Requests on it are answered side by side;
// what it holds (execs, attachments, a subscription) ends with it.
type session struct {
	s    *Supervisor
	conn *frame.Conn
	ctx  context.Context // done when the connection is gone
	wg   sync.WaitGroup

	mu    sync.Mutex
	execs []*execution
}

// requestsAtOnce bounds the requests of one connection that are worked on.
const requestsAtOnce = 256

func (s *Supervisor) serveConn(conn *frame.Conn) {
	ctx, cancel := context.WithCancel(s.life)
	ss := &session{s: s, conn: conn, ctx: ctx}
	defer func() {
		cancel()
		ss.wg.Wait()
		for _, e := range ss.execs {
			s.endExec(e)
		}
	}()
	slots := make(chan struct{}, requestsAtOnce)
	for {
		var req api.Request
		files, err := conn.Read(&req)
		if err != nil {
			closeFiles(files...)
			return
		}
		// The reader goes on when all are busy: it is what sees a hang-up, which
		// ends the requests.
		select {
		case slots <- struct{}{}:
		default:
			closeFiles(files...)
			ss.reply(req.ID, api.Response{}, &api.Error{Code: api.CodeBusy, Message: fmt.Sprintf("%d requests of this connection are being worked on", requestsAtOnce)})
			continue
		}
		ss.wg.Go(func() {
			defer func() { <-slots }()
			ss.answer(req, files)
		})
	}
}

// answer works on one request. It owns files.
func (ss *session) answer(req api.Request, files []*os.File) {
	defer func() { closeFiles(files...) }()
	ss.s.log.Debug("request", "op", req.Op, "id", req.ID)
	switch req.Op {
	case api.OpEvents:
		ss.events(req.ID)
		return
	case api.OpAttach:
		ss.attach(req, files)
		files = nil // taken over
		return
	case api.OpExec:
		ss.exec(req, files)
		return
	case api.OpUpgrade:
		err := ss.s.upgrade(ss.ctx, req.Upgrade, files)
		ss.reply(req.ID, api.Response{}, err)
		if err == nil {
			ss.s.stop(errReplaced)
		}
		return
	case api.OpShutdown:
		err := ss.s.shutdown(req.Shutdown != nil && req.Shutdown.Force)
		ss.reply(req.ID, api.Response{}, err)
		if err == nil {
			ss.s.stop(errShutdown)
		}
		return
	}
	resp, err := ss.call(req)
	ss.reply(req.ID, resp, err)
}

func (ss *session) reply(id uint64, resp api.Response, err error, files ...*os.File) {
	resp.ID = id
	if err != nil {
		resp.Error = apiError(err)
	}
	err = ss.conn.Write(resp, files...)
	if errors.Is(err, frame.ErrTooLarge) { // nothing of it was sent
		err = ss.conn.Write(api.Response{ID: id, Error: apiError(err)})
	}
	if err != nil {
		ss.conn.Close() // half a frame may be out: nothing more can be said
	}
}

func apiError(err error) *api.Error {
	var e *api.Error
	if errors.As(err, &e) {
		return &api.Error{Code: e.Code, Message: err.Error()}
	}
	return &api.Error{Code: api.CodeInternal, Message: err.Error()}
}

var errMissing = invalidf("the request lacks the field that its op names")

// call answers what is one request and one response. Starting a sandbox or
// container is not given up when the client goes away: it may come back and
// find it.
func (ss *session) call(req api.Request) (resp api.Response, err error) {
	s := ss.s
	switch req.Op {
	case api.OpHello:
		build, err := ownBuild()
		return api.Response{Version: api.Version, Build: build, Pid: os.Getpid()}, err
	case api.OpCreateSandbox:
		if req.Sandbox == nil {
			return resp, errMissing
		}
		st, err := s.createSandbox(s.life, *req.Sandbox)
		if err != nil {
			return resp, err
		}
		return api.Response{Sandbox: &st, Pid: st.Pid}, nil
	case api.OpRemoveSandbox:
		return resp, s.removeSandbox(s.life, req.Target)
	case api.OpStartContainer:
		if req.Container == nil {
			return resp, errMissing
		}
		st, err := s.startContainer(s.life, *req.Container)
		if err != nil {
			return resp, err
		}
		return api.Response{Container: &st, Pid: st.Pid}, nil
	case api.OpSignal:
		if req.Signal == nil {
			return resp, errMissing
		}
		return resp, s.signal(*req.Signal)
	case api.OpRemoveContainer:
		return resp, s.removeContainer(req.Target)
	case api.OpExecWait:
		return ss.execWait(req.Target)
	case api.OpResize:
		if req.Resize == nil {
			return resp, errMissing
		}
		return resp, s.resize(*req.Resize)
	case api.OpUpdate:
		if req.Update == nil {
			return resp, errMissing
		}
		return resp, s.update(*req.Update)
	case api.OpCloseStdin:
		c, err := s.runningContainer(req.Target)
		if err != nil {
			return resp, err
		}
		if c.io.spec.StdinOnce && !c.io.spec.TTY {
			s.closeStdin(c)
		}
		return resp, nil
	case api.OpFence:
		if req.Fence == nil {
			return resp, errMissing
		}
		st, err := s.fence.change(*req.Fence)
		return api.Response{Fence: &st}, err
	case api.OpList:
		resp.Sandboxes, resp.Containers = s.list(req.Starting)
		return resp, nil
	}
	return resp, invalidf("unknown op %q: this podmon speaks version %d", req.Op, api.Version)
}

// events streams events until the connection ends or the subscriber is too slow.
func (ss *session) events(id uint64) {
	events, cancel := ss.s.events.subscribe()
	defer cancel()
	ss.reply(id, api.Response{}, nil) // subscribed: what happens from now on is sent
	for {
		select {
		case e, ok := <-events:
			if !ok {
				ss.conn.Close()
				return
			}
			ss.reply(id, api.Response{Event: &e}, nil)
		case <-ss.ctx.Done():
			return
		}
	}
}

func (ss *session) exec(req api.Request, files []*os.File) {
	if req.Exec == nil {
		ss.reply(req.ID, api.Response{}, errMissing)
		return
	}
	e, master, err := ss.s.exec(ss.ctx, *req.Exec, files)
	if err != nil {
		ss.reply(req.ID, api.Response{}, err)
		return
	}
	ss.mu.Lock()
	ss.execs = append(ss.execs, e)
	ss.mu.Unlock()
	resp := api.Response{ExecID: e.id, Pid: e.proc.pid}
	if master != nil {
		defer master.Close()
		ss.reply(req.ID, resp, nil, master)
		return
	}
	ss.reply(req.ID, resp, nil)
}

func (ss *session) execWait(id string) (api.Response, error) {
	e, err := ss.s.execution(id)
	if err != nil {
		return api.Response{}, err
	}
	select {
	case <-e.done:
		return api.Response{ExecID: id, ExitCode: e.exit.code}, nil
	case <-ss.s.replaced:
		return api.Response{}, errReplaced
	case <-ss.ctx.Done():
		return api.Response{}, context.Cause(ss.ctx)
	}
}

// attach holds an attachment until the container or the client ends.
func (ss *session) attach(req api.Request, files []*os.File) {
	if req.Attach == nil {
		closeFiles(files...)
		ss.reply(req.ID, api.Response{}, errMissing)
		return
	}
	var stdout, stderr *os.File
	if req.Attach.HasStdout && len(files) > 0 {
		stdout, files = files[0], files[1:]
	}
	if req.Attach.HasStderr && len(files) > 0 {
		stderr, files = files[0], files[1:]
	}
	closeFiles(files...)
	a, err := ss.s.attach(*req.Attach, stdout, stderr)
	if err != nil {
		ss.reply(req.ID, api.Response{}, err)
		return
	}
	defer a.detach(ss.s)
	ss.s.countAttached(1)
	defer ss.s.countAttached(-1)
	if a.input != nil {
		ss.reply(req.ID, api.Response{}, nil, a.input)
		closeFiles(a.input)
		a.input = nil
	} else {
		ss.reply(req.ID, api.Response{}, nil)
	}
	if a.finished(ss.ctx.Done(), ss.s.replaced) {
		ss.s.mu.Lock()
		code := a.c.status.ExitCode
		ss.s.mu.Unlock()
		ss.reply(req.ID, api.Response{ExitCode: code}, nil)
	} else if ss.s.givesWay() {
		ss.reply(req.ID, api.Response{}, errReplaced)
	}
}

// shutdown clears the way for podmon's end, which comes after the answer.
func (s *Supervisor) shutdown(force bool) error {
	s.mu.Lock()
	busy := len(s.sandboxes) + len(s.containers)
	if busy > 0 && !force {
		s.mu.Unlock()
		return errorf(api.CodeBusy, "%d sandboxes and containers exist", busy)
	}
	s.closing = true
	s.mu.Unlock()
	if err := s.removeAll(); err != nil {
		s.mu.Lock()
		s.closing = false
		s.mu.Unlock()
		return err
	}
	s.fence.forget()
	// Before the answer: who asked may look at once whether anything is left.
	s.pauses.close()
	if err := s.leaveCgroup(); err != nil {
		s.log.Warn("podmon's cgroup stays", "err", err)
	}
	if err := unmountLive(s.cfg.Dir); err != nil {
		s.log.Warn("the empty file system of the records stays", "err", err)
	}
	return nil
}

// removeAll ends and forgets every sandbox and container.
func (s *Supervisor) removeAll() error {
	s.mu.Lock()
	var sandboxes, containers []string
	for id := range s.sandboxes {
		sandboxes = append(sandboxes, id)
	}
	for id, c := range s.containers {
		if s.sandboxes[c.status.Container.SandboxID] == nil {
			containers = append(containers, id)
		}
	}
	s.mu.Unlock()
	var errs []error
	for _, id := range sandboxes {
		errs = append(errs, s.removeSandbox(s.life, id))
	}
	for _, id := range containers {
		errs = append(errs, s.removeContainer(id))
	}
	return errors.Join(errs...)
}
