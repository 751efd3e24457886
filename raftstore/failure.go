package raftstore

import (
	"errors"
	"sync"
)

// failure is why a store stopped by itself.
type failure struct {
	once sync.Once
	ch   chan struct{}
	err  error
}

// Failed is closed when the store has stopped because it could no longer
// answer for what it holds; Err then says why. The process should end: at the
// next start the store heals itself from the other members if it can.
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

// fail stops the store. forget: its state must not be believed at the next
// start either. It may be called from any goroutine, and returns before the
// store has ended.
func (s *Store) fail(err error, forget bool) {
	s.failure.once.Do(func() {
		if forget {
			if why := s.healable(); why != nil {
				s.cfg.Logger.Error("the store's state is wrong, and cannot be fetched from others", "err", why)
			} else if werr := s.writeJSON(lostStateFile, lostState{Since: s.cfg.Now().UTC(), Reason: err.Error()}); werr != nil {
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
