package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"sync"
	"time"

	"k8s.io/apiserver/pkg/server/healthz"
	kubeversion "k8s.io/component-base/version"

	"github.com/clusterd/clusterd/member/clock"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/raftstore"
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

// clockFloor is a moment that has passed for certain, and what was then.
func clockFloor(trust *pki.Trust) (time.Time, string) {
	return clockFloorOf(kubeversion.Get().BuildDate, trust)
}

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

// checkClockBefore refuses what a clock of the past would spoil: a cluster of 1970 has an
// authority that has ended when the clock is set.
func checkClockBefore(doing string) error {
	floor, what := clockFloor(nil)
	if now := time.Now(); now.Before(floor) {
		return fmt.Errorf("%s: this machine's clock is wrong: it says %s, which is before %s (%s): set it (timedatectl set-time), and repeat the command",
			doing, now.UTC().Format(time.RFC3339), what, floor.UTC().Format(time.RFC3339))
	}
	return nil
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

// readClock asks servers for their time as the node with that id.
func readClock(tid func() transport.Identity, id string) func(context.Context, join.ServerAddr) (time.Duration, error) {
	return func(ctx context.Context, s join.ServerAddr) (time.Duration, error) {
		tid := tid()
		return join.AskClock(ctx, func(ctx context.Context) (net.Conn, error) { return tid.DialForTime(ctx, s.Addr, s.ID) }, id, time.Now)
	}
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

// newClockWatch is a server's.
func (m *Main) newClockWatch() *clockWatch {
	return &clockWatch{
		clock: &m.clock, log: room(m.log, "clock"), read: readClock(func() transport.Identity { return m.tid }, m.id.nodeID()), trust: m.trust.Load,
		others: m.otherServers, all: func() int { return len(m.otherServers()) + 1 }, self: true, period: clockPeriod,
		last: func() time.Time {
			if m.store == nil {
				return time.Time{}
			}
			return m.store.Time()
		},
		ask: make(chan struct{}, 1), changed: m.renewNow.Broadcast,
	}
}

// otherServers are those of the records, and before the store is open those of the data directory.
func (m *Main) otherServers() []join.ServerAddr {
	if m.store != nil {
		return m.serverAddrs()[1:]
	}
	var others []join.ServerAddr
	for _, p := range m.dir.readPeers() {
		others = append(others, join.ServerAddr{ID: p.ID, Name: p.Name, Addr: p.Addr})
	}
	return others
}

// keepClock keeps the verdict on this server's clock, and leadership away from it while others agree
// that it is wrong: what the leader does goes by its clock.
func (m *Main) keepClock(ctx context.Context) error {
	yield := leaderYield{verdict: m.clock.Verdict, leads: m.store.IsLeader, members: m.store.Members, transfer: m.store.TransferLeadershipTo, log: m.log}
	var yielding sync.WaitGroup
	defer yielding.Wait()
	yielding.Go(func() {
		for ctx.Err() == nil {
			wait := yield.look(ctx)
			select {
			case <-ctx.Done():
			case <-slack.After(wait):
			}
		}
	})
	return m.clockWatch.run(ctx)
}

// leaderYield hands leadership over while this server's clock is wrong: to a voter whose clock is
// right, as far as that is known, since another one would hand it back.
type leaderYield struct {
	verdict  func() clock.Verdict
	leads    func() bool
	members  func() ([]raftstore.Member, error)
	transfer func(ctx context.Context, id string) error
	log      *slog.Logger

	tries int // since the clock was right
}

const (
	yieldTimeout = 10 * time.Second
	yieldMost    = 30 * time.Second
)

// look hands over if that is needed, and returns after how long it is to be called again.
func (y *leaderYield) look(ctx context.Context) time.Duration {
	v := y.verdict()
	if !v.Wrong() || !v.Agreed {
		y.tries = 0
		return clockWrongPeriod
	}
	if !y.leads() {
		return clockWrongPeriod
	}
	err := y.handOver(ctx, v.By)
	y.tries++
	y.log.Warn("this server hands leadership over, as its clock is wrong", "tries", y.tries, "err", err)
	if err == nil && y.tries == 1 {
		return clockWrongPeriod
	}
	// It failed, or leadership came back: others are given the time to work meanwhile.
	return yieldMost + rand.N(yieldMost)
}

// handOver tries those whose clocks are right in turn.
func (y *leaderYield) handOver(ctx context.Context, right []string) error {
	ctx, cancel := context.WithTimeout(ctx, yieldTimeout)
	defer cancel()
	members, err := y.members()
	if err != nil {
		return err
	}
	var to []string
	for _, m := range members {
		if m.Voter && slices.Contains(right, m.ID) {
			to = append(to, m.ID)
		}
	}
	if len(to) == 0 {
		return errors.New("no other voter is known to have a right clock")
	}
	return y.transfer(ctx, to[y.tries%len(to)])
}

// clockCheck is the readiness of this server as its clock makes it.
func (m *Main) clockCheck() healthz.HealthChecker {
	return healthz.NamedCheck("clock", func(*http.Request) error {
		if v := m.clock.Verdict(); v.Wrong() {
			return errors.New(v.Why)
		}
		return nil
	})
}

// holdLoops waits while this machine's clock is wrong or was set and is not judged again yet: loops
// decide by it what has ended.
func (m *Main) holdLoops(ctx context.Context) {
	for ctx.Err() == nil && (m.clock.Doubtful() || m.clock.Verdict().Wrong()) {
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// whileClockIsRight runs work until ctx or the work ends, or the clock is wrong.
func (m *Main) whileClockIsRight(ctx context.Context, work func(context.Context) error) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	var watching sync.WaitGroup
	watching.Go(func() {
		for ctx.Err() == nil && !m.clock.Verdict().Wrong() {
			select {
			case <-ctx.Done():
			case <-slack.After(clockLook):
			}
		}
		stop()
	})
	err := work(ctx)
	stop()
	watching.Wait()
	return err
}
