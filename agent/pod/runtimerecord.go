package pod

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podstate"
)

// TypeSandbox is the type of a RuntimeRecord that is a pod's pause and namespaces;
// those of containers are the Kinds.
const TypeSandbox = "sandbox"

// RuntimeRecord is a sandbox or container as podmon holds it, for people who look at
// a node whose API does not answer. Its JSON is printed by `clusterd
// containers -o json`: fields may be added to it, and keep their meaning.
type RuntimeRecord struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	PodUID    string `json:"podUID"`
	Name      string `json:"name,omitempty"` // of the container; empty: a sandbox
	Type      string `json:"type,omitempty"` // empty: made before types were noted
	ID        string `json:"id"`
	SandboxID string `json:"sandboxID"`
	Attempt   uint32 `json:"attempt"`
	Image     string `json:"image,omitempty"`
	LogPath   string `json:"logPath,omitempty"`
	// CgroupParent is the pod's cgroup below every controller.
	CgroupParent string `json:"cgroupParent,omitempty"`

	// Unconfirmed: its pod was started without the API, which has not shown it since.
	Unconfirmed bool `json:"unconfirmed,omitempty"`

	Running    bool       `json:"running"`
	Pid        int        `json:"pid,omitempty"` // while it runs
	StartedAt  *time.Time `json:"startedAt,omitempty"`
	FinishedAt *time.Time `json:"finishedAt,omitempty"`
	ExitCode   *int       `json:"exitCode,omitempty"` // once it has ended
	Signal     int        `json:"signal,omitempty"`
	// Reason is why it ended, if more is known than the code: OOMKilled,
	// ContainerStatusUnknown (its end was not observed), StartError.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
}

// RuntimeRecords puts podmon's list in order: pod by pod, each pod's sandboxes before
// its containers, older attempts before newer ones. It is pure.
func RuntimeRecords(sandboxes []api.SandboxStatus, containers []api.ContainerStatus) []RuntimeRecord {
	var out []RuntimeRecord
	of := map[string]api.Sandbox{}
	for _, st := range sandboxes {
		s := st.Sandbox
		of[s.ID] = s
		h := RuntimeRecord{
			Namespace: s.Namespace, Pod: s.Name, PodUID: s.PodUID, Type: TypeSandbox, ID: s.ID, SandboxID: s.ID,
			Attempt: s.Attempt, CgroupParent: s.CgroupParent, Running: st.State == api.StateRunning, StartedAt: moment(st.CreatedAt),
		}
		if h.Running {
			h.Pid = st.Pid
		}
		out = append(out, h)
	}
	for _, st := range containers {
		c := st.Container
		s := of[c.SandboxID]
		h := RuntimeRecord{
			Namespace: s.Namespace, Pod: s.Name, PodUID: s.PodUID, Name: c.Name, Type: c.Labels[podstate.LabelType], ID: c.ID, SandboxID: c.SandboxID,
			Attempt: c.Attempt, Image: c.Labels[podstate.LabelImage], LogPath: c.LogPath, CgroupParent: s.CgroupParent,
			Running: st.State == api.StateRunning, StartedAt: moment(st.StartedAt),
		}
		if h.Running {
			h.Pid = st.Pid
		} else {
			h.FinishedAt, h.ExitCode, h.Signal = moment(st.FinishedAt), &st.ExitCode, st.Signal
		}
		switch {
		case st.OOMKilled:
			h.Reason = "OOMKilled"
		case st.Lost:
			h.Reason = "ContainerStatusUnknown"
		case st.StartError != "":
			h.Reason, h.Message = "StartError", st.StartError
		}
		out = append(out, h)
	}
	slices.SortStableFunc(out, func(a, b RuntimeRecord) int {
		return cmp.Or(
			strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Pod, b.Pod), strings.Compare(a.PodUID, b.PodUID),
			strings.Compare(a.Name, b.Name), cmp.Compare(a.Attempt, b.Attempt))
	})
	return out
}

// moment is a time of podmon's; nil: it has not come.
func moment(nanoseconds int64) *time.Time {
	if nanoseconds == 0 {
		return nil
	}
	t := time.Unix(0, nanoseconds).UTC()
	return &t
}
