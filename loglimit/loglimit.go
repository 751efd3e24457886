// Package loglimit rate-limits log lines caused by remote peers: one line per cause and
// interval, with the number of lines dropped since the previous one. It depends on the
// standard library only, so that every room can import it.
package loglimit

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// maxCauses is how many causes are told apart at a time. Causes beyond them count as
// one: strangers may think of many.
const maxCauses = 64

// Logger writes lines that strangers cause. Its methods may be called concurrently.
type Logger struct {
	log   *slog.Logger
	every time.Duration
	now   func() time.Time

	mu     sync.Mutex
	causes map[string]*cause
}

type cause struct {
	written time.Time // the last line
	omitted int       // since then
}

// New writes one line of each cause in the given interval.
func New(log *slog.Logger, every time.Duration) *Logger {
	return &Logger{log: log, every: every, now: time.Now, causes: make(map[string]*cause)}
}

// Log writes a line as slog.Logger.Log does, or leaves it out: then it is written at
// level debug. The cause is what it counts by.
func (l *Logger) Log(ctx context.Context, level slog.Level, cause, msg string, args ...any) {
	omitted, ok := l.take(cause)
	switch {
	case !ok:
		level = slog.LevelDebug
	case omitted > 0:
		args = append(args[:len(args):len(args)], "omitted", omitted)
	}
	l.log.Log(ctx, level, msg, args...)
}

// take reports whether a line may be written now, and how many of its cause were left
// out before it.
func (l *Logger) take(name string) (omitted int, ok bool) {
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	c := l.causes[name]
	if c == nil {
		c = l.add(name, now)
	}
	if !c.written.IsZero() && now.Sub(c.written) < l.every {
		c.omitted++
		return 0, false
	}
	omitted = c.omitted
	*c = cause{written: now}
	return omitted, true
}

// add makes room for a cause. mu is held.
func (l *Logger) add(name string, now time.Time) *cause {
	if len(l.causes) >= maxCauses {
		for other, c := range l.causes {
			if other != "" && now.Sub(c.written) >= l.every {
				delete(l.causes, other)
			}
		}
	}
	if len(l.causes) >= maxCauses {
		name = "" // all that are too many
	}
	c := l.causes[name]
	if c == nil {
		c = &cause{}
		l.causes[name] = c
	}
	return c
}
