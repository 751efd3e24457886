package main

import (
	"context"
	"time"

	"github.com/clusterd/clusterd/member/authority"
	"github.com/clusterd/clusterd/slack"
)

const (
	// tokenKeysLook is how often the leader looks whether the authority was exchanged.
	tokenKeysLook = time.Second
	// tokenKeysDrop is how often it looks for keys that are too old.
	tokenKeysDrop = time.Hour
)

// keepTokenKeys changes, as the leader, the key that signs the tokens of service
// accounts after each exchange of the authority for secrets, and deletes keys that verify no
// token any more. A thief of a server's disk has the key of that time; the new
// one is sealed with what follows from the new authority.
func (m *Main) keepTokenKeys(ctx context.Context) error {
	var k tokenKeys
	var reported string
	for {
		if err := m.lookAtTokenKeys(ctx, &k, time.Now()); err != nil && ctx.Err() == nil && err.Error() != reported {
			reported = err.Error()
			m.log.Warn("the key of service accounts' tokens could not be changed yet, trying again", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-slack.After(tokenKeysLook):
		}
	}
}

// tokenKeys is what the leader remembers of the keys between two looks.
type tokenKeys struct {
	followed uint64    // the state of the authority that the newest key follows
	dropped  time.Time // when old keys were last deleted
}

func (m *Main) lookAtTokenKeys(ctx context.Context, k *tokenKeys, now time.Time) error {
	state, err := authority.Get(ctx, m.store, true)
	if err != nil {
		return err
	}
	// Before this server has that state itself, it would seal the key with what
	// follows from the authority before.
	if number, alone := state.TokenKeys(); number > k.followed && m.trust.Load().Number >= number {
		made, err := m.api.FollowAuthority(ctx, number, alone)
		if err != nil {
			return err
		}
		if made {
			m.log.Info("service accounts' tokens are signed with a new key, to follow the authority", "authority", number, "olderTokensRefused", alone)
		}
		k.followed, k.dropped = number, time.Time{}
	}
	if now.Sub(k.dropped) < tokenKeysDrop {
		return nil
	}
	count, err := m.api.DropTokenKeys(ctx)
	if err != nil {
		return err
	}
	if count > 0 {
		m.log.Info("old keys of service accounts' tokens were deleted", "keys", count)
	}
	k.dropped = now
	return nil
}
