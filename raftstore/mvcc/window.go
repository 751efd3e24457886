package mvcc

// window remembers the outcomes of the latest transactions, so that one that
// reaches the log twice is decided once. A failed comparison is remembered too:
// its client may have the answer, and a later occurrence must not succeed.
//
// Every transaction decided after log index floor is in it.
type window struct {
	ring  []outcome // oldest first, ring[head:]
	head  int
	byID  map[CommandID]decided
	floor uint64
	sum   uint64 // of the entries' hashes
}

// Verdict is how a transaction was decided.
type Verdict uint8

const (
	Changed   Verdict = 1 // succeeded, with a revision of its own
	Unchanged Verdict = 2 // succeeded, there was nothing to change
	Failed    Verdict = 3 // a comparison did not hold
)

type decided struct {
	verdict Verdict
	rev     int64 // TxnResult.Revision
}

type outcome struct {
	id    CommandID
	index uint64
	decided
}

func (o *outcome) hash() uint64 {
	return mix(o.id.Session, o.id.Seq, uint64(o.verdict), uint64(o.rev), o.index)
}

func (w *window) init() { w.byID = make(map[CommandID]decided) }

func (w *window) find(id CommandID) (decided, bool) {
	d, ok := w.byID[id]
	return d, ok
}

func (w *window) add(o outcome, limit int64) {
	w.ring = append(w.ring, o)
	w.byID[o.id] = o.decided
	w.sum += o.hash()
	w.trim(limit)
}

func (w *window) trim(limit int64) {
	limit = max(limit, 0)
	for int64(len(w.ring)-w.head) > limit {
		o := w.ring[w.head]
		w.head++
		delete(w.byID, o.id)
		w.sum -= o.hash()
		// Others of the same entry may follow; they count as gone too.
		w.floor = o.index
	}
	if w.head > len(w.ring)/2 {
		w.ring = append(w.ring[:0], w.ring[w.head:]...)
		w.head = 0
	}
}
