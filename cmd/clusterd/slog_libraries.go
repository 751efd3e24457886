package main

import (
	"context"
	"log/slog"
	"strings"
)

// quieter lowers what the Kubernetes libraries log: info records to debug,
// errors that are retried to warnings, and what any client can cause at
// will to debug.
type quieter struct{ slog.Handler }

// clientsDoing are errors of the libraries that tell of a client's manners and
// not of this node's health: it went away, or it is a stranger.
var clientsDoing = map[string]bool{
	"Error on socket receive":                    true,
	"Error proxying data from client to backend": true,
	"Unable to authenticate the request":         true,
}

// toNobody reports whether a record is about an answer whose client had gone
// before it was written, or about a request that ended with its client. A server
// that stops has many of them.
func toNobody(r slog.Record) (is bool) {
	if r.Message != "Unhandled Error" {
		return false
	}
	r.Attrs(func(a slog.Attr) bool {
		if a.Key != "err" {
			return true
		}
		err := a.Value.String()
		is = strings.Contains(err, "apiserver was unable to write a ") ||
			err == "failed to fetch openapi paths: "+context.Canceled.Error() ||
			strings.Contains(err, "apiserver received an error that is not an metav1.Status") &&
				(strings.Contains(err, "closed pipe") || strings.Contains(err, context.Canceled.Error()))
		return false
	})
	return is
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
	if clientsDoing[r.Message] || toNobody(r) {
		r.Level = slog.LevelDebug
		if !q.Handler.Enabled(ctx, r.Level) {
			return nil
		}
	}
	return q.Handler.Handle(ctx, r)
}

func (q quieter) WithAttrs(a []slog.Attr) slog.Handler { return quieter{q.Handler.WithAttrs(a)} }
func (q quieter) WithGroup(n string) slog.Handler      { return quieter{q.Handler.WithGroup(n)} }
