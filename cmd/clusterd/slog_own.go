package main

import (
	"io"
	"os"
	"path/filepath"

	"github.com/clusterd/clusterd/agent/nodelog"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
)

// ownLog is the file of this program's own log, from which the node's logs are
// answered; "": standard error goes to the journal, which has it.
func (c *Config) ownLog() string {
	if os.Getenv("JOURNAL_STREAM") != "" || !c.NodeLogs { // systemd sets it
		return ""
	}
	return nodedir.Dir(c.Data).Path("log", nodelog.Service+".log")
}

// withOwnLog also writes to the file what is written to w. That the file cannot
// be written never keeps w from being.
func (c *Config) withOwnLog(w io.Writer) io.Writer {
	path := c.ownLog()
	if path == "" {
		return w
	}
	_ = os.MkdirAll(c.Data, 0o700)
	_ = os.MkdirAll(filepath.Dir(path), 0o755)
	return both{w, nodelog.OwnLog(path)}
}

// both writes to a and, as well as it goes, to b.
type both struct{ a, b io.Writer }

// Write implements io.Writer.
func (t both) Write(p []byte) (int, error) {
	_, _ = t.b.Write(p)
	return t.a.Write(p)
}
