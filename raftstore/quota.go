package raftstore

import (
	"fmt"
	"strings"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// QuotaError is returned for a write that would take more room than there is.
// It matches ErrNoSpace. Nothing was written.
type QuotaError struct {
	// Folder is the one whose quota is used up; "" is the whole store.
	Folder string
	Used   int64 // bytes of live keys and values
	Growth int64 // what the write would add
	Quota  int64 // what this write may fill: without the reserve, if it may not touch that
}

func (e *QuotaError) Error() string {
	where := "the store"
	if e.Folder != "" {
		where = e.Folder
	}
	return fmt.Sprintf("%v: %s holds %d bytes, %d more would go beyond the quota of %d", ErrNoSpace, where, e.Used, e.Growth, e.Quota)
}

// Is matches ErrNoSpace.
func (e *QuotaError) Is(target error) bool { return target == ErrNoSpace }

// smallGrowth is how much an existing key may grow and still use the reserve:
// what is being deleted is marked first, and what runs reports its state.
const smallGrowth = 16 << 10

// checkRoom refuses a transaction that the quotas have no room for. Three
// classes of writes meet three limits:
//
//   - what takes no more room than before always passes: deletes above all;
//   - writes under Config.VitalPrefixes, and small growth of existing keys,
//     may fill the quota to its end;
//   - all else ends where the reserve begins, and at the folders' quotas.
//
// The decision rests on this member's copy, before the log: writes that are
// under way at the same moment may together go beyond a quota by what members
// may have pending.
func (s *Store) checkRoom(t *mvcc.Txn) error {
	ks := s.keyspace()
	used := ks.Digest().Bytes
	bulk := s.cfg.QuotaBytes - s.cfg.ReserveBytes
	if len(s.cfg.FolderQuotas) == 0 && used+putBytes(t) <= bulk {
		return nil
	}
	growth, limit := int64(0), s.cfg.QuotaBytes
	for i := range t.Ops {
		op := &t.Ops[i]
		had := ks.Size(op.Key)
		if op.Type != mvcc.OpPut {
			growth -= had
			continue
		}
		grows := int64(len(op.Key)+len(op.Value)) - had
		growth += grows
		if grows <= 0 || had > 0 && grows <= smallGrowth || s.vital(op.Key) {
			continue
		}
		limit = bulk
		for folder, quota := range s.cfg.FolderQuotas {
			if !strings.HasPrefix(op.Key, folder) {
				continue
			}
			if in := ks.Folder(folder).Bytes; in+grows > quota {
				return &QuotaError{Folder: folder, Used: in, Growth: grows, Quota: quota}
			}
		}
	}
	if growth > 0 && used+growth > limit {
		return &QuotaError{Used: used, Growth: growth, Quota: limit}
	}
	return nil
}

func putBytes(t *mvcc.Txn) (n int64) {
	for i := range t.Ops {
		if t.Ops[i].Type == mvcc.OpPut {
			n += int64(len(t.Ops[i].Key) + len(t.Ops[i].Value))
		}
	}
	return n
}

func (s *Store) vital(key string) bool {
	for _, prefix := range s.cfg.VitalPrefixes {
		if strings.HasPrefix(key, prefix) {
			return true
		}
	}
	return false
}
