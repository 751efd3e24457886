package mvcc

import (
	"sort"
	"sync"
)

// change is one entry of the history: v took the place of prev at store time
// time. Its revision is v's.
type change struct {
	v      *version
	prev   *version // nil: the key was not known
	time   int64
	origin string // Txn.Origin, OriginExpiry, or "": not known
}

func (c *change) rev() int64 { return c.v.kv.ModRevision }

// versionOverhead is what a version costs in memory beside its key and value:
// the structs, the tree item and the history entry, rounded up.
const versionOverhead = 224

func (c *change) size() int64 {
	return int64(len(c.v.kv.Key)+len(c.v.kv.Value)) + versionOverhead
}

// HistoryBytes is what the transaction takes of Limits.HistoryBytes when it
// succeeds.
func (t *Txn) HistoryBytes() (n int64) {
	for i := range t.Ops {
		n += int64(len(t.Ops[i].Key)+t.Ops[i].Size()) + versionOverhead
	}
	return n
}

// HistoryByWriter tells how many bytes of the history each writer has made, through whichever
// members.
func (k *Keyspace) HistoryByWriter() map[string]int64 {
	all := make(map[string]int64)
	h := &k.history
	for next, more := int64(0), true; more; {
		next, more = h.sumOrigins(all, next)
	}
	for origin, bytes := range all {
		if who, from := SplitOrigin(origin); from != "" {
			delete(all, origin)
			all[who] += bytes
		}
	}
	return all
}

// sumOrigins adds the changes from revision rev on to sums, some thousands of
// them so that Apply does not wait for long, and returns where to go on.
func (h *history) sumOrigins(sums map[string]int64, rev int64) (next int64, more bool) {
	const step = 4096
	h.mu.RLock()
	defer h.mu.RUnlock()
	for i, begin := h.from(rev), h.from(rev); i < len(h.changes); i++ {
		c := &h.changes[i]
		if i-begin >= step && c.rev() != h.changes[i-1].rev() {
			return c.rev(), true
		}
		sums[c.origin] += c.size()
	}
	return 0, false
}

// history is the ring of changes, oldest first. compacted is the revision of
// the newest change that has left it: the state as of compacted can be read,
// and the events after it.
type history struct {
	mu        sync.RWMutex
	changes   []change // changes[head:] are in the ring
	head      int
	bytes     int64
	compacted int64
	// compactedTime is the store time of the change of revision compacted; 0:
	// not known, as after a restore. Nothing that Apply does depends on it.
	compactedTime int64
}

func (h *history) add(c change) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.changes = append(h.changes, c)
	h.bytes += c.size()
}

func (h *history) extent() (compacted, bytes int64) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return h.compacted, h.bytes
}

func (h *history) oldestTime() (int64, bool) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	if h.head == len(h.changes) {
		return 0, false
	}
	return h.changes[h.head].time, true
}

// trim drops whole revisions from the old end until at most maxBytes are left
// and none is from before minTime. It returns what was dropped.
func (h *history) trim(maxBytes, minTime int64) []change {
	h.mu.Lock()
	defer h.mu.Unlock()
	end := h.head
	for end < len(h.changes) {
		if h.bytes <= maxBytes && h.changes[end].time >= minTime {
			break
		}
		rev := h.changes[end].rev()
		h.compactedTime = h.changes[end].time
		for end < len(h.changes) && h.changes[end].rev() == rev {
			h.bytes -= h.changes[end].size()
			end++
		}
		h.compacted = rev
	}
	if end == h.head {
		return nil
	}
	dropped := make([]change, end-h.head)
	copy(dropped, h.changes[h.head:end])
	clear(h.changes[h.head:end])
	h.head = end
	if h.head > len(h.changes)/2 {
		// The moved half is no longer than what was dropped since the last
		// move: constant cost per change.
		n := copy(h.changes, h.changes[h.head:])
		clear(h.changes[n:])
		h.changes, h.head = h.changes[:n], 0
		if cap(h.changes) > 4096 && n < cap(h.changes)/4 {
			h.changes = append(make([]change, 0, 2*n), h.changes...)
		}
	}
	return dropped
}

// from is the position of the first change at or after rev. Caller holds mu.
func (h *history) from(rev int64) int {
	return h.head + sort.Search(len(h.changes)-h.head, func(i int) bool {
		return h.changes[h.head+i].rev() >= rev
	})
}

// previousAt maps the keys changed at rev to what they were before; false when
// rev is no longer in history.
func (h *history) previousAt(rev int64) (map[string]*version, bool) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	if rev <= h.compacted {
		return nil, false
	}
	prevs := make(map[string]*version)
	for i := h.from(rev); i < len(h.changes) && h.changes[i].rev() == rev; i++ {
		prevs[h.changes[i].v.kv.Key] = h.changes[i].prev
	}
	return prevs, true
}

// copyAll returns the ring's changes and the compacted revision.
func (h *history) copyAll() ([]change, int64) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	return append([]change(nil), h.changes[h.head:]...), h.compacted
}
