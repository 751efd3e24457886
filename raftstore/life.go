package raftstore

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/raftside"
)

// life is what a member's goroutines belong to.
type life struct {
	ctx    context.Context // ends when Close begins
	cancel context.CancelFunc
	wg     sync.WaitGroup
	mu     sync.Mutex
	closed bool
	done   chan struct{} // closed when Close is through
	// raftEnded is closed when nothing of raft runs any more, see errorOf.
	raftEnded chan struct{}
	failure   failure
}

// begin is called before anything else.
func (l *life) begin() {
	l.ctx, l.cancel = context.WithCancel(context.Background())
	l.done, l.raftEnded, l.failure.ch = make(chan struct{}), make(chan struct{}), make(chan struct{})
}

// start runs f in a goroutine that Close waits for. After Close has begun it
// does nothing: who waits for f must wait for ctx as well.
func (l *life) start(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return
	}
	l.wg.Add(1)
	go func() {
		defer l.wg.Done()
		f()
	}()
}

// errorOf waits for raft's answer to a new future, see raftside.ErrorOf.
func (l *life) errorOf(f raft.Future) error { return raftside.ErrorOf(f, l.raftEnded) }

// failure is why a store stopped by itself.
type failure struct {
	once sync.Once
	ch   chan struct{}
	err  error
}

// Failed is closed when the store has stopped because it could no longer
// answer for what it holds; Err then says why. The process should end: at the
// next start the store repairs itself from the other members if it can.
func (s *Store) Failed() <-chan struct{} { return s.failure.ch }

// Err is why the store stopped by itself; nil if it did not.
func (s *Store) Err() error {
	select {
	case <-s.failure.ch:
		return s.failure.err
	default:
		return nil
	}
}

// fail stops the store. forget: its state must not be used at the next
// start either. It may be called from any goroutine, and returns before the
// store has ended.
func (s *Store) fail(err error, forget bool) {
	s.failure.once.Do(func() {
		if forget {
			why, werr := s.state.MarkCorrupt(err)
			if why != nil {
				s.cfg.Logger.Error("the store's state is wrong, and cannot be fetched from others", "err", why)
			}
			if werr != nil {
				err = errors.Join(err, werr)
			}
		}
		s.cfg.Logger.Error("the store stops", "err", err)
		s.failure.err = err
		close(s.failure.ch)
		if s.raft() != nil { // otherwise Open fails
			go func() { _ = s.close(false) }()
		}
	})
}

// Close hands leadership over if this member leads and others can take it,
// stops, and returns when everything that was started has ended. Calls under
// way return ErrClosed or ErrUnknownOutcome.
func (s *Store) Close() error { return s.close(true) }

// Kill stops as a crash would: nothing is handed over or finished. For tests.
func (s *Store) Kill() { _ = s.close(false) }

func (s *Store) close(graceful bool) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		<-s.done
		return nil
	}
	s.closed = true
	s.mu.Unlock()
	defer close(s.done)

	if graceful && s.leads() && s.otherVoters() {
		s.transferLeadership()
	}
	s.cancel()
	s.raftSide.Stop()
	s.peers.Close()
	stopped := s.raft().Shutdown()
	err := s.streams.Close() // unblocks all readers of a peer, raft included
	err = errors.Join(err, stopped.Error())
	close(s.raftEnded)
	s.peers.Wait()
	s.raftSide.Wait()
	s.streams.Wait()
	s.wg.Wait()
	s.hub.Close()
	if graceful && !s.cfg.older {
		err = errors.Join(err, s.settling.Close(s.raft().LastIndex()))
	}
	return errors.Join(err, s.closeState())
}

// handOverTimeout is how long a leader that stops waits for its successor.
// raft waits for its election timeout, also for one that stops as well.
const handOverTimeout = 2 * time.Second

// transferLeadership lets another voter lead. What is still under way then ends when raft
// is shut down.
func (s *Store) transferLeadership() {
	done := make(chan error, 1)
	s.wg.Go(func() { done <- s.errorOf(s.raft().LeadershipTransfer()) })
	select {
	case err := <-done:
		if err != nil {
			s.cfg.Logger.Info("leadership was not handed over", "err", err)
		}
	case <-time.After(handOverTimeout):
		s.cfg.Logger.Info("leadership was not handed over in time")
	}
}

func (s *Store) otherVoters() bool {
	ms, err := s.Members()
	if err != nil {
		return false
	}
	for _, m := range ms {
		if m.Voter && m.ID != s.cfg.ID {
			return true
		}
	}
	return false
}
