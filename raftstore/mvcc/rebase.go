package mvcc

// Rebase returns a keyspace with the same keys, limits, time and log index,
// whose revision is higher by the given number and whose history begins there.
// It is for a state that goes on elsewhere than where its clients saw it last:
// they may have seen later revisions of it, which must not come again with
// another meaning. Watchers of the past get a CompactedError and start over.
//
// k must not be applied to meanwhile; it shares its keys with the result.
func (k *Keyspace) Rebase(by int64) *Keyspace {
	n := New()
	n.limits, n.index, n.now, n.rev = k.limits, k.index, k.now, k.rev+max(by, 0)
	n.history.compacted, n.history.compactedTime = n.rev, n.now
	n.window.floor = k.index
	k.tree.Ascend(func(it item) bool {
		if it.head.live() {
			v := &version{kv: it.head.kv, sum: it.head.sum}
			n.account(v, +1)
			n.folders.note(v.kv.Key, n.rev, v.use())
			n.tree.ReplaceOrInsert(item{key: v.kv.Key, head: v})
		}
		return true
	})
	n.publish(true)
	return n
}
