package main

import (
	"context"
	"errors"
	"net/http"
	"time"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/member/authority"
	"github.com/clusterd/clusterd/slack"
)

const (
	// tokenKeysLook is how often the leader looks whether the CA was rotated.
	tokenKeysLook = time.Second
	// tokenKeysDrop is how often it looks for keys that are too old, to sign or at all.
	tokenKeysDrop = time.Hour
)

// keepTokenKeys changes, as the leader, the key that signs the tokens of service
// accounts after each CA rotation for secrets, and when it is older than
// --token-key-age, and deletes keys that verify no token any more. A thief of a server's disk has the key of that time; the new
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

// rotateTokenKey makes another key because an administrator asked for it, on whatever
// server.
func (m *Main) rotateTokenKey(ctx context.Context) error {
	state, err := authority.Get(ctx, m.store, false)
	if err != nil {
		return err
	}
	if m.trust.Load().Number < state.Number { // it would be sealed with what follows from the authority before
		return errors.New("this server does not have the state of the authorities yet that the others have: try again in a few seconds")
	}
	made, err := m.api.RotateTokenKey(ctx, 0)
	if made {
		m.log.Info("service accounts' tokens are signed with a new key from a minute from now on: an administrator asked for it")
	}
	return err
}

// getTokenKeys says which keys there are.
func (a *clusterAPI) getTokenKeys(w http.ResponseWriter, r *http.Request) {
	states, err := a.tokenKeys(r.Context())
	if err != nil {
		fail(w, err)
		return
	}
	list := v1.TokenKeyList{Keys: []v1.TokenKey{}}
	for _, s := range states {
		list.Keys = append(list.Keys, v1.TokenKey(s))
	}
	reply(w, http.StatusOK, list)
}

// postTokenKeys makes another key, unless there is one that does not sign yet.
func (a *clusterAPI) postTokenKeys(w http.ResponseWriter, r *http.Request) {
	if err := a.rotateTokenKey(r.Context()); err != nil {
		fail(w, err)
		return
	}
	a.getTokenKeys(w, r)
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
	if age := m.cfg.TokenKeyAge.Duration; age > 0 && m.trust.Load().Number >= state.Number {
		made, err := m.api.RotateTokenKey(ctx, age)
		if err != nil {
			return err
		}
		if made {
			m.log.Info("service accounts' tokens are signed with a new key from a minute from now on", "the last one was older than", age)
		}
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
