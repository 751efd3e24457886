// Package api holds the messages between the agent and podmon, the small
// helper that owns the containers. Values only: no I/O, and nothing of
// Kubernetes or libcontainer. It only ever grows: a new clusterd speaks to
// podmons of older versions that are still holding containers.
package api

import "errors"

// Version is the protocol's version, sent in Hello by both sides. A field
// added does not change it; a message whose meaning changes does.
const Version = 1

// What a starting podmon says to its starter, once; anything else is the reason
// why it does not serve.
const (
	ReadyOK = "ok"
	// ReadyKept: another one serves in that directory, or is about to.
	ReadyKept = "kept"
)

// Ops of a Request. Each frame on the socket is one JSON object behind a
// 4-byte big-endian length; exec and attach pass file descriptors beside it
// (SCM_RIGHTS).
const (
	OpHello           = "hello"
	OpCreateSandbox   = "createSandbox"
	OpRemoveSandbox   = "removeSandbox"
	OpStartContainer  = "startContainer"
	OpSignal          = "signal"
	OpRemoveContainer = "removeContainer"
	OpExec            = "exec"
	OpExecWait        = "execWait"
	OpAttach          = "attach"
	OpCloseStdin      = "closeStdin" // of a container with StdinOnce; of others nothing
	OpUpdate          = "update"
	OpResize          = "resize"
	OpList            = "list"
	OpEvents          = "events"
	OpShutdown        = "shutdown"
	OpUpgrade         = "upgrade" // the program, a sealed memory file, beside it
)

// Sandbox asks for a pause process that holds the pod's namespaces.
type Sandbox struct {
	ID        string // unique on the node and over time; names the cgroup and state directory
	PodUID    string
	Namespace string
	Name      string
	Attempt   uint32

	Hostname string
	// NetNS is the path of the pinned network namespace to join; empty: the
	// host's (hostNetwork).
	NetNS string
	// Users gives the pod a user namespace: the one that owns NetNS, whose ids
	// 0…Count-1 are the host's from First on. Root file systems of its containers
	// must show the pod's ids, and their whole path be open to everybody's
	// search; bind mounts are made to show them.
	Users    *IDRange `json:",omitempty"`
	HostIPC  bool
	HostPID  bool
	SharePID bool // the pause holds a PID namespace that every container joins
	Sysctls  map[string]string
	// CgroupParent is the pod's cgroup below every controller, absolute:
	// "/clusterd/n1/burstable/pod<uid>".
	CgroupParent string
	PodResources Resources // limits of the pod's own cgroup

	// Labels are the agent's notes; podmon keeps and returns them unread.
	Labels map[string]string `json:",omitempty"`
}

// IDRange are ids of the host, users' and groups' alike, that a user namespace
// calls 0 to Count-1 (user_namespaces(7)).
type IDRange struct {
	First, Count uint32
}

// Container asks for one container in a sandbox, created and started.
type Container struct {
	ID        string
	SandboxID string
	Name      string
	Attempt   uint32
	// TargetID is a running container of the same sandbox whose processes this
	// one is to see: it joins that one's PID namespace, and ends with it.
	TargetID string `json:",omitempty"`

	Rootfs         string // mounted root file system, made by the agent
	ReadonlyRootfs bool
	Args           []string
	Env            []string // KEY=VALUE
	Cwd            string
	UID, GID       uint32
	ExtraGIDs      []uint32
	Mounts         []Mount
	Devices        []string // host device paths given to the container as they are
	// Volumes are device nodes that the container has under names of its own.
	Volumes []DeviceVolume `json:",omitempty"`
	// Hooks are programs that devices need to have run, in this order.
	Hooks []Hook `json:",omitempty"`

	Privileged      bool
	NoNewPrivileges bool
	Capabilities    []string // CAP_…, the bounding, permitted and effective sets
	Seccomp         string   // "RuntimeDefault", "Unconfined" or a JSON profile's path
	MaskedPaths     []string
	ReadonlyPaths   []string
	Rlimits         []Rlimit
	OOMScoreAdj     int
	// OOMSingleProcess: when the container is out of memory just the process
	// that the kernel chooses dies. Default: all of the container does.
	OOMSingleProcess bool `json:",omitempty"`

	TTY       bool
	Stdin     bool
	StdinOnce bool
	// LogPath is the CRI-format log file podmon appends to; empty: none. A
	// file that grows past LogMaxBytes (0: 10 MiB, negative: never) is renamed
	// to LogPath.1, that one to LogPath.2 and so on; LogMaxFiles (0: 5) counts
	// the current one too.
	LogPath     string
	LogMaxBytes int64
	LogMaxFiles int

	Resources Resources

	// Labels are the agent's notes; podmon keeps and returns them unread.
	Labels map[string]string `json:",omitempty"`
}

// Mount is one bind or file system in a container.
type Mount struct {
	Type        string // "bind" (default), "tmpfs", "proc", …
	Source      string
	Destination string
	ReadOnly    bool
	Propagation string   // "private" (default), "rslave", "rshared"
	Options     []string // further mount options: "size=64m", "noexec"
	// Mapped: the source shows the ids of the pod's user namespace already.
	Mapped bool `json:",omitempty"`
}

// DeviceVolume is a device node of the host that a container has under a name of
// its own: a volume, or a device that was allocated to it.
type DeviceVolume struct {
	Source, Destination string
	ReadOnly            bool `json:",omitempty"`
	// Access is what the container may do with the device, of the letters r, w
	// and m, or AccessNone: nothing that others do not let it do. Default: rwm, or
	// rm if ReadOnly.
	Access string `json:",omitempty"`
	// Mode (permission bits), UID and GID are the node's in the container, by the
	// ids that the container calls so; nil: as Source's.
	Mode     *uint32 `json:",omitempty"`
	UID, GID *uint32 `json:",omitempty"`
	// Number is what the node is, for a device that has none at Source.
	Number *DeviceNumber `json:",omitempty"`
}

// AccessNone gives a container the node of a device and no right to use it.
const AccessNone = "none"

// DeviceNumber names a device to the kernel.
type DeviceNumber struct {
	Type         string // "c": of characters, "b": of blocks, "p": a FIFO
	Major, Minor int64
}

// Moments of a container's life at which a Hook runs (OCI runtime specification).
// The first two and the last two are in the node's namespaces. A hook that fails,
// but for one after the end, fails the start.
const (
	HookPrestart        = "prestart"        // as createRuntime, before those
	HookCreateRuntime   = "createRuntime"   // the namespaces are there, the root is the node's
	HookCreateContainer = "createContainer" // the same in the container's mount namespace
	HookStartContainer  = "startContainer"  // in the container, of its files, instead of the program
	HookPoststart       = "poststart"       // the program runs
	HookPoststop        = "poststop"        // the container is gone
)

// Hook is a program that is run at a moment of a container's life, with the OCI
// runtime's state on its standard input.
type Hook struct {
	When string // one of the moments
	Path string
	Args []string `json:",omitempty"` // with the program's name; empty: that alone
	Env  []string `json:",omitempty"`
	// TimeoutSeconds is how long it may run; 0, and what is longer: 20.
	TimeoutSeconds int `json:",omitempty"`
}

// Rlimit is one resource limit (getrlimit(2)).
type Rlimit struct {
	Type       string // "RLIMIT_NOFILE"
	Soft, Hard uint64
}

// Resources are cgroup limits; a zero field means "leave alone".
type Resources struct {
	CPUShares   uint64 // cgroup v1 scale, 2…262144; turned into a weight on v2
	CPUQuota    int64  // microseconds per period
	CPUPeriod   uint64
	MemoryLimit int64 // bytes
	PidsLimit   int64
	CpusetCpus  string
	// Hugepages are limits in bytes by size of page, as the kernel names it
	// ("2MB"). Ignored where the kernel does not limit huge pages.
	Hugepages map[string]uint64 `json:",omitempty"`
}

// State of a sandbox or container.
const (
	StateRunning = "running"
	StateExited  = "exited"
	// StateStarting is of a container whose start podmon has not ended yet: it is
	// listed to who asks for it (Request.Starting), and then runs or has exited.
	StateStarting = "starting"
)

// SandboxStatus is what podmon knows of a sandbox.
type SandboxStatus struct {
	Sandbox   Sandbox
	State     string
	Pid       int
	CreatedAt int64 // unix nanoseconds
}

// ContainerStatus is what podmon knows of a container. An exited one is kept
// until OpRemoveContainer, so that no exit code is lost while the agent is
// away. Answers and events leave out the Container's Args, Env, Mounts, Devices
// and Volumes: a list of all containers must fit into one message.
type ContainerStatus struct {
	Container  Container
	State      string
	Pid        int
	StartedAt  int64 // unix nanoseconds
	FinishedAt int64
	ExitCode   int // 128+signal for a killed one
	Signal     int
	OOMKilled  bool
	// StartError is set when the process could not be started: the container
	// then is exited with ExitCode 128.
	StartError string
	// Lost is set when the process ended while no podmon was there to see its
	// exit code (podmon killed, machine rebooted): ExitCode then is 255.
	Lost bool
}

// Exec asks for one more process in a running container. Its stdio
// descriptors travel with the request: stdin, stdout, stderr in this order as
// far as the flags say; with TTY podmon answers with the terminal's master.
type Exec struct {
	ContainerID string
	Args        []string
	Env         []string // added to the container's own
	Cwd         string
	TTY         bool
	HasStdin    bool
	HasStdout   bool
	HasStderr   bool
}

// Attach asks for copies of a running container's output and for a way to its
// input. The descriptors to write to (stdout, stderr as far as the flags say)
// travel with the request, the one to write input into with the first
// response. With a terminal, stderr is never used. A second response with the
// same ID comes when the container has ended and everything it wrote has been
// passed on. A reader that lags behind by more than 1 MiB is cut off: it never
// holds up the container.
type Attach struct {
	ContainerID string
	HasStdin    bool
	HasStdout   bool
	HasStderr   bool
}

// Update asks for other limits on a running container or, when ID is a
// sandbox, on the pod's own cgroup.
type Update struct {
	ID        string
	Resources Resources
}

// Shutdown asks podmon to end. Without Force it refuses while a sandbox or a
// container exists; with it everything is killed and removed first.
type Shutdown struct {
	Force bool
}

// Upgrade asks podmon to give way to another program, which travels beside the
// request as a sealed memory file (package sealed) and goes on with all that
// podmon has. The answer comes before podmon ends; the client then connects
// again.
type Upgrade struct {
	// PatienceMillis is how long executions and attachments under way may go
	// on before they are ended, with CodeReplaced.
	PatienceMillis int64
}

// Signal asks for a signal to a container's first process.
type Signal struct {
	ID     string // container or sandbox
	Signal int
	All    bool // every process of its cgroup
}

// Resize sets the size of a terminal.
type Resize struct {
	ID            string // container, or exec id
	Width, Height uint16
}

// Request is one call. Just the field that Op names is set.
type Request struct {
	ID        uint64 `json:",omitempty"` // echoed in the Response
	Op        string
	Version   int        `json:",omitempty"` // hello
	Sandbox   *Sandbox   `json:",omitempty"`
	Container *Container `json:",omitempty"`
	Exec      *Exec      `json:",omitempty"`
	Signal    *Signal    `json:",omitempty"`
	Resize    *Resize    `json:",omitempty"`
	Attach    *Attach    `json:",omitempty"`
	Update    *Update    `json:",omitempty"`
	Shutdown  *Shutdown  `json:",omitempty"`
	Upgrade   *Upgrade   `json:",omitempty"`
	Fence     *Fence     `json:",omitempty"`
	Starting  bool       `json:",omitempty"` // list: also containers in StateStarting
	Target    string     `json:",omitempty"` // id for remove, execWait
}

// Response answers a Request, or is one message of an event stream.
type Response struct {
	ID         uint64            `json:",omitempty"`
	Error      *Error            `json:",omitempty"`
	Version    int               `json:",omitempty"`
	Build      string            `json:",omitempty"` // hello: sealed.Digest of podmon's program
	Pid        int               `json:",omitempty"`
	Sandbox    *SandboxStatus    `json:",omitempty"`
	Container  *ContainerStatus  `json:",omitempty"`
	ExecID     string            `json:",omitempty"`
	ExitCode   int               `json:",omitempty"`
	Sandboxes  []SandboxStatus   `json:",omitempty"`
	Containers []ContainerStatus `json:",omitempty"`
	Event      *Event            `json:",omitempty"`
	Fence      *FenceStatus      `json:",omitempty"`
}

// Event tells of a change of state; its sender never waits for the receiver
// (who lists after a gap).
type Event struct {
	Kind string // "sandboxExited", "containerStarted", "containerExited", EventFenced
	ID   string

	// Sandbox or Container is what the event's subject had become when the
	// event was made, so that the receiver need not list.
	Sandbox   *SandboxStatus   `json:",omitempty"`
	Container *ContainerStatus `json:",omitempty"`
}

// Error codes.
const (
	CodeNotFound = "notFound"
	CodeExists   = "exists"
	CodeInvalid  = "invalid"
	CodeInternal = "internal"
	// CodeNotRunning: the container or sandbox has exited.
	CodeNotRunning = "notRunning"
	// CodeBusy: it must end first (remove of a running container, shutdown).
	CodeBusy = "busy"
	// CodeStartFailed: an exec's process could not be started; Message is for
	// the user: `exec: "foo": executable file not found in $PATH`.
	CodeStartFailed = "startFailed"
	// CodeIncompatible: another program could not go on from this podmon
	// (OpUpgrade); Message says why.
	CodeIncompatible = "incompatible"
	// CodeReplaced: podmon gave way to another program (OpUpgrade) while this
	// execution or attachment was under way.
	CodeReplaced = "replaced"
)

// Error is a fault with a code to branch on and words for the user.
type Error struct {
	Code    string
	Message string
}

func (e *Error) Error() string { return e.Message }

// IsCode reports whether err is an Error with that code.
func IsCode(err error, code string) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == code
}
