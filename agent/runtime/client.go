// Package runtime is the agent's way to podmon, the helper that owns the node's
// containers: it finds the one that runs, starts one if none does, and speaks to
// it. It knows processes, namespaces and cgroups by their names in
// agent/podmon/api; what a pod is, it does not know.
package runtime

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podmon/api/frame"
)

// Config of a Client.
type Config struct {
	// Dir is podmon's state directory: absolute, required. One podmon per directory.
	Dir string
	// PodmonPath is the program to start; empty: the one inside clusterd.
	PodmonPath string
	// CgroupRoot is the node's cgroup, "/clusterd/n1": podmon puts itself
	// below it, apart from clusterd. Empty: it stays in clusterd's.
	CgroupRoot string
	// StartLimit is how long the start of a container may take, passed to a
	// podmon when it is started; 0: podmon's own default, 45 s.
	StartLimit time.Duration
	// UpgradeTimeout is how long executions and attachments under way hold up
	// the replacement of a running podmon by this Client's; default 10 s.
	UpgradeTimeout time.Duration
	Logger         *slog.Logger // default: slog.Default
}

// ErrDisconnected is returned when podmon went away during a call: what was
// asked for may have been done or not. The next call connects again.
var ErrDisconnected = errors.New("connection to podmon is broken")

// ErrClosed is returned by calls on a closed Client.
var ErrClosed = errors.New("podmon client is closed")

// Client speaks to one podmon. All methods may be called side by side; each
// blocks until podmon has answered or ctx is done (what was asked for then goes
// on). When the connection is lost the next call makes a new one, and starts a
// new podmon if none answers: it adopts the old one's containers.
type Client struct {
	cfg      Config
	life     context.Context // done when closed
	stop     context.CancelFunc
	upgraded Upgrade // set by Start
	// started is set once this Client has started a podmon.
	started atomic.Bool

	mu         sync.Mutex // guards below
	conn       *conn
	connecting *attempt // under way; nil: none
	closed     bool
	wg         sync.WaitGroup
}

// attempt is one attempt to connect.
type attempt struct {
	done chan struct{} // closed when it has ended
	err  error         // set before: why it failed, for all who waited for it
}

// Start finds the podmon of cfg.Dir or starts it. One that runs and is another
// program than the one that would be started is replaced, its containers
// unharmed; Upgraded says how that went.
func Start(ctx context.Context, cfg Config) (*Client, error) {
	if !filepath.IsAbs(cfg.Dir) {
		return nil, fmt.Errorf("podmon's folder %q is not an absolute path", cfg.Dir)
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	c := &Client{cfg: cfg}
	c.life, c.stop = context.WithCancel(context.WithoutCancel(ctx))
	if _, err := c.connect(ctx); err != nil {
		c.stop()
		return nil, err
	}
	if !c.started.Load() { // else it is that program
		c.upgraded = c.upgrade(ctx)
	}
	return c, nil
}

// Upgraded tells whether Start replaced the podmon that it found.
func (c *Client) Upgraded() Upgrade { return c.upgraded }

// Close ends the connection, with its streams of events, execs and attachments.
// Podmon and its containers go on.
func (c *Client) Close() error {
	c.mu.Lock()
	c.closed = true // before what is under way ends by stop, and asks why
	c.stop()
	if c.conn != nil {
		c.conn.close(ErrClosed)
	}
	c.mu.Unlock()
	c.wg.Wait()
	return nil
}

// connect gives the shared connection, made when there is none.
func (c *Client) connect(ctx context.Context) (*conn, error) {
	for {
		c.mu.Lock()
		if c.closed {
			c.mu.Unlock()
			return nil, ErrClosed
		}
		if c.conn != nil && !c.conn.broken() {
			defer c.mu.Unlock()
			return c.conn, nil
		}
		under := c.connecting
		if under == nil {
			under = &attempt{done: make(chan struct{})}
			c.connecting = under
			c.mu.Unlock()
			return c.reconnect(ctx, under)
		}
		c.mu.Unlock()
		// One attempt at a time; its outcome counts for all that wait for it, unless it
		// is that its caller did not want it any more.
		select {
		case <-under.done:
			if under.err != nil {
				return nil, under.err
			}
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-c.life.Done():
			return nil, ErrClosed
		}
	}
}

// reconnect dials podmon, and starts one where none answers, without holding
// the lock: that can take a minute. Close ends it.
func (c *Client) reconnect(ctx context.Context, under *attempt) (*conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.life, cancel)()
	fc, err := c.dialOrStart(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	if ctx.Err() == nil {
		under.err = err
	}
	close(under.done)
	c.connecting = nil
	if c.closed {
		if err == nil {
			fc.Close()
		}
		return nil, ErrClosed
	}
	if err != nil {
		return nil, err
	}
	cn := &conn{fc: fc, waiting: map[uint64]chan api.Response{}, gone: make(chan struct{})}
	c.wg.Go(cn.read)
	c.conn = cn
	return cn, nil
}

// call makes one request. An idempotent one is tried once more when the
// connection breaks under it.
func (c *Client) call(ctx context.Context, req api.Request, idempotent bool) (_ api.Response, err error) {
	began := time.Now()
	defer func() { observe(req.Op, began, err != nil) }()
	cn, err := c.connect(ctx)
	if err != nil {
		return api.Response{}, err
	}
	resp, err := cn.call(ctx, req)
	if idempotent && errors.Is(err, ErrDisconnected) {
		if cn, err = c.connect(ctx); err != nil {
			return api.Response{}, err
		}
		resp, err = cn.call(ctx, req)
	}
	if err != nil {
		return api.Response{}, fmt.Errorf("podmon %s: %w", req.Op, err)
	}
	if resp.Error != nil {
		return api.Response{}, resp.Error
	}
	return resp, nil
}

// CreateSandbox starts a pause process that holds a pod's namespaces.
func (c *Client) CreateSandbox(ctx context.Context, s api.Sandbox) (api.SandboxStatus, error) {
	resp, err := c.call(ctx, api.Request{Op: api.OpCreateSandbox, Sandbox: &s}, false)
	if err != nil {
		return api.SandboxStatus{}, err
	}
	if resp.Sandbox == nil {
		return api.SandboxStatus{}, errEmptyAnswer
	}
	return *resp.Sandbox, nil
}

var errEmptyAnswer = errors.New("podmon's answer lacks what was asked for")

// RemoveSandbox kills everything of a pod and forgets it and its containers.
// It is idempotent.
func (c *Client) RemoveSandbox(ctx context.Context, id string) error {
	_, err := c.call(ctx, api.Request{Op: api.OpRemoveSandbox, Target: id}, true)
	return err
}

// StartContainer creates and starts a container. One whose process cannot be
// started (no such command) is no error: its status says StartError.
func (c *Client) StartContainer(ctx context.Context, ct api.Container) (api.ContainerStatus, error) {
	resp, err := c.call(ctx, api.Request{Op: api.OpStartContainer, Container: &ct}, false)
	if err != nil {
		return api.ContainerStatus{}, err
	}
	if resp.Container == nil {
		return api.ContainerStatus{}, errEmptyAnswer
	}
	if len(resp.Container.Container.Hooks) < len(ct.Hooks) { // it answers with what it knows of the request
		_, err := c.call(ctx, api.Request{Op: api.OpSignal, Signal: &api.Signal{ID: ct.ID, Signal: 9, All: true}}, false) // SIGKILL
		return api.ContainerStatus{}, errors.Join(fmt.Errorf("container %s needs hooks, which the podmon that runs here is too old for: restart clusterd on the node, which replaces it (or says why not: event RuntimeNotUpgraded)", ct.Name), err)
	}
	return *resp.Container, nil
}

// Signal sends a signal to a container's or sandbox's first process.
func (c *Client) Signal(ctx context.Context, s api.Signal) error {
	_, err := c.call(ctx, api.Request{Op: api.OpSignal, Signal: &s}, false)
	return err
}

// RemoveContainer forgets an exited container. It is idempotent; a running one
// gives CodeBusy.
func (c *Client) RemoveContainer(ctx context.Context, id string) error {
	_, err := c.call(ctx, api.Request{Op: api.OpRemoveContainer, Target: id}, true)
	return err
}

// List gives every sandbox and container, oldest first.
func (c *Client) List(ctx context.Context) ([]api.SandboxStatus, []api.ContainerStatus, error) {
	resp, err := c.call(ctx, api.Request{Op: api.OpList, Starting: true}, true)
	return resp.Sandboxes, resp.Containers, err
}

// Ping asks whether podmon answers at all.
func (c *Client) Ping(ctx context.Context) error {
	_, err := c.call(ctx, api.Request{Op: api.OpHello}, true)
	return err
}

// Update sets other limits on a running container or, with a sandbox's id, on
// the pod's cgroup. Zero fields are left alone.
func (c *Client) Update(ctx context.Context, u api.Update) error {
	_, err := c.call(ctx, api.Request{Op: api.OpUpdate, Update: &u}, true)
	return err
}

// Fence changes, or with an empty f asks, which pods podmon ends by itself at
// which deadline.
func (c *Client) Fence(ctx context.Context, f api.Fence) (api.FenceStatus, error) {
	resp, err := c.call(ctx, api.Request{Op: api.OpFence, Fence: &f}, true)
	if err != nil {
		return api.FenceStatus{}, err
	}
	if resp.Fence == nil {
		return api.FenceStatus{}, errEmptyAnswer
	}
	return *resp.Fence, nil
}

// Resize sets the size of a container's terminal.
func (c *Client) Resize(ctx context.Context, r api.Resize) error {
	_, err := c.call(ctx, api.Request{Op: api.OpResize, Resize: &r}, true)
	return err
}

// Shutdown ends podmon. Without force it refuses (CodeBusy) while a sandbox or
// container exists; with it everything is killed and cleaned up first.
func (c *Client) Shutdown(ctx context.Context, force bool) error {
	_, err := c.call(ctx, api.Request{Op: api.OpShutdown, Shutdown: &api.Shutdown{Force: force}}, false)
	return err
}

// Events streams what happens from now on. The channel is closed when ctx is
// done, the connection breaks or its reader is too slow: the caller then lists
// and subscribes again (first subscribe, then list, to miss nothing).
func (c *Client) Events(ctx context.Context) (<-chan api.Event, error) {
	fc, err := c.private(ctx, api.Request{Op: api.OpEvents})
	if err != nil {
		return nil, err
	}
	events := make(chan api.Event, 64)
	ctx, cancel := c.bound(ctx)
	stop := context.AfterFunc(ctx, func() { fc.Close() })
	c.wg.Go(func() {
		defer close(events)
		defer fc.Close()
		defer cancel()
		defer stop()
		for {
			var resp api.Response
			if _, err := fc.Read(&resp); err != nil || resp.Event == nil {
				return
			}
			select {
			case events <- *resp.Event:
			case <-ctx.Done():
				return
			}
		}
	})
	return events, nil
}

// bound gives a context that is also done when the Client is closed.
func (c *Client) bound(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(c.life, func() { cancel(ErrClosed) })
	return ctx, func() { stop(); cancel(context.Canceled) }
}

// private makes a connection of its own and one request on it.
func (c *Client) private(ctx context.Context, req api.Request) (*frame.Conn, error) {
	fc, err := c.dialPrivate(ctx)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { fc.Close() })
	defer stop()
	var resp api.Response
	err = fc.Write(req)
	if err == nil {
		_, err = fc.Read(&resp)
	}
	if err == nil && resp.Error != nil {
		err = resp.Error
	}
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		fc.Close()
		return nil, fmt.Errorf("podmon %s: %w", req.Op, err)
	}
	return fc, nil
}

// dialPrivate connects to the podmon that answers the shared connection,
// starting one if need be.
func (c *Client) dialPrivate(ctx context.Context) (*frame.Conn, error) {
	if c.life.Err() != nil {
		return nil, ErrClosed
	}
	fc, err := dial(ctx, c.cfg.Dir)
	if err == nil {
		return fc, nil
	}
	if _, err := c.call(ctx, api.Request{Op: api.OpHello, Version: api.Version}, true); err != nil {
		return nil, err
	}
	return dial(ctx, c.cfg.Dir)
}

// conn is the connection that calls share.
type conn struct {
	fc   *frame.Conn
	gone chan struct{} // closed when broken; why then says why

	mu      sync.Mutex
	seq     uint64
	waiting map[uint64]chan api.Response
	why     error
}

func (cn *conn) broken() bool {
	select {
	case <-cn.gone:
		return true
	default:
		return false
	}
}

func (cn *conn) close(why error) {
	cn.mu.Lock()
	defer cn.mu.Unlock()
	if cn.why == nil {
		cn.why = why
		close(cn.gone)
		cn.fc.Close()
	}
}

// read hands answers to those who wait, until the connection breaks.
func (cn *conn) read() {
	for {
		var resp api.Response
		if _, err := cn.fc.Read(&resp); err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, net.ErrClosed) {
				cn.close(ErrDisconnected)
			} else {
				cn.close(fmt.Errorf("%w: %w", ErrDisconnected, err))
			}
			return
		}
		cn.mu.Lock()
		ch := cn.waiting[resp.ID]
		delete(cn.waiting, resp.ID)
		cn.mu.Unlock()
		if ch != nil {
			ch <- resp
		}
	}
}

func (cn *conn) call(ctx context.Context, req api.Request) (api.Response, error) {
	ch := make(chan api.Response, 1)
	cn.mu.Lock()
	cn.seq++
	req.ID = cn.seq
	cn.waiting[req.ID] = ch
	cn.mu.Unlock()
	defer func() {
		cn.mu.Lock()
		delete(cn.waiting, req.ID)
		cn.mu.Unlock()
	}()
	if err := cn.fc.Write(req); err != nil {
		if errors.Is(err, frame.ErrTooLarge) {
			return api.Response{}, err
		}
		cn.close(fmt.Errorf("%w: %w", ErrDisconnected, err))
	}
	select {
	case resp := <-ch:
		return resp, nil
	case <-ctx.Done():
		return api.Response{}, context.Cause(ctx)
	case <-cn.gone:
		select { // the answer may have come just before
		case resp := <-ch:
			return resp, nil
		default:
			return api.Response{}, cn.why
		}
	}
}
