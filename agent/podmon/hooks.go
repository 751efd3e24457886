package podmon

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/opencontainers/runc/libcontainer/configs"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// maxHookTime is how long a hook may run; its own limit can only be lower, and so can
// its part of the time that all hooks of a start have.
const maxHookTime = 20 * time.Second

// hookOutput is how much of a hook's last output an error shows.
const hookOutput = 1 << 10

// libcontainerHooks are those that libcontainer runs: it alone knows the moments
// between a container's namespaces, its root and its program.
var libcontainerHooks = map[string]configs.HookName{
	api.HookPrestart:        configs.Prestart,
	api.HookCreateRuntime:   configs.CreateRuntime,
	api.HookCreateContainer: configs.CreateContainer,
	api.HookStartContainer:  configs.StartContainer,
}

func validHooks(spec api.Container) error {
	for i, h := range spec.Hooks {
		_, known := libcontainerHooks[h.When]
		switch {
		case !known && h.When != api.HookPoststart && h.When != api.HookPoststop:
			return invalidf("container %s: hook %d, %s: no such moment as %q", spec.Name, i, h.Path, h.When)
		case !filepath.IsAbs(h.Path):
			return invalidf("container %s: %s hook %q is not an absolute path", spec.Name, h.When, h.Path)
		case h.TimeoutSeconds < 0:
			return invalidf("container %s: %s hook %s has a timeout of %d s: 1 or more, or none", spec.Name, h.When, h.Path, h.TimeoutSeconds)
		}
	}
	return nil
}

// setHooks gives libcontainer the hooks that it is to run, and the directory that
// they find the container's description in.
func (s *Supervisor) setHooks(cfg *configs.Config, spec *api.Container, pod *api.Sandbox) error {
	if len(spec.Hooks) == 0 {
		return nil
	}
	cfg.Labels = append(cfg.Labels, "bundle="+s.containerPath(spec.ID))
	cfg.Hooks = configs.Hooks{}
	for _, h := range s.startHooks(spec.Hooks) {
		name, ok := libcontainerHooks[h.When]
		if !ok {
			continue
		}
		if pod.Users != nil && h.When == api.HookCreateContainer {
			return invalidf("hook %s runs at createContainer, with the ids of the pod's user namespace, to which the node's files are closed: run the pod with hostUsers: true", h.Path)
		}
		cfg.Hooks[name] = append(cfg.Hooks[name], configs.NewCommandHook(&configs.Command{
			Path: h.Path, Args: hookArgs(h.Hook), Env: slices.Concat([]string{}, h.Env), Timeout: &h.limit,
		}))
	}
	return nil
}

func hookArgs(h api.Hook) []string {
	if len(h.Args) == 0 {
		return []string{h.Path}
	}
	return h.Args
}

func hookLimit(h api.Hook) time.Duration {
	if own := time.Duration(h.TimeoutSeconds) * time.Second; own > 0 && own < maxHookTime {
		return own
	}
	return maxHookTime
}

// timedHook is a hook and how long it may run.
type timedHook struct {
	api.Hook
	limit time.Duration
}

// startHooks are the hooks of a start. Together they have three quarters of the
// start's limit: libcontainer counts the time of each alone and kills a hook at its
// own limit only, which would be too late, and who gives up a start reaches the
// container's processes, not its hooks. If their limits sum up to more, each has less
// in proportion.
func (s *Supervisor) startHooks(hooks []api.Hook) []timedHook {
	var out []timedHook
	var sum time.Duration
	for _, h := range hooks {
		if h.When == api.HookPoststop {
			continue
		}
		out = append(out, timedHook{h, hookLimit(h)})
		sum += hookLimit(h)
	}
	if all := s.startLimit() * 3 / 4; sum > all {
		for i := range out {
			out[i].limit = time.Duration(float64(out[i].limit) * float64(all) / float64(sum)).Truncate(time.Millisecond)
		}
	}
	return out
}

// writeBundle describes the container for its hooks: they are told of a directory,
// and look there for the OCI runtime's config.json.
func (s *Supervisor) writeBundle(spec *api.Container) error {
	if len(spec.Hooks) == 0 {
		return nil
	}
	out := specs.Spec{
		Version: specs.Version,
		Root:    &specs.Root{Path: spec.Rootfs, Readonly: spec.ReadonlyRootfs},
		Process: &specs.Process{
			Args: spec.Args, Env: spec.Env, Cwd: spec.Cwd, Terminal: spec.TTY,
			User: specs.User{UID: spec.UID, GID: spec.GID, AdditionalGids: spec.ExtraGIDs},
		},
	}
	for _, m := range spec.Mounts {
		options := slices.Clone(m.Options)
		if m.ReadOnly {
			options = append(options, "ro")
		}
		if m.Propagation != "" {
			options = append(options, m.Propagation)
		}
		if m.Type == "" || m.Type == "bind" {
			options = append(options, "rbind")
		}
		out.Mounts = append(out.Mounts, specs.Mount{Type: m.Type, Source: m.Source, Destination: m.Destination, Options: options})
	}
	b, err := json.Marshal(out)
	if err != nil {
		return err
	}
	return os.WriteFile(s.containerPath(spec.ID, "config.json"), b, 0o600) // read by its hooks alone, in this boot
}

// runHooks runs the container's hooks of one moment. With all, one that fails
// holds up none of the others.
func (s *Supervisor) runHooks(ctx context.Context, c *container, when string, status specs.ContainerState, pid int, all bool) error {
	hooks := s.startHooks(c.status.Container.Hooks)
	if when == api.HookPoststop {
		hooks = nil
		for _, h := range c.status.Container.Hooks {
			hooks = append(hooks, timedHook{h, hookLimit(h)})
		}
	}
	var errs []error
	for _, h := range hooks {
		if h.When != when {
			continue
		}
		err := runHook(ctx, h, specs.State{Version: specs.Version, ID: c.id, Status: status, Pid: pid, Bundle: s.containerPath(c.id)})
		if err == nil {
			continue
		}
		errs = append(errs, fmt.Errorf("%s hook %s: %w", when, h.Path, err))
		if !all {
			break
		}
	}
	return errors.Join(errs...)
}

// poststop runs the hooks that clean up behind the container. They may run twice,
// if podmon is killed in between.
func (s *Supervisor) poststop(c *container) {
	if err := s.runHooks(context.Background(), c, api.HookPoststop, specs.StateStopped, 0, true); err != nil {
		s.log.Warn("hooks of an ended container failed", "id", c.id, "name", c.status.Container.Name, "err", err)
	}
}

// runHook runs one hook and what it starts, and waits for its end.
func runHook(ctx context.Context, h timedHook, state specs.State) error {
	in, err := json.Marshal(state)
	if err != nil {
		return err
	}
	begun := time.Now()
	ctx, cancel := context.WithTimeout(ctx, h.limit)
	defer cancel()
	var out tail
	cmd := exec.CommandContext(ctx, h.Path)
	cmd.Args, cmd.Env = hookArgs(h.Hook), slices.Concat([]string{}, h.Env)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(in), &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return unix.Kill(-cmd.Process.Pid, unix.SIGKILL) }
	cmd.WaitDelay = time.Second
	err = cmd.Run()
	switch {
	case err == nil, errors.Is(err, exec.ErrWaitDelay): // what it left behind holds its output
		return nil
	case ctx.Err() != nil:
		limit := h.limit
		if spent := time.Since(begun); spent < limit { // the start's was over
			limit = spent.Truncate(time.Millisecond)
		}
		return fmt.Errorf("it ran for more than %s%s", limit, out.said())
	}
	return fmt.Errorf("%w%s", err, out.said())
}

// tail keeps the last of what is written to it.
type tail struct{ b []byte }

func (t *tail) Write(b []byte) (int, error) {
	t.b = append(t.b, b[max(0, len(b)-hookOutput):]...)
	t.b = t.b[max(0, len(t.b)-hookOutput):]
	return len(b), nil
}

func (t *tail) said() string {
	if text := strings.TrimSpace(string(t.b)); text != "" {
		return ": " + text
	}
	return ""
}
