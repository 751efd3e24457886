// Package pod makes the pods that the API has bound to this node: one worker
// a pod, which does the steps that podstate.Plan gives and tells the API the
// status that podstate.BuildStatus gives.
//
// The worker is the only one that changes what is observed of its pod; all
// that happens elsewhere (exits, probes, finished operations, changes in the
// API) reaches it as messages. Nothing is polled.
package pod

import (
	"context"
	"net"
	"net/netip"
	"os"

	"go.opentelemetry.io/otel/trace"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"

	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/object"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podspec"
	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/agent/probe"
	"github.com/clusterd/clusterd/agent/runtime"
	"github.com/clusterd/clusterd/agent/users"
	"github.com/clusterd/clusterd/agent/volume"
)

// Runtime owns containers and outlives this process. All methods may be
// called concurrently; they block until done or ctx ends.
type Runtime interface {
	CreateSandbox(ctx context.Context, s api.Sandbox) (api.SandboxStatus, error)
	RemoveSandbox(ctx context.Context, id string) error
	StartContainer(ctx context.Context, c api.Container) (api.ContainerStatus, error)
	Signal(ctx context.Context, s api.Signal) error
	// Update sets other limits on a running container, or on the pod's own
	// cgroup by its sandbox's ID.
	Update(ctx context.Context, u api.Update) error
	RemoveContainer(ctx context.Context, id string) error
	List(ctx context.Context) ([]api.SandboxStatus, []api.ContainerStatus, error)
	// Ping asks whether the runtime answers at all.
	Ping(ctx context.Context) error
	// Events streams changes from now on; the channel is closed when the
	// stream breaks, after which the caller lists.
	Events(ctx context.Context) (<-chan api.Event, error)
	Exec(ctx context.Context, e api.Exec, io runtime.ExecIO) (int, error)
}

// Images holds images and mounts root file systems of them. Methods may be
// called concurrently.
type Images interface {
	// PullAs asks the registry even if the image is here.
	PullAs(ctx context.Context, ref string, as image.Credential) (image.Image, error)
	Get(ref string) (image.Image, bool, error)
	// Pulling are the pulls under way.
	Pulling() []image.Progress
	// Access says what is known about who may have the image of that ID by that name.
	Access(id, ref string, shown []image.Credential) (image.Access, error)
	Mount(ctx context.Context, img image.Image, id string) (rootfs string, err error)
	// MountMapped is Mount for a container in that user namespace.
	MountMapped(ctx context.Context, img image.Image, id string, users *os.File) (rootfs string, err error)
	Unmount(ctx context.Context, id string) error
	// Mounts lists the ids of all mounted root file systems.
	Mounts() ([]string, error)
	// MountVolume mounts an image read-only for a pod and a volume of it; while
	// it is mounted the image is in use.
	MountVolume(ctx context.Context, img image.Image, podUID, volume string) (path string, err error)
	// MountVolumeMapped is MountVolume for a pod in such a user namespace.
	MountVolumeMapped(ctx context.Context, img image.Image, podUID, volume string, users *os.File) (path string, err error)
	// Volume tells which image is mounted as a volume, if any is.
	Volume(podUID, volume string) (img image.Image, ok bool, err error)
	// UnmountVolumes takes all image volumes of a pod away.
	UnmountVolumes(ctx context.Context, podUID string) error
	// VolumeOwners lists the pods that have image volumes.
	VolumeOwners() ([]string, error)
	// Verify looks whether the image is whole on disk; image.ErrDamaged: it was
	// not, and is no longer here.
	Verify(ctx context.Context, id string) error
}

// Network connects pods. Methods may be called concurrently for different
// pods; each is idempotent.
type Network interface {
	// Attach makes the pod's network namespace and address. For a pod of the
	// host's network the path is empty.
	Attach(ctx context.Context, podUID string, hostNetwork bool) (netns string, ips []netip.Addr, err error)
	// AttachUsers is Attach for a pod with a user namespace of those ids, which
	// the network makes and which owns the pod's network namespace.
	AttachUsers(ctx context.Context, podUID string, ids users.Range) (netns string, ips []netip.Addr, err error)
	// Users opens the user namespace of such a pod; the file is the caller's.
	Users(podUID string) (*os.File, error)
	// Publish makes ports of the node lead to an attached pod's address, until
	// Detach.
	Publish(ctx context.Context, podUID string, addrs []netip.Addr, ports []podstate.HostPort) error
	// Limit bounds what an attached pod receives and sends, in bits a second, until
	// Detach; 0: not at all.
	Limit(ctx context.Context, podUID string, in, out uint64) error
	Detach(ctx context.Context, podUID string) error
	// Live removes what is of no pod that there is, after a restart. live names
	// those that there are; it is called while no pod gets a network, at once or once
	// there are networks, and must not call the Network.
	Live(ctx context.Context, live func() []string) error
	// Dial connects to a TCP port inside the pod's namespace.
	Dial(ctx context.Context, podUID string, hostNetwork bool, port int32) (net.Conn, error)
}

// Fence knows the pods that end with the node's Lease: *fence.Fence. Methods may
// be called concurrently.
type Fence interface {
	// Guard is called before anything of the pod is mounted. It blocks while the
	// node has no Lease and the pod is one of them.
	Guard(ctx context.Context, pod *v1.Pod) (guarded bool, err error)
	// Drop is called when nothing of the pod is left.
	Drop(ctx context.Context, uid types.UID) error
	// Sweep drops all pods that are not here.
	Sweep(ctx context.Context, here func(types.UID) bool) error
}

// Devices are those of the node that pods have for themselves. Methods may be
// called concurrently for different pods; each is idempotent.
type Devices interface {
	// Prepare makes ready what the pod's claims were given, and chooses what it asks
	// for of device plugins. It blocks on drivers and plugins.
	Prepare(ctx context.Context, pod *v1.Pod) error
	// Unprepare takes it back; when it returns nil nothing is held.
	Unprepare(ctx context.Context, uid types.UID) error
	// Held reports whether something is prepared for the pod, or may be.
	Held(uid types.UID) bool
	// Pods are those that something is held for.
	Pods() ([]types.UID, error)
	// Inject gives a container the devices that it asks for.
	Inject(ctx context.Context, pod *v1.Pod, container *v1.Container, c *api.Container) error
}

// Config of a Manager.
type Config struct {
	NodeName string
	NodeIPs  []netip.Addr
	// Node returns the node's object as last known; its allocatable resources
	// and labels decide admission. Never nil.
	Node func() *v1.Node
	// ReadNode reads the Node from the API, so that Node returns what it is now;
	// it returns when that is done or ctx has ended. nil: Node is always the newest.
	ReadNode func(ctx context.Context)

	// Client is nil on a node that has no API: it runs static pods alone.
	Client  kubernetes.Interface
	Static  StaticSource // nil: there are no static pods
	Runtime Runtime
	Images  Images
	Network Network
	Volumes *volume.Manager
	Objects *object.Cache
	// Services are announced to pods in their environment; nil: none are.
	Services podspec.Services
	Probes   *probe.Prober
	Recorder record.EventRecorder
	// Unconfirmed yields, once at most, pods that are to be started without the API, as they
	// were last known. nil: there are none.
	Unconfirmed <-chan []*v1.Pod
	// Changed is called when a pod's object, status or sandbox has changed, or its worker has
	// ended for good. It must not block, and must not call the Manager. Optional.
	Changed func(uid types.UID)
	// Ended is called before the API hears that a pod has ended for good. It may take a while.
	// Optional.
	Ended func(uid types.UID) error
	// OnRuntime is called when podmon begins or ceases to answer; it must not
	// block. Optional.
	OnRuntime func()

	// PodDir holds one directory a pod: volumes, etc-hosts, termination logs.
	PodDir string
	// EndedDir holds the last statuses of static pods that have ended.
	EndedDir string
	// LogDir holds NS_NAME_UID/CONTAINER/N.log.
	LogDir string
	// SweepLogs: the directory is ours alone, directories of unknown pods are removed.
	SweepLogs bool
	// LogLinks is a directory of links to the containers' logs; empty: none.
	LogLinks LogLinks
	// PodLogLinks is a directory of links to the pods' log directories; empty: none.
	PodLogLinks LogLinks
	CgroupRoot  string // "/clusterd-n1"

	// ResolvConf is the host's; pods with dnsPolicy Default, and all pods
	// when there is no cluster DNS, get its content. Default: /etc/resolv.conf,
	// or the file behind it when that leads to systemd-resolved's own address.
	ResolvConf string
	// ClusterDNS are the addresses of the cluster's name servers, ClusterDomain
	// what the names of Services end with; default "cluster.local".
	ClusterDNS    []netip.Addr
	ClusterDomain string

	// UnsafeSysctls may be set by pods beside the safe ones: names, or prefixes
	// that end with "*".
	UnsafeSysctls []string

	// Refuse says why the node takes no such pod now because it runs short of
	// something, "": it does. It must not block. Optional.
	Refuse func(pod *v1.Pod) string

	// Verify says which images that are here a pod gets without a look at its
	// credentials; the zero value: those that are preloaded.
	Verify ImageVerification

	// Fence ends pods whose volumes may be used elsewhere when the node has lost
	// its Lease; nil: nothing does.
	Fence Fence

	// Users are the ids of pods with a user namespace; nil: there are no such
	// pods on this node.
	Users *users.Ranges

	// CPUs says on which processors containers run; nil: on all.
	CPUs CPUs

	// Devices are what pods' claims and extended resources are served with; nil: pods
	// with claims wait.
	Devices Devices

	// PidsLimit of one pod; 0: none.
	PidsLimit int64
	// Tracer makes the spans of workers' turns and of what they begin; nil: there
	// are none.
	Tracer trace.Tracer
	// Parallel bounds the container and sandbox starts under way at one time
	// on the node; default 16.
	Parallel int
}
