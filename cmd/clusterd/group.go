package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// group runs the parts of a node: started in the order they were added,
// stopped in the reverse order, each given stopTimeout to end.
type group struct {
	log   *slog.Logger
	parts []part
}

type part struct {
	name string
	run  func(ctx context.Context) error
}

// stopTimeout bounds what one part may take to stop. A part that takes
// longer is left behind: the process ends anyway.
const stopTimeout = 10 * time.Second

// errEndedEarly is returned when a part ended by itself without an error.
var errEndedEarly = errors.New("exited unexpectedly")

func (g *group) add(name string, run func(ctx context.Context) error) {
	g.parts = append(g.parts, part{name, run})
}

// run blocks until ctx ends or a part does, then stops all. It returns the
// error of the part that ended early, if one did; for the others that is the cause
// (context.Cause) why theirs ended.
func (g *group) run(ctx context.Context) error {
	type ending struct {
		name string
		err  error
	}
	type running struct {
		part
		cancel context.CancelCauseFunc
		done   chan struct{}
	}
	ended := make(chan ending, len(g.parts))
	live := make([]running, 0, len(g.parts))
	for _, p := range g.parts {
		// Parts are stopped one by one, not by ctx.
		pctx, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
		r := running{p, cancel, make(chan struct{})}
		live = append(live, r)
		go func() {
			defer close(r.done)
			err := p.run(pctx)
			if pctx.Err() == nil { // it was not asked to
				if err == nil {
					err = errEndedEarly
				}
				ended <- ending{p.name, err}
				return
			}
			if err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, context.Cause(pctx)) {
				g.log.Warn("a part did not stop cleanly", "part", p.name, "err", err)
			}
		}()
	}
	var first error
	select {
	case <-ctx.Done():
	case e := <-ended:
		first = fmt.Errorf("%s: %w", e.name, e.err)
		var again *reexecError
		if errors.As(e.err, &again) {
			g.log.Info("restarting clusterd", "why", again.why)
		} else {
			g.log.Error("a part of the node ended, stopping the rest", "part", e.name, "err", e.err)
		}
	}
	for i := len(live) - 1; i >= 0; i-- {
		r := live[i]
		r.cancel(first) // nil: context.Canceled
		select {
		case <-r.done:
		case <-time.After(stopTimeout):
			g.log.Warn("a part takes too long to stop, going on without it", "part", r.name)
		}
	}
	return first
}
