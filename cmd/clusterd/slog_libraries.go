package main

import (
	"context"
	"log/slog"
	"strings"
)

// libraryLogFilter lowers what the Kubernetes libraries log: info records to debug,
// errors that are retried to warnings, and what any client can cause at
// will to debug.
type libraryLogFilter struct{ slog.Handler }

// clientErrors are errors of the libraries whose cause is a client and not this
// node: it went away, or it is not known.
var clientErrors = map[string]bool{
	"Error on socket receive":                    true,
	"Error proxying data from client to backend": true,
	"Unable to authenticate the request":         true,
}

// clientGone reports whether a record is about an answer whose client had gone
// before it was written, or about a request that ended with its client. A server
// that stops has many of them.
func clientGone(r slog.Record) (is bool) {
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

func (q libraryLogFilter) level(l slog.Level) slog.Level {
	switch {
	case l == slog.LevelInfo:
		return slog.LevelDebug
	case l >= slog.LevelError:
		return slog.LevelWarn
	default:
		return l
	}
}

func (q libraryLogFilter) Enabled(ctx context.Context, l slog.Level) bool {
	return q.Handler.Enabled(ctx, q.level(l))
}

func (q libraryLogFilter) Handle(ctx context.Context, r slog.Record) error {
	r.Level = q.level(r.Level)
	if clientErrors[r.Message] || clientGone(r) {
		r.Level = slog.LevelDebug
		if !q.Handler.Enabled(ctx, r.Level) {
			return nil
		}
	}
	return q.Handler.Handle(ctx, r)
}

func (q libraryLogFilter) WithAttrs(a []slog.Attr) slog.Handler {
	return libraryLogFilter{q.Handler.WithAttrs(a)}
}
func (q libraryLogFilter) WithGroup(n string) slog.Handler {
	return libraryLogFilter{q.Handler.WithGroup(n)}
}
