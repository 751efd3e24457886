// Package jointest is a store in memory for tests of what members do step by step
// with their records: a write can fail in it, as it does for a leader that is killed.
package jointest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// ErrKilled is what the write of KillAt returns.
var ErrKilled = errors.New("killed")

// Store is a join.Store in a map. Its methods may be called concurrently.
type Store struct {
	mu     sync.Mutex // guards all below
	rev    int64
	kvs    map[string]mvcc.KeyValue
	writes int64 // since KillAt
	kill   int64 // 0: none
	after  bool
	err    error // returned by everything, if it is set
}

// New returns an empty Store.
func New() *Store { return &Store{kvs: map[string]mvcc.KeyValue{}} }

// KillAt makes one write fail, counted from 1 for the next one: before it is done,
// or after. 0: none.
func (s *Store) KillAt(write int64, after bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writes, s.kill, s.after = 0, write, after
}

// FailWith makes everything fail with err from now on; nil: nothing any more.
func (s *Store) FailWith(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

// Txn implements join.Store.
func (s *Store) Txn(_ context.Context, t mvcc.Txn) (mvcc.TxnResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return mvcc.TxnResult{}, s.err
	}
	s.writes++
	killed := s.writes == s.kill
	if killed && !s.after {
		return mvcc.TxnResult{}, ErrKilled
	}
	for _, c := range t.Compares {
		if s.kvs[c.Key].ModRevision != c.ModRevision {
			return mvcc.TxnResult{Revision: s.rev}, nil
		}
	}
	s.rev++
	for _, op := range t.Ops {
		if op.Type == mvcc.OpDelete {
			delete(s.kvs, op.Key)
			continue
		}
		s.kvs[op.Key] = mvcc.KeyValue{Key: op.Key, Value: op.Value, ModRevision: s.rev}
	}
	if killed {
		return mvcc.TxnResult{}, ErrKilled
	}
	return mvcc.TxnResult{Succeeded: true, Revision: s.rev}, nil
}

// Get implements join.Store.
func (s *Store) Get(_ context.Context, key string, _ raftstore.ReadOptions) (*mvcc.KeyValue, int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if kv, ok := s.kvs[key]; ok && s.err == nil {
		return &kv, s.rev, nil
	}
	return nil, s.rev, s.err
}

// List implements join.Store; what it returns is sorted by key.
func (s *Store) List(_ context.Context, prefix string, _ raftstore.ListOptions) (raftstore.ListResult, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var r raftstore.ListResult
	for k, kv := range s.kvs {
		if strings.HasPrefix(k, prefix) {
			r.KVs = append(r.KVs, kv)
		}
	}
	slices.SortFunc(r.KVs, func(a, b mvcc.KeyValue) int { return strings.Compare(a.Key, b.Key) })
	return r, s.err
}
