package mvcc

import (
	"sync/atomic"

	"github.com/google/btree"
)

// Keyspace is the present state, a bounded history of it, and the outcomes of
// the latest commands.
//
// One goroutine applies; any number read at the same time. Present state is
// read without a lock, from an immutable view that Apply publishes once per
// batch.
type Keyspace struct {
	// What follows is changed by the applying goroutine only.
	tree    *btree.BTreeG[item]   // every key with a version in history or in the present
	expiry  *btree.BTreeG[expiry] // keys with a TTL, soonest first
	rev     int64
	now     int64 // store time: the highest batch time seen
	index   uint64
	keys    int64  // live keys
	bytes   int64  // of live keys and values
	sum     uint64 // of the hashes of all live versions: order does not matter
	limits  Limits
	window  window
	origins origins
	history history // its own lock: read by watchers and readers of the past
	folders folders // its own lock
	rests   rests   // its own lock

	view atomic.Pointer[view]
}

// view is the present as of one batch.
type view struct {
	tree       *btree.BTreeG[item]
	digest     Digest
	nextExpiry int64 // store time of the soonest expiry; 0: none
	limits     Limits
}

// Digest is a keyspace in a few numbers. Two nodes that have applied the same
// index have equal digests.
type Digest struct {
	Index        uint64 `json:"index"`    // last log index applied
	Revision     int64  `json:"revision"` // last change set
	Oldest       int64  `json:"oldest"`   // oldest revision that can be read
	Time         int64  `json:"time"`     // store time, unix milliseconds
	Keys         int64  `json:"keys"`
	Bytes        int64  `json:"bytes"`        // of live keys and values
	HistoryBytes int64  `json:"historyBytes"` // of versions in history
	Hash         uint64 `json:"hash,string"`  // of all of it: live keys, history range, time, result window
}

// version is one state of one key. kv and deleted never change; prev is cut
// when the version before leaves the history.
type version struct {
	kv      KeyValue
	deleted bool
	sum     uint64
	prev    atomic.Pointer[version]
}

func (v *version) live() bool { return v != nil && !v.deleted }

// current is v as callers see it: nil when the key is absent.
func (v *version) current() *KeyValue {
	if !v.live() {
		return nil
	}
	return &v.kv
}

type item struct {
	key  string
	head *version // newest; never nil inside a tree
}

type expiry struct {
	at  int64
	key string
}

// firstRevision is the revision of an empty keyspace: clients take 0 for
// "any", so it must not be the revision of anything.
const firstRevision = 1

const treeDegree = 32

func newItemTree() *btree.BTreeG[item] {
	return btree.NewG(treeDegree, func(a, b item) bool { return a.key < b.key })
}

func newExpiryTree() *btree.BTreeG[expiry] {
	return btree.NewG(treeDegree, func(a, b expiry) bool {
		return a.at < b.at || (a.at == b.at && a.key < b.key)
	})
}

// New returns an empty keyspace.
func New() *Keyspace {
	k := &Keyspace{
		tree:   newItemTree(),
		expiry: newExpiryTree(),
		rev:    firstRevision,
		limits: DefaultLimits,
	}
	k.history.compacted = firstRevision
	k.window.init()
	k.folders.init()
	k.publish(true)
	return k
}

// publish makes the state visible to readers. changed says whether the tree is
// not the one published last.
func (k *Keyspace) publish(changed bool) {
	oldest, bytes := k.history.extent()
	d := Digest{
		Index: k.index, Revision: k.rev, Oldest: oldest, Time: k.now,
		Keys: k.keys, Bytes: k.bytes, HistoryBytes: bytes,
	}
	d.Hash = mix(k.sum, uint64(k.rev), uint64(oldest), uint64(k.now), uint64(k.keys), k.window.sum)
	v := &view{digest: d, limits: k.limits}
	if e, ok := k.expiry.Min(); ok {
		v.nextExpiry = e.at
	}
	if old := k.view.Load(); changed || old == nil {
		v.tree = k.tree.Clone()
	} else {
		v.tree = old.tree
	}
	k.view.Store(v)
}

// Digest describes the state after the last batch.
func (k *Keyspace) Digest() Digest { return k.view.Load().digest }

// Revision is the last change set's.
func (k *Keyspace) Revision() int64 { return k.view.Load().digest.Revision }

// Index is the last log index applied.
func (k *Keyspace) Index() uint64 { return k.view.Load().digest.Index }

// Oldest is the oldest revision that can be read; events can be read from the
// one after it.
func (k *Keyspace) Oldest() int64 {
	oldest, _ := k.history.extent()
	return oldest
}

// Limits are the ones in force.
func (k *Keyspace) Limits() Limits { return k.view.Load().limits }

// Due reports whether a CmdTick with the given time would do something worth a
// log entry: expire a key, or trim a good part of the history.
func (k *Keyspace) Due(now int64) bool {
	v := k.view.Load()
	if v.nextExpiry != 0 && v.nextExpiry <= now {
		return true
	}
	oldest, ok := k.history.oldestTime()
	age := v.limits.HistoryAgeMillis
	return ok && oldest < now-age-max(age/4, 1000)
}

// Time is the store time of the last batch, unix milliseconds.
func (k *Keyspace) Time() int64 { return k.view.Load().digest.Time }
