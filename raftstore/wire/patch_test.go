package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// patchings are commands that put values by what they differ in.
func patchings() []mvcc.Command {
	return []mvcc.Command{
		{Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: 3, Seq: 5}, Basis: 9, Txn: mvcc.Txn{
			Origin:   "system:node:a",
			Compares: []mvcc.Compare{{Key: "/registry/leases/kube-node-lease/a", ModRevision: 70000}},
			Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/registry/leases/kube-node-lease/a", TTL: 60,
				Patch: &mvcc.Patch{Bytes: []byte{0, 90, 0, 2, 'x', 'y', 40, 4, 0}, Size: 132, Sum: 0x0123456789abcdef}}},
		}},
		{Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: 3, Seq: 6}, Txn: mvcc.Txn{
			Compares: []mvcc.Compare{{Key: "/a", ModRevision: 0}, {Key: "/b", ModRevision: 4}},
			Ops: []mvcc.Op{
				{Type: mvcc.OpPut, Key: "/a", Value: []byte("whole"), TTL: 1},
				{Type: mvcc.OpPut, Key: "/b", Patch: &mvcc.Patch{Bytes: []byte{}, Size: 0}},
				{Type: mvcc.OpDelete, Key: "/c"},
			},
		}},
	}
}

func TestPatchesAreChecked(t *testing.T) {
	good := patchings()[1]
	unnamed := good
	unnamed.Txn.Compares = good.Txn.Compares[:1]
	large := good
	large.Txn.Ops = []mvcc.Op{{Type: mvcc.OpPut, Key: "/b", Patch: &mvcc.Patch{Size: maxPatched + 1}}}
	older := AppendCommand(nil, &good)
	older[0] = byte(mvcc.CmdTxn) // the operation is no part of that type
	for what, raw := range map[string][]byte{
		"no comparison names": AppendCommand(nil, &unnamed),
		"too large a value":   AppendCommand(nil, &large),
		"unknown operation":   append([]byte{byte(mvcc.CmdTxn)}, append(older[1:11:11], 0, 1, patchedPut, 0)...),
	} {
		if _, err := decodeCommand(raw); !errors.Is(err, ErrCorrupt) || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
		_ = Weight(raw)
	}
}

func TestPut(t *testing.T) {
	for i, c := range append(append(commands(), append(named(), deletions()...)...), patchings()...) {
		raw := AppendCommand(nil, &c)
		want := c.Type == mvcc.CmdTxn && len(c.Txn.Ops) == 1 && c.Txn.Ops[0].Type == mvcc.OpPut
		origin, key, ok := Put(raw)
		if ok != want || ok && (string(key) != c.Txn.Ops[0].Key || string(origin) != c.Txn.Origin) {
			t.Errorf("command %d: %q, %q, %t", i, origin, key, ok)
		}
		for end := range raw {
			Put(raw[:end])
			Weight(raw[:end])
		}
	}
}

// A command with a patch counts as what it makes Apply do.
func TestPatchWeight(t *testing.T) {
	c := patchings()[0]
	if raw := AppendCommand(nil, &c); Weight(raw) != len(raw)+132 {
		t.Errorf("%d bytes weigh %d", len(raw), Weight(raw))
	}
}

// patchedHash is the keyspace's hash after testdata/replay-v1-patch.bin, and may never
// change, as replayHash.
const patchedHash = 0x3d423fcf7ef3e320

// A log with patches gives what the same log gives whose values are whole, also
// where a patch follows a snapshot, and always the same.
func TestPatchedReplay(t *testing.T) {
	written, whole := patchedLog()
	log := golden(t, "replay-v1-patch.bin", written)
	if !bytes.Equal(log, written) {
		t.Error("patches look different now: that is no fault if they give the same values; write another golden file beside this one")
	}
	k, index := mvcc.New(), uint64(0)
	for ; len(log) > 0; index++ {
		n := binary.LittleEndian.Uint32(log)
		b, err := DecodeBatch(log[4 : 4+n])
		if err != nil {
			t.Fatalf("entry %d: %v", index+1, err)
		}
		log = log[4+n:]
		for i, o := range k.Apply(index+1, b) {
			if o.Err != nil {
				t.Fatalf("entry %d, command %d: %v", index+1, i, o.Err)
			}
		}
		var buf bytes.Buffer
		if err := WriteSnapshot(&buf, k.Snapshot()); err != nil {
			t.Fatal(err)
		}
		if k, err = ReadSnapshot(&buf); err != nil {
			t.Fatalf("after entry %d: %v", index+1, err)
		}
	}
	if k.Digest() != whole {
		t.Errorf("with patches\n%+v, without\n%+v", k.Digest(), whole)
	}
	if k.Digest().Hash != patchedHash {
		t.Errorf("the hash is %#x, and was %#x", k.Digest().Hash, uint64(patchedHash))
	}
}

// patchedLog makes the log of TestPatchedReplay, and what comes of it without
// patches.
func patchedLog() (log []byte, whole mvcc.Digest) {
	r := rand.New(rand.NewPCG(8, 8))
	k := mvcc.New()
	patched := 0
	for i := range 120 {
		c := mvcc.Command{Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: 4, Seq: uint64(i)}, Basis: uint64(i), Txn: mvcc.Txn{Origin: "system:node:a"}}
		short := c
		for n := range 1 + r.IntN(2) {
			key := fmt.Sprintf("/%d/%d", n, r.IntN(4))
			value := fmt.Appendf(nil, "a value that is long enough to be worth it, renewed at %d, with an end that stays as it is: %d", r.IntN(1_000_000), i%3)
			cmp := mvcc.Compare{Key: key}
			if kv, _, _ := k.Get(key, 0); kv != nil {
				cmp.ModRevision = kv.ModRevision
			}
			if r.IntN(10) == 0 {
				cmp.ModRevision++ // it fails
			}
			op := mvcc.Op{Type: mvcc.OpPut, Key: key, Value: value, TTL: int64(r.IntN(2) * 100)}
			c.Txn.Compares, c.Txn.Ops = append(c.Txn.Compares, cmp), append(c.Txn.Ops, op)
			if op.Patch = k.Patch(key, cmp.ModRevision, value); op.Patch != nil {
				op.Value = nil
				patched++
			}
			short.Txn.Compares, short.Txn.Ops = append(short.Txn.Compares, cmp), append(short.Txn.Ops, op)
		}
		now := 1_789_000_000_000 + int64(i)*1000
		k.Apply(uint64(i+1), mvcc.Batch{Time: now, Commands: []mvcc.Command{c}})
		entry := AppendBatch(nil, now, [][]byte{AppendCommand(nil, &short)})
		log = binary.LittleEndian.AppendUint32(log, uint32(len(entry)))
		log = append(log, entry...)
	}
	if patched < 100 {
		panic(fmt.Sprintf("%d patches", patched))
	}
	return log, k.Digest()
}
