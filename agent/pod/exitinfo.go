package pod

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/internal/plainfile"
	"github.com/clusterd/clusterd/agent/podmon/api"
)

// Bounds of termination messages, in bytes and lines: of one file, of all
// containers of a pod, and of what is taken from a log.
const (
	maxMessage      = 4096
	maxMessages     = 12 << 10
	maxLogMessage   = 2048
	maxMessageLines = 80
)

// instanceOf translates podmon's record.
func instanceOf(st api.ContainerStatus) *Instance {
	c := st.Container
	i := &Instance{
		ID: c.ID, SandboxID: c.SandboxID, Attempt: c.Attempt, Recorded: true,
		Hash: c.Labels[labelHash], Image: c.Labels[labelImage], ImageID: c.Labels[labelImageID],
		Running:    st.State == api.StateRunning,
		StopSignal: c.Labels[labelSignal],
		User:       userOf(c),
	}
	if st.StartedAt > 0 {
		i.StartedAt = time.Unix(0, st.StartedAt)
	}
	return i
}

// userOf is whom a container's first process runs as. Its own group is among
// the supplemental ones, as other runtimes tell it.
func userOf(c api.Container) *v1.ContainerUser {
	groups := []int64{int64(c.GID)}
	for _, g := range c.ExtraGIDs {
		groups = append(groups, int64(g))
	}
	slices.Sort(groups)
	return &v1.ContainerUser{Linux: &v1.LinuxContainerUser{UID: int64(c.UID), GID: int64(c.GID), SupplementalGroups: slices.Compact(groups)}}
}

// exited takes an exit into the instance.
func (i *Instance) exited(st api.ContainerStatus, message string, now time.Time) {
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

// lastWords reads the termination message, or the end of the log where the
// policy says so.
func lastWords(st api.ContainerStatus, spec *v1.Container) string {
	if p := st.Container.Labels[labelMessage]; p != "" {
		if msg := head(p, maxMessage); msg != "" {
			return msg
		}
	}
	if spec != nil && spec.TerminationMessagePolicy == v1.TerminationMessageFallbackToLogsOnError && (st.ExitCode != 0 || st.OOMKilled) {
		return logTail(st.Container.LogPath)
	}
	return ""
}

func head(path string, n int64) string {
	f, err := plainfile.OpenBeneath(filepath.Split(path))
	if err != nil {
		return ""
	}
	defer f.Close()
	b, _ := io.ReadAll(io.LimitReader(f, n))
	return strings.ToValidUTF8(string(b), "?")
}

// logTail is the text of the last lines of a CRI log.
func logTail(path string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return ""
	}
	const window = 64 << 10
	off := max(st.Size()-window, 0)
	b, err := io.ReadAll(io.NewSectionReader(f, off, window))
	if err != nil {
		return ""
	}
	lines := bytes.Split(bytes.TrimRight(b, "\n"), []byte("\n"))
	if off > 0 && len(lines) > 1 {
		lines = lines[1:] // the first is cut
	}
	if len(lines) > maxMessageLines {
		lines = lines[len(lines)-maxMessageLines:]
	}
	var out bytes.Buffer
	for _, l := range lines {
		parts := bytes.SplitN(l, []byte(" "), 4) // time, stream, tag, text
		if len(parts) != 4 {
			continue
		}
		out.Write(parts[3])
		if !bytes.Equal(parts[2], []byte("P")) {
			out.WriteByte('\n')
		}
	}
	s := out.Bytes()
	if len(s) > maxLogMessage {
		s = s[len(s)-maxLogMessage:]
	}
	return strings.ToValidUTF8(string(s), "?")
}
