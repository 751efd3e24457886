package mvcc

import "fmt"

// Deletion takes many keys away, each for itself: one whose ModRevision is not
// the one named stays, and keeps the others from nothing. Every key that goes
// does so under a revision of its own, in order, so that a watcher can go on
// behind any of them.
type Deletion struct {
	Keys []Compare // ascending, without repetition; at most MaxDeletes
	// Origin says who asked, as Txn.Origin does.
	Origin string
}

// MaxDeletes bounds what one command makes Apply do. It is part of the meaning
// of the log.
const MaxDeletes = 1024

// Validate reports the first rule that d breaks. The rules are part of the
// meaning of the log: they must never change for what is already in it.
func (d *Deletion) Validate() error {
	if n := len(d.Keys); n == 0 || n > MaxDeletes {
		return fmt.Errorf("%w: %d keys to delete, 1 to %d can be", ErrInvalid, n, MaxDeletes)
	}
	for i := range d.Keys {
		switch c := &d.Keys[i]; {
		case c.Key == "":
			return fmt.Errorf("%w: key %d to delete is empty", ErrInvalid, i)
		case c.ModRevision <= 0:
			return fmt.Errorf("%w: key %d to delete has the revision %d", ErrInvalid, i, c.ModRevision)
		case i > 0 && c.Key <= d.Keys[i-1].Key:
			return fmt.Errorf("%w: key %d to delete, %q, does not come after the one before it", ErrInvalid, i, c.Key)
		}
	}
	return nil
}

// HistoryBytes is what the command takes of Limits.HistoryBytes when all keys go.
func (d *Deletion) HistoryBytes() (n int64) {
	for i := range d.Keys {
		n += int64(len(d.Keys[i].Key)) + versionOverhead
	}
	return n
}

// applyDelete returns in Previous what each key held that was deleted; nil for
// one that stays or was not there.
func (k *Keyspace) applyDelete(d *Deletion) TxnResult {
	res := TxnResult{Succeeded: true, Previous: make([]*KeyValue, len(d.Keys))}
	origin := k.origins.shared(d.Origin)
	for i := range d.Keys {
		prev := k.head(d.Keys[i].Key)
		if modRevision(prev) != d.Keys[i].ModRevision {
			continue
		}
		res.Previous[i] = prev.current()
		k.remove(prev, k.rev+1, origin)
		k.rev++
	}
	res.Revision = k.rev
	return res
}

// repeatDelete answers a Deletion that was decided before. The window knows the
// last of its revisions; the keys that went lie before it in the history, in
// the order of the command. (One that another command had deleted right before
// them, at the revision named here, counts as well: it is as gone.)
func (k *Keyspace) repeatDelete(d *Deletion, was decided) Outcome {
	res := TxnResult{Succeeded: true, Revision: was.rev, Previous: make([]*KeyValue, len(d.Keys))}
	if was.verdict != Changed {
		return Outcome{Result: res, Duplicate: true}
	}
	h := &k.history
	h.mu.RLock()
	defer h.mu.RUnlock()
	rev := was.rev
	for i := len(d.Keys) - 1; i >= 0; i-- {
		if rev <= h.compacted {
			return Outcome{Duplicate: true, Err: ErrForgotten}
		}
		c := &h.changes[h.from(rev)]
		if c.v.kv.Key < d.Keys[i].Key {
			continue // this key stayed
		}
		if c.v.kv.Key > d.Keys[i].Key || !c.v.deleted || modRevision(c.prev) != d.Keys[i].ModRevision {
			break // of a command before this one
		}
		res.Previous[i] = c.prev.current()
		rev--
	}
	return Outcome{Result: res, Duplicate: true}
}
