package raftside

import (
	"context"
	"io"
	"log/slog"

	"github.com/hashicorp/go-hclog"
)

// NewLogger hands raft's log lines to slog, one level lower: what raft calls
// an error (a peer not reached) is retried by raft, and its changes of state are
// reported by the store in its own words.
func NewLogger(l *slog.Logger) hclog.Logger {
	il := hclog.NewInterceptLogger(&hclog.LoggerOptions{Output: io.Discard, Level: hclog.Off})
	il.RegisterSink(sink{l})
	return il
}

// routine are lines that raft repeats for as long as a member is away, or
// while one that came back is caught up. Gossip says once that it is away.
var routine = map[string]bool{
	"failed to heartbeat to":                            true,
	"failed to appendEntries to":                        true,
	"failed to pipeline appendEntries to":               true,
	"failed to make requestVote RPC":                    true,
	"failed to make requestPreVote RPC":                 true,
	"failed to get previous log":                        true,
	"previous log term mis-match":                       true,
	"appendEntries rejected, sending older logs":        true,
	"failed to contact":                                 true,
	"rejecting pre-vote request since we have a leader": true,
}

type sink struct{ l *slog.Logger }

func (s sink) Accept(name string, level hclog.Level, msg string, args ...any) {
	to := slog.LevelDebug
	if level >= hclog.Warn {
		to = slog.LevelInfo
	}
	if level >= hclog.Error {
		to = slog.LevelWarn
	}
	if routine[msg] {
		to = slog.LevelDebug
	}
	ctx := context.Background()
	if !s.l.Enabled(ctx, to) {
		return
	}
	for i, a := range args {
		if f, ok := a.(hclog.Format); ok && len(f) > 0 {
			args[i] = f[1:]
		}
	}
	s.l.Log(ctx, to, msg, append([]any{"part", "raft"}, args...)...)
}
