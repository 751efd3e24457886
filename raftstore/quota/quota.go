// Package quota knows how much room a keyspace has and who may still have some of
// it (Limits), and who takes it (Usage, Top).
package quota

import (
	"errors"
	"fmt"
	"strings"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// ErrNoSpace is returned for a write that stores something when a quota is used
// up (then it is an *Error), or the leader's disk is full.
var ErrNoSpace = errors.New("no space left in the store")

// Error is returned for a write that would take more room than there is.
// It matches ErrNoSpace. Nothing was written.
type Error struct {
	// Folder is the one whose quota is used up; "" is the whole store.
	Folder string
	Used   int64 // bytes of live keys and values
	Growth int64 // what the write would add
	Quota  int64 // what this write may fill: without the reserve, if it may not touch that
}

func (e *Error) Error() string {
	where := "the store"
	if e.Folder != "" {
		where = e.Folder
	}
	return fmt.Sprintf("%v: %s holds %d bytes, %d more would go beyond the quota of %d", ErrNoSpace, where, e.Used, e.Growth, e.Quota)
}

// Is matches ErrNoSpace.
func (e *Error) Is(target error) bool { return target == ErrNoSpace }

// smallGrowth is how much an existing key may grow and still use the reserve:
// what is being deleted is marked first, and what runs reports its state.
const smallGrowth = 16 << 10

// Limits are what bounds the live keys and values.
type Limits struct {
	Bytes    int64            // of all
	Reserve  int64            // the part of it that only vital keys and small growth may use
	Folders  map[string]int64 // of parts; vital keys may go beyond, small growth a little
	Prefixes []string         // of vital keys
}

// Check refuses a transaction that there is no room for in the keyspace. Three
// classes of writes meet three limits:
//
//   - what takes no more room than before always passes: deletes above all;
//   - writes of vital keys may fill the quota to its end;
//   - small growth of existing keys may use the reserve but for its last quarter,
//     and goes beyond a folder's quota by an eighth of that, or by one such growth;
//   - all else ends where the reserve begins, and at the folders' quotas.
//
// The decision rests on one member's copy, before the log: writes that are
// under way at the same moment may together go beyond a quota by what members
// may have pending.
func (l *Limits) Check(ks *mvcc.Keyspace, t *mvcc.Txn) error {
	used := ks.Digest().Bytes
	bulk := l.Bytes - l.Reserve
	if len(l.Folders) == 0 && used+putBytes(t) <= bulk {
		return nil
	}
	growth, limit := int64(0), l.Bytes
	for i := range t.Ops {
		op := &t.Ops[i]
		had := ks.Size(op.Key)
		if op.Type != mvcc.OpPut {
			growth -= had
			continue
		}
		grows := int64(len(op.Key)+op.Size()) - had
		growth += grows
		if grows <= 0 || l.vital(op.Key) {
			continue
		}
		small := had > 0 && grows <= smallGrowth
		if small {
			limit = min(limit, l.Bytes-l.Reserve/4)
		} else {
			limit = bulk
		}
		for folder, quota := range l.Folders {
			if !strings.HasPrefix(op.Key, folder) {
				continue
			}
			if small {
				quota += max(quota/8, smallGrowth)
			}
			if in := ks.Folder(folder).Bytes; in+grows > quota {
				return &Error{Folder: folder, Used: in, Growth: grows, Quota: quota}
			}
		}
	}
	if growth > 0 && used+growth > limit {
		return &Error{Used: used, Growth: growth, Quota: limit}
	}
	return nil
}

func putBytes(t *mvcc.Txn) (n int64) {
	for i := range t.Ops {
		if t.Ops[i].Type == mvcc.OpPut {
			n += int64(len(t.Ops[i].Key) + t.Ops[i].Size())
		}
	}
	return n
}

func (l *Limits) vital(key string) bool {
	for _, prefix := range l.Prefixes {
		if strings.HasPrefix(key, prefix) {
			return true
		}
	}
	return false
}

// Essential reports whether a transaction is let through when a disk has no
// room: deletes, and what the reserve is for.
func (l *Limits) Essential(ks *mvcc.Keyspace, t *mvcc.Txn) bool {
	for i := range t.Ops {
		op := &t.Ops[i]
		had := ks.Size(op.Key)
		grows := int64(len(op.Key)+op.Size()) - had
		if op.Type == mvcc.OpPut && !l.vital(op.Key) && (had == 0 || grows > smallGrowth) {
			return false
		}
	}
	return true
}
