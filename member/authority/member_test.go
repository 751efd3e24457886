package authority

import (
	"context"
	"errors"
	"fmt"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
)

// member is one that follows the state: a server by its Follower, which a kill takes away.
type member struct {
	id     string
	server bool
	trust  *pki.Trust // with keys, of a server
}

var (
	errStep  = errors.New("a full disk")                 // of a step of a member's own
	errNoKey = errors.New("no other member has the key") // yet
)

// follow takes up the state, asking others for keys. fail is asked before each step of the
// member's own.
func (m *member) follow(ctx context.Context, s join.Store, made map[string]*pki.CA, all []*member, fail func() error) error {
	if !m.server {
		return m.followAsAgent(ctx, s)
	}
	settled := false
	f := Follower{
		Store: s, ID: m.id, Trust: func() *pki.Trust { return m.trust },
		Key: func(_ context.Context, ca *pki.CA) (*pki.CA, error) {
			have := m.trust.FindAny(ca.ID())
			if have == nil && m.id == "n1" {
				have = made[ca.ID()]
			}
			for _, other := range all {
				if have == nil && other.server {
					have = other.trust.FindAny(ca.ID())
				}
			}
			if have == nil {
				return nil, errNoKey
			}
			return have, nil
		},
		Adopt: func(next *pki.Trust) error {
			if err := fail(); err != nil {
				return err
			}
			m.trust = next
			return nil
		},
		Settle: func(context.Context) error {
			if err := fail(); err != nil {
				return err
			}
			settled = true
			return nil
		},
	}
	if _, err := f.Follow(ctx); err != nil {
		state, get := Get(ctx, s, true)
		has, all := progress.All(ctx, s, true)
		if errors.Is(err, errStep) && (get != nil || all != nil || state.Number > 0 && has[m.id] == state.Number) {
			return fmt.Errorf("%s says that it has state %d, and a step of it failed", m.id, state.Number)
		}
		return err
	}
	if !settled {
		return fmt.Errorf("%s has not settled", m.id)
	}
	return nil
}

func (m *member) followAsAgent(ctx context.Context, s join.Store) error {
	if err := RecordSeparateSupport(ctx, s, m.id, nil); err != nil {
		return err
	}
	state, err := Get(ctx, s, true)
	if err != nil || state.Number == 0 {
		return err
	}
	if state.Number > m.trust.Number {
		if m.trust, err = state.Trust(); err != nil {
			return err
		}
	}
	return RecordState(ctx, s, m.id, m.trust.Number, nil)
}
