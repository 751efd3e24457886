package main

import (
	"cmp"
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/clusterd/clusterd/member/clock"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/slack"
)

const (
	// clockLook is how often it is looked whether this machine slept or its clock was set.
	clockLook = time.Second
	// The other servers' clocks are asked for after that, and more often while this
	// machine's is wrong. Agents, of which there are many, ask seldom.
	clockPeriod      = 30 * time.Second
	clockAgentPeriod = 10 * time.Minute
	clockWrongPeriod = 2 * time.Second
	clockTimeout     = 3 * time.Second
)

// builtSlack is how far the clock of the machine that built this program may have been ahead.
const builtSlack = 48 * time.Hour

func clockFloorOf(buildDate string, trust *pki.Trust) (time.Time, string) {
	built, err := time.Parse(time.RFC3339, buildDate) // zero where it was built without
	if err == nil {
		built = built.Add(-builtSlack)
	}
	if trust != nil {
		if began := trust.Elder().Cert.NotBefore; began.After(built) {
			return began, "the cluster began"
		}
	}
	return built, "two days before this clusterd was built"
}

// clockWatch keeps the verdict on a machine's clock.
type clockWatch struct {
	clock  *clock.Clock
	log    *slog.Logger
	trust  func() *pki.Trust
	others func() []join.ServerAddr // the servers to ask
	all    func() int               // how many there are
	last   func() time.Time         // until when this node has seen the cluster's time; zero: not known
	self   bool                     // this node is one of them
	period time.Duration
	// read is how far a server's clock is ahead.
	read func(ctx context.Context, s join.ServerAddr) (time.Duration, error)
	ask  chan struct{} // is signalled (capacity 1) when they are to be asked now
	// changed is called when the clock was set, or the machine woke, and the others were asked;
	// and with each other verdict, also of how wrong it is.
	changed func()

	heard    bool       // another server has answered
	mu       sync.Mutex // guards said, differed
	said     string     // the last verdict's Why
	differed bool       // that the clock differs from another was logged
}

// look asks the others and judges.
func (w *clockWatch) look(ctx context.Context) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, clockTimeout)
	defer cancel()
	var mu sync.Mutex
	var readings []clock.Reading
	var asking sync.WaitGroup
	for _, s := range w.others() {
		asking.Go(func() {
			ahead, err := w.read(ctx, s)
			if err != nil {
				w.log.Debug("ask a server for its time", "node", s.Name, "peer", s.Addr, "err", err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			name := s.Name
			if name == "" {
				name = s.Addr.String()
			}
			readings = append(readings, clock.Reading{ID: s.ID, Name: name, Ahead: ahead})
		})
	}
	asking.Wait()
	if clock.WasSet(began, time.Now()) {
		return // the answers are of another clock; run sees it, too, and looks again
	}
	w.heard = w.heard || len(readings) > 0
	floor, what := clockFloor(w.trust())
	v := w.clock.Keep(clock.Judge(time.Now(), floor, what, readings, w.all(), w.self))
	if last := w.last(); v.Wrong() && v.Ahead == 0 && last.After(floor) {
		v.Ahead = time.Until(last) // to judge certificates by: all were signed before
	}
	w.note(v)
}

func (w *clockWatch) note(v clock.Verdict) {
	w.mu.Lock()
	defer w.mu.Unlock()
	was := w.said
	w.clock.Note(v)
	w.said = v.Why
	switch {
	case (was == "") == (v.Why == ""):
		if (v.Differs != "") != w.differed {
			w.differed = !w.differed
			w.log.Warn(cmp.Or(v.Differs, "no server's clock differs from this machine's any more"))
		}
	case v.Wrong():
		w.log.Error(v.Why)
	default:
		w.log.Info("this machine's clock is right again")
	}
}

// run keeps the verdict until ctx ends.
func (w *clockWatch) run(ctx context.Context) error {
	last := time.Now()
	var asked time.Time
	if w.heard { // a server looks before it begins
		asked = last
	}
	period := w.period
	for {
		now := time.Now()
		set := clock.WasSet(last, now)
		due := period
		if w.clock.Verdict().Wrong() {
			if due = clockWrongPeriod; !w.self {
				due = clockPeriod // that it was set is seen at once
			}
		}
		last = now
		wanted := false
		select {
		case <-w.ask:
			wanted = now.Sub(asked) >= clockWrongPeriod
		default:
		}
		if set || wanted || now.Sub(asked) >= due {
			before := w.clock.Verdict()
			w.look(ctx)
			asked = time.Now()
			period = w.period + rand.N(w.period/10) // nodes that began together spread
			if v := w.clock.Verdict(); set || v.Wrong() != before.Wrong() || (v.Ahead-before.Ahead).Abs() > clock.Tolerance {
				w.changed()
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-slack.After(clockLook):
		}
	}
}

// want asks for a look soon.
func (w *clockWatch) want() {
	select {
	case w.ask <- struct{}{}:
	default:
	}
}
