package join

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// Removal records that a key was removed from the cluster. It is kept
// permanently. A missing Record would not do in its place: a member that
// is behind lacks the records of those who joined last, and if it refused them
// it could never hear from a leader among them. No key ever comes back, since
// each join makes a new one.
type Removal struct {
	Name string `json:"name"`
	// Role is what it was; empty: a server, or older than this field.
	Role    pki.Role  `json:"role,omitempty"`
	Removed time.Time `json:"removed"`
	// Why is empty when an administrator removed the member, else one of the words
	// below; Epoch is then the number of the epoch that began without it.
	Why   string `json:"why,omitempty"`
	Epoch uint64 `json:"epoch,omitempty"`
}

// Why a member was left out of a new epoch.
const (
	Recovered = "recovered" // the cluster had lost its quorum
	Restored  = "restored"  // it was restored from a copy
)

// tellFor is how long agents are sent a removed server's id: its certificate has
// ended then, also by clocks that differ by a day.
const tellFor = pki.MaxServerLifetime + 24*time.Hour

// TellAgents reports whether agents must be informed at that time, because the key
// may still have a server's certificate.
func (r Removal) TellAgents(now time.Time) bool {
	return r.Role != pki.Agent && now.Sub(r.Removed) < tellFor
}

// What members have of a change of the authority or of gossip's key is recorded below
// these, by their ids.
const (
	AuthorityProgress = "/clusterd/authority-has/"
	GossipKeyProgress = "/clusterd/gossip-key-has/"
	// SeparateKnown: which members know of separate authorities.
	SeparateKnown = "/clusterd/authority-separate/"
)

func removalOps(r Record, why Removal) []mvcc.Op {
	why.Role = r.Role
	return []mvcc.Op{
		{Type: mvcc.OpDelete, Key: memberPrefix + r.ID},
		{Type: mvcc.OpDelete, Key: AuthorityProgress + r.ID},
		{Type: mvcc.OpDelete, Key: GossipKeyProgress + r.ID},
		{Type: mvcc.OpDelete, Key: SeparateKnown + r.ID},
		put(removed+r.ID, why),
	}
}

// IsRemoved reports whether this member knows that the key was removed. It
// asks no other member and does not wait.
func IsRemoved(ctx context.Context, s Store, id string) (bool, error) {
	kv, _, err := s.Get(ctx, removed+id, raftstore.ReadOptions{Stale: true})
	if err != nil {
		return false, fmt.Errorf("look up whether %s was removed: %w", id, err)
	}
	return kv != nil, nil
}

// NameOf is the name of a member, or of one that was removed, as far as this member's own
// store knows; "" if it does not.
func NameOf(ctx context.Context, s Store, id string) string {
	for _, prefix := range []string{memberPrefix, removed} {
		kv, _, err := s.Get(ctx, prefix+id, raftstore.ReadOptions{Stale: true})
		var named struct {
			Name string `json:"name"`
		}
		if err == nil && kv != nil && json.Unmarshal(kv.Value, &named) == nil {
			return named.Name
		}
	}
	return ""
}

// Watched is a Store that can be watched.
type Watched interface {
	Store
	Watch(ctx context.Context, prefix string, o raftstore.WatchOptions) (*raftstore.Watcher, error)
}

// Removals tells each of every removed key, those of the past first, until ctx
// ends or each returns an error. A key may be reported again.
func Removals(ctx context.Context, s Watched, each func(id string, r Removal) error) error {
	for {
		err := removals(ctx, s, each)
		var compacted *mvcc.CompactedError
		if !errors.As(err, &compacted) {
			return err
		}
	}
}

func removals(ctx context.Context, s Watched, each func(id string, r Removal) error) error {
	past, err := s.List(ctx, removed, raftstore.ListOptions{ReadOptions: raftstore.ReadOptions{Stale: true}})
	if err != nil {
		return fmt.Errorf("list the removed members: %w", err)
	}
	tell := func(kv mvcc.KeyValue) error {
		var r Removal
		if err := json.Unmarshal(kv.Value, &r); err != nil {
			return fmt.Errorf("removal %s: %w", kv.Key, err)
		}
		return each(idOf(kv.Key, removed), r)
	}
	for _, kv := range past.KVs {
		if err := tell(kv); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	w, err := s.Watch(ctx, removed, raftstore.WatchOptions{Revision: past.Revision + 1})
	if err != nil {
		return fmt.Errorf("watch for removed members: %w", err)
	}
	for batch := range w.C() {
		for _, e := range batch.Events {
			if e.Type == mvcc.Delete {
				continue
			}
			if err := tell(e.KV); err != nil {
				return err
			}
		}
	}
	return w.Err()
}
