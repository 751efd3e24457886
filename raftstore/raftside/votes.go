package raftside

import (
	"errors"
	"syscall"
	"time"

	"github.com/hashicorp/raft"
)

// A vote is asked for once, on a connection out of raft's pool, and raft waits for
// the rest of its election timeout when that fails. Connections in the pool are
// dead when their peer has restarted or its link was down, and silent for seconds
// when packets were lost: an election after that took several timeouts, one for
// each of them. So a vote is asked for again, on another connection: at once after
// an error, and after a while without an answer. It is the same question of the
// same term; the voter gives the same answer, and the first one counts.

const (
	// askVoteAgain is how long an answer is waited for before the next try.
	askVoteAgain = 150 * time.Millisecond
	// voteTries is one more than the pool can hold.
	voteTries = poolSize + 1
)

// RequestVote implements raft.Transport.
func (p *Transport) RequestVote(id raft.ServerID, target raft.ServerAddress, req *raft.RequestVoteRequest, resp *raft.RequestVoteResponse) error {
	return untilAnswered(p, resp, func(resp *raft.RequestVoteResponse) error {
		return p.NetworkTransport.RequestVote(id, target, req, resp)
	})
}

// RequestPreVote implements raft.WithPreVote.
func (p *Transport) RequestPreVote(id raft.ServerID, target raft.ServerAddress, req *raft.RequestPreVoteRequest, resp *raft.RequestPreVoteResponse) error {
	return untilAnswered(p, resp, func(resp *raft.RequestPreVoteResponse) error {
		return p.NetworkTransport.RequestPreVote(id, target, req, resp)
	})
}

var errStopped = errors.New("the member stops")

// untilAnswered asks until there is an answer, the host refuses connections, or it
// was tried often enough.
func untilAnswered[T any](p *Transport, resp *T, ask func(*T) error) error {
	type answer struct {
		resp *T
		err  error
	}
	answers := make(chan answer, voteTries)
	asked, ended := 0, 0
	again := func() {
		asked++
		p.votes.Go(func() {
			resp := new(T)
			err := ask(resp)
			answers <- answer{resp, err}
		})
	}
	again()
	tick := time.NewTicker(askVoteAgain)
	defer tick.Stop()
	for {
		select {
		case a := <-answers:
			if a.err == nil {
				*resp = *a.resp
				return nil
			}
			ended++
			switch {
			case errors.Is(a.err, syscall.ECONNREFUSED):
				return a.err
			case asked < voteTries:
				again()
			case ended == asked:
				return a.err
			}
		case <-tick.C:
			if asked < voteTries {
				again()
			}
		case <-p.cfg.Done:
			return errStopped
		}
	}
}
