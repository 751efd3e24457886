// Package agenttest has twins of what the agent works with: a runtime, an
// image store and a network that live in memory, behave as the real ones do,
// and can be made to fail.
package agenttest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime"
)

// Runtime is a podmon in memory. Containers run until they are made to exit.
// The zero value is not usable; see NewRuntime.
type Runtime struct {
	mu         sync.Mutex // guards all below
	sandboxes  map[string]*api.SandboxStatus
	containers map[string]*api.ContainerStatus
	streams    []chan api.Event
	pid        int
	log        []string
	execs      [][]string
	deadline   int64
	fenced     map[string]api.FencedPodStatus // the list, by the pods' UIDs

	// StartErr, when it returns an error or a start error, decides over a
	// start. Set it before use.
	StartErr func(c api.Container) (startError string, err error)
	// UpdateErr, when it returns an error, refuses an update. Set it before use.
	UpdateErr func(u api.Update) error
	// ExecFn answers an exec; default: exit code 0.
	ExecFn func(ctx context.Context, e api.Exec, io runtime.ExecIO) (int, error)
	// IgnoreTerm keeps containers from ending at their stop signal.
	IgnoreTerm func(c api.Container) bool
	// OnStart is called after a start, without the lock.
	OnStart func(c api.Container)
	// Lose, when it says so, does what is asked for and loses the answer, as a
	// podmon does that is killed in between. op is "sandbox" or "start".
	Lose func(op string) bool
	// Listed, if set, changes what List says of a container, or leaves it out by
	// false.
	Listed func(st *api.ContainerStatus) bool
}

// ErrLost is what a lost answer looks like.
var ErrLost = errors.New("connection to podmon is broken")

// Upgraded says that nothing was.
func (r *Runtime) Upgraded() runtime.Upgrade { return runtime.Upgrade{} }

func (r *Runtime) lost(op string) error {
	if r.Lose != nil && r.Lose(op) {
		return ErrLost
	}
	return nil
}

// NewRuntime returns an empty Runtime.
func NewRuntime() *Runtime {
	return &Runtime{sandboxes: map[string]*api.SandboxStatus{}, containers: map[string]*api.ContainerStatus{}, pid: 100}
}

func notFound(id string) error {
	return &api.Error{Code: api.CodeNotFound, Message: "no such id: " + id}
}

func exists(id string) error { return &api.Error{Code: api.CodeExists, Message: "id exists: " + id} }

func notRunning(id string) error {
	return &api.Error{Code: api.CodeNotRunning, Message: "not running: " + id}
}

// Calls lists what was asked for, in order: "start web", "signal web 15" ….
func (r *Runtime) Calls() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.log)
}

// Execs lists the commands that were run.
func (r *Runtime) Execs() [][]string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.execs)
}

func (r *Runtime) note(format string, args ...any) {
	r.log = append(r.log, fmt.Sprintf(format, args...))
}

func (r *Runtime) emit(e api.Event) {
	for i := 0; i < len(r.streams); i++ {
		select {
		case r.streams[i] <- e:
		default: // a reader too slow is cut off, as podmon does
			close(r.streams[i])
			r.streams = slices.Delete(r.streams, i, i+1)
			i--
		}
	}
}

// CreateSandbox implements pod.Runtime.
func (r *Runtime) CreateSandbox(_ context.Context, s api.Sandbox) (api.SandboxStatus, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sandboxes[s.ID] != nil {
		return api.SandboxStatus{}, exists(s.ID)
	}
	r.pid++
	st := &api.SandboxStatus{Sandbox: s, State: api.StateRunning, Pid: r.pid, CreatedAt: time.Now().UnixNano()}
	r.sandboxes[s.ID] = st
	r.note("sandbox %s %d", s.Name, s.Attempt)
	if err := r.lost("sandbox"); err != nil {
		return api.SandboxStatus{}, err
	}
	return *st, nil
}

// RemoveSandbox implements pod.Runtime.
func (r *Runtime) RemoveSandbox(_ context.Context, id string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for cid, c := range r.containers {
		if c.Container.SandboxID == id {
			r.exit(c, 137, false)
			delete(r.containers, cid)
		}
	}
	if s := r.sandboxes[id]; s != nil {
		r.note("remove sandbox %s", s.Sandbox.Name)
		delete(r.sandboxes, id)
	}
	return nil
}

// StartContainer implements pod.Runtime.
func (r *Runtime) StartContainer(_ context.Context, c api.Container) (api.ContainerStatus, error) {
	var startError string
	if r.StartErr != nil {
		var err error
		if startError, err = r.StartErr(c); err != nil {
			return api.ContainerStatus{}, err
		}
	}
	r.mu.Lock()
	s := r.sandboxes[c.SandboxID]
	var refused error
	switch {
	case s == nil:
		refused = notFound(c.SandboxID)
	case r.fenced[s.Sandbox.PodUID].Fenced:
		refused = &api.Error{Code: api.CodeFenced, Message: "the pod was fenced"}
	case s.State != api.StateRunning:
		refused = notRunning(c.SandboxID)
	case r.containers[c.ID] != nil:
		refused = exists(c.ID)
	}
	if refused != nil {
		r.mu.Unlock()
		return api.ContainerStatus{}, refused
	}
	r.pid++
	now := time.Now().UnixNano()
	st := &api.ContainerStatus{Container: c, State: api.StateRunning, Pid: r.pid, StartedAt: now}
	if startError != "" {
		st.State, st.ExitCode, st.StartError, st.FinishedAt = api.StateExited, 128, startError, now
	}
	r.containers[c.ID] = st
	r.note("start %s", c.Name)
	out := *st
	r.emit(api.Event{Kind: "containerStarted", ID: c.ID, Container: &out})
	r.mu.Unlock()
	if r.OnStart != nil {
		r.OnStart(c)
	}
	if err := r.lost("start"); err != nil {
		return api.ContainerStatus{}, err
	}
	return out, nil
}

func (r *Runtime) exit(c *api.ContainerStatus, code int, oom bool) {
	if c.State == api.StateExited {
		return
	}
	c.State, c.ExitCode, c.OOMKilled, c.FinishedAt = api.StateExited, code, oom, time.Now().UnixNano()
	if code > 128 {
		c.Signal = code - 128
	}
	out := *c
	r.emit(api.Event{Kind: "containerExited", ID: c.Container.ID, Container: &out})
}

// Exit ends the running container of that name.
func (r *Runtime) Exit(name string, code int) { r.end(name, code, false) }

// OOM ends the running container of that name for lack of memory.
func (r *Runtime) OOM(name string) { r.end(name, 137, true) }

func (r *Runtime) end(name string, code int, oom bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.containers {
		if c.Container.Name == name {
			r.exit(c, code, oom)
		}
	}
}

// KillPause ends the sandbox of the pod of that name.
func (r *Runtime) KillPause(podName string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.sandboxes {
		if s.Sandbox.Name == podName && s.State == api.StateRunning {
			s.State = api.StateExited
			out := *s
			r.emit(api.Event{Kind: "sandboxExited", ID: s.Sandbox.ID, Sandbox: &out})
		}
	}
}

// Forget makes all containers and sandboxes vanish without a word, as a boot
// does.
func (r *Runtime) Forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	clear(r.sandboxes)
	clear(r.containers)
}

// Break closes all event streams.
func (r *Runtime) Break() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.streams {
		close(s)
	}
	r.streams = nil
}

// Signal implements pod.Runtime.
func (r *Runtime) Signal(_ context.Context, s api.Signal) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.containers[s.ID]
	if c == nil {
		return notFound(s.ID)
	}
	if c.State != api.StateRunning {
		return notRunning(s.ID)
	}
	r.note("signal %s %d", c.Container.Name, s.Signal)
	if s.Signal == 9 || r.IgnoreTerm == nil || !r.IgnoreTerm(c.Container) {
		r.exit(c, 128+s.Signal, false)
	}
	return nil
}

// RemoveContainer implements pod.Runtime.
func (r *Runtime) RemoveContainer(_ context.Context, id string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.containers[id]
	if c == nil {
		return nil
	}
	if c.State == api.StateRunning {
		return &api.Error{Code: api.CodeBusy, Message: "container is running"}
	}
	delete(r.containers, id)
	return nil
}

// Fence implements fence.Podmon. Its deadlines are never reached by time alone.
func (r *Runtime) Fence(_ context.Context, f api.Fence) (api.FenceStatus, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if f.Deadline != 0 {
		r.deadline = f.Deadline
	}
	if len(f.Add) > 0 && r.deadline <= 1 {
		return api.FenceStatus{}, &api.Error{Code: api.CodeFenced, Message: "no deadline"}
	}
	if r.fenced == nil {
		r.fenced = map[string]api.FencedPodStatus{}
	}
	for _, uid := range f.Drop {
		delete(r.fenced, uid)
	}
	for _, p := range f.Add {
		r.fenced[p.UID] = api.FencedPodStatus{UID: p.UID}
	}
	st := api.FenceStatus{Deadline: r.deadline}
	for uid, p := range r.fenced {
		if r.deadline == 1 && !p.Fenced { // a nanosecond after the boot
			p.Fenced, p.Ended = true, true
			r.fenced[uid] = p
			for _, c := range r.containers {
				if s := r.sandboxes[c.Container.SandboxID]; s != nil && s.Sandbox.PodUID == uid {
					r.exit(c, 137, false)
				}
			}
			r.emit(api.Event{Kind: api.EventFenced, ID: uid})
		}
		st.Pods = append(st.Pods, p)
	}
	return st, nil
}

// Ping implements pod.Runtime.
func (r *Runtime) Ping(context.Context) error { return nil }

// List implements pod.Runtime.
func (r *Runtime) List(context.Context) ([]api.SandboxStatus, []api.ContainerStatus, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var s []api.SandboxStatus
	var c []api.ContainerStatus
	for _, x := range r.sandboxes {
		s = append(s, *x)
	}
	for _, x := range r.containers {
		if st := *x; r.Listed == nil || r.Listed(&st) {
			c = append(c, st)
		}
	}
	return s, c, nil
}

// Events implements pod.Runtime.
func (r *Runtime) Events(ctx context.Context) (<-chan api.Event, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	ch := make(chan api.Event, 256)
	r.streams = append(r.streams, ch)
	context.AfterFunc(ctx, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		if i := slices.Index(r.streams, ch); i >= 0 {
			close(ch)
			r.streams = slices.Delete(r.streams, i, i+1)
		}
	})
	return ch, nil
}

// Exec implements pod.Runtime.
func (r *Runtime) Exec(ctx context.Context, e api.Exec, eio runtime.ExecIO) (int, error) {
	r.mu.Lock()
	var refused error
	if c := r.containers[e.ContainerID]; c == nil {
		refused = notFound(e.ContainerID)
	} else if c.State != api.StateRunning {
		refused = notRunning(e.ContainerID)
	} else {
		r.execs = append(r.execs, e.Args)
	}
	fn := r.ExecFn
	r.mu.Unlock()
	if refused != nil {
		return 0, refused
	}
	if fn == nil {
		return 0, nil
	}
	return fn(ctx, e, eio)
}

// Attach waits for the container's end.
func (r *Runtime) Attach(ctx context.Context, _ string, _ runtime.ExecIO, _ bool) error {
	<-ctx.Done()
	return ctx.Err()
}

// Update implements pod.Runtime: what is not 0 replaces what was set before.
func (r *Runtime) Update(_ context.Context, u api.Update) error {
	if r.UpdateErr != nil {
		if err := r.UpdateErr(u); err != nil {
			return err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	c, s := r.containers[u.ID], r.sandboxes[u.ID]
	var have *api.Resources
	switch {
	case c != nil && c.State != api.StateRunning:
		return notRunning(u.ID)
	case c != nil:
		have = &c.Container.Resources
		r.note("update %s", c.Container.Name)
	case s != nil:
		have = &s.Sandbox.PodResources
		r.note("update sandbox %s", s.Sandbox.Name)
	default:
		return notFound(u.ID)
	}
	for _, f := range []struct{ to, from *int64 }{
		{&have.CPUQuota, &u.Resources.CPUQuota}, {&have.MemoryLimit, &u.Resources.MemoryLimit}, {&have.PidsLimit, &u.Resources.PidsLimit},
	} {
		if *f.from != 0 {
			*f.to = *f.from
		}
	}
	for _, f := range []struct{ to, from *uint64 }{
		{&have.CPUShares, &u.Resources.CPUShares}, {&have.CPUPeriod, &u.Resources.CPUPeriod},
	} {
		if *f.from != 0 {
			*f.to = *f.from
		}
	}
	if u.Resources.CpusetCpus != "" {
		have.CpusetCpus = u.Resources.CpusetCpus
	}
	return nil
}

// Resources are the limits of the running container of that name, or of the
// sandbox of the pod of that name.
func (r *Runtime) Resources(name string) api.Resources {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.containers {
		if c.Container.Name == name && c.State == api.StateRunning {
			return c.Container.Resources
		}
	}
	for _, s := range r.sandboxes {
		if s.Sandbox.Name == name && s.State == api.StateRunning {
			return s.Sandbox.PodResources
		}
	}
	return api.Resources{}
}

// Counts says how many sandboxes and containers there are.
func (r *Runtime) Counts() (sandboxes, containers int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.sandboxes), len(r.containers)
}
