// Package election knows who leads (Leader, Leadership), and has a leader that is
// gone or silent replaced sooner than raft's own timeouts would (Election). It
// knows no Store.
package election

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/peer"
	"github.com/clusterd/clusterd/slack"
)

// raft elects when no heartbeat has come for its timeout, and waits up to
// twice as long. That time is for a leader that is only slow. A leader whose
// process has ended can be distinguished from it: its host refuses connections. And
// members that start together know that there is no leader. In these two cases the
// voters agree among themselves at once, and one of them stands for election.
// A leader that is silent, because its machine or its link is down, or frozen,
// cannot be distinguished from a slow one: there they wait for it, but not for as long as
// raft, whose members draw times of their own and refuse each other as long as
// one of them still waits. When a majority has heard nothing for almost
// HeartbeatTimeout, or for longer where members are known to be slow (timeouts), one of
// them stands.
//
// Nothing of raft's safety rests on this: raft takes the candidacy for a
// transfer of leadership, and the votes decide. What the agreement of a
// majority prevents is that a leader is deposed because one member cannot reach
// it.

// Raft is what is asked of it; a *raft.Raft.
type Raft interface {
	State() raft.RaftState
	CurrentTerm() uint64
	LastContact() time.Time
	GetConfiguration() raft.ConfigurationFuture
	Stats() map[string]string
}

// Voters are the other members, as peer.Calls knows them.
type Voters interface {
	Ask(ids []string, kind byte, body []byte) (answers <-chan peer.Answer, forget func())
}

// Config is what an Election works with. All fields are required.
type Config struct {
	ID     string // this member's
	Raft   Raft
	Voters Voters
	Leader *Leader
	// Dial opens a stream to a member, on which nothing need be said.
	Dial func(ctx context.Context, id string) (net.Conn, error)
	// Stand makes this member a candidate now.
	Stand func() error
	// GiveUp makes this member, a candidate in that term, a follower in the next one.
	GiveUp func(term uint64) error
	// Gap is how late heartbeats of a leader have been of late that came after all.
	Gap func() time.Duration
	// Lost says whether this member's state is lost: it has no vote then.
	Lost   func() bool
	Logger *slog.Logger

	HeartbeatTimeout, ElectionTimeout time.Duration // raft's own may be longer
	// Silence is how long a leader may say nothing before its followers ask each
	// other, on a machine that is not overloaded. 0: a bit less than HeartbeatTimeout.
	Silence time.Duration
}

// Election watches over the leader. Its methods may be called concurrently.
type Election struct {
	cfg      Config
	timeouts timeouts
	stood    atomic.Pointer[stood] // when this member last made itself a candidate
}

// stood is when, and the term before that election's.
type stood struct {
	at   time.Time
	term uint64
}

// New starts nothing, see MonitorLeader, MonitorSilence and Agree.
func New(cfg Config) *Election {
	if cfg.Silence == 0 {
		cfg.Silence = cfg.HeartbeatTimeout * 9 / 10
	}
	return &Election{cfg: cfg, timeouts: timeouts{silence: cfg.Silence, gap: cfg.Gap}}
}

// MonitorLeader keeps a silent stream open to each leader in turn. When it ends
// and cannot be opened again because the host refuses, the leader is gone. It
// returns with ctx.
func (e *Election) MonitorLeader(ctx context.Context) {
	for ctx.Err() == nil {
		leader, changed := e.cfg.Leader.Current()
		if leader != "" && leader != e.cfg.ID && e.isGone(ctx, leader, changed) {
			e.Agree(ctx, leader)
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// isGone returns true when the leader refuses connections, and false when
// another one leads, or when it is not known.
func (e *Election) isGone(ctx context.Context, leader string, changed <-chan struct{}) bool {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() {
		select {
		case <-changed:
			cancel()
		case <-ctx.Done():
		}
	})
	ended := time.Now()
	for {
		conn, err := e.dialToSee(ctx, leader)
		switch {
		case ctx.Err() != nil:
			return false
		case err == nil:
			untilEnd(ctx, conn)
			ended = time.Now()
		case refusedBy(err):
			return true
		case time.Since(ended) > e.cfg.HeartbeatTimeout:
			return false // it is silent: that is for raft to judge
		default:
			// A process that is just ending still takes connections, and
			// resets them.
			time.Sleep(dyingPause)
		}
	}
}

// MonitorSilence stands for election when the voters agree that they have no
// leader, or hear nothing of the one they have. It returns with ctx.
func (e *Election) MonitorSilence(ctx context.Context) {
	var run campaign
	asked := 0
	for {
		leader, changed := e.cfg.Leader.Current()
		wait := e.timeouts.wait()
		switch state := e.cfg.Raft.State(); {
		case leader == e.cfg.ID || state == raft.Leader:
			run, asked = campaign{}, 0
			e.timeouts.leads(time.Now())
		case state == raft.Candidate:
			wait = e.watchElection(&run, wait)
		case state == raft.Follower:
			heard := e.heard()
			silent := e.timeouts.silentFor(heard, time.Now())
			if run.gaveUp && leader == "" && e.cfg.Raft.CurrentTerm() == run.term+1 {
				silent = max(silent, wait)
			}
			if silent < wait {
				wait -= silent
				asked = 0
				if leader != "" {
					run = campaign{}
					e.timeouts.leads(time.Now())
				}
				break
			}
			if e.shouldStand(ctx, leader, question{e.askFor(asked), silent > 2*wait}) {
				e.cfg.Logger.Info("standing for election: the leader is silent", "leader", leader, "for", time.Since(heard).Round(time.Millisecond))
				e.Stand()
				asked = 0
				break
			}
			// Without a majority there is no reason to ask all the time.
			asked++
			wait = min(e.cfg.Silence/32*time.Duration(1+asked/32), e.cfg.Silence) * e.timeouts.factor()
		}
		var due <-chan time.Time
		if leader == e.cfg.ID {
			due = slack.After(wait) // a change of the leader ends this wait
		} else {
			e.timeouts.sleeps(time.Now().Add(wait))
			due = time.After(wait)
		}
		select {
		case <-due:
		case <-changed:
		case <-ctx.Done():
			return
		}
		if leader != e.cfg.ID {
			e.timeouts.woke(time.Now())
		}
	}
}

// campaign is an election that this member has stood for by Stand.
type campaign struct {
	term   uint64
	since  time.Time
	wait   time.Duration // for votes
	gaveUp bool          // it is a follower again, in the term after
}

// watchElection looks at this member's election, and gives it up when it has failed, so that
// another one can be held. It returns when to look again. An election of raft's own is
// left to raft: a member that is cut off must not raise its term again and again.
func (e *Election) watchElection(c *campaign, least time.Duration) time.Duration {
	now := time.Now()
	term := e.cfg.Raft.CurrentTerm()
	if stood := e.stood.Load(); stood == nil || term != stood.term+1 {
		return least
	}
	if c.term != term {
		*c = campaign{term: term, since: now, wait: max(least, e.cfg.ElectionTimeout) + rand.N(least)}
	}
	if left := c.wait - now.Sub(c.since); left > 0 {
		return left
	}
	e.timeouts.failedElection()
	e.cfg.Logger.Info("the election has brought no leader", "term", c.term, "after", now.Sub(c.since).Round(time.Millisecond))
	if err := e.cfg.GiveUp(c.term); err != nil {
		e.cfg.Logger.Debug("give an election up", "err", err)
	}
	c.since, c.gaveUp = now, true
	return e.cfg.Silence / 32
}

// heard is when this member last had reason not to stand for election.
func (e *Election) heard() time.Time {
	heard := e.cfg.Raft.LastContact()
	if since := e.cfg.Leader.Since(); since.After(heard) {
		heard = since // it led itself, or an election has just ended
	}
	return heard
}

// askFor is how long the others' answers are waited for: longer when nobody has
// answered for a while.
func (e *Election) askFor(asked int) time.Duration {
	wait := e.cfg.HeartbeatTimeout / 4
	return wait * min(e.timeouts.factor()*time.Duration(1+asked/4), 16)
}

// isSilent reports whether this member has heard nothing of a leader for that
// long.
func (e *Election) isSilent() bool {
	heard := e.cfg.Raft.LastContact()
	return !heard.IsZero() && e.timeouts.silentFor(heard, time.Now()) >= e.cfg.Silence
}

// dyingPause is the pause before a leader whose stream has broken is tried
// again.
const dyingPause = 5 * time.Millisecond

// dialToSee opens a stream of calls, on which nothing need be said.
func (e *Election) dialToSee(ctx context.Context, id string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, e.cfg.HeartbeatTimeout)
	defer cancel()
	return e.cfg.Dial(ctx, id)
}

// askAgain is the pause before voters who did not agree are asked again; a change
// of the leader cuts it short.
const askAgain = 20 * time.Millisecond

// untilEnd returns when the peer has ended the stream, or with ctx, and closes
// it.
func untilEnd(ctx context.Context, conn net.Conn) {
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	defer func() { _ = conn.Close() }()
	var b [1]byte
	_, _ = conn.Read(b[:])
}

// refusedBy reports whether a host refused the connection. A host that
// is down, or out of reach, says nothing.
func refusedBy(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

// Agree asks the other voters until there is a leader, this member stands,
// or raft's own timeout has passed. lost is the leader that is gone, "" when
// this member has known none since it started.
func (e *Election) Agree(ctx context.Context, lost string) {
	ctx, cancel := context.WithTimeout(ctx, 2*e.cfg.HeartbeatTimeout)
	defer cancel()
	began := time.Now()
	for ctx.Err() == nil {
		leader, changed := e.cfg.Leader.Current()
		if leader != "" && leader != lost {
			return
		}
		q := question{e.askFor(0), time.Since(began) > e.cfg.Silence}
		if e.cfg.Raft.State() == raft.Follower && e.shouldStand(ctx, lost, q) {
			e.cfg.Logger.Info("standing for election at once", "lost", lost)
			e.Stand()
			return
		}
		select {
		case <-changed:
		case <-time.After(askAgain):
		case <-ctx.Done():
		}
	}
}

// ShouldStand asks every other voter. True: those that answer have no leader
// either, are a majority together with this member, and none of them would make
// a better leader.
func (e *Election) ShouldStand(ctx context.Context, lost string) bool {
	return e.shouldStand(ctx, lost, question{timeout: e.askFor(0)})
}

// question is how the others are asked.
type question struct {
	timeout time.Duration
	// later: an election in a later term, of which this member has not heard, has had its
	// time. To stand in vain is how this one learns of the term.
	later bool
}

func (e *Election) shouldStand(ctx context.Context, lost string, q question) bool {
	cf := e.cfg.Raft.GetConfiguration()
	if cf.Error() != nil {
		return false
	}
	var others []string
	voter, voters := false, 0
	for _, m := range cf.Configuration().Servers {
		if m.Suffrage != raft.Voter {
			continue
		}
		voters++
		switch string(m.ID) {
		case e.cfg.ID:
			voter = true
		case lost:
		default:
			others = append(others, string(m.ID))
		}
	}
	if !voter || e.cfg.Lost() {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, q.timeout)
	defer cancel()
	answers, forget := e.cfg.Voters.Ask(others, peer.KindLeaderless, []byte(e.cfg.ID+"\x00"+lost))
	defer forget()
	mine := e.voterState()
	agreed := 1
	for range others {
		select {
		case answer := <-answers:
			theirs := voterStateOf(&answer)
			switch {
			case theirs == nil:
			case !theirs.leaderless || theirs.term > mine.term && !q.later || theirs.betterThan(mine) && !theirs.candidate, theirs.newerThan(mine):
				// It has a leader, or an election is under way, or it will stand.
				return false
			default:
				agreed++
			}
		case <-ctx.Done():
			return agreed > voters/2 // who is silent that long will not vote soon
		}
	}
	return agreed > voters/2
}

func (e *Election) voterState() *voterState {
	r := e.cfg.Raft
	stats := r.Stats()
	number := func(name string) uint64 {
		n, _ := strconv.ParseUint(stats[name], 10, 64)
		return n
	}
	state := r.State()
	st := &voterState{id: e.cfg.ID, leaderless: state != raft.Leader, candidate: state == raft.Candidate, term: r.CurrentTerm()}
	st.lastTerm, st.lastIndex = number("last_log_term"), number("last_log_index")
	if at := number("last_snapshot_index"); at > st.lastIndex {
		st.lastTerm, st.lastIndex = number("last_snapshot_term"), at
	}
	return st
}

// Answer answers peer.KindLeaderless: whether this member has no leader
// either, or hears nothing of it. One that it hears and that the caller has lost
// is tried.
func (e *Election) Answer(ctx context.Context, body []byte) []byte {
	caller, lost, _ := bytes.Cut(body, []byte{0})
	st := e.voterState()
	leader, _ := e.cfg.Leader.Current()
	if stood := e.stood.Load(); stood != nil && time.Since(stood.at) < e.cfg.ElectionTimeout/2*e.timeouts.factor() {
		st.leaderless = false // its own election is under way
	}
	if st.leaderless && leader != "" && leader != string(caller) && !e.isSilent() {
		st.leaderless = leader == string(lost) && (e.refuses(ctx, leader) || e.isSilent())
	}
	return st.append(nil)
}

// refuses reports whether the member's host refuses connections. It tries for
// as long as a leader may still be silent.
func (e *Election) refuses(ctx context.Context, id string) bool {
	ctx, cancel := context.WithDeadline(ctx, e.cfg.Raft.LastContact().Add(e.cfg.Silence))
	defer cancel()
	conn, err := e.dialToSee(ctx, id)
	if err != nil {
		return refusedBy(err)
	}
	_ = conn.Close()
	return false
}

// Stand makes this member a candidate at once.
func (e *Election) Stand() {
	e.stood.Store(&stood{time.Now(), e.cfg.Raft.CurrentTerm()})
	if err := e.cfg.Stand(); err != nil {
		e.cfg.Logger.Debug("stand for election", "err", err)
	}
}
