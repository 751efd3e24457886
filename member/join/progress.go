package join

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// Progress is how far each member is with something that members do step by step
// together: which state each has, by number. It lies in the store, a key a member.
type Progress struct {
	Prefix string // of the keys; the member's id follows
	Origin string // who writes it, in the store's history
}

type progressRecord struct {
	Number uint64 `json:"number"`
}

// Note records that a member has the state with that number. What is known is not
// written again. may is asked before something is written; nil: it always may.
func (p Progress) Note(ctx context.Context, s Store, id string, number uint64, may func() bool) error {
	b, err := json.Marshal(progressRecord{number})
	if err != nil {
		return err
	}
	key := p.Prefix + id
	kv, _, err := s.Get(ctx, key, raftstore.ReadOptions{Stale: true})
	if err == nil && kv != nil && string(kv.Value) == string(b) {
		return nil
	}
	if may != nil && !may() {
		return nil
	}
	if _, err = s.Txn(ctx, mvcc.Txn{Origin: p.Origin, Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: key, Value: b}}}); err != nil {
		return fmt.Errorf("write %s: %w", key, err)
	}
	return nil
}

// All is the number of each member that noted one, by id. A stale answer needs no
// leader.
func (p Progress) All(ctx context.Context, s Store, stale bool) (map[string]uint64, error) {
	list, err := s.List(ctx, p.Prefix, raftstore.ListOptions{ReadOptions: raftstore.ReadOptions{Stale: stale}})
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", p.Prefix, err)
	}
	out := map[string]uint64{}
	for _, kv := range list.KVs {
		var r progressRecord
		if err := json.Unmarshal(kv.Value, &r); err != nil {
			return nil, fmt.Errorf("%s: %w", kv.Key, err)
		}
		out[strings.TrimPrefix(kv.Key, p.Prefix)] = r.Number
	}
	return out, nil
}

// Forget is the change that takes all of it out of a keyspace: of a cluster that
// begins on new machines, from a copy.
func (p Progress) Forget(k *mvcc.Keyspace) ([]mvcc.Op, error) {
	all, err := k.List(mvcc.Range{Prefix: p.Prefix})
	if err != nil {
		return nil, err
	}
	var ops []mvcc.Op
	for _, kv := range all.KVs {
		ops = append(ops, mvcc.Op{Type: mvcc.OpDelete, Key: kv.Key})
	}
	return ops, nil
}
