package authority

import (
	"context"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
)

// Follower is a server's part of rotations: it takes up the state of the store, and says
// so once it has done all that this asks. It may be killed at any moment. Its methods
// are for one goroutine.
type Follower struct {
	Store join.Store
	ID    string // of this member
	// Trust is what this member trusts now, with the keys of all authorities.
	Trust func() *pki.Trust
	// Key finds the key of an authority.
	Key func(ctx context.Context, ca *pki.CA) (*pki.CA, error)
	// Adopt makes a trust this member's, on disk in one step, then in use.
	Adopt func(next *pki.Trust) error
	// Settle does what else follows from what this member trusts. It is called after
	// Adopt and once at the start, until it returns no error: each of its steps must
	// bear to be repeated. May be nil.
	Settle func(ctx context.Context) error
	// May is asked before something is written to the store; nil: it always may.
	May func() bool

	settled bool
	number  uint64 // of the trust that was settled
}

// noteTimeout is how long a write of this member's progress may take.
const noteTimeout = 5 * time.Second

// Follow takes up the state of the store, once. It returns the state if it is a new one to
// this member, and an error if something is to be tried again.
func (f *Follower) Follow(ctx context.Context) (*State, error) {
	var news *State
	state, err := Get(ctx, f.Store, true)
	if err != nil {
		return nil, err
	}
	if state.Number > f.Trust().Number {
		next, err := f.trustOf(ctx, state)
		if err != nil {
			return nil, err
		}
		if err := f.Adopt(next); err != nil {
			return nil, err
		}
		news = &state
	}
	trust := f.Trust()
	if f.Settle != nil && (!f.settled || f.number != trust.Number) {
		if err := f.Settle(ctx); err != nil {
			return news, err
		}
		f.settled, f.number = true, trust.Number
	}
	if f.May != nil && !f.May() {
		return news, nil
	}
	ctx, cancel := context.WithTimeout(ctx, noteTimeout)
	defer cancel()
	if !trust.Separated() {
		if err := RecordSeparateSupport(ctx, f.Store, f.ID, nil); err != nil {
			return news, err
		}
	}
	if state.Number == 0 || trust.Number != state.Number {
		return news, nil // its own word on a state to come waits until the store has that
	}
	return news, RecordState(ctx, f.Store, f.ID, state.Number, nil)
}

// trustOf is the state with the keys of its authorities.
func (f *Follower) trustOf(ctx context.Context, state State) (*pki.Trust, error) {
	trust, err := state.Trust()
	if err != nil {
		return nil, err
	}
	for _, p := range pki.Purposes {
		if !trust.Owns(p) {
			continue
		}
		var cas []*pki.CA
		for _, ca := range trust.For(p).All() {
			whole, err := f.Key(ctx, ca)
			if err != nil {
				return nil, err
			}
			cas = append(cas, whole)
		}
		trust = trust.With(p, cas...)
	}
	return trust, nil
}
