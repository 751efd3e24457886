package mvcc

// maxExpiredPerTick bounds the change set of one tick; the next tick takes the
// rest.
const maxExpiredPerTick = 1000

// Apply applies the commands of the log entry at index and returns one Outcome
// for each. It is the only way in which the keyspace changes. An index that
// was applied before is a broken invariant of raft and panics.
//
// Values in the batch are kept, so they must not be changed afterwards.
func (k *Keyspace) Apply(index uint64, b Batch) []Outcome {
	if index <= k.index {
		panic("mvcc: log entry applied twice")
	}
	k.index = index
	k.now = max(k.now, b.Time)
	before := k.rev
	out := make([]Outcome, len(b.Commands))
	for i := range b.Commands {
		c := &b.Commands[i]
		switch c.Type {
		case CmdTxn, CmdDelete:
			out[i] = k.applyCommand(c)
		case CmdTick:
			k.expire()
		case CmdLimits:
			k.limits = c.Limits
			k.window.trim(k.limits.Window)
		default:
			// A decoder that lets this through has let through a log written
			// by a newer version: going on would make this node differ.
			panic("mvcc: unknown command type")
		}
	}
	removed := k.compact()
	k.publish(k.rev != before || removed)
	return out
}

// Advance notes a log entry that changes nothing here (raft's own).
func (k *Keyspace) Advance(index uint64) {
	if index > k.index {
		k.index = index
		k.publish(false)
	}
}

func (k *Keyspace) applyCommand(c *Command) Outcome {
	if d, ok := k.window.find(c.ID); ok {
		return k.repeat(c, d)
	}
	if c.Basis < k.window.floor {
		return Outcome{Err: ErrExpired}
	}
	if err := c.validate(); err != nil {
		return Outcome{Err: err}
	}
	before := k.rev
	var res TxnResult
	if c.Type == CmdDelete {
		res = k.applyDelete(&c.Delete)
	} else {
		var err error
		if res, err = k.applyTxn(&c.Txn); err != nil {
			return Outcome{Err: err}
		}
	}
	verdict := Failed
	switch {
	case res.Succeeded && k.rev != before:
		verdict = Changed
	case res.Succeeded:
		verdict = Unchanged
	}
	k.window.add(outcome{c.ID, k.index, decided{verdict, res.Revision}}, k.limits.Window)
	return Outcome{Result: res}
}

func (k *Keyspace) applyTxn(t *Txn) (TxnResult, error) {
	for i := range t.Compares {
		if modRevision(k.head(t.Compares[i].Key)) != t.Compares[i].ModRevision {
			return TxnResult{Revision: k.rev, Current: k.currentOf(t.Compares, k.rev)}, nil
		}
	}
	if err := k.patch(t); err != nil {
		return TxnResult{}, err
	}
	res := TxnResult{Succeeded: true, Previous: make([]*KeyValue, len(t.Ops))}
	rev := k.rev + 1
	origin := k.origins.shared(t.Origin)
	for i := range t.Ops {
		op := &t.Ops[i]
		prev := k.head(op.Key)
		res.Previous[i] = prev.current()
		switch {
		case op.Type == OpPut:
			k.put(op, prev, rev, origin)
		case prev.live():
			k.remove(prev, rev, origin)
		default: // deleting what is not there changes nothing
			continue
		}
		k.rev = rev
	}
	res.Revision = k.rev
	return res, nil
}

// currentOf returns what the compared keys held at a revision in the history.
func (k *Keyspace) currentOf(cs []Compare, rev int64) []*KeyValue {
	cur := make([]*KeyValue, len(cs))
	for i := range cs {
		cur[i] = at(k.head(cs[i].Key), rev).current()
	}
	return cur
}

// repeat answers a command that was decided before, with what it replaced or
// what its comparisons met then: the present may have changed, and could even
// satisfy them.
func (k *Keyspace) repeat(c *Command, d decided) Outcome {
	if c.Type == CmdDelete {
		return k.repeatDelete(&c.Delete, d)
	}
	res := TxnResult{Succeeded: d.verdict != Failed, Revision: d.rev}
	if d.verdict == Failed {
		if d.rev < k.Oldest() {
			return Outcome{Duplicate: true, Err: ErrForgotten}
		}
		res.Current = k.currentOf(c.Txn.Compares, d.rev)
		return Outcome{Result: res, Duplicate: true}
	}
	res.Previous = make([]*KeyValue, len(c.Txn.Ops))
	if d.verdict == Changed {
		prevs, ok := k.history.previousAt(d.rev)
		if !ok {
			return Outcome{Duplicate: true, Err: ErrForgotten}
		}
		for i := range c.Txn.Ops {
			res.Previous[i] = prevs[c.Txn.Ops[i].Key].current()
		}
	}
	return Outcome{Result: res, Duplicate: true}
}

func modRevision(v *version) int64 {
	if !v.live() {
		return 0
	}
	return v.kv.ModRevision
}

func (k *Keyspace) head(key string) *version {
	it, _ := k.tree.Get(item{key: key})
	return it.head
}

func (k *Keyspace) put(op *Op, prev *version, rev int64, origin string) {
	v := &version{kv: KeyValue{
		Key: op.Key, Value: op.Value,
		CreateRevision: rev, ModRevision: rev, Version: 1,
	}}
	if prev != nil {
		v.kv.Key = prev.kv.Key // one copy of the key for all its versions
	}
	if prev.live() {
		v.kv.CreateRevision = prev.kv.CreateRevision
		v.kv.Version = prev.kv.Version + 1
	}
	if op.TTL > 0 {
		v.kv.ExpiresAt = k.now + op.TTL*1000
	}
	k.replace(prev, v, origin)
}

func (k *Keyspace) remove(prev *version, rev int64, origin string) {
	k.replace(prev, &version{deleted: true, kv: KeyValue{Key: prev.kv.Key, ModRevision: rev}}, origin)
}

// replace puts v in the place of prev, in the tree, the sums, the expiry order
// and the history.
func (k *Keyspace) replace(prev, v *version, origin string) {
	if prev.live() {
		k.account(prev, -1)
	}
	if v.live() {
		v.sum = hashKV(&v.kv)
		k.account(v, +1)
	}
	k.folders.note(v.kv.Key, v.kv.ModRevision, v.use().minus(prev.use()))
	v.prev.Store(prev)
	k.tree.ReplaceOrInsert(item{key: v.kv.Key, head: v})
	k.history.add(change{v: v, prev: prev, time: k.now, origin: origin})
}

// account adds (+1) or takes away (-1) a live version from the totals.
func (k *Keyspace) account(v *version, sign int64) {
	k.keys += sign
	k.bytes += sign * int64(len(v.kv.Key)+len(v.kv.Value))
	if sign > 0 {
		k.sum += v.sum
	} else {
		k.sum -= v.sum
	}
	if v.kv.ExpiresAt == 0 {
		return
	}
	e := expiry{at: v.kv.ExpiresAt, key: v.kv.Key}
	if sign > 0 {
		k.expiry.ReplaceOrInsert(e)
	} else {
		k.expiry.Delete(e)
	}
}

// expire deletes the keys whose time has come, soonest first, under one
// revision.
func (k *Keyspace) expire() {
	rev := k.rev + 1
	for range maxExpiredPerTick {
		e, ok := k.expiry.Min()
		if !ok || e.at > k.now {
			return
		}
		k.remove(k.head(e.key), rev, OriginExpiry)
		k.rev = rev
	}
}

// compact drops what the limits no longer allow from the history, and reports
// whether keys left the tree with it.
func (k *Keyspace) compact() (removed bool) {
	for _, c := range k.history.trim(k.limits.HistoryBytes, k.now-k.limits.HistoryAgeMillis) {
		// c.v is now the oldest version of its key that a reader may see.
		c.v.prev.Store(nil)
		if !c.v.deleted {
			continue
		}
		if it, ok := k.tree.Get(item{key: c.v.kv.Key}); ok && it.head == c.v {
			k.tree.Delete(it)
			removed = true
		}
	}
	return removed
}
