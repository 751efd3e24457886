// Package agent is the equivalent of a kubelet: it runs the pods bound to this node,
// reports their status and serves the node's API (logs, exec, port-forward, …).
//
// It is a client of the API like any other. What it created stays when it stops:
// containers belong to podmon, networks and mounts to the kernel, and a new agent
// adopts them.
package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcore "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
	"k8s.io/utils/cpuset"

	"github.com/clusterd/clusterd/agent/checkpoint"
	"github.com/clusterd/clusterd/agent/claim"
	"github.com/clusterd/clusterd/agent/csi"
	"github.com/clusterd/clusterd/agent/dns"
	"github.com/clusterd/clusterd/agent/fence"
	"github.com/clusterd/clusterd/agent/host"
	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/node"
	"github.com/clusterd/clusterd/agent/object"
	"github.com/clusterd/clusterd/agent/plugin"
	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/agent/podcertificate"
	"github.com/clusterd/clusterd/agent/podresources"
	"github.com/clusterd/clusterd/agent/pressure"
	"github.com/clusterd/clusterd/agent/probe"
	"github.com/clusterd/clusterd/agent/runtime"
	"github.com/clusterd/clusterd/agent/shutdown"
	"github.com/clusterd/clusterd/agent/static"
	"github.com/clusterd/clusterd/agent/stats"
	"github.com/clusterd/clusterd/agent/stream"
	"github.com/clusterd/clusterd/agent/users"
	"github.com/clusterd/clusterd/agent/volume"
	"github.com/clusterd/clusterd/agent/watches"
	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/apis/paths"
)

// Runtime owns the containers: *runtime.Client.
type Runtime interface {
	pod.Runtime
	Attach(ctx context.Context, id string, io runtime.ExecIO, tty bool) error
	fence.Podmon
	// Upgraded says what was done about a podmon of another clusterd.
	Upgraded() runtime.Upgrade
}

// Images owns the images: *image.Store.
type Images interface {
	pod.Images
	List(ctx context.Context) ([]image.Image, error)
	Load(ctx context.Context, r io.Reader) ([]image.Image, error)
	// VerifyAll drops the images that are damaged on disk.
	VerifyAll(ctx context.Context) error
	GC(ctx context.Context, p image.GCPolicy) ([]image.Image, error)
	Remove(ctx context.Context, ref string) error
	Pin(ctx context.Context, ref string, pinned bool) error
	// TryMapped says why root file systems cannot be mounted in that user
	// namespace, nil: they can.
	TryMapped(users *os.File) error
	// Written is the directory of what a container has changed of its image.
	Written(id string) string
	// VolumePath is where an image is mounted as a volume, or would be.
	VolumePath(podUID, volume string) string
}

// Network connects pods: *podnetwork.Network.
type Network interface {
	pod.Network
	// Run keeps the node's network until ctx ends.
	Run(ctx context.Context) error
	// Ready reports whether pods can be connected, and why not.
	Ready() (ok bool, why string)
	// OnReady asks for a call when they can be; fn must not block.
	OnReady(fn func())
}

// Config of an Agent.
type Config struct {
	NodeName string // required
	// NodeIPs are the node's InternalIPs, one of each family at most, the primary
	// first; required.
	NodeIPs []netip.Addr
	// NodeAddresses are reported beside NodeIPs and NodeName: what others than the
	// cluster reach the node by.
	NodeAddresses []v1.NodeAddress
	// Notices become events of the node when it is registered.
	Notices []host.Notice
	// DataDir holds pods, logs and volumes; required.
	DataDir string
	// CgroupRoot is the parent of all pods' cgroups; required, "/clusterd-n1".
	CgroupRoot string
	// Client is an API client as system:node:NAME; nil: there is no API, and
	// the node runs its static pods alone.
	Client kubernetes.Interface
	// HeartbeatClient renews the Lease; default Client.
	HeartbeatClient kubernetes.Interface
	// EventClient writes events, apart from the rest, which never waits for
	// them; default Client.
	EventClient kubernetes.Interface

	Runtime Runtime // required
	Images  Images  // required
	Network Network // required
	// Mounter makes the mounts of volumes; default volume.Kernel.
	Mounter volume.Mounter

	Version string // "v1.37.0", shown as the node's version
	MaxPods int    // default 110
	// LeaseTime is after what time without a renewal the node's Lease has run
	// out; default 40 s.
	LeaseTime time.Duration
	// FenceClaims: pods with claims end with the Lease unless they say that they
	// do not; else just those that say that they do.
	FenceClaims bool
	// DriverDir is where plugins (drivers of volumes and devices) look for a kubelet: an absolute path, of one
	// node alone; default DataDir/kubelet.
	DriverDir string
	// CDIDirs hold the descriptions of devices (Container Device Interface); default
	// /etc/cdi and /var/run/cdi.
	CDIDirs []string
	// PodLogDir holds the containers' logs; default DataDir/log/pods. Directories
	// of unknown pods are removed only from the default.
	PodLogDir string
	// LogLinks is a directory for a link to each container's log, by the name that
	// log shippers read: POD_NAMESPACE_CONTAINER-ID.log. Empty: none.
	LogLinks string
	// PodLogLinks is a directory for a link to each pod's log directory, by the name that log
	// shippers read: NAMESPACE_NAME_UID. Empty: none.
	PodLogLinks string
	// ResolvConf is given to pods that are not to use cluster DNS; default:
	// see pod.Config.
	ResolvConf string
	// ClusterDNS are the cluster's name servers; empty: pods get ResolvConf.
	ClusterDNS    []netip.Addr
	ClusterDomain string // default "cluster.local"
	// DNS is the name server that this node runs by itself; nil: none. Addrs,
	// Ranges, Address and Settings count, the rest is filled in.
	DNS       *dns.Config
	PidsLimit int64 // of a pod; default 0: none
	// UserIDs are the host's ids that pods with a user namespace get theirs
	// from; the zero Range: the node has no such pods.
	UserIDs users.Range
	// CPUs says on which processors containers run; nil: on all.
	CPUs pod.CPUs
	// AllocatableCPUs are those that containers can have for themselves.
	AllocatableCPUs cpuset.CPUSet
	// Paths is what is measured of the ways to other nodes:
	// (*podnetwork.Network).Paths; nil: nothing. It must not block.
	Paths func() paths.Report
	// NodeLogs answers with the machine's logs at /logs/; nil: they are not served.
	NodeLogs http.Handler
	// UnsafeSysctls may be set by pods beside the safe ones: names, or prefixes
	// that end with "*".
	UnsafeSysctls []string
	// Eviction are the thresholds below which pods are ended to keep the node
	// alive; nil: pressure.Defaults. Empty, not nil: none.
	Eviction []pressure.Threshold
	// EvictionTransition is how long the node's pressure conditions stay after
	// their cause has gone; default 5 min.
	EvictionTransition time.Duration
	// LocalStoragePeriod is how often pods with a limit of what they take of the
	// disk are measured; default 10 s.
	LocalStoragePeriod time.Duration
	ImageGC            ImageGC
	// ImageVerification says which images that are here pods get without a look at
	// their credentials; default NeverVerifyPreloadedImages.
	ImageVerification pod.ImageVerification
	// Reserved is kept from pods; nil: some memory.
	Reserved v1.ResourceList
	Parallel int // container starts at one time; default 16
	// Watches are those that other parts of the node share; their owner runs them.
	// Default: the agent's own.
	Watches *watches.Watches
	// Tracer makes spans of what is done for pods; nil: there are none.
	Tracer     trace.Tracer
	NodeLabels map[string]string
	// NodeAnnotations are further annotations of the node. Optional.
	NodeAnnotations map[string]string
	// Registration is what the Node is made with; later changes of it by others stay.
	Registration node.Registration
	NodePort     int32 // of the node's calls, reported in the Node's status

	// StaticDir holds the files of static pods, StaticURL answers with more of
	// them; empty: none. See agent/static.
	StaticDir, StaticURL string
	// statics, if set, is read in the place of these two.
	statics pod.StaticSource
	// Shutdown is how long pods have to end, by their priority, before the machine goes
	// down; nil: shutdowns are not held up.
	Shutdown []shutdown.Period
	// Membership is given up when the machine is shut down for good, within Shutdown;
	// nil: the machine stays a member of its cluster.
	Membership Membership
	// Checkpoint keeps what the node's pods need to start without the API; nil: they wait
	// for it.
	Checkpoint *checkpoint.Keeper
	// OnEvent is called with every event, beside the API. It must not block.
	// Optional.
	OnEvent func(*v1.Event)
}

// Agent is one node's agent.
type Agent struct {
	cfg     Config
	node    *node.Node
	pods    *pod.Manager
	guard   *pressure.Guard
	local   *pressure.LocalGuard
	down    *shutdown.Guard // nil: shutdowns are not held up
	volumes *volume.Manager
	stats   *stats.Collector
	cgroups stats.Cgroups
	objects *object.Cache
	events  record.EventBroadcaster
	// recorder writes to events.
	recorder record.EventRecorder
	// services are all Services, for the environments of pods; nil: there is no API.
	services     cache.SharedIndexInformer
	watches      *watches.Watches       // that this agent runs; nil: others do
	paths        *pathWatch             // nil: paths are not measured
	dns          *dns.Server            // nil: there is none
	claims       *claim.Keeper          // nil: there is no API
	plugins      *plugin.Registry       // nil: there is no API
	drivers      *csi.Manager           // nil: there is no API
	devices      *devices               // nil: there is no API
	certificates *podcertificate.Keeper // of pods; nil: there is no API
	tokens       *tokens                // of pods' service accounts
	coldBoot     *coldBoot              // nil: pods wait for the API
	handler      http.Handler
	podServer    *podresources.Server
}

// New checks the configuration and puts the parts together. It starts nothing.
func New(cfg Config) (*Agent, error) {
	switch {
	case cfg.NodeName == "" || cfg.DataDir == "" || cfg.CgroupRoot == "":
		return nil, errors.New("agent: NodeName, DataDir and CgroupRoot are required")
	case len(cfg.NodeIPs) == 0:
		return nil, errors.New("agent: NodeIPs is required")
	case cfg.Runtime == nil || cfg.Images == nil || cfg.Network == nil:
		return nil, errors.New("agent: Runtime, Images and Network are required")
	}
	if cfg.HeartbeatClient == nil {
		cfg.HeartbeatClient = cfg.Client
	}
	if cfg.EventClient == nil {
		cfg.EventClient = cfg.Client
	}
	if cfg.Mounter == nil {
		cfg.Mounter = volume.Kernel{}
	}
	ownLogs := cfg.PodLogDir == ""
	if ownLogs {
		cfg.PodLogDir = filepath.Join(cfg.DataDir, "log", "pods")
	}
	if err := host.Folders(cfg.DataDir); err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	if cfg.DriverDir == "" {
		var err error
		if cfg.DriverDir, err = filepath.Abs(filepath.Join(cfg.DataDir, "kubelet")); err != nil {
			return nil, fmt.Errorf("agent: %w", err)
		}
	}
	if cfg.Eviction == nil {
		var err error
		if cfg.Eviction, err = pressure.Parse(pressure.Defaults); err != nil {
			return nil, fmt.Errorf("agent: %w", err)
		}
	}
	gc := &cfg.ImageGC
	gc.High, gc.Low, gc.MinAge = cmp.Or(gc.High, 85), cmp.Or(gc.Low, 80), cmp.Or(gc.MinAge, 2*time.Minute)
	var own *watches.Watches
	if cfg.Watches == nil && cfg.Client != nil {
		var err error
		if own, err = watches.New(cfg.Client); err != nil {
			return nil, fmt.Errorf("agent: %w", err)
		}
		cfg.Watches = own
	}
	a := &Agent{cfg: cfg, watches: own, events: record.NewBroadcaster(), cgroups: stats.Cgroups{Mount: "/sys/fs/cgroup"}}
	machine := pressure.Machine{NodeDir: cfg.DataDir, ImageDir: a.imageDir()}
	a.guard = pressure.New(pressure.Config{
		Thresholds: cfg.Eviction, Transition: cfg.EvictionTransition, Measure: machine.Measure, Candidates: a.candidates,
		Evict:   func(uid types.UID, message string, hard bool) { a.pods.Evict(uid, message, hard) },
		Reclaim: a.reclaim, Changed: func() { a.node.Poke() },
	})
	a.stats = stats.New(stats.Config{
		NodeName: cfg.NodeName, Cgroups: a.cgroups, Root: cfg.CgroupRoot, NodeDir: cfg.DataDir, ImageDir: a.imageDir(), BootTime: machineStarted(), Pods: a.measured,
		MemoryOf: func() (int64, int64) {
			l := machine.Measure()[pressure.MemoryAvailable]
			return l.Available, l.Capacity
		},
		Volumes: a.volumesOf,
		Processes: func() (int64, int64) {
			l := machine.Measure()[pressure.PidAvailable]
			return l.Capacity - l.Available, l.Capacity
		},
	})
	podDir := filepath.Join(cfg.DataDir, "pods")
	podUsers, err := podUsers(cfg, podDir)
	if err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	a.recorder = a.events.NewRecorder(scheme.Scheme, v1.EventSource{Component: EventSource, Host: cfg.NodeName})
	nodeConfig := node.Config{
		LeaseTime: cmp.Or(cfg.LeaseTime, defaultLeaseTime),
		Name:      cfg.NodeName, IPs: cfg.NodeIPs, Addresses: cfg.NodeAddresses, Client: cfg.Client, Heartbeat: cfg.HeartbeatClient, Version: cfg.Version,
		MaxPods: cfg.MaxPods, DataDir: cfg.DataDir, Labels: cfg.NodeLabels, Registration: cfg.Registration, Port: cfg.NodePort,
		Annotations: a.annotations(), Clock: fence.BootTime,
		Devices:  a.deviceCounts,
		Reserved: cfg.Reserved, Pressure: a.guard.Under, VolumesInUse: a.volumesInUse,
		Images: a.nodeImages, Ready: a.faults, Conditions: a.conditions,
		Handlers: func() []v1.NodeRuntimeHandler {
			return pod.RuntimeHandlers(&v1.NodeRuntimeHandlerFeatures{UserNamespaces: new(podUsers != nil && podUsers.Supported() == nil)})
		},
	}
	var podFence pod.Fence // stays nil without an API
	if cfg.Client != nil {
		f := a.newFence(nodeConfig.LeaseTime, podDir)
		nodeConfig.Fence, podFence = f, f
	}
	a.node = node.New(nodeConfig)
	prober := &probe.Prober{Version: cfg.Version, Metrics: probe.NewMetrics()}
	a.tokens = newTokens(cfg.Client, func(uid types.UID) { a.pods.VolumesChanged(uid) })
	changed := func(uid types.UID) {}
	found := func(*v1.Pod, *v1.PersistentVolumeClaim, *v1.PersistentVolume) {}
	var unconfirmed chan []*v1.Pod // stays nil without records
	var ended func(types.UID) error
	if cfg.Checkpoint != nil {
		a.coldBoot = newColdBoot(a, cfg.Checkpoint)
		changed, found, unconfirmed, ended = cfg.Checkpoint.PodChanged, a.coldBoot.found, a.coldBoot.unconfirmed, cfg.Checkpoint.Ended
	}
	volumes := volume.Config{Dir: podDir, Mounter: cfg.Mounter, Tokens: a.tokens, Allocatable: a.allocatable, ImagePath: cfg.Images.VolumePath, Memory: a.memoryFor}
	a.objects = object.New(cfg.Client, func(uid objectUID, ref object.Ref) { a.pods.ObjectChanged(uid, ref); changed(uid) })
	volumes.Objects, volumes.TrustBundles = a.objects, a.objects
	if cfg.Client != nil {
		a.claims = claim.New(claim.Config{Client: cfg.Client, NodeName: cfg.NodeName, Dir: a.claimDir(), Recorder: a.recorder, Node: a.node.Object, Found: found})
		a.plugins = plugin.New(cfg.DriverDir)
		a.drivers = csi.New(csi.Config{
			Client: cfg.Client, NodeName: cfg.NodeName, Node: a.node, Root: cfg.DriverDir, Plugins: a.plugins, Tokens: a.tokens, Recorder: a.recorder, Mounted: volume.Kernel{}.Mounted,
		})
		if a.devices, err = a.newDevices(); err != nil {
			return nil, fmt.Errorf("agent: %w", err)
		}
		a.certificates = podcertificate.New(podcertificate.Config{
			Client: cfg.Client, NodeName: cfg.NodeName, Node: a.node.Object, Recorder: a.recorder, Clock: clock.RealClock{},
			Changed: func(uid types.UID) { a.pods.VolumesChanged(uid) },
		})
		volumes.Claims, volumes.Drivers, volumes.Certificates = a.claims, a.drivers, a.certificates
	}
	statics, err := a.statics(a.recorder)
	if err != nil {
		return nil, err
	}
	a.volumes = volume.New(volumes)
	a.local = pressure.NewLocal(pressure.LocalConfig{
		Period: cfg.LocalStoragePeriod, Pods: a.localPods, Use: a.localUse,
		Evict: func(uid types.UID, message string) { a.pods.EvictOver(uid, message) },
	})
	var podDevices pod.Devices // stays nil without an API
	if a.devices != nil {
		podDevices = *a.devices
	}
	var readNode func(context.Context) // stays nil without an API
	if cfg.Client != nil {
		readNode = a.node.Read
	}
	a.pods = pod.NewManager(pod.Config{
		Devices: podDevices,
		Changed: changed, Unconfirmed: unconfirmed, Ended: ended,
		Static:   statics,
		Services: a.serviceLister(),
		NodeName: cfg.NodeName, NodeIPs: cfg.NodeIPs, Node: a.node.Object, ReadNode: readNode, Client: cfg.Client,
		Runtime: cfg.Runtime, Images: cfg.Images, Network: cfg.Network, Volumes: a.volumes, Objects: a.objects,
		Probes: prober, OnRuntime: a.node.Poke, Recorder: a.recorder,
		PodDir: podDir, EndedDir: filepath.Join(cfg.DataDir, "static-ended"), LogDir: cfg.PodLogDir, SweepLogs: ownLogs, LogLinks: pod.LogLinks(cfg.LogLinks), PodLogLinks: pod.LogLinks(cfg.PodLogLinks), CgroupRoot: cfg.CgroupRoot,
		ResolvConf: cfg.ResolvConf, ClusterDNS: cfg.ClusterDNS, ClusterDomain: cfg.ClusterDomain,
		PidsLimit: cfg.PidsLimit, Verify: cfg.ImageVerification, Fence: podFence, Users: podUsers, CPUs: cfg.CPUs, UnsafeSysctls: cfg.UnsafeSysctls,
		Refuse: func(p *v1.Pod) string { return pressure.Refuses(p, core.QOSClass(p), a.guard.Under) }, Parallel: cfg.Parallel, Tracer: cfg.Tracer,
	})
	prober.Exec = a.pods
	if cfg.Shutdown != nil {
		settings := shutdown.Config{Periods: cfg.Shutdown, Pods: a.pods, Changed: a.shutdownChanged}
		if cfg.Membership != nil {
			settings.Member = member{cfg.Membership, cfg.Client, cfg.NodeName}
		}
		a.down = shutdown.New(settings)
	}
	if a.dns, err = a.newDNS(); err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	if err := a.coldBoot.follow(a.dns); err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	cfg.Network.OnReady(func() { a.node.Poke(); a.pods.PokeAll() })
	if cfg.Paths != nil {
		a.paths = newPathWatch(cfg.Paths)
	}
	a.handler = stream.NewHandler(stream.Config{
		Pods: a.pods, Runtime: cfg.Runtime, Images: nodesImages{a}, Network: cfg.Network, LogDir: cfg.PodLogDir,
		ImagesChanged: func() { a.node.Poke(); a.pods.ImagesChanged() }, Configz: a.configz(),
		Summary: a.stats.Summary, Metrics: a.metrics(prober.Metrics), NodeLogs: cfg.NodeLogs, Paths: cfg.Paths,
	})
	a.podServer, err = podresources.New(podresources.Config{
		Socket: filepath.Join(cfg.DataDir, host.PodResources, podresources.SocketName), Pods: a.podResources, Known: a.pods.Seen(),
		Devices: func() []podresources.Devices { return a.devices.allocatable() },
		CPUs:    ids(cfg.AllocatableCPUs), Memory: func() map[string]uint64 { return podresources.Memory(a.allocatable()) },
	})
	if err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	return a, nil
}

// recordNotices makes an event of each notice once the node is registered: a
// server that does not let it in yet refuses its events, and the recorder does
// not try those again.
func (a *Agent) recordNotices(ctx context.Context) {
	if a.cfg.Client != nil && a.node.Until(ctx, func(n *v1.Node) bool { return n.UID != "" }) != nil {
		return
	}
	for _, n := range a.cfg.Notices {
		a.recorder.Event(nodeRef(a.cfg.NodeName), v1.EventTypeWarning, n.Reason, n.Message)
	}
}

// Run serves the node until ctx ends. It returns when all that it started has
// ended; containers run on.
func (a *Agent) Run(ctx context.Context) error {
	// Pods stop first: what is under way for them still needs the network.
	outer, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if a.cfg.Client != nil {
		a.events.StartRecordingToSink(eventSink{&typedcore.EventSinkImpl{Interface: a.cfg.EventClient.CoreV1().Events("")}})
	}
	if a.cfg.OnEvent != nil {
		a.events.StartEventWatcher(a.cfg.OnEvent)
	}
	defer a.events.Shutdown()
	emitUpgradeEvent(a.recorder, nodeRef(a.cfg.NodeName), a.cfg.Runtime.Upgraded())
	defer a.objects.Close()
	var wg sync.WaitGroup
	wg.Go(func() { a.recordNotices(ctx) })
	var mu sync.Mutex
	var errs []error
	part := func(ctx context.Context, name string, run func(context.Context) error) {
		wg.Go(func() {
			// A part that ends early ends the agent.
			defer cancel()
			if err := run(ctx); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, fmt.Errorf("%s: %w", name, err))
			}
		})
	}
	wg.Go(func() {
		if err := a.cfg.Images.VerifyAll(ctx); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Images could not be verified")
		}
	})
	if a.cfg.Client != nil {
		part(ctx, "node", a.node.Run)
		part(ctx, "claims", a.claims.Run)
		part(ctx, "certificates of pods", a.certificates.Run)
		part(ctx, "tokens of pods", a.tokens.Run)
		part(outer, "plugins", a.plugins.Run)
		part(outer, "CSI drivers", a.drivers.Run)
		part(outer, "drivers of devices", a.devices.claims.Run)
		part(outer, "device plugins", a.devices.plugins.Run)
	}
	if a.watches != nil {
		part(ctx, "watches", a.watches.Run)
	}
	if a.coldBoot != nil {
		part(ctx, "checkpoint", a.coldBoot.run)
	}
	if a.dns != nil {
		part(ctx, "dns", a.dns.Run)
	}
	if a.paths != nil {
		part(ctx, "paths", func(ctx context.Context) error {
			a.paths.run(ctx, a.node.Poke)
			return nil
		})
	}
	if a.down != nil {
		part(ctx, "shutdowns", a.down.Run)
	}
	part(ctx, "pressure", a.guard.Run)
	part(ctx, "local storage", a.local.Run)
	part(ctx, "images", a.collectImages)
	part(ctx, "pod resources", a.podServer.Run)
	part(ctx, "kernel's log", func(ctx context.Context) error {
		return node.WatchOOM(ctx, nodeRef(a.cfg.NodeName), a.recorder)
	})
	part(outer, "network", a.cfg.Network.Run)
	part(ctx, "pods", func(ctx context.Context) error {
		defer stop()
		return a.pods.Run(ctx)
	})
	wg.Wait()
	return errors.Join(errs...)
}

// defaultLeaseTime is upstream's.
const defaultLeaseTime = 40 * time.Second

// newFence makes what ends pods with the node's Lease.
func (a *Agent) newFence(leaseTime time.Duration, podDir string) *fence.Fence {
	return fence.New(fence.Config{
		NodeName: a.cfg.NodeName, Client: a.cfg.Client, Podmon: a.cfg.Runtime, RenewDeadline: node.RenewDeadline(leaseTime), Claims: a.cfg.FenceClaims, Recorder: a.recorder,
		Volume: func(ctx context.Context, p *v1.Pod, name string) (*v1.PersistentVolume, error) {
			return a.claims.Volume(ctx, p, name)
		},
		Dirs: func(uid types.UID) []string {
			return []string{absolute(filepath.Join(podDir, string(uid))), filepath.Join(a.cfg.DriverDir, "pods", string(uid))}
		},
		Fail: func(uid types.UID) { a.pods.FailFenced(uid) },
	})
}

// absolute is the path from the root, or the path itself where that is not known.
func absolute(path string) string {
	if abs, err := filepath.Abs(path); err == nil {
		return abs
	}
	return path
}

// annotations are those of the node.
func (a *Agent) annotations() map[string]string {
	out := map[string]string{names.LocalPathRoot: a.claimDir()}
	maps.Copy(out, a.cfg.NodeAnnotations)
	return out
}

// claimDir holds the volumes that are directories of this node.
func (a *Agent) claimDir() string {
	return absolute(filepath.Join(a.cfg.DataDir, "claims"))
}

// Handler serves the node's calls (logs, exec, images …). The caller has
// authenticated and authorized the client.
func (a *Agent) Handler() http.Handler { return a.handler }

// Node is the Node object as last known.
func (a *Agent) Node() *v1.Node { return a.node.Object() }

// statics reads the static pods; what is wrong with them is reported by events of
// the node.
func (a *Agent) statics(recorder record.EventRecorder) (pod.StaticSource, error) {
	if a.cfg.statics != nil || a.cfg.StaticDir == "" && a.cfg.StaticURL == "" {
		return a.cfg.statics, nil
	}
	r, err := static.New(static.Config{
		NodeName: a.cfg.NodeName, Dir: a.cfg.StaticDir, URL: a.cfg.StaticURL,
		OnFault: func(where string, err error) {
			klog.Background().Error(err, "Static pods are not as they should be", "where", where)
			recorder.Eventf(nodeRef(a.cfg.NodeName), v1.EventTypeWarning, "FailedStaticPod", "Static pods of %s: %v", where, err)
		},
	})
	if err != nil {
		return nil, fmt.Errorf("agent: %w", err)
	}
	return r, nil
}

func (a *Agent) allocatable() v1.ResourceList { return a.node.Object().Status.Allocatable }
