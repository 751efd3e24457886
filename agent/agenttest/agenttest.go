// Package agenttest has twins of what the agent works with: a runtime, an
// image store and a network that live in memory, behave as the real ones do,
// and can be told to fail.
package agenttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	ocispec "github.com/google/go-containerregistry/pkg/v1"

	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/agent/runtime"
	"github.com/clusterd/clusterd/agent/users"
)

// Runtime is a podmon in memory. Containers run until they are told to exit.
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
		c = append(c, *x)
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

// Images is an image store in memory.
type Images struct {
	Dir string // root file systems are made here; required

	mu     sync.Mutex // guards all below
	images map[string]image.Image
	mounts map[string]bool
	// volumes are mounted images, by owner and name.
	volumes map[string]map[string]image.Image
	// PullErr decides over pulls of images that are not here; nil: they
	// appear.
	PullErr func(ctx context.Context, ref string) error
	// Damaged says which images are found to be damaged; they go then.
	Damaged func(id string) bool
}

// Add puts an image there.
func (s *Images) Add(ref string, cfg ocispec.Config) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.images == nil {
		s.images = map[string]image.Image{}
	}
	s.images[ref] = image.Image{ID: "sha256:" + fmt.Sprintf("%064x", len(s.images)+1), Refs: []string{ref}, Size: 1000, Config: cfg}
}

// Get implements pod.Images.
func (s *Images) Get(ref string) (image.Image, bool, error) {
	if ref == "Bad Name" {
		return image.Image{}, false, fmt.Errorf("%w: %q", image.ErrInvalidName, ref)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i, ok := s.images[ref]
	return i, ok, nil
}

// Ensure implements pod.Images.
func (s *Images) Ensure(ctx context.Context, ref string, auth image.Auth) (image.Image, error) {
	if i, ok, err := s.Get(ref); ok || err != nil {
		return i, err
	}
	return s.Pull(ctx, ref, auth)
}

// Pull implements pod.Images.
func (s *Images) Pull(ctx context.Context, ref string, _ image.Auth) (image.Image, error) {
	if s.PullErr != nil {
		if err := s.PullErr(ctx, ref); err != nil {
			return image.Image{}, err
		}
	}
	s.Add(ref, ocispec.Config{Entrypoint: []string{"/app"}})
	i, _, err := s.Get(ref)
	return i, err
}

// Verify implements pod.Images.
func (s *Images) Verify(_ context.Context, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Damaged == nil || !s.Damaged(id) {
		return nil
	}
	for ref, img := range s.images {
		if img.ID == id {
			delete(s.images, ref)
		}
	}
	return fmt.Errorf("%w: layer 3", image.ErrDamaged)
}

// Mount implements pod.Images.
func (s *Images) Mount(_ context.Context, _ image.Image, id string) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mounts == nil {
		s.mounts = map[string]bool{}
	}
	s.mounts[id] = true
	p := filepath.Join(s.Dir, id)
	return p, os.MkdirAll(p, 0o755)
}

// MountMapped implements pod.Images.
func (s *Images) MountMapped(ctx context.Context, img image.Image, id string, _ *os.File) (string, error) {
	return s.Mount(ctx, img, id)
}

// TryMapped implements agent.Images: it can.
func (s *Images) TryMapped(*os.File) error { return nil }

// Unmount implements pod.Images.
func (s *Images) Unmount(_ context.Context, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mounts, id)
	return os.RemoveAll(filepath.Join(s.Dir, id))
}

// VolumePath is where an image would be mounted as a volume.
func (s *Images) VolumePath(owner, name string) string {
	return filepath.Join(s.Dir, "volumes", owner, name)
}

// MountVolumeMapped implements pod.Images.
func (s *Images) MountVolumeMapped(ctx context.Context, img image.Image, owner, name string, _ *os.File) (string, error) {
	return s.MountVolume(ctx, img, owner, name)
}

// MountVolume implements pod.Images.
func (s *Images) MountVolume(_ context.Context, img image.Image, owner, name string) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.volumes == nil {
		s.volumes = map[string]map[string]image.Image{}
	}
	if s.volumes[owner] == nil {
		s.volumes[owner] = map[string]image.Image{}
	}
	s.volumes[owner][name] = img
	p := s.VolumePath(owner, name)
	return p, os.MkdirAll(p, 0o755)
}

// Volume implements pod.Images.
func (s *Images) Volume(owner, name string) (image.Image, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	img, ok := s.volumes[owner][name]
	return img, ok, nil
}

// UnmountVolumes implements pod.Images.
func (s *Images) UnmountVolumes(_ context.Context, owner string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.volumes, owner)
	return os.RemoveAll(filepath.Join(s.Dir, "volumes", owner))
}

// VolumeOwners implements pod.Images.
func (s *Images) VolumeOwners() ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.volumes)), nil
}

// Mounts lists the ids that are mounted.
func (s *Images) Mounts() ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for id := range s.mounts {
		out = append(out, id)
	}
	slices.Sort(out)
	return out, nil
}

// Network hands out addresses and connects nothing.
type Network struct {
	mu        sync.Mutex // guards all below
	attached  map[string]netip.Addr
	published map[string][]podstate.HostPort
	limits    map[string][2]uint64
	users     map[string]users.Range
	next      netip.Addr
	// Err is returned by Attach.
	Err error
	// SlowDetach is how long Detach takes. Set it before the agent runs.
	SlowDetach time.Duration
}

// SetErr makes Attach fail, or work again.
func (n *Network) SetErr(err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.Err = err
}

// Attach implements pod.Network.
func (n *Network) Attach(_ context.Context, uid string, hostNetwork bool) (string, []netip.Addr, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if hostNetwork { // nothing of it can fail
		return "", []netip.Addr{netip.MustParseAddr("192.0.2.1")}, nil
	}
	if n.Err != nil {
		return "", nil, n.Err
	}
	if n.attached == nil {
		n.attached, n.next = map[string]netip.Addr{}, netip.MustParseAddr("10.42.0.2")
	}
	if _, ok := n.attached[uid]; !ok {
		n.attached[uid] = n.next
		n.next = n.next.Next()
	}
	return "/run/netns/" + uid, []netip.Addr{n.attached[uid]}, nil
}

// AttachUsers implements pod.Network.
func (n *Network) AttachUsers(ctx context.Context, uid string, ids users.Range) (string, []netip.Addr, error) {
	n.mu.Lock()
	if n.users == nil {
		n.users = map[string]users.Range{}
	}
	n.users[uid] = ids
	n.mu.Unlock()
	return n.Attach(ctx, uid, false)
}

// UsersOf are the ids that the pod was last attached with.
func (n *Network) UsersOf(uid string) users.Range {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.users[uid]
}

// Users implements pod.Network: it opens nothing of use.
func (n *Network) Users(string) (*os.File, error) { return os.Open(os.DevNull) }

// Detach implements pod.Network.
func (n *Network) Detach(ctx context.Context, uid string) error {
	if n.SlowDetach > 0 {
		select {
		case <-time.After(n.SlowDetach):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.published, uid)
	delete(n.limits, uid)
	delete(n.attached, uid)
	return nil
}

// Live implements pod.Network.
func (n *Network) Live(_ context.Context, uids []string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	for u := range n.attached {
		if !slices.Contains(uids, u) {
			delete(n.attached, u)
		}
	}
	return nil
}

// Publish notes the ports; Detach drops them.
func (n *Network) Publish(_ context.Context, uid string, _ []netip.Addr, ports []podstate.HostPort) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.published == nil {
		n.published = map[string][]podstate.HostPort{}
	}
	n.published[uid] = ports
	return nil
}

// Limit notes the bounds; Detach drops them.
func (n *Network) Limit(_ context.Context, uid string, in, out uint64) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.limits == nil {
		n.limits = map[string][2]uint64{}
	}
	n.limits[uid] = [2]uint64{in, out}
	return nil
}

// Limits are what the pod may receive and send, in bits a second.
func (n *Network) Limits(uid string) [2]uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.limits[uid]
}

// Published are the ports that lead to the pod.
func (n *Network) Published(uid string) []podstate.HostPort {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.published[uid]
}

// Attached counts the pods that are connected.
func (n *Network) Attached() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.attached)
}

// Dial refuses.
func (n *Network) Dial(context.Context, string, bool, int32) (net.Conn, error) {
	return nil, errors.New("agenttest: nothing listens here")
}

// Run waits for ctx.
func (n *Network) Run(ctx context.Context) error { <-ctx.Done(); return nil }

// Ready is always true.
func (n *Network) Ready() (bool, string) { return true, "" }

// OnReady never calls.
func (n *Network) OnReady(func()) {}

// Mounter makes no mounts, and remembers which were asked for.
type Mounter struct {
	mu sync.Mutex
	at map[string]bool
}

// Hugetlbfs implements volume.Mounter.
func (m *Mounter) Hugetlbfs(target string, _ int64) error { return m.mount(target) }

// Tmpfs implements volume.Mounter.
func (m *Mounter) Tmpfs(target string, _ int64) error { return m.mount(target) }

// Bind implements volume.Mounter.
func (m *Mounter) Bind(_ *os.File, target string) error { return m.mount(target) }

func (m *Mounter) mount(target string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.at == nil {
		m.at = map[string]bool{}
	}
	m.at[target] = true
	return nil
}

// Unmount implements volume.Mounter.
func (m *Mounter) Unmount(target string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.at, target)
	return nil
}

// Mounted implements volume.Mounter.
func (m *Mounter) Mounted(dir string) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.at[dir], nil
}

// Below implements volume.Mounter.
func (m *Mounter) Below(dir string) ([]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for p := range m.at {
		if p == dir || len(p) > len(dir) && p[:len(dir)+1] == dir+"/" {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b string) int { return len(b) - len(a) })
	return out, nil
}
