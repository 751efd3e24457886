// Package upgrade keeps in the store what concerns all members of a roll-out: which
// keys releases are signed with, and how far the roll-out is. What is done on one
// node is in member/releases; the order is the business of whoever runs the roll-out.
package upgrade

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/releases"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// origin names the maker of these records in the store's history.
const origin = "clusterd upgrade"

const (
	keysPrefix = "/clusterd/release-keys/" // + the key's name → v1.ReleaseKey
	rolloutKey = "/clusterd/upgrade"       // → v1.Rollout
)

// ErrNone is returned when there is no such key, or no roll-out.
var ErrNone = errors.New("there is none")

// ErrUnderWay is returned when another roll-out goes on.
var ErrUnderWay = errors.New("another roll-out goes on")

// Trust records a key that releases may be signed with. It may be trusted already.
func Trust(ctx context.Context, s join.Store, text string, now time.Time) (v1.ReleaseKey, error) {
	k, err := releases.ParseKey(text)
	if err != nil {
		return v1.ReleaseKey{}, err
	}
	rec := v1.ReleaseKey{ID: k.Name(), Key: k.String(), Since: now.UTC().Truncate(time.Second)}
	b, err := json.Marshal(rec)
	if err != nil {
		return rec, err
	}
	_, err = s.Txn(ctx, mvcc.Txn{Origin: origin, Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: keysPrefix + rec.ID, Value: b}}})
	if err != nil {
		return rec, fmt.Errorf("record the key of releases: %w", err)
	}
	return rec, nil
}

// Distrust forgets a key.
func Distrust(ctx context.Context, s join.Store, id string) error {
	kv, _, err := s.Get(ctx, keysPrefix+id, raftstore.ReadOptions{})
	if err != nil {
		return err
	}
	if kv == nil {
		return ErrNone
	}
	_, err = s.Txn(ctx, mvcc.Txn{Origin: origin, Ops: []mvcc.Op{{Type: mvcc.OpDelete, Key: keysPrefix + id}}})
	return err
}

// Keys are the keys that are trusted, as the leader has them: a key that was taken
// away is good nowhere.
func Keys(ctx context.Context, s join.Store) ([]v1.ReleaseKey, error) {
	list, err := s.List(ctx, keysPrefix, raftstore.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list the keys of releases: %w", err)
	}
	keys := make([]v1.ReleaseKey, len(list.KVs))
	for i, kv := range list.KVs {
		if err := json.Unmarshal(kv.Value, &keys[i]); err != nil {
			return nil, fmt.Errorf("%s: %w", kv.Key, err)
		}
	}
	return keys, nil
}

// Parse makes keys of their lines, as servers tell agents.
func Parse(lines []string) ([]releases.Key, error) {
	var keys []releases.Key
	for _, line := range lines {
		k, err := releases.ParseKey(line)
		if err != nil {
			return nil, err
		}
		keys = append(keys, k)
	}
	return keys, nil
}

// Get is the last roll-out; ErrNone: there was none.
func Get(ctx context.Context, s join.Store) (v1.Rollout, error) {
	r, _, err := get(ctx, s)
	return r, err
}

func get(ctx context.Context, s join.Store) (r v1.Rollout, revision int64, err error) {
	kv, _, err := s.Get(ctx, rolloutKey, raftstore.ReadOptions{})
	switch {
	case err != nil:
		return r, 0, fmt.Errorf("read the roll-out: %w", err)
	case kv == nil:
		return r, 0, ErrNone
	}
	if err := json.Unmarshal(kv.Value, &r); err != nil {
		return r, 0, fmt.Errorf("%s: %w", rolloutKey, err)
	}
	return r, kv.ModRevision, nil
}

// Put records how far a roll-out is, unless another command's goes on, which has said
// so within v1.RolloutSilence. The time of the record is now.
func Put(ctx context.Context, s join.Store, r v1.Rollout, now time.Time) (v1.Rollout, error) {
	old, revision, err := get(ctx, s)
	if err != nil && !errors.Is(err, ErrNone) {
		return r, err
	}
	if old.ID != r.ID && old.GoesOn(now) {
		return r, fmt.Errorf("%w: to %s, by another command that was heard %s ago; see `clusterctl upgrade status`", ErrUnderWay, old.Version, now.Sub(old.Updated).Round(time.Second))
	}
	r.Updated = now.UTC()
	b, err := json.Marshal(r)
	if err != nil {
		return r, err
	}
	res, err := s.Txn(ctx, mvcc.Txn{
		Origin:   origin,
		Compares: []mvcc.Compare{{Key: rolloutKey, ModRevision: revision}},
		Ops:      []mvcc.Op{{Type: mvcc.OpPut, Key: rolloutKey, Value: b}},
	})
	if err == nil && !res.Succeeded {
		err = ErrUnderWay
	}
	return r, err
}
