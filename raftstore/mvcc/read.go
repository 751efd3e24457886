package mvcc

import (
	"fmt"
	"strings"
)

// CompactedError is returned when a revision has left the history. It matches
// ErrCompacted.
type CompactedError struct {
	Requested int64
	Oldest    int64 // oldest revision that can be read
}

func (e *CompactedError) Error() string {
	return fmt.Sprintf("revision %d has been compacted: the oldest is %d", e.Requested, e.Oldest)
}

// Is matches ErrCompacted.
func (e *CompactedError) Is(target error) bool { return target == ErrCompacted }

// FutureRevisionError is returned when a revision has not happened yet. It
// matches ErrFutureRevision.
type FutureRevisionError struct {
	Requested int64
	Current   int64
}

func (e *FutureRevisionError) Error() string {
	return fmt.Sprintf("revision %d is in the future: the current one is %d", e.Requested, e.Current)
}

// Is matches ErrFutureRevision.
func (e *FutureRevisionError) Is(target error) bool { return target == ErrFutureRevision }

// Range says what List returns.
type Range struct {
	Prefix    string // keys beginning with it; "" for all
	From      string // first key wanted; "" or anything before Prefix: from its beginning
	Limit     int    // 0: all
	CountOnly bool
	NoCount   bool  // Count is not wanted: only what is returned is looked at
	Revision  int64 // 0: the present
}

// Listing is a List's result. KVs is shared like every KeyValue.
type Listing struct {
	KVs      []KeyValue
	More     bool  // keys follow after the last of KVs
	Count    int64 // all keys of the range, whatever the limit; with NoCount, at least those of KVs
	Revision int64 // as of which it holds
}

// Get returns key as of revision (0: the present), nil when it does not exist,
// and the revision as of which that holds.
func (k *Keyspace) Get(key string, revision int64) (*KeyValue, int64, error) {
	v := k.view.Load()
	rev, err := k.resolve(v, revision)
	if err != nil {
		return nil, 0, err
	}
	it, _ := v.tree.Get(item{key: key})
	kv := at(it.head, rev).current()
	if err := k.stillReadable(rev, revision); err != nil {
		return nil, 0, err
	}
	return kv, rev, nil
}

// List returns the keys of a range in order, all as of one revision. A page
// costs what it returns where the count of its range is known, see knownCount.
func (k *Keyspace) List(r Range) (Listing, error) {
	res, _, err := k.list(r)
	return res, err
}

// list is List, and tells how many keys it has looked at.
func (k *Keyspace) list(r Range) (res Listing, looked int, err error) {
	v := k.view.Load()
	rev, err := k.resolve(v, r.Revision)
	if err != nil {
		return Listing{}, 0, err
	}
	res.Revision = rev
	count, known := k.knownCount(rev, r.Prefix, r.From)
	if r.CountOnly && known {
		res.Count = count
		return res, 0, k.stillReadable(rev, r.Revision)
	}
	ascend(v, r.Prefix, max(r.From, r.Prefix), func(head *version) bool {
		looked++
		kv := at(head, rev).current()
		if kv == nil {
			return true
		}
		res.Count++
		switch {
		case r.CountOnly:
		case r.Limit > 0 && len(res.KVs) >= r.Limit:
			res.More = true
			return !known && !r.NoCount
		default:
			res.KVs = append(res.KVs, *kv)
		}
		return true
	})
	if err := k.stillReadable(rev, r.Revision); err != nil {
		return Listing{}, looked, err
	}
	if known {
		res.Count = count
	}
	if res.More && (known || !r.NoCount) {
		last := res.KVs[len(res.KVs)-1].Key
		k.rests.note(rest{rev, r.Prefix, last + "\x00"}, res.Count-int64(len(res.KVs)))
	}
	return res, looked, nil
}

// ascend visits the keys of a prefix in order until visit returns false.
func ascend(v *view, prefix, from string, visit func(head *version) bool) {
	v.tree.AscendGreaterOrEqual(item{key: from}, func(it item) bool {
		return strings.HasPrefix(it.key, prefix) && visit(it.head)
	})
}

// resolve turns a revision asked for into one that v can answer.
func (k *Keyspace) resolve(v *view, asked int64) (int64, error) {
	switch {
	case asked == 0:
		return v.digest.Revision, nil
	case asked > v.digest.Revision:
		return 0, &FutureRevisionError{Requested: asked, Current: v.digest.Revision}
	default:
		return asked, k.stillReadable(asked, asked)
	}
}

// stillReadable is asked again after reading: Apply cuts old versions while we
// walk them, and what was cut must not be taken for absent. The present as of
// a view needs no old version.
func (k *Keyspace) stillReadable(rev, asked int64) error {
	if asked == 0 {
		return nil
	}
	if oldest := k.Oldest(); rev < oldest {
		return &CompactedError{Requested: rev, Oldest: oldest}
	}
	return nil
}

// at walks from the newest version to the one in force at rev.
func at(v *version, rev int64) *version {
	for v != nil && v.kv.ModRevision > rev {
		v = v.prev.Load()
	}
	return v
}

// Events returns the changes from revision from on, in order, whole revisions
// only, stopping after limit or more events. through is the last revision that
// is covered: from-1 when nothing has happened since.
func (k *Keyspace) Events(from int64, limit int) (events []Event, through int64, err error) {
	// The history runs ahead of the view while a batch is being applied.
	visible := k.Revision()
	h := &k.history
	h.mu.RLock()
	defer h.mu.RUnlock()
	if from <= h.compacted {
		return nil, 0, &CompactedError{Requested: from, Oldest: h.compacted}
	}
	through = from - 1
	for i := h.from(from); i < len(h.changes); i++ {
		c := &h.changes[i]
		if c.rev() > visible || (c.rev() != through && len(events) >= limit) {
			break
		}
		events = append(events, c.event())
		through = c.rev()
	}
	return events, through, nil
}

func (c *change) event() Event {
	e := Event{Type: Put, KV: c.v.kv, Prev: c.prev.current()}
	if c.v.deleted {
		e.Type = Delete
	}
	return e
}
