// Package mvcc is the replicated keyspace itself: keys with revisions, a
// bounded history, and commands that change them. It has no clock, no chance,
// no I/O and no goroutine, so the same commands give the same bytes on every
// node: raft hands Apply the log, everything else only reads.
package mvcc

import "errors"

// KeyValue is one key as of one revision. Value is shared and must not be
// changed by anyone.
type KeyValue struct {
	Key            string
	Value          []byte
	CreateRevision int64 // revision of the write that created the key
	ModRevision    int64 // revision of the write that gave it this value
	Version        int64 // 1 at creation, +1 per write
	ExpiresAt      int64 // store time, unix milliseconds; 0: never
}

// EventType says what a change did.
type EventType uint8

const (
	// Put: the key was created or updated.
	Put EventType = iota + 1
	// Delete: the key was deleted, or has expired.
	Delete
)

// Event is one change of one key. For Delete, KV holds only Key and
// ModRevision (the revision of the deletion). Prev is the value replaced or
// deleted; nil when the key was created.
type Event struct {
	Type EventType
	KV   KeyValue
	Prev *KeyValue
}

// Compare is a condition on one key: its ModRevision equals the given one.
// ModRevision 0 means that the key does not exist.
type Compare struct {
	Key         string
	ModRevision int64
}

// OpType says what an Op does.
type OpType uint8

const (
	// OpPut creates or updates the key.
	OpPut OpType = iota + 1
	// OpDelete deletes the key, if it exists.
	OpDelete
)

// Op is one write of a transaction.
type Op struct {
	Type  OpType
	Key   string
	Value []byte
	TTL   int64 // seconds from the apply; 0: never expires. OpPut only
	// Patch, if there is one, stands for Value until Apply has made it. OpPut only.
	Patch *Patch
}

// Size is the length of the value that is put.
func (o *Op) Size() int {
	if o.Patch != nil {
		return o.Patch.Size
	}
	return len(o.Value)
}

// Txn is one atomic change set: when every Compare holds, all Ops are applied
// under one new revision; otherwise nothing changes. A key may occur in one
// Op only.
type Txn struct {
	Compares []Compare
	Ops      []Op
	// Origin says who asked, in words for people. The history keeps it with
	// each change; it decides nothing. See SplitOrigin.
	Origin string
}

// OriginExpiry is the origin of the deletion of a key whose time had come.
const OriginExpiry = "expiry"

// TxnResult tells what became of a Txn.
type TxnResult struct {
	Succeeded bool
	// Revision is the change set's own revision when it succeeded, and the
	// keyspace's revision at the time of the comparison when it did not.
	Revision int64
	// Current holds, when a comparison failed, the present state of each
	// compared key, in the order of Compares; nil for one that does not exist.
	Current []*KeyValue
	// Previous holds, when it succeeded, what each Op replaced or deleted, in
	// the order of Ops; nil where there was nothing.
	Previous []*KeyValue
}

// Errors of reads.
var (
	// ErrCompacted is returned when the revision asked for is older than the
	// history that is kept. Match with errors.Is; *CompactedError carries the
	// oldest revision that can still be read.
	ErrCompacted = errors.New("revision has been compacted")
	// ErrFutureRevision is returned when the revision asked for has not
	// happened yet.
	ErrFutureRevision = errors.New("revision is in the future")
)
