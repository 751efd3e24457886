package pod

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podspec"
	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/apis/core"
)

// Deadlines of operations. A thing that takes longer is given up, reported in the
// status, and tried again after its back-off. A pull has none: how long a slow
// line takes for a large image is not known, and the image store ends one for which
// nothing comes any more.
const (
	sandboxDeadline  = time.Minute
	volumeDeadline   = 2 * time.Minute
	authDeadline     = 2 * time.Minute // to find out with which credentials to pull
	createDeadline   = time.Minute
	httpHookDeadline = 10 * time.Minute // a postStart command or sleep has the pod's life
	teardownDeadline = 2 * time.Minute
	apiDeadline      = 30 * time.Second
)

// worker serves one pod from its first sight to its end. Its loop is the only
// goroutine that touches the fields below mu's; all others talk to it by send.
type worker struct {
	unread []ended // run reads their messages
	m      *Manager
	uid    types.UID
	// static: the pod is the node's own, and the API only mirrors it. Set
	// before the loop runs.
	static bool

	mu    sync.Mutex // guards inbox
	inbox []func()

	removed bool          // the watch has shown its end; guarded by Manager.mu
	poke    chan struct{} // capacity 1

	view atomic.Pointer[View] // what others may see, replaced at every turn

	// Owned by the loop.
	ctx             context.Context // of the agent's run
	pod             *v1.Pod
	gone            bool
	obs             podstate.Observed
	ops             map[string]*operation          // by container
	images          map[string]image.Image         // by container, of the last pull
	exits           map[string]chan struct{}       // by instance ID, closed at its exit
	early           map[string]api.ContainerStatus // exits that came before their start's answer
	probes          map[string]*probing            // by instance ID
	backOffReported map[string]string              // by container: instance whose back-off has an event
	// backedOff is, by container or "volume/" and a volume's name, the image
	// fault whose back-off was reported.
	backedOff map[string]*podstate.Fault
	// volumePulls are the image volumes that are being pulled, by name.
	volumePulls map[string]context.CancelFunc
	preparing   context.CancelFunc   // of devices; nil: none are being prepared
	making      string               // ID of the sandbox that is being created
	starting    map[string]string    // by container: ID of the instance that is being started
	verified    map[string]time.Time // by image: when it was found whole after a failed start
	since       time.Time            // first sight, for the start metric
	ran         bool                 // the start metric was taken
	status      statusState
	mirror      mirrorState // of a static pod
	end         endState    // of a static pod
	shutdown    bool        // the pod ended because the machine goes down; set before the loop runs, or by it
	again       bool        // it is a static one that is to begin again
	unconfirmed atomic.Bool // it was started without the API, which has not shown it since
	dropped     bool        // it was, and the API's list did not have it; guarded by the manager's mu
	span        spanState
	fresh       refreshState
	wg          sync.WaitGroup // operations under way

	left     chan struct{} // closed, once, when nothing of the pod is left on the node
	leftOnce sync.Once
}

// operation is something under way for a container.
type operation struct{ cancel context.CancelFunc }

// View is what the rest of the node may know of a pod.
type View struct {
	Pod        *v1.Pod
	MirrorUID  types.UID // what the API calls a static pod
	Status     *v1.PodStatus
	SandboxID  string
	Containers map[string]ContainerView
}

// ContainerView is the newest instance of a container.
type ContainerView struct {
	ID       string
	Running  bool
	Made     bool
	Attempt  uint32
	Previous *uint32         // attempt of the instance before
	Exited   <-chan struct{} // closed at the exit; nil: not running
}

func newWorker(m *Manager, pod *v1.Pod, gone bool, rec podstate.Records) *worker {
	w := &worker{
		m: m, uid: pod.UID, poke: make(chan struct{}, 1), left: make(chan struct{}), pod: pod, gone: gone, since: time.Now(),
		ops: map[string]*operation{}, images: map[string]image.Image{}, exits: map[string]chan struct{}{},
		early: map[string]api.ContainerStatus{}, probes: map[string]*probing{}, backOffReported: map[string]string{},
		backedOff: map[string]*podstate.Fault{}, starting: map[string]string{}, verified: map[string]time.Time{}, volumePulls: map[string]context.CancelFunc{},
	}
	// The caller holds the manager's lock: files are read by run.
	w.obs = podstate.Seed(pod, rec, w.since, func(st api.ContainerStatus, spec *v1.Container) string {
		w.unread = append(w.unread, ended{st, spec})
		return ""
	})
	w.obs.ReadOnlyTrees = podspec.ReadOnlyTrees()
	w.obs.Devices.Held = m.cfg.Devices != nil && m.cfg.Devices.Held(pod.UID)
	if w.obs.StartedAt.IsZero() {
		w.obs.StartedAt = w.since
	}
	w.status.stored = &pod.Status
	for _, c := range w.obs.Containers {
		if c.Running() {
			w.exits[c.Now.ID] = make(chan struct{})
		}
	}
	w.setView(&pod.Status) // found from the first moment
	return w
}

// ended is a container that had ended before this agent began.
type ended struct {
	status api.ContainerStatus
	spec   *v1.Container
}

// readWords fills in what the containers said that ended before this agent
// began.
func (w *worker) readWords() {
	for _, u := range w.unread {
		c := w.obs.Containers[u.status.Container.Name]
		if c == nil {
			continue
		}
		for _, i := range []*podstate.Instance{c.Now, c.Last} {
			if i != nil && i.ID == u.status.Container.ID && i.Message == "" {
				i.Message = lastWords(u.status, u.spec)
			}
		}
	}
	w.unread = nil
}

// send gives the loop something to do on its own goroutine. It never blocks.
func (w *worker) send(fn func()) {
	w.mu.Lock()
	w.inbox = append(w.inbox, fn)
	w.mu.Unlock()
	select {
	case w.poke <- struct{}{}:
	default:
	}
}

// run is the loop. It returns when the pod is finished or ctx ends; in both
// cases nothing that it started is left.
func (w *worker) run(ctx context.Context) {
	log := klog.FromContext(ctx).WithValues("pod", klog.KObj(w.pod), "uid", w.uid)
	ctx, cancel := context.WithCancel(klog.NewContext(ctx, log))
	defer w.leftOnce.Do(func() { close(w.left) }) // it ends: who waits for it waits for no more
	defer w.wg.Wait()
	defer cancel()
	w.ctx = ctx
	w.m.cfg.Objects.Acquire(w.uid, w.refs())
	w.readWords()
	for _, c := range w.obs.Containers {
		if c.Running() {
			w.startProbes(c)
		}
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		w.mu.Lock()
		todo := w.inbox
		w.inbox = nil
		w.mu.Unlock()
		for _, fn := range todo {
			fn()
		}
		wake := w.turn()
		w.afterShutdown()
		if w.obs.Finished && len(w.ops) == 0 {
			return
		}
		if wake.IsZero() {
			timer.Stop()
		} else {
			timer.Reset(time.Until(wake))
		}
		select {
		case <-ctx.Done():
			return
		case <-w.poke:
		case <-timer.C:
		}
	}
}

// turn tells the status, plans, and begins the steps. It returns when it
// wants to be called again at the latest.
func (w *worker) turn() time.Time {
	now := time.Now()
	defer w.beginTurn()()
	wake := w.publish(now)
	sooner := func(t time.Time) {
		if !t.IsZero() && (wake.IsZero() || t.Before(wake)) {
			wake = t
		}
	}
	for _, s := range podstate.Plan(podstate.Desired{Pod: w.pod, Gone: w.gone}, w.obs, now) {
		if s, ok := s.(podstate.Wait); ok {
			sooner(s.Until)
			continue
		}
		w.begin(s)
	}
	sooner(w.tellBackOffs(now))
	sooner(w.slowOps(now))
	sooner(w.refreshDue(now))
	workerSeconds.WithLabelValues("sync").Observe(time.Since(now).Seconds())
	return wake
}

// begin starts one step.
func (w *worker) begin(s podstate.Step) {
	w.span.step = stepName(s)
	defer func() { w.span.step = "" }()
	switch s := s.(type) {
	case podstate.SetupVolumes:
		w.setupVolumes()
	case podstate.PrepareDevices:
		w.prepareDevices()
	case podstate.CancelDevices:
		if w.preparing != nil {
			w.preparing()
		}
	case podstate.ReleaseDevices:
		w.releaseDevices()
	case podstate.CreateSandbox:
		w.createSandbox(s.Attempt)
	case podstate.RemoveSandbox:
		w.removeSandbox(s.ID)
	case podstate.EndStray:
		w.endStray(s.ID)
	case podstate.Pull:
		w.pull(w.obs.Containers[s.Container], w.spec(s.Container))
	case podstate.Start:
		w.startContainer(w.obs.Containers[s.Container], s.Attempt)
	case podstate.PullVolume:
		w.pullVolume(s.Volume)
	case podstate.CancelVolume:
		if cancel := w.volumePulls[s.Volume]; cancel != nil {
			cancel()
		}
	case podstate.Stop:
		w.stopContainer(w.obs.Containers[s.Container], s)
	case podstate.Cancel:
		if op := w.ops[s.Container]; op != nil {
			op.cancel()
		}
	case podstate.Grant:
		w.grant()
	case podstate.Resize:
		w.resize()
	case podstate.Fail:
		w.fail(s.Verdict)
	case podstate.Teardown:
		w.teardown()
	case podstate.Finish:
		w.finish()
	default:
		panic(fmt.Sprintf("pod worker: unknown step %T", s))
	}
}

// fail sets the verdict, once.
func (w *worker) fail(v podstate.Verdict) {
	if w.obs.Verdict != nil {
		return
	}
	w.obs.Verdict = &v
	w.event(v1.EventTypeWarning, v.Reason, "%s", v.Message)
	w.send(func() {})
}

// operate runs fn for a container on a goroutine of its own; what fn returns
// is applied by the loop. At most one operation per container counts: a newer
// one cancels and replaces the older, whose result is then ignored.
func (w *worker) operate(c *podstate.Container, kind podstate.Op, fn func(ctx context.Context) (apply func())) {
	if old := w.ops[c.Name]; old != nil {
		old.cancel()
	}
	ctx, cancel := context.WithCancel(w.ctx)
	op := &operation{cancel}
	w.ops[c.Name] = op
	c.Op, c.OpSince = kind, time.Now()
	ctx, ended := w.traced(ctx)
	w.wg.Go(func() {
		defer cancel()
		apply := fn(ctx)
		ended()
		w.send(func() {
			if w.ops[c.Name] != op {
				return
			}
			delete(w.ops, c.Name)
			c.Op, c.StopGrace, c.Stop = podstate.OpNone, 0, podstate.StopStage{}
			apply()
		})
	})
}

// background runs fn on a goroutine with a deadline; apply runs in the loop.
func (w *worker) background(deadline time.Duration, fn func(ctx context.Context) (apply func())) {
	ctx, cancel := context.WithTimeout(w.ctx, deadline)
	ctx, ended := w.traced(ctx)
	w.wg.Go(func() {
		defer cancel()
		apply := fn(ctx)
		ended()
		w.send(apply)
	})
}

// setPod takes a newer version of the API object.
func (w *worker) setPod(pod *v1.Pod) {
	if !newer(pod, w.pod) {
		return
	}
	old := w.pod
	w.pod = pod
	for _, spec := range podstate.AllContainers(&pod.Spec) {
		if w.obs.Containers[spec.Name] == nil {
			w.obs.Containers[spec.Name] = &podstate.Container{Name: spec.Name}
		}
	}
	ours := w.status.built != nil && core.FinalPhase(w.status.built.Phase)
	if core.FinalPhase(pod.Status.Phase) && !ours && !w.static && !w.obs.Final && w.obs.EndedAs == "" {
		// Another writer (taint eviction, garbage collection) says that the pod has
		// ended. Its controller has made another one: this one must not run on.
		w.obs.EndedAs = pod.Status.Phase
	}
	if f := w.obs.ResizePending; f != nil {
		f.RetryAt = time.Time{} // it may ask for something else now
	}
	if !podstate.SameStatus(&pod.Status, w.status.stored) && !w.status.writing {
		w.status.stored = &pod.Status // another writer changed it: put it right
	}
	if !maps.Equal(old.Labels, pod.Labels) || !maps.Equal(old.Annotations, pod.Annotations) {
		w.refresh()
	}
	if len(pod.Spec.EphemeralContainers) != len(old.Spec.EphemeralContainers) {
		w.m.cfg.Objects.Acquire(w.uid, w.refs())
	}
}

// setGone tells that the API has no such pod any more.
func (w *worker) setGone() { w.gone = true }

// spec is a container as the node has granted it.
func (w *worker) spec(name string) *v1.Container {
	for _, c := range podstate.AllContainers(&podstate.Granted(w.pod, w.obs.Allocated).Spec) {
		if c.Name == name {
			return c
		}
	}
	return nil
}

func (w *worker) kind(name string) podstate.Kind {
	for i := range w.pod.Spec.InitContainers {
		if c := &w.pod.Spec.InitContainers[i]; c.Name == name {
			return podstate.InitKind(c)
		}
	}
	for i := range w.pod.Spec.Containers {
		if w.pod.Spec.Containers[i].Name == name {
			return podstate.KindApp
		}
	}
	return podstate.KindEphemeral
}

// tellBackOffs makes one event per instance that has to wait.
func (w *worker) tellBackOffs(now time.Time) (wake time.Time) {
	if podstate.Ending(podstate.Desired{Pod: w.pod, Gone: w.gone}, w.obs) {
		return wake
	}
	pull := func(key string, f *podstate.Fault, ref string, tell func(kind, reason, format string, args ...any)) {
		if f == nil || f.Reason != "ErrImagePull" {
			return
		}
		switch turns := f.At.Add(podstate.ErrImagePullShown); { // the status turns then
		case turns.After(now):
			if wake.IsZero() || turns.Before(wake) {
				wake = turns
			}
		case w.backedOff[key] != f:
			w.backedOff[key] = f
			tell(v1.EventTypeNormal, "BackOff", "Back-off pulling image %q", ref)
			tell(v1.EventTypeWarning, "Failed", "Error: ImagePullBackOff")
		}
	}
	for name, v := range w.obs.ImageVolumes {
		if !v.Busy {
			pull("volume/"+name, v.Err, podstate.ImageSource(&w.pod.Spec, name).Reference, w.event)
		}
	}
	for name, c := range w.obs.Containers {
		if c.Op == podstate.OpNone {
			pull(name, c.ImageErr, c.ImageRef, func(kind, reason, format string, args ...any) {
				w.containerEvent(name, kind, reason, format, args...)
			})
		}
		if c.Now == nil || c.Now.Running || c.Op != podstate.OpNone || c.BackOff == 0 || w.backOffReported[name] == c.Now.ID || !now.Before(podstate.RestartAt(c)) {
			continue
		}
		if spec := w.spec(name); spec != nil && podstate.WillRestart(&w.pod.Spec, spec, w.kind(name), c) {
			w.backOffReported[name] = c.Now.ID
			w.containerEvent(name, v1.EventTypeWarning, "BackOff", "Back-off restarting failed container %s in pod %s_%s(%s)",
				name, w.pod.Name, w.pod.Namespace, w.pod.UID)
		}
	}
	return wake
}

// slowOps asks for a turn when an operation gets long enough to be named in
// the status.
func (w *worker) slowOps(now time.Time) (wake time.Time) {
	named := func(since time.Time) {
		if t := since.Add(podstate.SlowAfter); t.After(now) && (wake.IsZero() || t.Before(wake)) {
			wake = t
		}
	}
	for _, c := range w.obs.Containers {
		if c.Op != podstate.OpNone {
			named(c.OpSince)
		}
	}
	for _, v := range w.obs.ImageVolumes {
		if v.Busy {
			named(v.Since)
		}
	}
	if s := w.obs.Sandbox.State; s == podstate.SandboxCreating || s == podstate.SandboxRemoving {
		named(w.obs.Sandbox.Since)
	}
	if w.obs.TearingDown {
		named(w.obs.TeardownSince)
	}
	if v := w.obs.Volumes; v.Busy && !v.Ready {
		named(v.Since)
	}
	if d := w.obs.Devices; d.Preparing || d.Releasing {
		named(d.Since)
	}
	return wake
}

func (w *worker) event(kind, reason, format string, args ...any) {
	w.m.cfg.Recorder.Eventf(w.ref(""), kind, reason, format, args...)
}

func (w *worker) containerEvent(name, kind, reason, format string, args ...any) {
	path := "spec.containers{" + name + "}"
	switch w.kind(name) {
	case podstate.KindInit, podstate.KindSidecar:
		path = "spec.initContainers{" + name + "}"
	case podstate.KindEphemeral:
		path = "spec.ephemeralContainers{" + name + "}"
	}
	w.m.cfg.Recorder.Eventf(w.ref(path), kind, reason, format, args...)
}

// ref names the pod as the API knows it.
func (w *worker) ref(fieldPath string) *v1.ObjectReference {
	if w.static && w.mirror.pod != nil {
		return podRef(w.mirror.pod, fieldPath)
	}
	return podRef(w.pod, fieldPath)
}

// podRef names a pod, or a container of it, in an event.
func podRef(pod *v1.Pod, fieldPath string) *v1.ObjectReference {
	return &v1.ObjectReference{
		APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID,
		ResourceVersion: pod.ResourceVersion, FieldPath: fieldPath,
	}
}
