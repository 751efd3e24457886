package runtime

import (
	"context"
	"errors"
	"io/fs"
	"syscall"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// ErrNoPodmon is returned by Look when no podmon serves in the directory.
var ErrNoPodmon = errors.New("no podmon serves there")

// Look lists every sandbox and container of the podmon of dir, oldest first. It
// starts none and changes nothing, so that it can be used beside clusterd, and
// where clusterd is down.
func Look(ctx context.Context, dir string) ([]api.SandboxStatus, []api.ContainerStatus, error) {
	fc, _, err := hello(ctx, dir)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return nil, nil, ErrNoPodmon
	}
	if err != nil {
		return nil, nil, err
	}
	defer fc.Close()
	stop := context.AfterFunc(ctx, func() { fc.Close() })
	defer stop()
	var resp api.Response
	if err := fc.Write(api.Request{Op: api.OpList}); err != nil {
		return nil, nil, err
	}
	if _, err := fc.Read(&resp); err != nil {
		return nil, nil, errors.Join(err, context.Cause(ctx))
	}
	if resp.Error != nil {
		return nil, nil, resp.Error
	}
	return resp.Sandboxes, resp.Containers, nil
}
