package mvcc

import (
	"fmt"
	"sort"
	"time"
)

// Extent is the range of revisions that can be read, and their store times in
// unix milliseconds.
type Extent struct {
	Oldest     int64 `json:"oldest"`     // oldest revision that can be read
	OldestTime int64 `json:"oldestTime"` // since when it is known to have been the present one
	Newest     int64 `json:"newest"`
	NewestTime int64 `json:"newestTime"` // of the last log entry applied
}

// TimeCompactedError is returned for a time before the history. It matches
// ErrCompacted.
type TimeCompactedError struct {
	Requested int64 // unix milliseconds
	Extent    Extent
}

func (e *TimeCompactedError) Error() string {
	return fmt.Sprintf("the history does not reach back to %s: the oldest revision is %d, of %s",
		stamp(e.Requested), e.Extent.Oldest, stamp(e.Extent.OldestTime))
}

// Is matches ErrCompacted.
func (e *TimeCompactedError) Is(target error) bool { return target == ErrCompacted }

func stamp(millis int64) string { return time.UnixMilli(millis).UTC().Format(time.RFC3339) }

// Extent tells which revisions can be read.
func (k *Keyspace) Extent() Extent {
	h := &k.history
	h.mu.RLock()
	defer h.mu.RUnlock()
	return k.extent()
}

// extent needs history.mu.
func (k *Keyspace) extent() Extent {
	d, h := k.view.Load().digest, &k.history
	e := Extent{Oldest: h.compacted, OldestTime: h.compactedTime, Newest: d.Revision, NewestTime: d.Time}
	if e.OldestTime == 0 {
		if e.OldestTime = d.Time; h.head < len(h.changes) {
			e.OldestTime = h.changes[h.head].time
		}
	}
	return e
}

// RevisionAt is the revision that was the present one at a store time (unix
// milliseconds); the newest one for a time after the last change. A time before
// the history gives a *TimeCompactedError.
func (k *Keyspace) RevisionAt(millis int64) (int64, error) {
	h := &k.history
	h.mu.RLock()
	defer h.mu.RUnlock()
	e := k.extent()
	changes := h.changes[h.head:]
	later := sort.Search(len(changes), func(i int) bool {
		return changes[i].time > millis || changes[i].rev() > e.Newest
	})
	switch {
	case later > 0:
		return changes[later-1].rev(), nil
	case millis < e.OldestTime:
		return 0, &TimeCompactedError{Requested: millis, Extent: e}
	default:
		return e.Oldest, nil
	}
}

// KeyChange is one change of one key.
type KeyChange struct {
	Event
	Time   int64  // store time, unix milliseconds
	Origin string // who asked; "" when it is not known
}

// KeyHistory is what the history holds about one key.
type KeyHistory struct {
	// Base is the key as of Extent.Oldest; nil when it did not exist then.
	Base *KeyValue
	// Changes since then, oldest first; deletions too.
	Changes []KeyChange
	// More: there were more changes than asked for, and the oldest ones and
	// Base are left out.
	More   bool
	Extent Extent
}

// History tells the latest changes of key, at most limit of them (0: all).
func (k *Keyspace) History(key string, limit int) KeyHistory {
	h := &k.history
	// With the history held nothing is cut off the chains of versions beyond
	// what had left the history before.
	h.mu.RLock()
	defer h.mu.RUnlock()
	res := KeyHistory{Extent: k.extent()}
	it, _ := k.view.Load().tree.Get(item{key: key})
	v := at(it.head, res.Extent.Newest)
	for ; v != nil && v.kv.ModRevision > h.compacted; v = v.prev.Load() {
		if limit > 0 && len(res.Changes) == limit {
			res.More = true
			break
		}
		c := h.changeOf(v)
		res.Changes = append(res.Changes, KeyChange{Event: c.event(), Time: c.time, Origin: c.origin})
	}
	if !res.More {
		res.Base = v.current()
	}
	for i, j := 0, len(res.Changes)-1; i < j; i, j = i+1, j-1 {
		res.Changes[i], res.Changes[j] = res.Changes[j], res.Changes[i]
	}
	return res
}

// changeOf finds the entry of the history that made v, which must be in it.
// Caller holds mu.
func (h *history) changeOf(v *version) *change {
	i := h.from(v.kv.ModRevision)
	for h.changes[i].v != v {
		i++
	}
	return &h.changes[i]
}
