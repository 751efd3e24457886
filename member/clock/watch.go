package clock

import (
	"cmp"
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/slack"
)

const (
	// lookPeriod is how often it is looked whether this machine slept or its clock was set.
	lookPeriod = time.Second
	// Period is after how long a server asks the others for their clocks. It asks more often while
	// its own is wrong. Agents, of which there are many, ask seldom: AgentPeriod.
	Period      = 30 * time.Second
	AgentPeriod = 10 * time.Minute
	wrongPeriod = 2 * time.Second
	askTimeout  = 3 * time.Second
)

// builtSlack is how far the clock of the machine that built this program may have been ahead.
const builtSlack = 48 * time.Hour

// Floor is a moment that has passed for certain, and what was then. buildDate is when this program
// was built (RFC 3339), empty if that is not known; trust, which may be nil, has the cluster's CAs.
func Floor(buildDate string, trust *pki.Trust) (time.Time, string) {
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

// Watch keeps the verdict on a machine's clock. Look is not called beside Run.
type Watch struct {
	Clock *Clock
	Log   *slog.Logger
	// Floor is a moment that has passed for certain, and what was then.
	Floor   func() (time.Time, string)
	Others  func() []join.ServerAddr // the servers to ask
	Servers func() int               // how many there are
	Last    func() time.Time         // until when this node has seen the cluster's time; zero: not known
	Self    bool                     // this node is one of them
	Period  time.Duration            // after how long they are asked again: Period or AgentPeriod
	// Read asks how far a server's clock is ahead. It may block until ctx ends, and is called
	// concurrently.
	Read func(ctx context.Context, s join.ServerAddr) (time.Duration, error)
	// Changed is called when the clock was set, or the machine woke, and the others were asked;
	// and with each other verdict, also of how wrong it is.
	Changed func()

	heard    bool        // another server has answered
	wanted   atomic.Bool // they are to be asked now
	mu       sync.Mutex  // guards said, differed
	said     string      // the last verdict's Why
	differed bool        // that the clock differs from another was logged
}

// Look asks the others and judges.
func (w *Watch) Look(ctx context.Context) {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	var mu sync.Mutex
	var readings []Reading
	var asking sync.WaitGroup
	for _, s := range w.Others() {
		asking.Go(func() {
			ahead, err := w.Read(ctx, s)
			if err != nil {
				w.Log.Debug("ask a server for its time", "node", s.Name, "peer", s.Addr, "err", err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			name := s.Name
			if name == "" {
				name = s.Addr.String()
			}
			readings = append(readings, Reading{ID: s.ID, Name: name, Ahead: ahead})
		})
	}
	asking.Wait()
	if WasSet(began, time.Now()) {
		return // the answers are of another clock; Run sees it, too, and looks again
	}
	w.heard = w.heard || len(readings) > 0
	floor, what := w.Floor()
	v := w.Clock.Keep(Judge(time.Now(), floor, what, readings, w.Servers(), w.Self))
	if last := w.Last(); v.Wrong() && v.Ahead == 0 && last.After(floor) {
		v.Ahead = time.Until(last) // to judge certificates by: all were signed before
	}
	w.note(v)
}

func (w *Watch) note(v Verdict) {
	w.mu.Lock()
	defer w.mu.Unlock()
	was := w.said
	w.Clock.Note(v)
	w.said = v.Why
	switch {
	case (was == "") == (v.Why == ""):
		if (v.Differs != "") != w.differed {
			w.differed = !w.differed
			w.Log.Warn(cmp.Or(v.Differs, "no server's clock differs from this machine's any more"))
		}
	case v.Wrong():
		w.Log.Error(v.Why)
	default:
		w.Log.Info("this machine's clock is right again")
	}
}

// Run keeps the verdict until ctx ends.
func (w *Watch) Run(ctx context.Context) error {
	last := time.Now()
	var asked time.Time
	if w.heard { // a server looks before it begins
		asked = last
	}
	period := w.Period
	for {
		now := time.Now()
		set := WasSet(last, now)
		due := period
		if w.Clock.Verdict().Wrong() {
			if due = wrongPeriod; !w.Self {
				due = Period // that it was set is seen at once
			}
		}
		last = now
		wanted := w.wanted.Swap(false) && now.Sub(asked) >= wrongPeriod
		if set || wanted || now.Sub(asked) >= due {
			before := w.Clock.Verdict()
			w.Look(ctx)
			asked = time.Now()
			period = w.Period + rand.N(w.Period/10) // nodes that began together spread
			if v := w.Clock.Verdict(); set || v.Wrong() != before.Wrong() || (v.Ahead-before.Ahead).Abs() > Tolerance {
				w.Changed()
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-slack.After(lookPeriod):
		}
	}
}

// RequestLook asks for a look soon. It may be called concurrently.
func (w *Watch) RequestLook() { w.wanted.Store(true) }
