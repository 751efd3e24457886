package runtime

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podmon/api/frame"
	"github.com/clusterd/clusterd/agent/podmon/api/sealed"
	"github.com/clusterd/clusterd/agent/runtime/podmonbin"
)

const (
	helloTime = 10 * time.Second // a live podmon on a busy machine answers within
	startTime = 60 * time.Second // a new one serves within, adopting included
	maxLog    = 4 << 20          // podmon's own log is set aside beyond
)

// dialOrStart gives a connection on which podmon has said hello.
func (c *Client) dialOrStart(ctx context.Context) (*frame.Conn, error) {
	fc, _, err := hello(ctx, c.cfg.Dir)
	if err == nil {
		return fc, nil
	}
	var refused *api.Error
	if errors.As(err, &refused) {
		return nil, err // it lives, and does not want to speak to us
	}
	if ctx.Err() != nil { // no caller waits for one any more; it may be there, and slow
		return nil, err
	}
	if err := c.start(ctx); err != nil {
		return nil, fmt.Errorf("start podmon: %w", err)
	}
	if fc, err = helloSoon(ctx, c.cfg.Dir); err != nil {
		return nil, fmt.Errorf("podmon was started but does not answer: %w", err)
	}
	c.started.Store(true)
	return fc, nil
}

// helloSoon waits for a podmon that is being started, by us or by its keeper.
func helloSoon(ctx context.Context, dir string) (*frame.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	for {
		fc, _, err := hello(ctx, dir)
		var refused *api.Error
		if err == nil || errors.As(err, &refused) {
			return fc, err
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return nil, err
		}
	}
}

func dial(ctx context.Context, dir string) (*frame.Conn, error) {
	// A socket's address holds 107 bytes; a longer one is reached through a
	// descriptor of its directory.
	path := filepath.Join(dir, "podmon.sock")
	if len(path) > 100 {
		d, err := os.Open(dir)
		if err != nil {
			return nil, err
		}
		defer d.Close()
		path = fmt.Sprintf("/proc/self/fd/%d/podmon.sock", d.Fd())
	}
	var dialer net.Dialer
	uc, err := dialer.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	return frame.NewConn(uc.(*net.UnixConn)), nil
}

// hello connects and asks who is there.
func hello(ctx context.Context, dir string) (_ *frame.Conn, who api.Response, err error) {
	ctx, cancel := context.WithTimeout(ctx, helloTime)
	defer cancel()
	fc, err := dial(ctx, dir)
	if err != nil {
		return nil, who, err
	}
	stop := context.AfterFunc(ctx, func() { fc.Close() })
	defer stop()
	var resp api.Response
	err = fc.Write(api.Request{Op: api.OpHello, Version: api.Version})
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
		return nil, who, fmt.Errorf("say hello to podmon: %w", err)
	}
	return fc, resp, nil
}

// program is the podmon that this Client would start, as a sealed memory file;
// the caller closes it.
func (c *Client) program() (*os.File, error) {
	if c.cfg.PodmonPath == "" {
		return podmonbin.Open()
	}
	f, err := os.Open(c.cfg.PodmonPath)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return sealed.New("podmon", f)
}

// start runs a new podmon, detached, and waits until it serves.
func (c *Client) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	if err := os.MkdirAll(c.cfg.Dir, 0o711); err != nil {
		return err
	}
	program, err := c.program()
	if err != nil {
		return err
	}
	defer program.Close()
	log, err := openOwnLog(filepath.Join(c.cfg.Dir, "podmon.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	readyR, readyW, err := os.Pipe()
	if err != nil {
		return err
	}
	defer readyR.Close()
	defer readyW.Close()

	// The process started here only starts podmon proper and ends.
	var said bytes.Buffer
	args := []string{"--root", c.cfg.Dir, "--cgroup-root", c.cfg.CgroupRoot, "--ready-fd", "3", "--detach"}
	if c.cfg.StartLimit > 0 {
		args = append(args, "--start-limit", c.cfg.StartLimit.String())
	}
	cmd := exec.CommandContext(ctx, fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), program.Fd()), args...)
	cmd.Args[0] = "podmon"
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{readyW}
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%w (see %s)", err, log.Name())
	}
	readyW.Close()
	stop := context.AfterFunc(ctx, func() { _ = readyR.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := io.Copy(&said, readyR); err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return fmt.Errorf("wait until it serves: %w", err)
	}
	switch word := strings.TrimSpace(said.String()); word {
	case api.ReadyOK:
		c.cfg.Logger.Info("podmon started", "dir", c.cfg.Dir)
		return nil
	case api.ReadyKept: // its keeper starts it
		return nil
	case "":
		return fmt.Errorf("it ended at once (see %s)", log.Name())
	default:
		return errors.New(word)
	}
}

// openOwnLog opens podmon's own log to append to; a large one is set aside.
func openOwnLog(path string) (*os.File, error) {
	if st, err := os.Stat(path); err == nil && st.Size() > maxLog {
		if err := os.Rename(path, path+".1"); err != nil { //nolint:forbidigo // a log: written on as it is
			return nil, err
		}
	}
	return os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
}
