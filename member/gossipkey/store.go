package gossipkey

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// origin names the maker of these records in the store's history.
const origin = "clusterd gossip key"

// stateKey is the key in the store of the State.
const stateKey = "/clusterd/gossip-key"

// progress is which state each server has.
var progress = join.Progress{Prefix: join.GossipKeyProgress, Origin: origin}

// Get reads the state. A cluster that has its first key has the zero State, but for
// its phase. A stale one needs no leader.
func Get(ctx context.Context, s join.Store, stale bool) (State, error) {
	state, _, err := get(ctx, s, stale)
	return state, err
}

func get(ctx context.Context, s join.Store, stale bool) (State, int64, error) {
	state := State{Phase: Stable}
	kv, _, err := s.Get(ctx, stateKey, raftstore.ReadOptions{Stale: stale})
	if err != nil || kv == nil {
		return state, 0, wrap("read the state of the gossip key", err)
	}
	return state, kv.ModRevision, wrap("the state of the gossip key", json.Unmarshal(kv.Value, &state))
}

func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}

// put replaces the state that was read at the revision, and reports whether no
// other write came first.
func put(ctx context.Context, s join.Store, revision int64, next State) (bool, error) {
	b, err := json.Marshal(next)
	if err != nil {
		return false, err
	}
	res, err := s.Txn(ctx, mvcc.Txn{
		Origin:   origin,
		Compares: []mvcc.Compare{{Key: stateKey, ModRevision: revision}},
		Ops:      []mvcc.Op{{Type: mvcc.OpPut, Key: stateKey, Value: b}},
	})
	return res.Succeeded, wrap("write the state of the gossip key", err)
}

// RecordState records that a server has the state with that number.
func RecordState(ctx context.Context, s join.Store, id string, number uint64) error {
	return progress.Note(ctx, s, id, number, nil)
}

// RequestRotation asks the leader for another key, for a reason.
func RequestRotation(ctx context.Context, s join.Store, why string) error {
	_, err := s.Txn(ctx, mvcc.Txn{Origin: origin, Ops: []mvcc.Op{join.GossipKeyRotation(why)}})
	return wrap("ask for another gossip key", err)
}

// LastRequest is the revision of the last wish for another key; 0: there was none.
func LastRequest(ctx context.Context, s join.Store) (int64, error) {
	kv, _, err := s.Get(ctx, join.GossipKeyWishKey, raftstore.ReadOptions{Stale: true})
	if err != nil || kv == nil {
		return 0, wrap("read whether another gossip key is wanted", err)
	}
	return kv.ModRevision, nil
}

// Servers are the servers of the records and which state they have.
func Servers(ctx context.Context, s join.Store, stale bool) ([]Server, error) {
	records, err := join.Records(ctx, s, stale)
	if err != nil {
		return nil, err
	}
	has, err := progress.All(ctx, s, stale)
	if err != nil {
		return nil, err
	}
	var servers []Server
	for _, r := range join.Servers(records) {
		number, knows := has[r.ID]
		servers = append(servers, Server{ID: r.ID, Name: r.Name, Arrived: r.Confirmed, Knows: knows, Has: number})
	}
	return servers, nil
}

// Forget is the change that makes a keyspace one that has its first key: of a
// cluster that begins on new machines, from a copy.
func Forget(k *mvcc.Keyspace) ([]mvcc.Op, error) {
	ops, err := progress.Forget(k)
	return append([]mvcc.Op{{Type: mvcc.OpDelete, Key: stateKey}, {Type: mvcc.OpDelete, Key: join.GossipKeyWishKey}}, ops...), err
}
