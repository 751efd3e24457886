package api

// OpFence tells podmon which pods must not run on when the node has lost its
// cluster, and until when it has not: see Fence.
const OpFence = "fence"

// EventFenced is the Kind of an Event whose ID is a pod's UID: its deadline has
// passed, and it is being ended.
const EventFenced = "podFenced"

// CodeFenced: the pod's deadline has passed. It does not run again.
const CodeFenced = "fenced"

// Fence changes which pods are fenced by podmon itself, without a request, when
// a deadline passes: all their processes are killed and what is mounted in
// their directories is unmounted. One deadline counts for all of them; who asks
// moves it on while it may. A pod that was fenced stays so until it is dropped:
// nothing is started in it again. Podmon keeps all of this for its successors.
// A Fence that is empty changes nothing, and asks.
type Fence struct {
	// Deadline is in nanoseconds of CLOCK_BOOTTIME, which runs on while the
	// machine sleeps. One that has passed fences at once. 0: it stays.
	Deadline int64 `json:",omitempty"`
	// Add are further pods. They are refused, with CodeFenced, when there is no
	// deadline or it has passed.
	Add []FencedPod `json:",omitempty"`
	// Drop are UIDs of pods that have no process any more.
	Drop []string `json:",omitempty"`
}

// FencedPod is a pod on the list.
type FencedPod struct {
	UID string
	// Dirs are the directories in which its volumes are mounted, absolute.
	Dirs []string
}

// FenceStatus is the list as it is.
type FenceStatus struct {
	Deadline int64
	Pods     []FencedPodStatus
}

// FencedPodStatus is a pod of the list: Fenced when its deadline has passed,
// Ended when it has no process and no mount any more.
type FencedPodStatus struct {
	UID    string
	Fenced bool `json:",omitempty"`
	Ended  bool `json:",omitempty"`
}
