package raftstore

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"net"
	"strconv"
	"syscall"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/peer"
)

// raft elects when no heartbeat has come for HeartbeatTimeout, and waits up to
// twice as long. That patience is for a leader that is only slow. A leader whose
// process has ended can be told from it: its host refuses connections. And
// members that start together know that nobody leads. In these two cases the
// voters agree among themselves at once, and one of them stands for election.
// A leader that is silent, because its machine or its link is down, or frozen,
// cannot be told from a slow one: there they wait for it, but not for as long as
// raft, whose members draw times of their own and refuse each other as long as
// one of them still waits. When a majority has heard nothing for almost
// HeartbeatTimeout, one of them stands.
//
// Nothing of raft's safety rests on this: to raft the one who stands was told
// by a leader to take over, and the votes decide. What the agreement of a
// majority prevents is that a leader is deposed because one member cannot reach
// it.

// attendLeader keeps a silent stream open to each leader in turn. When it ends
// and cannot be opened again because the host refuses, the leader is gone.
func (s *Store) attendLeader() {
	for s.ctx.Err() == nil {
		leader, changed := s.leader.current()
		if leader != "" && leader != s.cfg.ID && s.isGone(leader, changed) {
			s.agreeOnLeader(leader)
		}
		select {
		case <-changed:
		case <-s.ctx.Done():
		}
	}
}

// isGone returns true when the leader refuses connections, and false when
// another one leads, or when it cannot be told.
func (s *Store) isGone(leader string, changed <-chan struct{}) bool {
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	s.start(func() {
		select {
		case <-changed:
			cancel()
		case <-ctx.Done():
		}
	})
	ended := time.Now()
	for {
		conn, err := s.dialToSee(ctx, leader)
		switch {
		case ctx.Err() != nil:
			return false
		case err == nil:
			untilEnd(ctx, conn)
			ended = time.Now()
		case refusedBy(err):
			return true
		case time.Since(ended) > s.cfg.HeartbeatTimeout:
			return false // it is silent: that is for raft to judge
		default:
			// A process that is just ending still takes connections, and
			// resets them.
			time.Sleep(dyingPause)
		}
	}
}

// silence is how long a leader may be silent before its followers ask each
// other: less than raft's own patience, so that nobody is in the middle of a
// vain election of raft's then.
func (s *Store) silence() time.Duration {
	if s.cfg.silence != 0 {
		return s.cfg.silence
	}
	return s.cfg.HeartbeatTimeout * 9 / 10
}

// attendSilence stands for election when the voters agree that they have no
// leader, or hear nothing of the one they have.
func (s *Store) attendSilence() {
	again := s.silence() / 32
	for asked := 0; ; {
		wait := s.silence()
		leader, changed := s.leader.current()
		if leader != s.cfg.ID && s.raft().State() == raft.Follower {
			heard := s.raft().LastContact()
			if since := s.leader.since(); since.After(heard) {
				heard = since // it led itself, or an election has just ended
			}
			if wait -= time.Since(heard); wait > 0 {
				asked = 0
			} else {
				if s.shouldStand(s.ctx, leader) {
					s.cfg.Logger.Info("standing for election: the leader is silent", "leader", leader, "for", time.Since(heard).Round(time.Millisecond))
					s.standForElection()
				}
				// Without a majority there is nobody to ask all the time.
				asked++
				wait = min(again*time.Duration(1+asked/32), s.silence())
			}
		}
		select {
		case <-time.After(wait):
		case <-changed:
		case <-s.ctx.Done():
			return
		}
	}
}

// isSilent reports whether this member has heard nothing of a leader for that
// long.
func (s *Store) isSilent() bool {
	heard := s.raft().LastContact()
	return !heard.IsZero() && time.Since(heard) >= s.silence()
}

// dyingPause is the pause before a leader whose stream has broken is tried
// again.
const dyingPause = 5 * time.Millisecond

// dialToSee opens a stream of calls, on which nothing need be said.
func (s *Store) dialToSee(ctx context.Context, id string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.HeartbeatTimeout)
	defer cancel()
	return s.streams.Open(ctx, id, peer.CallStream)
}

// untilEnd returns when the peer has ended the stream, or with ctx, and closes
// it.
func untilEnd(ctx context.Context, conn net.Conn) {
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	defer func() { _ = conn.Close() }()
	var b [1]byte
	_, _ = conn.Read(b[:])
}

// refusedBy reports whether a host said that nobody listens there. A host that
// is down, or out of reach, says nothing.
func refusedBy(err error) bool { return errors.Is(err, syscall.ECONNREFUSED) }

// agreeOnLeader asks the other voters until somebody leads, this member stands,
// or raft's own patience has ended. lost is the leader that is gone, "" when
// this member has known none since it started.
func (s *Store) agreeOnLeader(lost string) {
	ctx, cancel := context.WithTimeout(s.ctx, 2*s.cfg.HeartbeatTimeout)
	defer cancel()
	for ctx.Err() == nil {
		leader, changed := s.leader.current()
		if leader != "" && leader != lost {
			return
		}
		if s.raft().State() == raft.Follower && s.shouldStand(ctx, lost) {
			s.cfg.Logger.Info("standing for election at once", "lost", lost)
			s.standForElection()
			return
		}
		select {
		case <-changed:
		case <-time.After(retryAfter):
		case <-ctx.Done():
		}
	}
}

// shouldStand asks every other voter. True: those that answer have no leader
// either, are a majority together with this member, and none of them would make
// a better leader.
func (s *Store) shouldStand(ctx context.Context, lost string) bool {
	cf := s.raft().GetConfiguration()
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
		case s.cfg.ID:
			voter = true
		case lost:
		default:
			others = append(others, string(m.ID))
		}
	}
	if !voter || s.raftSide.Gate.Shut() {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, s.cfg.HeartbeatTimeout/4)
	defer cancel()
	answers := make(chan *voterState, len(others))
	question := []byte(s.cfg.ID + "\x00" + lost)
	for _, id := range others {
		call := s.peers.Call(id, peer.KindLeaderless, question, func(f peer.Frame, _ bool, err error) {
			if err != nil || f.Kind != peer.KindVoterState {
				answers <- nil
				return
			}
			answers <- parseVoterState(id, f.Body)
		})
		defer s.peers.Forget(id, call)
	}
	mine := s.voterState()
	agreed := 1
	for range others {
		select {
		case theirs := <-answers:
			switch {
			case theirs == nil:
			case !theirs.leaderless || theirs.term > mine.term || theirs.betterThan(mine) && !theirs.candidate, theirs.newerThan(mine):
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

// voterState is what a voter says of itself.
type voterState struct {
	id                        string
	leaderless                bool // it does not lead, and has no leader
	candidate                 bool // it is asking for votes in raft's own time
	term, lastTerm, lastIndex uint64
}

// betterThan orders the voters: the one with the newest log, which all others
// may vote for, and of several such the one with the highest ID.
func (a *voterState) betterThan(b *voterState) bool {
	return a.newerThan(b) || !b.newerThan(a) && a.id > b.id
}

// newerThan reports whether a would refuse b its vote.
func (a *voterState) newerThan(b *voterState) bool {
	if a.lastTerm != b.lastTerm {
		return a.lastTerm > b.lastTerm
	}
	return a.lastIndex > b.lastIndex
}

func (s *Store) voterState() *voterState {
	r := s.raft()
	stats := r.Stats()
	number := func(name string) uint64 {
		n, _ := strconv.ParseUint(stats[name], 10, 64)
		return n
	}
	state := r.State()
	st := &voterState{id: s.cfg.ID, leaderless: state != raft.Leader, candidate: state == raft.Candidate, term: r.CurrentTerm()}
	st.lastTerm, st.lastIndex = number("last_log_term"), number("last_log_index")
	if at := number("last_snapshot_index"); at > st.lastIndex {
		st.lastTerm, st.lastIndex = number("last_snapshot_term"), at
	}
	return st
}

// answerLeaderless answers KindLeaderless: whether this member has no leader
// either, or hears nothing of it. One that it hears and that the caller has lost
// is tried.
func (s *Store) answerLeaderless(ctx context.Context, body []byte) []byte {
	caller, lost, _ := bytes.Cut(body, []byte{0})
	st := s.voterState()
	leader, _ := s.leader.current()
	if stood := s.stood.Load(); stood != nil && time.Since(*stood) < s.cfg.ElectionTimeout/2 {
		st.leaderless = false // its own election is under way
	}
	if st.leaderless && leader != "" && leader != string(caller) && !s.isSilent() {
		st.leaderless = leader == string(lost) && (s.refuses(ctx, leader) || s.isSilent())
	}
	return st.append(nil)
}

// refuses reports whether the member's host refuses connections. It tries for
// as long as a leader may still be silent.
func (s *Store) refuses(ctx context.Context, id string) bool {
	ctx, cancel := context.WithDeadline(ctx, s.raft().LastContact().Add(s.silence()))
	defer cancel()
	conn, err := s.dialToSee(ctx, id)
	if err != nil {
		return refusedBy(err)
	}
	_ = conn.Close()
	return false
}

func (a *voterState) append(b []byte) []byte {
	switch {
	case a.leaderless && a.candidate:
		b = append(b, 2)
	case a.leaderless:
		b = append(b, 1)
	default:
		b = append(b, 0)
	}
	for _, n := range []uint64{a.term, a.lastTerm, a.lastIndex} {
		b = binary.LittleEndian.AppendUint64(b, n)
	}
	return b
}

// parseVoterState returns nil for what is not one.
func parseVoterState(id string, b []byte) *voterState {
	if len(b) != 25 {
		return nil
	}
	n := func(i int) uint64 { return binary.LittleEndian.Uint64(b[1+8*i:]) }
	return &voterState{id: id, leaderless: b[0] == 1 || b[0] == 2, candidate: b[0] == 2, term: n(0), lastTerm: n(1), lastIndex: n(2)}
}

// standForElection makes this member a candidate at once.
func (s *Store) standForElection() {
	now := time.Now()
	s.stood.Store(&now)
	if err := s.raftSide.StandForElection(); err != nil {
		s.cfg.Logger.Debug("stand for election", "err", err)
	}
}
