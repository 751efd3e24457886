package mvcc_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

func TestRebase(t *testing.T) {
	k := mvcc.New()
	index := uint64(0)
	apply := func(k *mvcc.Keyspace, basis uint64, ops ...mvcc.Op) mvcc.Outcome {
		index++
		return k.Apply(index, mvcc.Batch{Time: int64(1000 + index), Commands: []mvcc.Command{{
			Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: 1, Seq: index}, Basis: basis, Txn: mvcc.Txn{Ops: ops},
		}}})[0]
	}
	for i := range 50 {
		apply(k, index, mvcc.Op{Type: mvcc.OpPut, Key: fmt.Sprint("/", i%7), Value: []byte(fmt.Sprint(i)), TTL: int64(i % 2 * 100)})
	}
	apply(k, index, mvcc.Op{Type: mvcc.OpDelete, Key: "/3"})
	before, rev := k.Digest(), k.Revision()

	n := k.Rebase(1000)
	if k.Digest() != before {
		t.Error("it changed the keyspace it was made from")
	}
	d := n.Digest()
	if d.Revision != rev+1000 || d.Oldest != d.Revision || d.Keys != before.Keys || d.Bytes != before.Bytes || d.HistoryBytes != 0 || d.Index != before.Index {
		t.Errorf("%+v from %+v", d, before)
	}
	was, err := k.List(mvcc.Range{})
	if err != nil {
		t.Fatal(err)
	}
	is, err := n.List(mvcc.Range{})
	if err != nil || len(is.KVs) != 6 {
		t.Fatal(len(is.KVs), err)
	}
	for i := range was.KVs {
		if fmt.Sprint(was.KVs[i]) != fmt.Sprint(is.KVs[i]) {
			t.Errorf("%+v became %+v", was.KVs[i], is.KVs[i])
		}
	}
	if _, _, err := n.Get("/1", rev); !errors.Is(err, mvcc.ErrCompacted) {
		t.Errorf("a past revision: %v", err)
	}
	if o := apply(n, before.Index-1, mvcc.Op{Type: mvcc.OpPut, Key: "/x"}); !errors.Is(o.Err, mvcc.ErrExpired) {
		t.Errorf("a command from before: %+v", o)
	}
	if o := apply(n, before.Index, mvcc.Op{Type: mvcc.OpPut, Key: "/x"}); o.Err != nil || o.Result.Revision != rev+1001 {
		t.Errorf("the next command: %+v", o)
	}
	// What is due expires there as well.
	index++
	n.Apply(index, mvcc.Batch{Time: 1 << 40, Commands: []mvcc.Command{{Type: mvcc.CmdTick}}})
	if got := n.Digest().Keys; got >= d.Keys {
		t.Errorf("%d keys after all TTLs", got)
	}
}
