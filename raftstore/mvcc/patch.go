package mvcc

import (
	"fmt"

	"github.com/cespare/xxhash/v2"

	"github.com/clusterd/clusterd/raftstore/delta"
)

// Patch is a value by what it differs in from the one that its key has at the
// revision that a comparison of the same transaction names. Every member has that
// value when the comparison holds.
type Patch struct {
	Bytes []byte // see package delta
	Size  int    // of the value
	Sum   uint64 // xxHash64 of the value
}

// minPatched is the shortest value for which a patch is looked for.
const minPatched = 64

// Patch returns what puts value in the place of the one that key has at revision
// rev; nil if that is not the present one, or a patch would not be much shorter. It
// may be called by any goroutine.
func (k *Keyspace) Patch(key string, rev int64, value []byte) *Patch {
	if len(value) < minPatched {
		return nil
	}
	it, _ := k.view.Load().tree.Get(item{key: key})
	// The hash: a patch of a value that has changed in this machine's memory would be
	// refused by all.
	if rev == 0 || modRevision(it.head) != rev || hashKV(&it.head.kv) != it.head.sum {
		return nil
	}
	patch := delta.Make(it.head.kv.Value, value)
	if patch == nil {
		return nil
	}
	return &Patch{Bytes: patch, Size: len(value), Sum: xxhash.Sum64(value)}
}

// compares reports whether t names a revision of key.
func (t *Txn) compares(key string) bool {
	for i := range t.Compares {
		if t.Compares[i].Key == key && t.Compares[i].ModRevision > 0 {
			return true
		}
	}
	return false
}

// patch makes the values of t's patches, when its comparisons hold. With an error
// nothing was changed, and every member whose keyspace is the same has that error.
//
// A base that is not what was applied is this machine's memory alone. To go on would
// make it differ from the others, so it stops: what is on disk is whole.
func (k *Keyspace) patch(t *Txn) error {
	for i := range t.Ops {
		op := &t.Ops[i]
		if op.Patch == nil {
			continue
		}
		base := k.head(op.Key)
		if hashKV(&base.kv) != base.sum {
			panic(fmt.Sprintf("mvcc: key %q of revision %d has changed in memory", op.Key, base.kv.ModRevision))
		}
		value, err := delta.Expand(base.kv.Value, op.Patch.Bytes, op.Patch.Size)
		if err != nil {
			return fmt.Errorf("%w: key %q of revision %d: %w", ErrPatch, op.Key, base.kv.ModRevision, err)
		}
		if sum := xxhash.Sum64(value); sum != op.Patch.Sum {
			return fmt.Errorf("%w: key %q of revision %d: the hash of what came out is %016x, and was %016x", ErrPatch, op.Key, base.kv.ModRevision, sum, op.Patch.Sum)
		}
		op.Value = value
	}
	return nil
}
