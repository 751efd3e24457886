package pod

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/internal/plainfile"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podstate"
)

// Bounds of termination messages, in bytes and lines: of one file, and of
// what is taken from a log.
const (
	maxMessage      = 4096
	maxLogMessage   = 2048
	maxMessageLines = 80
)

// lastWords reads the termination message, or the end of the log where the
// policy says so.
func lastWords(st api.ContainerStatus, spec *v1.Container) string {
	if p := st.Container.Labels[podstate.LabelMessage]; p != "" {
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
