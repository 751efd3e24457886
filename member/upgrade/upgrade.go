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
var ErrNone = errors.New("no rollout recorded")

// ErrUnderWay is returned while another rollout is in progress.
var ErrUnderWay = errors.New("another rollout is in progress")

// ErrOtherKey is returned when another key is trusted under the id of one that is to be.
var ErrOtherKey = errors.New("another key is trusted under that id")

// Trust records a key that releases may be signed with. It may be trusted already, and
// stays as it is then. Another key of its id is ErrOtherKey: an id is chosen by whoever
// makes a key, and says nothing of it.
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
	kv, _, err := s.Get(ctx, keysPrefix+rec.ID, raftstore.ReadOptions{})
	if err != nil {
		return rec, fmt.Errorf("read the key of releases: %w", err)
	}
	if kv != nil {
		var old v1.ReleaseKey
		if err := json.Unmarshal(kv.Value, &old); err != nil {
			return rec, fmt.Errorf("%s: %w", kv.Key, err)
		}
		if old.Key == rec.Key {
			return old, nil
		}
		return rec, fmt.Errorf("key %s: %w, since %s: if it is to take that one's place, take that away first with `clusterctl upgrade distrust %s`; if not, find out who has made a key of the same id", rec.ID, ErrOtherKey, old.Since.Format(time.RFC3339), rec.ID)
	}
	res, err := s.Txn(ctx, mvcc.Txn{
		Origin:   origin,
		Compares: []mvcc.Compare{{Key: keysPrefix + rec.ID}}, // there is none still
		Ops:      []mvcc.Op{{Type: mvcc.OpPut, Key: keysPrefix + rec.ID, Value: b}},
	})
	if err != nil {
		return rec, fmt.Errorf("record the key of releases: %w", err)
	}
	if !res.Succeeded { // another client has just added one of that id
		return Trust(ctx, s, text, now)
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

// Store is what roll-outs are kept in. Time is store time, which the machines' clocks
// do not move.
type Store interface {
	join.Store
	Time() time.Time
}

// Get is the last roll-out, and for how long nothing was heard of its command; ErrNone:
// there was none.
func Get(ctx context.Context, s Store) (v1.Rollout, error) {
	r, _, err := get(ctx, s)
	if err == nil {
		r.HeardAgo = silence(s, r).String()
	}
	return r, err
}

// silence is for how long nothing was heard of a roll-out's command. A record of a
// version that did not note store time is judged by its wall clock.
func silence(s Store, r v1.Rollout) time.Duration {
	if r.Heard.IsZero() {
		return time.Since(r.Updated)
	}
	return max(0, s.Time().Sub(r.Heard))
}

func get(ctx context.Context, s Store) (r v1.Rollout, revision int64, err error) {
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
// so within v1.RolloutSilence of store time: whatever server was asked, and whatever its
// clock is set to. now is what people see as the time of the record.
func Put(ctx context.Context, s Store, r v1.Rollout, now time.Time) (v1.Rollout, error) {
	old, revision, err := get(ctx, s)
	if err != nil && !errors.Is(err, ErrNone) {
		return r, err
	}
	if quiet := silence(s, old); old.ID != r.ID && old.GoesOn(quiet) {
		return r, fmt.Errorf("%w: to %s, by another command that was heard %s ago; see `clusterctl upgrade status`", ErrUnderWay, old.Version, quiet.Round(time.Second))
	}
	r.Updated, r.Heard, r.HeardAgo = now.UTC(), s.Time().UTC(), ""
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
