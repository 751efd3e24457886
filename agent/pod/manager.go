package pod

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"os"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace/noop"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/object"
	"github.com/clusterd/clusterd/agent/podspec"
	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/apis/core"
)

type sandboxIPs = []netip.Addr

// Manager runs one worker for each pod of this node and feeds them: the API's
// watch, podmon's events, changed ConfigMaps and Secrets.
type Manager struct {
	cfg  Config
	spec *podspec.Builder

	starts chan struct{} // a token per sandbox or container start under way
	writes chan struct{} // a token per status write under way

	pins    chan struct{} // asks keepPinned for another look
	pinning sync.Mutex    // one pass of pin at a time; taken before mu

	seen  chan struct{}   // closed when the API's list has been seen, and all sources of static pods
	taken chan struct{}   // closed when the API's list has been taken
	stale map[string]bool // root file systems mounted before Run; not changed after

	staticRead chan struct{} // closed when every source of static pods has been read

	taking sync.Mutex // guards the giving of ids to pods

	mu         sync.Mutex // guards all below
	ctx        context.Context
	workers    map[types.UID]*worker
	ended      map[types.UID]bool    // finished here, not yet gone from the watch
	static     map[types.UID]*v1.Pod // as last read from their sources
	mirrors    map[string]*v1.Pod    // as the API has them, by namespace/name
	staticSeen bool                  // staticRead is closed
	admitted   map[types.UID]*v1.Pod // who holds a part of the node, as granted
	deferred   map[types.UID]bool    // who waits for a larger part of the node
	records    map[types.UID]*podstate.Records
	routes     map[string]types.UID  // sandbox ID → pod
	awaiting   map[types.UID]*v1.Pod // new here, not admitted until the Node has been read again
	behind     map[types.UID]*v1.Pod // new here, wait for an unconfirmed pod: see standsBehind
	listing    int                   // lists of the runtime under way
	unrouted   map[string]bool       // sandboxes forgotten meanwhile: such a list may still hold them
	shares     map[string]uint64     // of the class cgroups, as last set
	synced     bool                  // the API's list has been seen
	fault      string                // why podmon's events cannot be had, "": they can
	hung       string                // why it does not answer otherwise, "": it does
	shutdown   bool                  // the machine is about to go down
	wg         sync.WaitGroup
}

// NewManager returns a Manager; it starts nothing.
func NewManager(cfg Config) *Manager {
	if cfg.Parallel <= 0 {
		cfg.Parallel = 16
	}
	if cfg.Tracer == nil {
		cfg.Tracer = noop.NewTracerProvider().Tracer("")
	}
	if cfg.ClusterDomain == "" {
		cfg.ClusterDomain = "cluster.local"
	}
	return &Manager{
		cfg: cfg,
		spec: &podspec.Builder{
			NodeName: cfg.NodeName, NodeIPs: cfg.NodeIPs, Node: cfg.Node, Volumes: cfg.Volumes, Objects: cfg.Objects, PodDir: cfg.PodDir, LogDir: cfg.LogDir,
			ResolvConf: cfg.ResolvConf, ClusterDNS: cfg.ClusterDNS, ClusterDomain: cfg.ClusterDomain, NoCluster: cfg.Client == nil,
		},
		starts: make(chan struct{}, cfg.Parallel), writes: make(chan struct{}, 16), seen: make(chan struct{}), taken: make(chan struct{}), pins: make(chan struct{}, 1), stale: map[string]bool{},
		workers: map[types.UID]*worker{}, ended: map[types.UID]bool{}, admitted: map[types.UID]*v1.Pod{}, deferred: map[types.UID]bool{}, awaiting: map[types.UID]*v1.Pod{}, behind: map[types.UID]*v1.Pod{},
		static: map[types.UID]*v1.Pod{}, mirrors: map[string]*v1.Pod{}, staticRead: make(chan struct{}),
		records: map[types.UID]*podstate.Records{}, routes: map[string]types.UID{}, unrouted: map[string]bool{},
		shares: map[string]uint64{}, fault: "it was not asked yet",
	}
}

// RuntimeFault says why podmon does not answer; empty: it does.
func (m *Manager) RuntimeFault() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return cmp.Or(m.fault, m.hung)
}

func (m *Manager) setFault(why string) { m.setOne(&m.fault, why) }
func (m *Manager) setHung(why string)  { m.setOne(&m.hung, why) }

// setOne sets one of the two faults, and tells when the runtime as a whole has
// failed or is back.
func (m *Manager) setOne(fault *string, why string) {
	m.mu.Lock()
	before := m.fault != "" || m.hung != ""
	*fault = why
	changed := before != (m.fault != "" || m.hung != "")
	m.mu.Unlock()
	if changed && m.cfg.OnRuntime != nil {
		m.cfg.OnRuntime()
	}
}

// Resync is how often podmon's list is compared with what the workers
// believe, should an event have been lost.
const resync = time.Minute

// Run serves pods until ctx ends. It first learns what podmon holds, so that
// no container is made twice; it removes what no pod claims only after the
// API's list has been seen. Containers run on when it returns.
func (m *Manager) Run(ctx context.Context) error {
	for _, dir := range []string{m.cfg.PodDir, m.cfg.LogDir, m.cfg.EndedDir, string(m.cfg.LogLinks), string(m.cfg.PodLogLinks)} {
		if dir == "" {
			continue
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("pod folders: %w", err)
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer m.wg.Wait()
	defer cancel()
	m.mu.Lock()
	m.ctx = ctx
	m.mu.Unlock()
	mounted, err := m.cfg.Images.Mounts()
	if err != nil {
		return fmt.Errorf("root file systems: %w", err)
	}
	for _, id := range mounted {
		m.stale[id] = true
	}
	events, err := m.connect(ctx)
	if err != nil {
		return nil // ctx ended before podmon answered
	}
	m.keepUsers()
	m.wg.Go(func() { m.listen(ctx, events) })
	m.wg.Go(func() { m.watchRuntime(ctx) })
	if m.cfg.CPUs != nil {
		m.wg.Go(func() { m.keepPinned(ctx) })
	}
	if s := m.cfg.Static; s != nil {
		m.wg.Go(func() {
			if err := s.Run(ctx, m.setStatic); err != nil {
				klog.FromContext(ctx).Error(err, "Static pods are read no more")
			}
		})
	} else {
		m.setStatic(nil, true)
	}
	var listed <-chan struct{} = m.staticRead
	if m.cfg.Client != nil {
		if listed, err = m.watch(ctx); err != nil {
			return err
		}
	}
	m.wg.Go(func() { m.awaitUnconfirmed(ctx, listed) })
	// What podmon holds is an orphan only if no source has its pod.
	for _, source := range []<-chan struct{}{m.staticRead, listed} {
		select {
		case <-source:
		case <-ctx.Done():
			return nil
		}
	}
	m.settle(ctx)
	<-ctx.Done()
	return nil
}

// watch follows the API's pods of this node until ctx ends; listed is closed
// when the first list has been taken.
func (m *Manager) watch(ctx context.Context) (listed <-chan struct{}, err error) {
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (kruntime.Object, error) {
			o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", m.cfg.NodeName).String()
			return m.cfg.Client.CoreV1().Pods("").List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", m.cfg.NodeName).String()
			return m.cfg.Client.CoreV1().Pods("").Watch(ctx, o)
		},
	}
	informer := cache.NewSharedIndexInformer(cache.ToListWatcherWithWatchListSemantics(lw, m.cfg.Client), &v1.Pod{}, 0, cache.Indexers{})
	if err := informer.SetTransform(stripManaged); err != nil {
		return nil, fmt.Errorf("pod watch: %w", err)
	}
	handle, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { m.set(o.(*v1.Pod)) },
		UpdateFunc: func(_, o any) { m.set(o.(*v1.Pod)) },
		DeleteFunc: func(o any) {
			if d, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = d.Obj
			}
			m.remove(o.(*v1.Pod))
		},
	})
	if err != nil {
		return nil, fmt.Errorf("pod watch: %w", err)
	}
	m.wg.Go(func() { informer.RunWithContext(ctx) })
	return handle.HasSyncedChecker().Done(), nil
}

// stripManaged drops what the node never reads.
func stripManaged(o any) (any, error) {
	if p, ok := o.(*v1.Pod); ok {
		p.ManagedFields = nil
	}
	return o, nil
}

// set takes a pod of the watch.
func (m *Manager) set(pod *v1.Pod) {
	if m.shows(pod) {
		m.setMirror(pod, false)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.workers[pod.UID]; w != nil {
		w.send(func() { w.setPod(pod) })
		m.confirm(w)
		return
	}
	if m.ended[pod.UID] || m.ctx == nil || m.ctx.Err() != nil || m.standsBehind(pod) || m.awaitsNode(pod) {
		return
	}
	m.launch(m.begin(pod, false))
}

// begin makes the worker of a pod that is new to this agent, and admits it if
// it is new to the node. The caller holds mu.
func (m *Manager) begin(pod *v1.Pod, static bool) *worker {
	rec := m.take(pod.UID)
	w := newWorker(m, pod, false, rec)
	w.static = static
	if static && len(rec.Sandboxes) > 0 {
		w.obs.StartedAt = time.Unix(0, rec.Sandboxes[0].CreatedAt) // no API remembers it
	}
	known := len(rec.Sandboxes) > 0 || len(rec.Containers) > 0
	// One that another writer ended has what it has until nothing of it runs.
	over := core.FinalPhase(pod.Status.Phase) && (w.obs.EndedAs == "" || !w.obs.Alive())
	if !over && (known || pod.DeletionTimestamp == nil) {
		var verdict *podstate.Verdict
		if !known {
			verdict, w.shutdown = m.admit(pod)
		}
		if verdict == nil {
			err := m.assignCPUs(pod)
			switch {
			case err == nil:
			case known:
				klog.FromContext(m.ctx).Error(err, "Running pod gets no processors of its own", "namespace", pod.Namespace, "pod", pod.Name)
			default:
				verdict = &podstate.Verdict{Reason: "UnexpectedAdmissionError", Message: "Allocate failed due to " + err.Error() + ", which is unexpected"}
			}
		}
		if verdict != nil {
			w.inbox = append(w.inbox, func() { w.fail(*verdict) })
		} else {
			m.admitted[pod.UID] = podstate.Granted(pod, w.obs.Allocated)
		}
	}
	containersPerPod.Observe(float64(len(pod.Spec.Containers)))
	return w
}

// launch runs a worker. The caller holds mu.
func (m *Manager) launch(w *worker) {
	m.workers[w.uid] = w
	m.wg.Go(func() {
		w.run(m.ctx)
		m.cfg.Probes.Metrics.Forget(string(w.uid))
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.workers[w.uid] == w && m.ctx.Err() == nil {
			delete(m.workers, w.uid)
			m.releaseLocked(w.uid)
			delete(m.deferred, w.uid)
			if w.static {
				m.dropEnded(w.uid)
				m.afterStatic(fullName(w.pod))
			} else if !w.gone && !w.removed {
				m.ended[w.uid] = true
			}
			m.changed(w.uid)
			m.takeBehind()
		}
	})
}

// remove takes the disappearance of a pod from the API.
func (m *Manager) remove(pod *v1.Pod) {
	if m.shows(pod) {
		m.setMirror(pod, true)
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.ended, pod.UID)
	delete(m.awaiting, pod.UID)
	delete(m.behind, pod.UID)
	if w := m.workers[pod.UID]; w != nil {
		w.removed = true
		w.send(func() { w.setPod(pod); w.setGone() })
	}
}

// settle: the API's list is known now, so what podmon holds beside it has
// no pod.
func (m *Manager) settle(ctx context.Context) {
	m.mu.Lock()
	m.synced = true
	close(m.seen)
	var orphans []types.UID
	for uid := range m.records {
		if m.workers[uid] == nil {
			orphans = append(orphans, uid)
		}
	}
	for _, uid := range orphans {
		m.adopt(uid)
	}
	for name := range m.mirrors {
		m.dropMirror(name)
	}
	m.mu.Unlock()
	if err := m.cfg.Network.Live(ctx, m.working); err != nil {
		klog.FromContext(ctx).Error(err, "Network of deleted pods was not cleaned up")
	}
	m.releaseStaleCPUs()
	m.sweepFolders(ctx)
	m.sweepMounts(ctx)
	m.sweepDevices(ctx)
	if err := m.sweepImageVolumes(ctx); err != nil {
		klog.FromContext(ctx).Error(err, "Image volumes of deleted pods stay mounted")
	}
	if err := m.sweepFence(ctx); err != nil {
		klog.FromContext(ctx).Info("Deleted pods were not removed from the fencing list, will retry", "err", err)
	}
	m.sweepEnded()
}

// working are the UIDs of the pods that have a worker.
func (m *Manager) working() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]string, 0, len(m.workers))
	for uid := range m.workers {
		out = append(out, string(uid))
	}
	return out
}

// sweepMounts unmounts root file systems whose container was never made.
func (m *Manager) sweepMounts(ctx context.Context) {
	mounted, err := m.cfg.Images.Mounts()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Root file systems could not be listed")
		return
	}
	// Only a mount older than this run, of a container podmon does not hold,
	// is unused: others may be about to be used.
	_, containers, err := m.cfg.Runtime.List(ctx)
	if err != nil {
		return // the next start of the agent sweeps
	}
	used := map[string]bool{}
	for _, c := range containers {
		used[c.Container.ID] = true
	}
	for _, id := range mounted {
		if used[id] || !m.stale[id] {
			continue
		}
		if err := m.cfg.Images.Unmount(ctx, id); err != nil {
			klog.FromContext(ctx).Error(err, "Root file system of no container stays mounted", "id", id)
		}
	}
}

// adopt makes a worker that ends a pod the API does not know. The caller
// holds mu.
func (m *Manager) adopt(uid types.UID) {
	rec := m.take(uid)
	pod := orphan(uid, rec)
	m.launch(newWorker(m, pod, true, rec))
}

// orphan makes up the API object of a pod known only to podmon.
func orphan(uid types.UID, rec podstate.Records) *v1.Pod {
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{UID: uid, Name: string(uid), Namespace: "orphans"}}
	for _, s := range rec.Sandboxes {
		pod.Name, pod.Namespace = s.Sandbox.Name, s.Sandbox.Namespace
		pod.Spec.HostNetwork = s.Sandbox.NetNS == ""
	}
	names := map[string]bool{}
	for _, c := range rec.Containers {
		if n := c.Container.Name; !names[n] {
			names[n] = true
			pod.Spec.Containers = append(pod.Spec.Containers, v1.Container{Name: n, Image: c.Container.Labels[podstate.LabelImage]})
		}
	}
	return pod
}

// sweepFolders removes pod directories and logs of deleted pods.
func (m *Manager) sweepFolders(ctx context.Context) {
	uids, err := m.cfg.Volumes.Pods()
	if err != nil {
		klog.FromContext(ctx).Error(err, "Pod folders could not be listed")
	}
	for _, uid := range uids {
		m.mu.Lock()
		used := m.workers[uid] != nil
		m.mu.Unlock()
		if used {
			continue
		}
		sweep, cancel := context.WithTimeout(ctx, sweepTimeout)
		err := m.cfg.Volumes.Teardown(sweep, uid)
		cancel()
		if err != nil {
			klog.FromContext(ctx).Error(err, "Folder of a deleted pod stays, will retry", "uid", uid)
			m.wg.Go(func() { m.sweepLater(ctx, uid) })
		}
	}
	m.sweepLogs(ctx)
}

// sweepTimeout bounds what the start of the agent waits for one directory.
const sweepTimeout = 5 * time.Second

// sweepLater removes a directory that could not be removed at once: the CSI
// driver that has a mount in it may start later than the agent.
func (m *Manager) sweepLater(ctx context.Context, uid types.UID) {
	for wait := time.Second; ; wait = min(2*wait, time.Minute) {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		m.mu.Lock()
		used := m.workers[uid] != nil
		m.mu.Unlock()
		if used {
			return
		}
		sweep, cancel := context.WithTimeout(ctx, teardownDeadline)
		err := m.cfg.Volumes.Teardown(sweep, uid)
		cancel()
		if err == nil {
			klog.FromContext(ctx).Info("Folder of a deleted pod is removed", "uid", uid)
			return
		}
	}
}

// take hands the records of a pod to its worker. The caller holds mu.
func (m *Manager) take(uid types.UID) podstate.Records {
	r := m.records[uid]
	delete(m.records, uid)
	if r == nil {
		return podstate.Records{}
	}
	return *r
}

// holders are the pods that hold a part of the node. The caller holds mu.
func (m *Manager) holders() []*v1.Pod {
	out := make([]*v1.Pod, 0, len(m.admitted))
	for _, p := range m.admitted {
		out = append(out, p)
	}
	return out
}

// release gives back what the pod held of the node.
func (m *Manager) release(uid types.UID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.releaseLocked(uid)
}

func (m *Manager) releaseLocked(uid types.UID) {
	if _, held := m.admitted[uid]; held {
		delete(m.admitted, uid)
		m.releaseCPUs(uid)
		m.roomLocked()
	}
}

// slot waits for a turn to start something; release gives it back.
func (m *Manager) slot(ctx context.Context) (release func(), err error) {
	select {
	case m.starts <- struct{}{}:
		return func() { <-m.starts }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// PokeAll makes every worker look again at once: something outside of the
// pods, like the node's network, has got better.
func (m *Manager) PokeAll() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range m.workers {
		w.send(func() {
			if f := w.obs.Sandbox.Err; f != nil {
				f.RetryAt = time.Time{}
			}
		})
	}
}

// ObjectChanged is for object.New.
func (m *Manager) ObjectChanged(uid types.UID, _ object.Ref) { m.VolumesChanged(uid) }

// VolumesChanged makes a pod's volumes be looked at again: what one of their
// sources waits for may be there.
func (m *Manager) VolumesChanged(uid types.UID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if w := m.workers[uid]; w != nil {
		w.send(w.onObject)
	}
}

// ImagesChanged makes every container look again at once whose image was not
// to be had and is here now.
func (m *Manager) ImagesChanged() {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, w := range m.workers {
		w.send(w.onImages)
	}
}

// Seen is closed when the API's list of this node's pods, and every source of
// static pods, has been seen. Before that a pod that is not found may still be
// here.
func (m *Manager) Seen() <-chan struct{} { return m.seen }

func volumeUID(uid string) types.UID { return types.UID(uid) }

// routeTo notes which pod a sandbox belongs to; unroute forgets it.
func (m *Manager) routeTo(sandbox string, uid types.UID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.routes[sandbox] = uid
}

func (m *Manager) unroute(sandbox string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.routes, sandbox)
	if m.listing > 0 {
		m.unrouted[sandbox] = true
	}
}
