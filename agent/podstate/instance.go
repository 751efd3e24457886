package podstate

import (
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// InstanceOf translates podmon's record.
func InstanceOf(st api.ContainerStatus) *Instance {
	c := st.Container
	i := &Instance{
		ID: c.ID, SandboxID: c.SandboxID, Attempt: c.Attempt, Recorded: true,
		Hash: c.Labels[LabelHash], Image: c.Labels[LabelImage], ImageID: c.Labels[LabelImageID],
		Running:    st.State == api.StateRunning,
		StopSignal: c.Labels[LabelSignal],
		User:       userOf(c),
	}
	if st.StartedAt > 0 {
		i.StartedAt = time.Unix(0, st.StartedAt)
	}
	return i
}

// userOf is the user of a container's first process. Its primary group is listed among
// the supplemental groups too, as CRI runtimes report it.
func userOf(c api.Container) *v1.ContainerUser {
	groups := []int64{int64(c.GID)}
	for _, g := range c.ExtraGIDs {
		groups = append(groups, int64(g))
	}
	slices.Sort(groups)
	return &v1.ContainerUser{Linux: &v1.LinuxContainerUser{UID: int64(c.UID), GID: int64(c.GID), SupplementalGroups: slices.Compact(groups)}}
}

// Exited takes an exit into the instance.
func (i *Instance) Exited(st api.ContainerStatus, message string, now time.Time) {
	i.Running, i.Started, i.Ready = false, false, false
	i.FinishedAt = now
	if st.FinishedAt > 0 {
		i.FinishedAt = time.Unix(0, st.FinishedAt)
	}
	i.EndSeen = endSeen(i.FinishedAt, now)
	i.ExitCode, i.Signal, i.Message = int32(st.ExitCode), int32(st.Signal), message
	switch {
	case st.StartError != "":
		i.Reason, i.Message = startErrorReason(st.StartError), st.StartError
		if i.ExitCode == 0 {
			i.ExitCode = 128
		}
	case st.Lost:
		i.Reason, i.Message = "ContainerStatusUnknown", "The container ended while nothing watched it: its exit code is not known."
		if i.ExitCode == 0 {
			i.ExitCode = 137
		}
	case st.OOMKilled:
		i.Reason = "OOMKilled"
	case i.ExitCode == 0:
		i.Reason = "Completed"
	default:
		i.Reason = "Error"
	}
}

// endSeen is an end of the past, never of the future, on the clock of now.
func endSeen(finished, now time.Time) time.Time {
	return now.Add(-max(0, now.Sub(finished)))
}

// startErrorReason tells a container that cannot run from one that could not
// be made.
func startErrorReason(msg string) string {
	for _, s := range []string{"exec:", "executable file not found", "no such file or directory", "permission denied", "exec format error", "is a directory"} {
		if strings.Contains(msg, s) {
			return "ContainerCannotRun"
		}
	}
	return "StartError"
}
