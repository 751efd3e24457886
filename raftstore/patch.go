package raftstore

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// patches is whether values may be put into the log as patches of those before
// them: all members take them. That is asked for again after patchesFor, in a
// goroutine, since all writes rest on it.
type patches struct {
	may    atomic.Bool
	asked  atomic.Int64 // when, unix nanoseconds
	asking atomic.Bool
}

// patchesFor is how long an answer is believed. A member that joined meanwhile and
// does not take patches stops with the first of them, and says why: as one that joins
// later would.
const patchesFor = time.Second

func (s *Store) mayPatch() bool {
	p := &s.commands.patches
	if time.Now().UnixNano()-p.asked.Load() > int64(patchesFor) && p.asking.CompareAndSwap(false, true) {
		s.start(func() {
			p.may.Store(s.allSpeak(s.ctx, wire.Patched))
			p.asked.Store(time.Now().UnixNano())
			p.asking.Store(false)
		})
	}
	return p.may.Load()
}

// withPatches returns the operations of t, and in the place of values patches where
// this member has the value that a comparison names, and a patch is much shorter. It
// is made here, not by the leader: then the way there is short, too.
func (s *Store) withPatches(t *mvcc.Txn) []mvcc.Op {
	ops := t.Ops
	for i := range t.Ops {
		op := &t.Ops[i]
		if op.Type != mvcc.OpPut {
			continue
		}
		rev := int64(0)
		for j := range t.Compares {
			if t.Compares[j].Key == op.Key {
				rev = t.Compares[j].ModRevision
			}
		}
		if rev == 0 || !s.mayPatch() {
			continue
		}
		patch := s.keyspace().Patch(op.Key, rev, op.Value)
		if patch == nil {
			continue
		}
		if &ops[0] == &t.Ops[0] {
			ops = slices.Clone(ops) // what was handed in is the caller's
		}
		ops[i].Value, ops[i].Patch = nil, patch
	}
	return ops
}
