package main

import (
	"context"
	"log/slog"
)

// quieter lowers what the Kubernetes libraries log: info records to debug,
// errors that heal themselves to warnings, and what any client can cause at
// will to debug.
type quieter struct{ slog.Handler }

// clientsDoing are errors of the libraries that tell of a client's manners and
// not of this node's health: it went away, or it is a stranger.
var clientsDoing = map[string]bool{
	"Error on socket receive":            true,
	"Unable to authenticate the request": true,
}

func (q quieter) level(l slog.Level) slog.Level {
	switch {
	case l == slog.LevelInfo:
		return slog.LevelDebug
	case l >= slog.LevelError:
		return slog.LevelWarn
	default:
		return l
	}
}

func (q quieter) Enabled(ctx context.Context, l slog.Level) bool {
	return q.Handler.Enabled(ctx, q.level(l))
}

func (q quieter) Handle(ctx context.Context, r slog.Record) error {
	r.Level = q.level(r.Level)
	if clientsDoing[r.Message] {
		r.Level = slog.LevelDebug
		if !q.Handler.Enabled(ctx, r.Level) {
			return nil
		}
	}
	return q.Handler.Handle(ctx, r)
}

func (q quieter) WithAttrs(a []slog.Attr) slog.Handler { return quieter{q.Handler.WithAttrs(a)} }
func (q quieter) WithGroup(n string) slog.Handler      { return quieter{q.Handler.WithGroup(n)} }
