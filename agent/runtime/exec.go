package runtime

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podmon/api/frame"
	"github.com/clusterd/clusterd/agent/podmon/api/unread"
	"golang.org/x/sys/unix"
)

// ExecIO is where an exec's or attach's streams go; nil fields are not
// connected. Stdin may be read from for a moment after the call has returned:
// a Read in progress cannot be given up.
type ExecIO struct {
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer // unused with a terminal
	// Resize carries sizes of the user's terminal; its IDs are ignored.
	Resize <-chan api.Resize
}

// lateOutput is how long output is waited for after the process has ended,
// while something it left behind still holds the other end.
const lateOutput = 2 * time.Second

// Exec runs a process in a container and returns its exit code when it has
// ended and its output has been copied. Has… flags of req are set from eio. A
// process that cannot be started gives an *api.Error with CodeStartFailed. When
// ctx is done the process is killed.
func (c *Client) Exec(ctx context.Context, req api.Exec, eio ExecIO) (exitCode int, err error) {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	fc, err := c.dialPrivate(ctx)
	if err != nil {
		return 0, err
	}
	// Closing the connection kills the process.
	defer fc.Close()
	stop := context.AfterFunc(ctx, func() { fc.Close() })
	defer stop()
	defer func() {
		if err != nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
	}()

	var st streams
	defer st.close()
	req.HasStdin, req.HasStdout, req.HasStderr = false, false, false
	if !req.TTY {
		if err := st.pipes(&req, eio); err != nil {
			return 0, err
		}
	}
	resp, master, err := exchange(fc, api.Request{ID: 1, Op: api.OpExec, Exec: &req}, st.remote)
	if err != nil {
		return 0, err
	}
	st.closeRemote()
	if master != nil {
		st.terminal(master, eio)
	}
	st.copy(eio)
	go st.resize(eio.Resize, master) // ends with st.close
	wait, _, err := exchange(fc, api.Request{ID: 2, Op: api.OpExecWait, Target: resp.ExecID}, nil)
	if err != nil {
		return 0, err
	}
	st.finish(lateOutput)
	return wait.ExitCode, nil
}

// Attach copies a running container's streams until it has ended, its output is
// closed or ctx is done (which gives ctx's error). tty says whether the
// container has a terminal.
func (c *Client) Attach(ctx context.Context, containerID string, eio ExecIO, tty bool) (err error) {
	ctx, cancel := c.bound(ctx)
	defer cancel()
	fc, err := c.dialPrivate(ctx)
	if err != nil {
		return err
	}
	defer fc.Close()
	stop := context.AfterFunc(ctx, func() { fc.Close() })
	defer stop()
	defer func() {
		if err != nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
	}()

	var st streams
	defer st.close()
	if tty {
		eio.Stderr = nil
	}
	req := api.Attach{ContainerID: containerID, HasStdin: eio.Stdin != nil}
	if req.HasStdout, err = st.output(eio.Stdout, &st.stdout); err != nil {
		return err
	}
	if req.HasStderr, err = st.output(eio.Stderr, &st.stderr); err != nil {
		return err
	}
	_, input, err := exchange(fc, api.Request{ID: 1, Op: api.OpAttach, Attach: &req}, st.remote)
	if err != nil {
		return err
	}
	st.closeRemote()
	st.stdin = input
	st.afterStdin = func() {
		if !tty {
			// Only a container that takes its input once minds.
			_, _ = c.call(ctx, api.Request{Op: api.OpCloseStdin, Target: containerID}, true)
		}
	}
	st.copy(eio)
	if tty && eio.Resize != nil {
		go st.resize(eio.Resize, input)
	}
	var end api.Response
	if _, err := fc.Read(&end); err != nil {
		return fmt.Errorf("attach: %w", ErrDisconnected)
	}
	if end.Error != nil {
		return fmt.Errorf("attach: %w", end.Error)
	}
	st.finish(lateOutput)
	return nil
}

// exchange makes one request on a connection of its own; at most one descriptor
// comes back.
func exchange(fc *frame.Conn, req api.Request, files []*os.File) (api.Response, *os.File, error) {
	if err := fc.Write(req, files...); err != nil {
		return api.Response{}, nil, fmt.Errorf("podmon %s: %w: %w", req.Op, ErrDisconnected, err)
	}
	var resp api.Response
	got, err := fc.Read(&resp)
	if err == nil && resp.Error != nil {
		err = resp.Error
	} else if err != nil {
		err = fmt.Errorf("podmon %s: %w: %w", req.Op, ErrDisconnected, err)
	}
	if err != nil || len(got) == 0 {
		for _, f := range got {
			f.Close()
		}
		return resp, nil, err
	}
	return resp, got[0], nil
}

// streams are our ends of a process's stdio and the goroutines that copy.
type streams struct {
	remote                []*os.File // the process's ends, until they have been sent
	stdin, stdout, stderr *os.File
	afterStdin            func() // when the input has been copied to its end

	outputs sync.WaitGroup
	ended   chan struct{}
}

// pipes makes what of req's streams eio connects.
func (st *streams) pipes(req *api.Exec, eio ExecIO) error {
	if eio.Stdin != nil {
		r, w, err := os.Pipe()
		if err != nil {
			return err
		}
		st.remote, st.stdin, req.HasStdin = append(st.remote, r), w, true
	}
	var err error
	if req.HasStdout, err = st.output(eio.Stdout, &st.stdout); err != nil {
		return err
	}
	req.HasStderr, err = st.output(eio.Stderr, &st.stderr)
	return err
}

func (st *streams) output(to io.Writer, ours **os.File) (bool, error) {
	if to == nil {
		return false, nil
	}
	r, w, err := os.Pipe()
	if err != nil {
		return false, err
	}
	st.remote, *ours = append(st.remote, w), r
	return true, nil
}

// terminal uses one master for both directions.
func (st *streams) terminal(master *os.File, eio ExecIO) {
	if eio.Stdout == nil {
		st.stdout = master // read nevertheless, or the process would block
	}
	st.stdin, st.stdout = master, master
}

func (st *streams) closeRemote() {
	for _, f := range st.remote {
		f.Close()
	}
	st.remote = nil
}

func (st *streams) copy(eio ExecIO) {
	st.ended = make(chan struct{})
	if st.stdin != nil && eio.Stdin != nil {
		shared := st.stdin == st.stdout // a terminal's master stays open
		go func() {                     // ends with eio.Stdin, or a write to the closed end
			_, err := io.Copy(st.stdin, eio.Stdin)
			if !shared {
				st.stdin.Close()
			}
			if st.afterStdin != nil && err == nil {
				st.afterStdin()
			}
		}()
	}
	for _, p := range []struct {
		from *os.File
		to   io.Writer
	}{{st.stdout, eio.Stdout}, {st.stderr, eio.Stderr}} {
		if p.from == nil {
			continue
		}
		to := p.to
		if to == nil {
			to = io.Discard
		}
		st.outputs.Go(func() {
			// A terminal's end is EIO. A writer that fails ends the copy; the
			// process then meets a closed pipe.
			_, err := io.Copy(to, p.from)
			if errors.Is(err, os.ErrDeadlineExceeded) {
				// A slow reader let the time run out: what the process wrote is still there.
				unread.Each(p.from, func(b []byte) bool { _, err := to.Write(b); return err == nil })
			}
			if p.from != st.stdin {
				p.from.Close()
			}
		})
	}
}

// finish waits for the output of an ended process.
func (st *streams) finish(late time.Duration) {
	limit := time.AfterFunc(late, func() {
		for _, f := range []*os.File{st.stdout, st.stderr} {
			if f != nil {
				_ = f.SetReadDeadline(time.Unix(1, 0))
			}
		}
	})
	defer limit.Stop()
	st.outputs.Wait()
}

// resize passes sizes on to the terminal behind master until close.
func (st *streams) resize(sizes <-chan api.Resize, master *os.File) {
	if sizes == nil || master == nil {
		return
	}
	for {
		select {
		case size, ok := <-sizes:
			if !ok || setSize(master, size) != nil {
				return
			}
		case <-st.ended:
			return
		}
	}
}

func setSize(master *os.File, size api.Resize) error {
	rc, err := master.SyscallConn()
	if err != nil {
		return err
	}
	var ioErr error
	err = rc.Control(func(fd uintptr) {
		ioErr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Col: size.Width, Row: size.Height})
	})
	return errors.Join(err, ioErr)
}

// close ends every copy and waits for those of output.
func (st *streams) close() {
	if st.ended != nil {
		close(st.ended)
	}
	st.closeRemote()
	for _, f := range []*os.File{st.stdin, st.stdout, st.stderr} {
		if f != nil {
			f.Close()
		}
	}
	st.outputs.Wait()
}
