package authority

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/slack"
)

// Server is a server's part in CA rotations: it follows the state of the store and records
// how far it is; it starts rotations, and takes them from step to step while it leads.
//
// The new CA's key is never in the store. Its maker has it on disk before the state
// names it; the other servers ask each other for it, over connections that prove keys of
// the records, which the old CA's key does not help to forge. Run, Begin and Lead may
// be called concurrently.
type Server struct {
	Store join.Store
	ID    string // of this member
	// Trust is what this member trusts now, with the keys of all CAs.
	Trust func() *pki.Trust
	// Now is the cluster's time.
	Now func() time.Time
	// HasLeader reports whether the store has one: without it nothing is written.
	HasLeader func() bool
	// Successors are the CAs that this server made, on its disk.
	Successors SuccessorStore
	// Fetch asks another server for its keys; it may block until ctx ends.
	Fetch func(ctx context.Context, server join.Record) (*join.Keys, error)
	// Adopt and Settle are the Follower's.
	Adopt  func(next *pki.Trust) error
	Settle func(ctx context.Context) error
	// Refresh asks an agent, by name, to look for changes. It may block until ctx ends.
	Refresh func(ctx context.Context, name string)
	Log     *slog.Logger

	// reported is the last error in the log; of Run's goroutine.
	reported string
	// making is held while the keys of successors are on disk and no state names them yet.
	making sync.Mutex
}

// SuccessorStore keeps CAs that this server made, with their keys, until they are
// in use or of no use. Its methods may be called concurrently.
type SuccessorStore interface {
	WriteSuccessor(ca *pki.CA) error
	// ReadSuccessor returns nil if there is none.
	ReadSuccessor(id string) (*pki.CA, error)
	// Successors are their ids, and when each was written.
	Successors() (map[string]time.Time, error)
	// DropSuccessor removes one; that there is none is no error.
	DropSuccessor(id string) error
}

const (
	followPeriod = time.Second
	// keysTimeout is how long another server may take to send its keys.
	keysTimeout = 5 * time.Second
	// refreshTimeout is how long an agent may take to look for changes.
	refreshTimeout = time.Second
	// successorTimeout is how long after its key was written a successor may still be named by
	// a state: no write to the store takes as long.
	successorTimeout = 10 * time.Minute
)

// Run follows the state until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	follower := Follower{
		Store: s.Store, ID: s.ID, Trust: s.Trust, Key: s.withKey, Adopt: s.Adopt, May: s.HasLeader,
		Settle: func(ctx context.Context) error {
			if err := s.Settle(ctx); err != nil {
				return err
			}
			return s.dropSuccessors(ctx)
		},
	}
	for {
		state, err := follower.Follow(ctx)
		if state != nil {
			s.Log.Info("this server follows the CA rotation", "phase", state.Phase, "number", state.Number)
		}
		if err != nil && ctx.Err() == nil && err.Error() != s.reported {
			s.reported = err.Error()
			s.Log.Warn("the CA rotation cannot be followed yet, trying again", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-slack.After(followPeriod):
		}
	}
}

// withKey finds a CA's key: in use here, in what this server made, or with
// another server.
func (s *Server) withKey(ctx context.Context, ca *pki.CA) (*pki.CA, error) {
	if known := s.Trust().FindAny(ca.ID()); known != nil && known.HasKey() {
		return known, nil
	}
	if made, err := s.Successors.ReadSuccessor(ca.ID()); err != nil || made != nil {
		return made, err
	}
	records, err := join.Records(ctx, s.Store, true)
	if err != nil {
		return nil, err
	}
	for _, rec := range join.Servers(records) {
		if rec.ID == s.ID {
			continue
		}
		attempt, cancel := context.WithTimeout(ctx, keysTimeout)
		keys, err := s.Fetch(attempt, rec)
		cancel()
		if err != nil || keys.Trust == nil {
			s.Log.Debug("ask a server for the CA's key", "node", rec.Name, "err", err)
			continue
		}
		theirs, err := keys.Whole(s.Trust())
		if err != nil {
			return nil, fmt.Errorf("the keys of %s: %w", rec.Name, err)
		}
		if found := theirs.FindAny(ca.ID()); found != nil {
			return found, nil
		}
	}
	return nil, fmt.Errorf("no server that answers holds the key of authority %s yet", ca.ID())
}

// dropSuccessors removes the keys of successors that are of no use any more.
func (s *Server) dropSuccessors(ctx context.Context) error {
	if made, err := s.Successors.Successors(); err != nil || len(made) == 0 {
		return err
	}
	if !s.making.TryLock() {
		return errors.New("this server is starting another CA rotation")
	}
	defer s.making.Unlock()
	made, err := s.Successors.Successors()
	if err != nil {
		return err
	}
	named, err := s.named(ctx)
	if err != nil {
		named = nil
	}
	for _, id := range obsolete(made, ids(s.Trust()), named, s.Now()) {
		if err := s.Successors.DropSuccessor(id); err != nil {
			return err
		}
	}
	return nil
}

// obsolete are the successors that are in use, whose keys are elsewhere then, and those that no
// state names and none will. made is when each was written. named nil: it is not known
// what the state names.
func obsolete(made map[string]time.Time, used, named map[string]bool, now time.Time) (drop []string) {
	for id, written := range made {
		if used[id] || named != nil && !named[id] && now.Sub(written) > successorTimeout {
			drop = append(drop, id)
		}
	}
	return drop
}

// ids are those of all CAs in a trust.
func ids(t *pki.Trust) map[string]bool {
	all := map[string]bool{}
	for _, ca := range t.Whole() {
		all[ca.ID()] = true
	}
	return all
}

// named are the CAs of the state, as the leader has it.
func (s *Server) named(ctx context.Context) (map[string]bool, error) {
	ctx, cancel := context.WithTimeout(ctx, keysTimeout)
	defer cancel()
	state, err := Get(ctx, s.Store, false)
	if err != nil {
		return nil, err
	}
	if state.Number == 0 {
		return map[string]bool{}, nil
	}
	trust, err := state.Trust()
	if err != nil {
		return nil, err
	}
	return ids(trust), nil
}

// create makes successors of the CAs for these purposes, or those that are their first
// own ones, and has begin name them to the cluster. Their keys are on disk before.
func (s *Server) create(of []pki.Purpose, begin func(Request) error) error {
	s.making.Lock()
	defer s.making.Unlock()
	now, trust := s.Now(), s.Trust()
	request := Request{Now: trust, Successors: map[pki.Purpose][]byte{}, Maker: s.ID}
	var made []string
	drop := func(err error) error {
		for _, id := range made {
			err = errors.Join(err, s.Successors.DropSuccessor(id))
		}
		return err
	}
	for _, p := range of {
		create := func() (*pki.CA, error) { return trust.Signer().NewFor(p, now) }
		if trust.Owns(p) {
			create = func() (*pki.CA, error) { return trust.For(p).Signer().NewSuccessor(now) }
		}
		successor, err := create()
		if err == nil {
			err = s.Successors.WriteSuccessor(successor)
		}
		if err != nil {
			return drop(err)
		}
		made = append(made, successor.ID())
		request.Successors[p] = pki.EncodeCert(successor.Cert)
	}
	err := begin(request)
	if errors.Is(err, ErrUnderWay) || errors.Is(err, ErrBehind) { // after any other error it may have started
		return drop(err)
	}
	return err
}

// Begin starts a rotation of the CAs for these purposes, see the function of that name.
func (s *Server) Begin(ctx context.Context, of []pki.Purpose, grace time.Duration, finish bool) error {
	return s.create(of, func(r Request) error {
		r.Grace, r.Finish = grace, finish
		return Begin(ctx, s.Store, r, s.Now())
	})
}

// Lead takes rotations from step to step while this node leads, until ctx ends.
func (s *Server) Lead(ctx context.Context) error {
	var refreshing sync.WaitGroup
	defer refreshing.Wait()
	leader := Leader{
		Store: s.Store,
		Log:   s.Log,
		Now:   s.Now,
		Make: func(ctx context.Context, of []pki.Purpose) error {
			err := s.create(of, func(r Request) error {
				return RetryWithNewKeys(ctx, s.Store, r, s.Now())
			})
			if errors.Is(err, ErrUnderWay) {
				return nil // one that has its key
			}
			return err
		},
		Refresh: func(name string) {
			refreshing.Go(func() {
				ctx, cancel := context.WithTimeout(ctx, refreshTimeout)
				defer cancel()
				s.Refresh(ctx, name)
			})
		},
	}
	return leader.Run(ctx)
}
