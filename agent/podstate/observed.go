package podstate

import (
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/apis/core"
)

// Desired is what the API wants of one pod.
type Desired struct {
	Pod *v1.Pod
	// Gone is set when the API has no such pod any more: everything of it is
	// stopped and removed, without a status or event.
	Gone bool
}

// Verdict is a pod failed by the node itself: refused at admission, past its
// deadline, evicted. It never changes once set.
type Verdict struct {
	Reason  string // "OutOfcpu", "DeadlineExceeded", …
	Message string
}

// ReasonTerminated is the Verdict's reason of pods that end because the machine goes
// down: the kubelet's word.
const ReasonTerminated = "Terminated"

// Op is what a worker is doing for one container right now. At most one
// operation runs per container.
type Op string

// The operations on a container.
const (
	OpNone  Op = ""
	OpPull  Op = "pull"
	OpStart Op = "start"
	OpStop  Op = "stop"
)

// Kind says which list of the spec a container is from.
type Kind string

// The kinds of container. A sidecar is an init container that is always
// restarted and outlives the initialization.
const (
	KindInit      Kind = "init"
	KindSidecar   Kind = "sidecar"
	KindApp       Kind = "app"
	KindEphemeral Kind = "ephemeral"
)

// Fault is why something could not be done, in the words of the status, and
// when it is tried again.
type Fault struct {
	Reason   string
	Message  string
	At       time.Time
	RetryAt  time.Time
	Reported time.Time // when an event last reported it
}

// ReportAgain is how often an event repeats a fault that goes on: often enough that
// it is among the pod's events whenever they are listed (they are kept an hour),
// and seldom enough that the recorder, which lets a pod say only so much, still
// passes on what comes after.
const ReportAgain = 5 * time.Minute

// News reports whether an event is to report the fault: it is a new one, or
// was last reported long ago.
func (f *Fault) News() bool { return f.Reported.Equal(f.At) }

// Observed is all that Plan knows of the node's side of a pod. It is owned by
// the pod's worker; Plan and BuildStatus only read it.
type Observed struct {
	Verdict *Verdict
	// EvictGrace is set when the verdict is an eviction by the node: how long
	// the containers get to end.
	EvictGrace *time.Duration
	// EndSince is when the first container was asked to end for the pod's end.
	EndSince time.Time
	// Disrupted is set when it was evicted for the node's sake.
	Disrupted bool
	// SelfFencing is set when podmon ends the pod if the node loses its Lease.
	SelfFencing bool
	// Final is set when the API already held a terminal phase when this agent
	// first saw the pod: nothing is started again.
	Final bool
	// EndedAs is the terminal phase that another writer gave the pod, or that an
	// agent which has found its containers read in the API: what runs is ended,
	// nothing starts, and the phase stands. "": the pod has not ended so.
	EndedAs v1.PodPhase
	// ReadOnlyTrees is set when the kernel can make a mount read-only with all that
	// is mounted below it.
	ReadOnlyTrees bool
	// StartedAt is when this node accepted the pod (status.startTime).
	StartedAt time.Time

	Sandbox Sandbox
	Volumes Volumes
	Devices Devices
	// ImageVolumes is by volume name; every image volume of the spec has an
	// entry.
	ImageVolumes map[string]*ImageVolume
	// Containers is by container name; every container of the spec has an
	// entry.
	Containers map[string]*Container

	// Allocated is what the node has granted each container; see resize.go.
	Allocated Allocation
	// ResizePending is why the node cannot grant what the spec asks for.
	ResizePending *Fault
	// Resizing is set while cgroups are written; ResizeErr is why that failed.
	Resizing  bool
	ResizeErr *Fault

	// Strays are what podmon holds of the pod and nothing above stands for, by
	// ID: made for a request whose answer was lost. They are ended.
	Strays map[string]*Stray

	// StatusStored is true when the API has acknowledged the status as built
	// from the present state.
	StatusStored bool
	// TearingDown is set while the teardown runs; TornDown when sandbox,
	// network, mounts and records of the pod are gone.
	TearingDown bool
	TornDown    bool
	TeardownErr *Fault
	// TeardownPart is what the teardown is at, since TeardownSince.
	TeardownPart  string
	TeardownSince time.Time
	// Finishing is set while the API object is being deleted; Finished when
	// that is done.
	Finishing bool
	Finished  bool
	FinishErr *Fault
}

// Alive reports whether a container of the pod runs, or a device of it is held.
func (o *Observed) Alive() bool {
	if o.Devices.Held { // what they had was not taken back yet
		return true
	}
	for _, c := range o.Containers {
		if c.Running() {
			return true
		}
	}
	return false
}

// SandboxState is the state of a pod's sandbox.
type SandboxState string

// The states of a sandbox.
//
//	absent ──create──▶ creating ──▶ ready ──pause died──▶ dead ──▶ removing ──▶ absent
const (
	SandboxAbsent   SandboxState = ""
	SandboxCreating SandboxState = "creating"
	SandboxReady    SandboxState = "ready"
	SandboxDead     SandboxState = "dead"
	SandboxRemoving SandboxState = "removing"
)

// Sandbox is the pod's pause process and network as observed.
type Sandbox struct {
	Since   time.Time // when creating or removing began
	ID      string
	State   SandboxState
	Attempt uint32 // of the newest sandbox; the next one is Attempt+1 if Made
	Made    bool   // a sandbox has been made before
	MadeAt  time.Time
	IPs     []netip.Addr
	// Limits are those of the pod's own cgroup, as last written.
	Limits api.Resources
	Err    *Fault
}

// Stray is a sandbox or container that is to be ended because no
// spec asks for it, or its record is lost.
type Stray struct {
	Container bool // else a sandbox
	Busy      bool // it is being ended
	Err       *Fault
}

// Volumes is the state of a pod's volumes.
type Volumes struct {
	Ready bool
	Busy  bool
	Since time.Time // when they were begun to be made
	Err   *Fault
}

// Container is one container of the spec as observed: its newest instance,
// the one before, and what is being done about it.
type Container struct {
	Name string

	Op        Op
	OpSince   time.Time     // of a stop that is made sooner, when the first began
	StopGrace time.Duration // of the running OpStop
	Stop      StopStage     // of the running OpStop

	// ImageReady is set by a successful pull and consumed by the next start.
	ImageReady bool
	ImageRef   string // the image reference ImageReady speaks of
	ImageID    string
	ImageErr   *Fault
	ImageDelay time.Duration // back-off the next image fault will get

	// StartErr is why the last start made no instance.
	StartErr *Fault

	Now  *Instance // newest, nil: never made
	Last *Instance // the one before, exited

	Restarts int32
	// BackOff is how long after Now's exit the next start has to wait.
	BackOff time.Duration
}

// StopCause says why an instance was stopped by us.
type StopCause string

// The causes of a stop.
const (
	StopNone      StopCause = ""
	StopChanged   StopCause = "changed"   // the spec has another image now
	StopUnhealthy StopCause = "unhealthy" // a probe or hook failed
	StopSandbox   StopCause = "sandbox"   // the sandbox died
	StopPod       StopCause = "pod"       // the pod ends
	StopResized   StopCause = "resized"   // its size changed, and its policy asks for a restart
)

// StopStage is how far a stop is.
type StopStage struct {
	Doing string    // what is waited for, "running the preStop hook"
	Since time.Time // when that began
	Until time.Time // when it is given up; zero: never
}

// Instance is one run of a container.
type Instance struct {
	ID        string
	SandboxID string
	Attempt   uint32
	Hash      string
	Image     string
	ImageID   string

	Running    bool
	CreatedAt  time.Time
	StartedAt  time.Time
	FinishedAt time.Time
	// EndSeen is the end on the agent's own steady clock, which back-off counts
	// from: FinishedAt is in the future after the machine's clock was set back.
	EndSeen  time.Time
	ExitCode int32
	Signal   int32
	Reason   string // terminated reason
	Message  string // terminated message

	// Recorded is set while podmon holds a record of the instance.
	Recorded bool
	// Started: the startup probe (if any) has passed and postStart has ended.
	Started bool
	// Ready is the readiness probe's last word; true without a probe.
	Ready bool
	// Sick is why the instance must be killed, "": it need not.
	Sick string
	// SickGrace overrides the grace period of the kill.
	SickGrace *int64
	// PreStopDone: the preStop hook has been run.
	PreStopDone bool
	StopCause   StopCause
	// StopSignal is what stops it, "SIGTERM"; "": not known.
	StopSignal string
	// User is whom it runs as; nil: not known.
	User *v1.ContainerUser
	// Applied is what its cgroup holds.
	Applied v1.ResourceRequirements
}

// Running reports whether its newest instance runs.
func (c *Container) Running() bool { return c.Now != nil && c.Now.Running }

// busyStarting reports whether the container is on its way to its next run.
func (c *Container) busyStarting() bool { return c.Op == OpPull || c.Op == OpStart }

// kindOf returns the kind of an init container.
func InitKind(c *v1.Container) Kind {
	if core.IsSidecar(c) {
		return KindSidecar
	}
	return KindInit
}
